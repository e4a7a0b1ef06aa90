"""Accuracies: the fraction of correct predictions, by several definitions of correct."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hpcstrat._core.types import Array
from hpcstrat.metrics._means import PairMean
from hpcstrat.metrics._metric import as_numbers, as_pair


class Accuracy(PairMean):
    """The fraction of predictions that equal their labels.

    Examples:
        >>> import hpcstrat as hs
        >>> accuracy = hs.metrics.Accuracy()
        >>> accuracy.update_state([1, 2, 3, 4], [0, 2, 3, 4])
        >>> print(accuracy.result())
        0.75
    """

    _KERNEL = "value = (double)label[j] == (double)predicted[j];"
    # Exact beyond 2**53.
    _KERNEL_OF_INTEGERS = "value = (long long)label[j] == (long long)predicted[j];"

    def __init__(self, name: str = "accuracy", dtype: npt.DTypeLike | None = None) -> None:
        super().__init__(name, dtype)

    def _values(self, true: Any, predicted: Any) -> Any:
        return true == predicted

    def _statements(self, true: Array, predicted: Array) -> str:
        are_integers = true.dtype.kind in "iub" and predicted.dtype.kind in "iub"
        return self._KERNEL_OF_INTEGERS if are_integers else self._KERNEL


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
    """

    _KERNEL = "value = (double)label[j] == ((double)predicted[j] > option ? 1.0 : 0.0);"

    def __init__(
        self,
        name: str = "binary_accuracy",
        dtype: npt.DTypeLike | None = None,
        threshold: float = 0.5,
    ) -> None:
        super().__init__(name, dtype)
        self.threshold: float = float(threshold)

    def _check(self, call: str, y_true: Any, y_pred: Any) -> tuple[Array, Array, tuple[int, ...]]:
        true, predicted, shape = super()._check(call, y_true, y_pred)
        self._option = round_for(self.threshold, predicted.dtype)
        return true, predicted, shape

    def _values(self, true: Any, predicted: Any) -> Any:
        return true == (predicted > self._option)


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


_FIRST_LARGEST = """
    long long {name} = 0;
    for (long long c = 1; c < classes; ++c)
        if ({array}[j * classes + c] > {array}[j * classes + {name}]) {name} = c;
"""
_CLASS = "const double target = (double)label[j];"
_CLASS_OF_ONE_HOT = (
    _FIRST_LARGEST.format(name="first", array="label") + "    const double target = (double)first;"
)
_IS_LARGEST = (
    _FIRST_LARGEST.format(name="best", array="predicted") + "    value = (double)best == target;"
)
_IS_IN_TOP = """
    if (0 <= target && target < classes) {
        const double score = (double)predicted[j * classes + (long long)target];
        long long larger = 0;
        bool are_finite = true;
        for (long long c = 0; c < classes; ++c) {
            const double other = (double)predicted[j * classes + c];
            larger += other > score;
            are_finite = are_finite && isfinite(other);
        }
        value = are_finite && larger < option;
    }
"""


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

    _KERNEL = _CLASS + _IS_LARGEST

    def __init__(
        self, name: str = "sparse_categorical_accuracy", dtype: npt.DTypeLike | None = None
    ) -> None:
        super().__init__(name, dtype)

    def _values(self, true: Any, predicted: Any) -> Any:
        return predicted.argmax(axis=-1) == self._labels(true)


class CategoricalAccuracy(SparseCategoricalAccuracy):
    """The fraction of predictions whose largest score is the label's; labels are one-hot.

    `y_true` has the shape of `y_pred`, `(..., classes)`.
    """

    _is_one_hot = True
    _KERNEL = _CLASS_OF_ONE_HOT + _IS_LARGEST

    def __init__(
        self, name: str = "categorical_accuracy", dtype: npt.DTypeLike | None = None
    ) -> None:
        super().__init__(name, dtype)


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

    _KERNEL = _CLASS + _IS_IN_TOP

    def __init__(
        self,
        k: int = 5,
        name: str = "sparse_top_k_categorical_accuracy",
        dtype: npt.DTypeLike | None = None,
    ) -> None:
        if k < 1:
            raise ValueError(f"{type(self).__name__}: k is {k!r}; it must be at least 1")
        super().__init__(name, dtype)
        self.k: int = k
        self._option = float(k)

    def _values(self, true: Any, predicted: Any) -> Any:
        labels = self._labels(true)[..., None]
        of_label = labels == np.arange(predicted.shape[-1])
        zero = predicted.dtype.type(0)  # NumPy 1.26 does not promote bfloat16 with a Python number
        scores = np.where(of_label, predicted, zero).sum(
            axis=-1, keepdims=True, dtype=predicted.dtype
        )
        is_known = of_label.any(axis=-1) & np.isfinite(predicted).all(axis=-1)
        return is_known & ((predicted > scores).sum(axis=-1) < self.k)


class TopKCategoricalAccuracy(SparseTopKCategoricalAccuracy):
    """The fraction of predictions with fewer than `k` scores above the label's.

    Labels are one-hot, of the shape of `y_pred`.

    Args:
        k: the number of the largest scores that count.
        name: the metric's name.
        dtype: the dtype of `result`, `float64` by default.

    Raises:
        ValueError: `k` is less than 1.
    """

    _is_one_hot = True
    _KERNEL = _CLASS_OF_ONE_HOT + _IS_IN_TOP

    def __init__(
        self,
        k: int = 5,
        name: str = "top_k_categorical_accuracy",
        dtype: npt.DTypeLike | None = None,
    ) -> None:
        super().__init__(k, name, dtype)


def round_for(threshold: float, dtype: np.dtype[Any]) -> float:
    """Rounds a threshold to `float32` if it is compared with predictions of 16 or 32 bits."""
    return float(np.float32(threshold)) if dtype.kind in "fV" and dtype.itemsize < 8 else threshold
