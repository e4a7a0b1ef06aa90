"""Means of values: Mean and Sum, and errors and accuracies, which are means over predictions."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcstrat._core.types import Array
from hpcstrat.metrics._metric import (
    Metric,
    PairMetric,
    as_classes,
    as_numbers,
    as_pair,
    as_weights,
    rounded_for,
)

_SCALARS = (float, int, np.float64, np.float32)
"""The types of most losses."""


class _WeightedMean(Metric):
    """Its totals are the weighted sum of the values and the sum of the weights."""

    def __init__(self, name: str | None = None, dtype: npt.DTypeLike | None = None) -> None:
        super().__init__(name, dtype)

    def _add_values(self, values: Any, sample_weight: Any) -> None:
        if sample_weight is None and type(values) in _SCALARS:
            self._write(np.array((values, 1.0)))
            return
        call = f"{type(self).__name__}.update_state"
        values = as_numbers(call, "values", values)
        if sample_weight is None:
            self._add(_sum, values)
        else:
            self._add(_sum, values, as_weights(call, sample_weight, values.shape))

    def combine(self, totals: np.ndarray[Any, Any]) -> Any:
        """Computes the weighted mean; 0 before the first value."""
        total, count = totals
        return total / count if count else np.float64(0.0)


def _sum(xp: Any, values: Any, weights: Any = None) -> tuple[Any, Any]:
    """The weighted sum of the values, and the sum of the weights."""
    if weights is not None:
        return (values * weights).sum(), weights.sum()
    if not values.ndim:
        return values, 1
    if xp is np and values.dtype.kind == "b":
        return np.count_nonzero(values), values.size
    return xp.add.reduce(values, axis=None, dtype=np.float64), values.size


class _ValueMean(_WeightedMean):
    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Adds values, an array of any shape, each with its weight.

        For a replica function; never communicates.

        Raises:
            TypeError: an argument is not an array of numbers.
            ValueError: the weights do not fit the values.

        Examples:
            >>> loss = hs.metrics.Mean()
            >>> loss.update_state([1.0, 2.0, 6.0], sample_weight=[1, 1, 0])  # without the last
            >>> print(loss.result())
            1.5
        """
        self._add_values(values, sample_weight)


class Mean(_ValueMean):
    """The mean of all values.

    Examples:
        >>> import hpcstrat as hs
        >>> loss = hs.metrics.Mean()
        >>> loss.update_state([1.0, 2.0, 6.0])
        >>> print(loss.result())
        3.0
    """


class Sum(_ValueMean):
    """The sum of all values, each times its weight.

    Examples:
        >>> import hpcstrat as hs
        >>> total = hs.metrics.Sum()
        >>> total.update_state([[1.0, 2.0], [3.0, 4.0]], sample_weight=[1, 10])  # per row
        >>> print(total.result())
        73.0
    """

    def combine(self, totals: np.ndarray[Any, Any]) -> Any:
        """Takes the weighted sum."""
        return totals[0]


class MeanMetricWrapper(_WeightedMean):
    """The mean of a function of labels and predictions, for your own metric.

    Args:
        fn: called with labels, predictions and `kwargs`; returns an array of values, of NumPy or
            CuPy as its arguments.
        name: the metric's name; by default the function's.
        dtype: the dtype of `result`, `float64` by default.
        **kwargs: passed to the function.

    Examples:
        >>> import numpy as np
        >>> import hpcstrat as hs
        >>> def relative_error(y_true, y_pred):
        ...     return abs(y_true - y_pred) / y_true
        >>> error = hs.metrics.MeanMetricWrapper(relative_error)
        >>> error.update_state(np.array([1.0, 4.0]), np.array([2.0, 3.0]))
        >>> print(error.result())
        0.625
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        name: str | None = None,
        dtype: npt.DTypeLike | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(fn.__name__ if name is None else name, dtype)
        self._fn = functools.partial(fn, **kwargs)

    def get_config(self) -> dict[str, Any]:
        """The arguments for `from_config`, with the function itself.

        Examples:
            >>> def near(y_true, y_pred, within):
            ...     return abs(y_true - y_pred) < within
            >>> metric = hs.metrics.MeanMetricWrapper(near, within=0.1)
            >>> {name: value for name, value in metric.get_config().items() if name != "fn"}
            {'name': 'near', 'dtype': 'float64', 'within': 0.1}
        """
        return {**super().get_config(), "fn": self._fn.func, **self._fn.keywords}

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds the function's values, each with its weight.

        For a replica function; never communicates.

        Raises:
            TypeError: the values or the weights are not numbers.
            ValueError: the weights do not fit the values.

        Examples:
            >>> bias = hs.metrics.MeanMetricWrapper(lambda true, pred: pred - true, name="bias")
            >>> bias.update_state(np.zeros(3), np.array([1.0, 2.0, -9.0]), sample_weight=[1, 1, 0])
            >>> print(bias.result())
            1.5
        """
        self._add_values(self._fn(y_true, y_pred), sample_weight)


