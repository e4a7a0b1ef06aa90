"""Metrics of binary predictions at thresholds: counts, precision, recall and AUC."""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from hpcstrat._core import gpu
from hpcstrat.metrics._counts import CountMetric
from hpcstrat.metrics._metric import rounded_for


def _ratio(part: Any, whole: Any) -> Any:
    """`part / whole`, and 0 for 0 / 0."""
    return np.divide(part, whole, out=np.zeros_like(part), where=whole != 0)


@functools.cache  # for good: CUDA graphs read them
def _on_gpu(ordinal: int, dtype: np.dtype[Any], thresholds: bytes) -> Any:
    """Thresholds on this GPU, which is current, for all its streams."""
    xp = gpu.load_cupy("a metric")
    array = xp.asarray(np.frombuffer(thresholds, dtype))
    xp.cuda.get_current_stream().synchronize()
    return array


class _Counts(NamedTuple):
    """Counts at each threshold, in ascending order."""

    true_positives: Any
    false_positives: Any
    true_negatives: Any
    false_negatives: Any

    @property
    def precision(self) -> Any:
        return _ratio(self.true_positives, self.true_positives + self.false_positives)

    @property
    def recall(self) -> Any:
        return _ratio(self.true_positives, self.true_positives + self.false_negatives)


class ThresholdMetric(CountMetric):
    """Counts negative and positive labels by the number of thresholds that predictions exceed.

    The bins, for n thresholds (the last counts invalid predictions):

        label 0: exceeds 0 ... n | label 1: exceeds 0 ... n | invalid
    """

    _INVALID = (
        "predictions are not between 0 and 1; pass probabilities, or logits with from_logits=True"
    )
    _needs_probabilities = False
    from_logits: bool = False

    def __init__(
        self, name: str | None, dtype: npt.DTypeLike | None, thresholds: Sequence[float]
    ) -> None:
        super().__init__(name, dtype, 2 * (len(thresholds) + 1))
        self.thresholds: list[float] = [float(threshold) for threshold in thresholds]
        self._ascending = np.sort(self.thresholds)

    def _bins(self, xp: Any, true: Any, predicted: Any) -> Any:
        ascending = rounded_for(self._ascending, predicted.dtype)
        if xp is not np:
            ascending = _on_gpu(predicted.data.device_id, ascending.dtype, ascending.tobytes())
        if self.from_logits:
            predicted = 0.5 + 0.5 * xp.tanh(predicted.astype(np.float64) / 2)
        first = (ascending.size + 1) * (true != 0)
        bins = first + xp.searchsorted(ascending, predicted)
        if self._needs_probabilities:
            return xp.where((predicted >= 0) & (predicted <= 1), bins, self._invalid)
        return xp.where(xp.isnan(predicted), first, bins)

    def _of_counts(self, counts: np.ndarray[Any, Any]) -> Any:
        by_label = counts.reshape(2, -1)  # for each label: those above 0, 1, ... thresholds
        at_most = by_label.cumsum(axis=1)[:, :-1]
        more = by_label[:, ::-1].cumsum(axis=1)[:, -2::-1]
        return self._of(_Counts(more[1], more[0], at_most[0], at_most[1]))

    @abc.abstractmethod
    def _of(self, counts: _Counts) -> Any:
        """Computes the result from the counts at each threshold."""


class AtThresholds(ThresholdMetric):
    """A number at each threshold, in the order passed; for a single threshold a scalar."""

    _number: str  # of `_Counts`

    def __init__(
        self,
        thresholds: float | Sequence[float] | None = None,
        name: str | None = None,
        dtype: npt.DTypeLike | None = None,
    ) -> None:
        given = np.atleast_1d(np.asarray(0.5 if thresholds is None else thresholds, np.float64))
        if given.ndim != 1 or not given.size or not ((given >= 0) & (given <= 1)).all():
            raise ValueError(
                f"{type(self).__name__}: thresholds is {thresholds!r}; it must be a number between "
                "0 and 1, or several"
            )
        super().__init__(name, dtype, given.tolist())

    def _of(self, counts: _Counts) -> Any:
        values = np.empty(len(self.thresholds))
        values[np.argsort(self.thresholds, kind="stable")] = getattr(counts, self._number)
        return values if values.size > 1 else values[0]


