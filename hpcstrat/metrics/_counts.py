"""Metrics of counts: the confusion matrix, and the mean intersection over union."""

from __future__ import annotations

import abc
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcstrat._core.types import Array
from hpcstrat.metrics._metric import PairMetric, as_classes, as_numbers


class CountMetric(PairMetric):
    """Counts pairs of labels and predictions, by their weights, in bins.

    The last bin counts invalid pairs. On the host they raise in `update_state`; on a GPU, for which
    the host does not wait, in `result`.
    """

    _INVALID = ""
    """Why the pairs in the last bin are invalid."""

    def __init__(self, name: str | None, dtype: npt.DTypeLike | None, bins: int) -> None:
        super().__init__(name, dtype, (bins + 1,))
        self._invalid = bins

    def _new(self, xp: Any, true: Any, predicted: Any, weights: Any = None) -> Any:
        bins, size = self._bins(xp, true, predicted), self._invalid + 1
        if xp is np:
            if (bins == self._invalid).any():
                raise ValueError(f"{type(self).__name__}.update_state: {self._INVALID}")
            return np.bincount(bins.ravel(), None if weights is None else weights.ravel(), size)
        # CuPy's `bincount` would wait for the GPU. An invalid pair counts even if its weight is 0.
        if weights is None:
            weights = xp.ones(())  # `at` would copy a number from the host, which graphs refuse
        else:
            weights = xp.where(bins == self._invalid, 1.0, weights)
        counts = xp.zeros(size)
        xp.add.at(counts, bins, weights)
        return counts

    @abc.abstractmethod
    def _bins(self, xp: Any, true: Any, predicted: Any) -> Any:
        """The bin of each pair of a label and a prediction, by the functions of `xp`."""

    def combine(self, totals: np.ndarray[Any, Any]) -> Any:
        """Computes the result from the counts in the bins.

        Raises:
            ValueError: one bin counts what is invalid, and has counted some.
        """
        if totals[-1]:
            raise ValueError(
                f"{type(self).__name__}.result: update_state was passed arrays in which "
                f"{self._INVALID}"
            )
        return self._of_counts(totals[:-1])

    @abc.abstractmethod
    def _of_counts(self, counts: np.ndarray[Any, Any]) -> Any:
        """Computes the result from the counts in the bins."""


class ConfusionMatrix(CountMetric):
    """How often each label, the row, was predicted as each class, the column.

    `result` has shape `(num_classes, num_classes)`. Labels and predictions are class indices, as
    integers or whole floats. Others are refused; TensorFlow counts probabilities below 1 as class
    0.

    Args:
        num_classes: the number of classes.
        name: the metric's name.
        dtype: the dtype of `result`, `float64` by default.
        ignore_class: a label to ignore, such as 255 or -1.

    Raises:
        ValueError: `num_classes` is less than 1.

    Examples:
        >>> import hpcstrat as hs
        >>> matrix = hs.metrics.ConfusionMatrix(num_classes=2)
        >>> matrix.update_state([0, 0, 1, 1], [0, 1, 0, 1], sample_weight=[0.3, 0.3, 0.3, 0.1])
        >>> print(matrix.result())
        [[0.3 0.3]
         [0.3 0.1]]

        >>> pixels = hs.metrics.ConfusionMatrix(num_classes=2, ignore_class=255)
        >>> pixels.update_state([0, 1, 255], [0, 0, 1])
        >>> print(pixels.result())
        [[1. 0.]
         [1. 0.]]
    """

    _INVALID = (
        "labels or predictions are not below num_classes, are negative, or have fractions; pass "
        "class indices, such as the argmax of probabilities"
    )

    def __init__(
        self,
        num_classes: int,
        name: str | None = None,
        dtype: npt.DTypeLike | None = None,
        ignore_class: int | None = None,
    ) -> None:
        if num_classes < 1:
            raise ValueError(
                f"{type(self).__name__}: num_classes is {num_classes!r}; it must be at least 1"
            )
        super().__init__(name, dtype, num_classes**2 + 1)
        self.num_classes: int = num_classes
        self.ignore_class: int | None = ignore_class

    def _bins(self, xp: Any, true: Any, predicted: Any) -> Any:
        size = self.num_classes
        row, is_row = as_classes(true, size)
        column, is_column = as_classes(predicted, size)
        bins = xp.where(is_row & is_column, row * size + column, self._invalid)
        if self.ignore_class is None:
            return bins
        return xp.where(true == self.ignore_class, size**2, bins)

    def _of_counts(self, counts: np.ndarray[Any, Any]) -> Any:
        return counts[:-1].reshape(self.num_classes, self.num_classes)