class PairMean(PairMetric, _WeightedMean):
    """The mean of a value for each label and its prediction."""

    def _new(self, xp: Any, true: Any, predicted: Any, weights: Any = None) -> tuple[Any, Any]:
        return _sum(xp, self._values(xp, true, predicted), weights)

    @abc.abstractmethod
    def _values(self, xp: Any, true: Any, predicted: Any) -> Any:
        """Computes the values, by the functions of `xp`."""


# ---- errors


def _errors(true: Any, predicted: Any) -> Any:
    # Cast first: differences of unsigned integers wrap around.
    return true.astype(np.float64) - predicted


class MeanAbsoluteError(PairMean):
    """The mean of the absolute errors, `|y_true - y_pred|`.

    Examples:
        >>> import hpcstrat as hs
        >>> error = hs.metrics.MeanAbsoluteError()
        >>> error.update_state([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 8.0])
        >>> print(error.result())
        1.0
    """

    def _values(self, xp: Any, true: Any, predicted: Any) -> Any:
        return abs(_errors(true, predicted))


class MeanSquaredError(PairMean):
    """The mean of the squared errors, `(y_true - y_pred)**2`.

    Examples:
        >>> import hpcstrat as hs
        >>> error = hs.metrics.MeanSquaredError()
        >>> error.update_state([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 8.0])
        >>> print(error.result())
        4.0
    """

    def _values(self, xp: Any, true: Any, predicted: Any) -> Any:
        return _errors(true, predicted) ** 2


class RootMeanSquaredError(MeanSquaredError):
    """The square root of the mean of the squared errors.

    Examples:
        >>> import hpcstrat as hs
        >>> error = hs.metrics.RootMeanSquaredError()
        >>> error.update_state([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 8.0])
        >>> print(error.result())
        2.0
    """

    def combine(self, totals: np.ndarray[Any, Any]) -> Any:
        """Computes the root of the mean."""
        return np.sqrt(super().combine(totals))


# ---- accuracies


class Accuracy(PairMean):
    """The fraction of predictions that equal their labels.

    Examples:
        >>> import hpcstrat as hs
        >>> accuracy = hs.metrics.Accuracy()
        >>> accuracy.update_state([1, 2, 3, 4], [0, 2, 3, 4])
        >>> print(accuracy.result())
        0.75
    """

    def _values(self, xp: Any, true: Any, predicted: Any) -> Any:
        return true == predicted


class BinaryAccuracy(PairMean):
    """The fraction of predictions that equal their labels, 0 or 1, after a threshold.

    Args:
        name: the metric's name.
        dtype: the dtype of `result`, `float64` by default.
        threshold: predictions above it count as 1, others as 0.

    Examples:
        >>> import hpcstrat as hs
        >>> accuracy = hs.metrics.BinaryAccuracy()
        >>> accuracy.update_state([1, 1, 0, 0], [0.98, 1.0, 0.0, 0.6])
        >>> print(accuracy.result())
        0.75

        >>> strict = hs.metrics.BinaryAccuracy(threshold=0.7)  # 0.6 counts as 0
        >>> strict.update_state([1, 1, 0, 0], [0.98, 1.0, 0.0, 0.6])
        >>> print(strict.result())
        1.0
    """

    def __init__(
        self,
        name: str | None = None,
        dtype: npt.DTypeLike | None = None,
        threshold: float = 0.5,
    ) -> None:
        super().__init__(name, dtype)
        self.threshold: float = float(threshold)

    def _values(self, xp: Any, true: Any, predicted: Any) -> Any:
        return true == (predicted > rounded_for(self.threshold, predicted.dtype))