class TruePositives(AtThresholds):
    """The number of positive labels that were predicted as positive: above a threshold.

    Labels are 0 or 1. Predictions are usually probabilities.

    Args:
        thresholds: a number or several, between 0 and 1; 0.5 by default. `result` has a number for
            each.
        name: the metric's name, `true_positives` by default.
        dtype: the dtype of `result`, `float64` by default.

    Raises:
        ValueError: a threshold is not between 0 and 1.

    Examples:
        >>> import hpcstrat as hs
        >>> positives = hs.metrics.TruePositives(thresholds=[0.3, 0.7])  # a count for each
        >>> positives.update_state([0, 1, 1, 1], [0.9, 0.2, 0.5, 0.8])
        >>> print(positives.result())
        [2. 1.]
    """

    _number = "true_positives"


class FalsePositives(AtThresholds):
    """The number of negative labels that were predicted as positive.

    The arguments are those of `TruePositives`.

    Examples:
        >>> import hpcstrat as hs
        >>> positives = hs.metrics.FalsePositives()
        >>> positives.update_state([0, 0, 0, 1], [0.9, 0.2, 0.6, 0.8])
        >>> print(positives.result())
        2.0
    """

    _number = "false_positives"


class TrueNegatives(AtThresholds):
    """The number of negative labels that were predicted as negative.

    The arguments are those of `TruePositives`.

    Examples:
        >>> import hpcstrat as hs
        >>> negatives = hs.metrics.TrueNegatives()
        >>> negatives.update_state([0, 0, 0, 1], [0.9, 0.2, 0.6, 0.8])
        >>> print(negatives.result())
        1.0
    """

    _number = "true_negatives"


class FalseNegatives(AtThresholds):
    """The number of positive labels that were predicted as negative.

    The arguments are those of `TruePositives`.

    Examples:
        >>> import hpcstrat as hs
        >>> negatives = hs.metrics.FalseNegatives()
        >>> negatives.update_state([0, 1, 1, 1], [0.9, 0.2, 0.5, 0.8])
        >>> print(negatives.result())  # 0.2, and 0.5, which is not above 0.5
        2.0
    """

    _number = "false_negatives"


class Precision(AtThresholds):
    """The fraction of positive predictions that are right, `TP / (TP + FP)`.

    The arguments are those of `TruePositives`.

    Examples:
        >>> import hpcstrat as hs
        >>> precision = hs.metrics.Precision()
        >>> precision.update_state([0, 1, 1, 1], [1.0, 0.0, 1.0, 1.0])
        >>> print(f"{precision.result():.4f}")
        0.6667
    """

    _number = "precision"


class Recall(AtThresholds):
    """The fraction of positive labels that were found, `TP / (TP + FN)`.

    The arguments are those of `TruePositives`.

    Examples:
        >>> import hpcstrat as hs
        >>> recall = hs.metrics.Recall(thresholds=[0.3, 0.7])
        >>> recall.update_state([0, 1, 1, 1], [0.9, 0.2, 0.5, 0.8])
        >>> print(recall.result().round(4))
        [0.6667 0.3333]
    """

    _number = "recall"


