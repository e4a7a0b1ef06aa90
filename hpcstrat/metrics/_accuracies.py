"""Accuracies: the fraction of correct predictions, by several definitions of correct."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from hpcstrat._core.types import Array
from hpcstrat.metrics._means import PairMean
from hpcstrat.metrics._metric import as_classes, as_numbers, as_pair, rounded_for


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