class _ClassAccuracy(PairMean):
    """For predictions of shape `(..., classes)`; labels are class indices or one-hot."""

    _is_one_hot = False

    def _check(self, call: str, y_true: Any, y_pred: Any) -> tuple[Array, Array, tuple[int, ...]]:
        if self._is_one_hot:
            true, predicted = as_pair(call, y_true, y_pred)
        else:
            true, predicted = as_numbers(call, "y_true", y_true), as_numbers(call, "y_pred", y_pred)
            if true.ndim == predicted.ndim and true.shape[-1:] == (1,):
                true = true[..., 0]
            if true.shape != predicted.shape[:-1]:
                raise ValueError(
                    f"{call}: y_true has shape {true.shape} and y_pred {predicted.shape}; y_pred "
                    "must have one more dimension, the scores of the classes, and y_true the "
                    "indices of the correct classes"
                )
        if not predicted.ndim or not predicted.shape[-1]:
            raise ValueError(
                f"{call}: y_pred has shape {predicted.shape}; its last dimension must be that of "
                "classes"
            )
        return true, predicted, predicted.shape[:-1]

    def _labels(self, true: Any) -> Any:
        return true.argmax(axis=-1) if self._is_one_hot else true


class SparseCategoricalAccuracy(_ClassAccuracy):
    """The fraction of predictions whose largest score is the label's; labels are class indices.

    `y_pred` has shape `(..., classes)`, probabilities or logits; `y_true` lacks the last dimension,
    or has size 1 there.

    Examples:
        >>> import hpcstrat as hs
        >>> accuracy = hs.metrics.SparseCategoricalAccuracy()
        >>> accuracy.update_state([2, 1], [[0.1, 0.6, 0.3], [0.05, 0.95, 0.0]])
        >>> print(accuracy.result())
        0.5
    """

    def _values(self, xp: Any, true: Any, predicted: Any) -> Any:
        return predicted.argmax(axis=-1) == self._labels(true)


class CategoricalAccuracy(SparseCategoricalAccuracy):
    """The fraction of predictions whose largest score is the label's; labels are one-hot.

    `y_true` has the shape of `y_pred`, `(..., classes)`.

    Examples:
        >>> import hpcstrat as hs
        >>> accuracy = hs.metrics.CategoricalAccuracy()
        >>> accuracy.update_state([[0, 0, 1], [0, 1, 0]], [[0.1, 0.6, 0.3], [0.05, 0.95, 0.0]])
        >>> print(accuracy.result())
        0.5
    """

    _is_one_hot = True


class SparseTopKCategoricalAccuracy(_ClassAccuracy):
    """The fraction of predictions with fewer than `k` scores above the label's.

    Labels are class indices. `y_pred` has shape `(..., classes)`; `y_true` lacks the last
    dimension, or has size 1 there. Predictions with a score that is not finite are wrong.

    Args:
        k: the number of the largest scores that count.
        name: the metric's name.
        dtype: the dtype of `result`, `float64` by default.

    Raises:
        ValueError: `k` is less than 1.

    Examples:
        >>> import hpcstrat as hs
        >>> accuracy = hs.metrics.SparseTopKCategoricalAccuracy(k=2)
        >>> accuracy.update_state([2, 1], [[0.1, 0.6, 0.3], [0.5, 0.1, 0.4]])
        >>> print(accuracy.result())
        0.5
    """

    def __init__(
        self, k: int = 5, name: str | None = None, dtype: npt.DTypeLike | None = None
    ) -> None:
        if k < 1:
            raise ValueError(f"{type(self).__name__}: k is {k!r}; it must be at least 1")
        super().__init__(name, dtype)
        self.k: int = k

    def _values(self, xp: Any, true: Any, predicted: Any) -> Any:
        label, is_class = as_classes(self._labels(true), predicted.shape[-1])
        place = xp.where(is_class, label, 0)[..., None]
        of_label = xp.take_along_axis(predicted, place, axis=-1)
        is_known = is_class & xp.isfinite(predicted).all(axis=-1)
        return is_known & ((predicted > of_label).sum(axis=-1) < self.k)


class TopKCategoricalAccuracy(SparseTopKCategoricalAccuracy):
    """The fraction of predictions with fewer than `k` scores above the label's.

    Labels are one-hot, of the shape of `y_pred`.

    Args:
        k: the number of the largest scores that count.
        name: the metric's name.
        dtype: the dtype of `result`, `float64` by default.

    Raises:
        ValueError: `k` is less than 1.

    Examples:
        >>> import hpcstrat as hs
        >>> y_true, y_pred = [[0, 0, 1], [0, 1, 0]], [[0.1, 0.6, 0.3], [0.5, 0.1, 0.4]]
        >>> for k in 1, 2, 3:
        ...     accuracy = hs.metrics.TopKCategoricalAccuracy(k)
        ...     accuracy.update_state(y_true, y_pred)
        ...     print(k, accuracy.result())
        1 0.0
        2 0.5
        3 1.0
    """

    _is_one_hot = True
