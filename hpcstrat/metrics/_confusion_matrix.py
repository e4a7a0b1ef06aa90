"""The confusion matrix: how often each label was predicted as each class."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hpcstrat.metrics._metric import Metric, as_numbers, require_equal_shapes

_NOT_CLASSES = (
    "labels or predictions are not below num_classes, are negative, or have fractions; pass class "
    "indices, such as the argmax of probabilities"
)


class ConfusionMatrix(Metric):
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
        # The totals: the matrix, row by row, then the counts of ignored and of invalid pairs. On
        # the host invalid pairs raise in `update_state`; on a GPU, for which the host does not
        # wait, in `result`.
        super().__init__(name, dtype, (num_classes**2 + 2,))
        self.num_classes: int = num_classes
        self.ignore_class: int | None = ignore_class

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Counts labels and predictions, arrays of equal shapes, each pair by its weight.

        For a replica function; never communicates. Weights' shape may lack the last dimensions.

        Raises:
            TypeError: an argument is not an array of real numbers.
            ValueError: the shapes do not fit; or a label or prediction is not a class, for which
                `result` raises if they are on a GPU.

        Examples:
            >>> matrix = hs.metrics.ConfusionMatrix(num_classes=2)
            >>> matrix.update_state([[0, 1], [1, 1]], [[0, 1], [0, 0]], sample_weight=[1.0, 0.5])
            >>> print(matrix.result())
            [[1. 0.]
             [1. 1.]]
        """
        call = f"{type(self).__name__}.update_state"
        true, predicted = as_numbers(call, "y_true", y_true), as_numbers(call, "y_pred", y_pred)
        require_equal_shapes(call, true, predicted)
        self._add(call, self._counts, (true, predicted), sample_weight, true.shape)

    def _counts(self, xp: Any, true: Any, predicted: Any, weights: Any = None) -> Any:
        """What the totals grow by."""
        classes = self.num_classes
        ignored, invalid, size = classes**2, classes**2 + 1, classes**2 + 2
        row, is_row = _as_classes(true, classes)
        column, is_column = _as_classes(predicted, classes)
        bins = xp.where(is_row & is_column, row * classes + column, invalid)
        if self.ignore_class is not None:
            bins = xp.where(true == self.ignore_class, ignored, bins)
        if xp is np:
            if (bins == invalid).any():
                raise ValueError(f"{type(self).__name__}.update_state: {_NOT_CLASSES}")
            return np.bincount(bins.ravel(), None if weights is None else weights.ravel(), size)
        # CuPy's `bincount` would wait for the GPU. An invalid pair counts even if its weight is 0.
        if weights is None:
            weights = xp.ones(())  # `at` would copy a number from the host, which graphs refuse
        else:
            weights = xp.where(bins == invalid, 1.0, weights)
        counts = xp.zeros(size)
        xp.add.at(counts, bins, weights)
        return counts

    def combine(self, totals: np.ndarray[Any, Any]) -> Any:
        """Computes the matrix.

        Raises:
            ValueError: a label or prediction was not a class.
        """
        if totals[-1]:
            raise ValueError(
                f"{type(self).__name__}.result: update_state was passed arrays in which "
                f"{_NOT_CLASSES}"
            )
        return totals[:-2].reshape(self.num_classes, self.num_classes)


def _as_classes(values: Any, classes: int) -> tuple[Any, Any]:
    """Class indices as integers, and where they are of classes: whole, and below `classes`."""
    with np.errstate(invalid="ignore"):  # NaN, on the host
        index = values.astype(np.int64, copy=False)
    return index, (index == values) & (index >= 0) & (index < classes)