class MeanIoU(ConfusionMatrix):
    """The mean of the intersection over union, `TP / (TP + FP + FN)`, over classes that occur.

    Labels and predictions are class indices, such as those of an image's pixels, as for
    `ConfusionMatrix`; or, where not sparse, a score for each class along an axis of their own, such
    as one-hot labels or probabilities.

    Args:
        num_classes: the number of classes.
        name: the metric's name.
        dtype: the dtype of `result`, `float64` by default.
        ignore_class: a label to ignore, such as 255 or -1.
        sparse_y_true: whether labels are class indices.
        sparse_y_pred: whether predictions are class indices.
        axis: the axis of the scores.

    Raises:
        ValueError: `num_classes` is less than 1.

    Examples:
        >>> import hpcstrat as hs
        >>> iou = hs.metrics.MeanIoU(num_classes=2)
        >>> iou.update_state([0, 0, 1, 1], [0, 1, 0, 1])
        >>> print(f"{iou.result():.4f}")
        0.3333

        >>> scores = hs.metrics.MeanIoU(num_classes=2, sparse_y_pred=False, axis=0)
        >>> scores.update_state([0, 1, 1], [[0.9, 0.8, 0.1], [0.1, 0.2, 0.9]])
        >>> print(scores.result())
        0.5
    """

    def __init__(
        self,
        num_classes: int,
        name: str | None = None,
        dtype: npt.DTypeLike | None = None,
        ignore_class: int | None = None,
        sparse_y_true: bool = True,
        sparse_y_pred: bool = True,
        axis: int = -1,
    ) -> None:
        super().__init__(num_classes, name, dtype, ignore_class)
        self.sparse_y_true: bool = sparse_y_true
        self.sparse_y_pred: bool = sparse_y_pred
        self.axis: int = axis

    def _check(self, call: str, y_true: Any, y_pred: Any) -> tuple[Array, Array, tuple[int, ...]]:
        if self.sparse_y_true and self.sparse_y_pred:
            return super()._check(call, y_true, y_pred)
        true, predicted = as_numbers(call, "y_true", y_true), as_numbers(call, "y_pred", y_pred)
        shape = self._shape(call, "y_true", true, self.sparse_y_true)
        of_predictions = self._shape(call, "y_pred", predicted, self.sparse_y_pred)
        if shape != of_predictions:
            raise ValueError(
                f"{call}: the class indices of y_true have shape {shape} and those of y_pred "
                f"{of_predictions}; they must be equal"
            )
        return true, predicted, shape

    def _shape(self, call: str, argument: str, array: Array, is_sparse: bool) -> tuple[int, ...]:
        """The shape of the class indices."""
        if is_sparse:
            return array.shape
        if not -array.ndim <= self.axis < array.ndim:
            raise ValueError(
                f"{call}: {argument} has shape {array.shape} and so no axis {self.axis} of scores"
            )
        first = self.axis % array.ndim
        return array.shape[:first] + array.shape[first + 1 :]

    def _bins(self, xp: Any, true: Any, predicted: Any) -> Any:
        return super()._bins(
            xp,
            true if self.sparse_y_true else true.argmax(axis=self.axis),
            predicted if self.sparse_y_pred else predicted.argmax(axis=self.axis),
        )

    def _of_counts(self, counts: np.ndarray[Any, Any]) -> Any:
        matrix = super()._of_counts(counts)
        intersection = np.diagonal(matrix)
        union = matrix.sum(axis=0) + matrix.sum(axis=1) - intersection
        occurs = union != 0
        return (intersection[occurs] / union[occurs]).mean() if occurs.any() else 0.0
