"""Metrics of counts: the confusion matrix, and the mean intersection over union."""

from __future__ import annotations

import abc
import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcstrat._core import gpu
from hpcstrat._core.types import Array
from hpcstrat.metrics._metric import Metric, as_pair, as_weights


class CountMetric(Metric):
    """Counts pairs of labels and predictions, by their weights, in bins.

    The last bin counts invalid pairs. On the host they raise in `update_state`. A kernel cannot
    raise, so on a GPU they raise in `result`.
    """

    _INVALID = ""
    """Why the pairs in the last bin are invalid."""

    def __init__(self, name: str, dtype: npt.DTypeLike | None, bins: int) -> None:
        super().__init__(name, dtype, (bins + 1,))

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds labels and predictions, each with its weight.

        For a replica function; never communicates.

        Args:
            y_true: labels, of any shape.
            y_pred: predictions, of the same shape.
            sample_weight: weights, whose shape may lack the last dimensions.

        Raises:
            TypeError: an argument is not an array of numbers.
            ValueError: the shapes do not fit, or labels or predictions are out of range; with
                arrays on a GPU, `result` raises the latter.
        """
        call = f"{type(self).__name__}.update_state"
        true, predicted = as_pair(call, y_true, y_pred)
        weights = None if sample_weight is None else as_weights(call, sample_weight, true.shape)
        if self._runs_on_gpu() and (gpu.is_on_gpu(true) or gpu.is_on_gpu(predicted)):
            self._add_on_gpu(self._launch, true, predicted, weights)
            return
        bins = self._bins(gpu.to_host(true), gpu.to_host(predicted)).ravel()
        counts = np.bincount(
            bins, None if weights is None else gpu.to_host(weights).ravel(), self.totals.size
        )
        if (bins == self.totals.size - 1).any():
            raise ValueError(f"{call}: {self._INVALID}")
        self._add(counts.astype(np.float64, copy=False))

    @abc.abstractmethod
    def _bins(self, true: Any, predicted: Any) -> np.ndarray[Any, Any]:
        """The bin of each pair of a label and a prediction, which are in NumPy arrays."""

    @abc.abstractmethod
    def _launch(self, true: Array, predicted: Array, weights: Array | None, totals: Array) -> None:
        """Adds labels and predictions to the bins with one kernel."""

    def _combine(self, totals: np.ndarray[Any, Any]) -> Any:
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
    """

    _INVALID = (
        "labels or predictions are not below num_classes, are negative, or have fractions; pass "
        "class indices, such as the argmax of probabilities"
    )

    def __init__(
        self,
        num_classes: int,
        name: str = "confusion_matrix",
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

    def _bins(self, true: Any, predicted: Any) -> np.ndarray[Any, Any]:
        size = self.num_classes
        row, column = _classes(true), _classes(predicted)
        is_valid = (row >= 0) & (row < size) & (column >= 0) & (column < size)
        bins = np.where(is_valid, row * size + column, size**2 + 1)
        if self.ignore_class is None:
            return bins
        return np.where(row == self.ignore_class, size**2, bins)

    def _launch(self, true: Array, predicted: Array, weights: Array | None, totals: Array) -> None:
        ignored = [0, 0] if self.ignore_class is None else [1, self.ignore_class]
        weight = 1.0 if weights is None else weights
        _count_classes()(true, predicted, weight, self.num_classes, *ignored, totals)

    def _of_counts(self, counts: np.ndarray[Any, Any]) -> Any:
        return counts[:-1].reshape(self.num_classes, self.num_classes)


class MeanIoU(ConfusionMatrix):
    """The mean of the intersection over union, `TP / (TP + FP + FN)`, over classes that occur.

    Labels and predictions are class indices, such as those of an image's pixels, as for
    `ConfusionMatrix`.

    Args:
        num_classes: the number of classes.
        name: the metric's name.
        dtype: the dtype of `result`, `float64` by default.
        ignore_class: a label to ignore, such as 255 or -1.

    Raises:
        ValueError: `num_classes` is less than 1.

    Examples:
        >>> import hpcstrat as hs
        >>> iou = hs.metrics.MeanIoU(num_classes=2)
        >>> iou.update_state([0, 0, 1, 1], [0, 1, 0, 1])
        >>> print(f"{iou.result():.4f}")
        0.3333
    """

    def __init__(
        self,
        num_classes: int,
        name: str = "mean_io_u",
        dtype: npt.DTypeLike | None = None,
        ignore_class: int | None = None,
    ) -> None:
        super().__init__(num_classes, name, dtype, ignore_class)

    def _of_counts(self, counts: np.ndarray[Any, Any]) -> Any:
        matrix = super()._of_counts(counts)
        intersection = np.diagonal(matrix)
        union = matrix.sum(axis=0) + matrix.sum(axis=1) - intersection
        occurs = union != 0
        return (intersection[occurs] / union[occurs]).mean() if occurs.any() else 0.0


_NO_CLASS = np.iinfo(np.int64).min


def _classes(values: Any) -> np.ndarray[Any, Any]:
    """Class indices as integers; `_NO_CLASS` for fractions, such as probabilities."""
    with np.errstate(invalid="ignore"):
        whole = values.astype(np.int64)
        if values.dtype.kind in "iub":
            return whole
        return np.where(whole.astype(values.dtype) == values, whole, _NO_CLASS)


@functools.cache
def _count_classes() -> Any:
    return gpu.load_cupy("a metric").ElementwiseKernel(
        "T label, U predicted, float64 weight, int64 classes, bool ignores, int64 ignored",
        "raw float64 totals",
        """
const long long row = (long long)label, column = (long long)predicted;
const bool is_label = (double)row == (double)label, is_class = (double)column == (double)predicted;
if (ignores && is_label && row == ignored)
    atomicAdd(&totals[classes * classes], weight);
else if (is_label && 0 <= row && row < classes && is_class && 0 <= column && column < classes)
    atomicAdd(&totals[row * classes + column], weight);
else
    atomicAdd(&totals[classes * classes + 1], 1.0);
""",
        "hpcstrat_metric_classes",
        no_return=True,
    )