class AUC(ThresholdMetric):
    """The area under the ROC or precision-recall curve, from counts at thresholds, as in Keras.

    Labels are 0 or 1, predictions probabilities. The precision-recall curve is interpolated as by
    Davis and Goadrich, "The Relationship Between Precision-Recall and ROC Curves", 2006.

    Args:
        num_thresholds: the number of thresholds, evenly spaced: the first is just below 0, the last
            just above 1.
        curve: `"ROC"` or `"PR"`.
        summation_method: `"interpolation"`; or `"minoring"` or `"majoring"`, whose rectangles under
            the curve have the lower or the higher value of two neighbours.
        name: the metric's name.
        dtype: the dtype of `result`, `float64` by default.
        thresholds: thresholds between 0 and 1, instead of evenly spaced; the first and the last are
            added.
        from_logits: whether predictions are logits, whose sigmoid is the probability.

    Raises:
        ValueError: an option has another value.

    Examples:
        >>> import hpcstrat as hs
        >>> auc = hs.metrics.AUC(num_thresholds=3)
        >>> auc.update_state([0, 0, 1, 1], [0.0, 0.5, 0.3, 0.9])
        >>> print(auc.result())
        0.75

        Each option:

        >>> def area(**options):
        ...     auc = hs.metrics.AUC(**options)
        ...     auc.update_state([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8])
        ...     return round(float(auc.result()), 4)
        >>> area(), area(curve="PR"), area(num_thresholds=3)  # 0, 0.5 and 1
        (0.75, 0.7973, 0.75)
        >>> area(thresholds=[0.5]), area(thresholds=[0.5], from_logits=True)
        (0.75, 0.5)
        >>> [area(num_thresholds=3, summation_method=how) for how in ("minoring", "majoring")]
        [0.5, 1.0]
    """

    _needs_probabilities = True

    def __init__(
        self,
        num_thresholds: int = 200,
        curve: Literal["ROC", "PR"] = "ROC",
        summation_method: Literal["interpolation", "minoring", "majoring"] = "interpolation",
        name: str | None = None,
        dtype: npt.DTypeLike | None = None,
        thresholds: Sequence[float] | None = None,
        from_logits: bool = False,
    ) -> None:
        if thresholds is None and num_thresholds < 2:
            raise ValueError(f"AUC: num_thresholds is {num_thresholds!r}; it must be at least 2")
        inner = (
            np.arange(1, num_thresholds - 1) / (num_thresholds - 1)
            if thresholds is None
            else np.sort(thresholds)
        )
        if not ((inner >= 0) & (inner <= 1)).all():
            raise ValueError(f"AUC: thresholds is {thresholds!r}; they must be between 0 and 1")
        if curve not in ("ROC", "PR"):
            raise ValueError(f"AUC: curve is {curve!r}; it must be 'ROC' or 'PR'")
        if summation_method not in _HEIGHTS:
            raise ValueError(
                f"AUC: summation_method is {summation_method!r}; it must be one of {[*_HEIGHTS]}"
            )
        super().__init__(name, dtype, [-_EPSILON, *inner.tolist(), 1 + _EPSILON])
        self.curve: str = curve
        self.summation_method: str = summation_method
        self.from_logits: bool = from_logits
        self.num_thresholds: int = len(self.thresholds)
        self._has_own_thresholds = thresholds is not None

    def get_config(self) -> dict[str, Any]:
        """The arguments for `from_config`.

        Examples:
            >>> config = hs.metrics.AUC(thresholds=[0.25, 0.5]).get_config()
            >>> config["thresholds"], config["curve"]
            ([0.25, 0.5], 'ROC')
        """
        own = self.thresholds[1:-1] if self._has_own_thresholds else None
        return {**super().get_config(), "thresholds": own}

    def _of(self, counts: _Counts) -> Any:
        if self.curve == "PR" and self.summation_method == "interpolation":
            return _interpolate_precision(counts)
        if self.curve == "PR":
            x, y = counts.recall, counts.precision
        else:
            negatives = counts.false_positives + counts.true_negatives
            x, y = _ratio(counts.false_positives, negatives), counts.recall
        return ((x[:-1] - x[1:]) * _HEIGHTS[self.summation_method](y[:-1], y[1:])).sum()


_EPSILON = 1e-7
_HEIGHTS = {
    "interpolation": lambda a, b: (a + b) / 2,
    "minoring": np.minimum,
    "majoring": np.maximum,
}


def _interpolate_precision(counts: _Counts) -> Any:
    """The area under the precision-recall curve with counts linear between thresholds."""
    true, predicted = counts.true_positives, counts.true_positives + counts.false_positives
    step = true[:-1] - true[1:]
    slope = _ratio(step, np.maximum(predicted[:-1] - predicted[1:], 0))
    intercept = true[1:] - slope * predicted[1:]
    both = (predicted[:-1] > 0) & (predicted[1:] > 0)
    growth = np.divide(predicted[:-1], predicted[1:], out=np.ones_like(step), where=both)
    return _ratio(
        slope * (step + intercept * np.log(growth)), true[1:] + counts.false_negatives[1:]
    ).sum()
