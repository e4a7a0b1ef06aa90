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
    REAL,
    REAL_OR_COMPLEX,
    Metric,
    as_numbers,
    require_equal_shapes,
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
        self._add(call, _sums, (values,), sample_weight, values.shape)

    def combine(self, totals: np.ndarray[Any, Any]) -> Any:
        """Computes the weighted mean; 0 before the first value."""
        total, count = totals
        return total / count if count else np.float64(0.0)


def _sums(xp: Any, values: Any, weights: Any = None) -> tuple[Any, Any]:
    """The weighted sum of the values, and the sum of the weights."""
    if weights is not None:
        return (values * weights).sum(), weights.sum()
    if not values.ndim:
        return values, 1
    if xp is np and values.dtype.kind == "b":
        return np.count_nonzero(values), values.size
    return xp.add.reduce(values, axis=None, dtype=np.float64), values.size


class Mean(_WeightedMean):
    """The mean of all values.

    Examples:
        >>> import hpcstrat as hs
        >>> loss = hs.metrics.Mean()
        >>> loss.update_state([1.0, 2.0, 6.0])
        >>> print(loss.result())
        3.0
    """

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Adds values, an array of any shape, each with its weight.

        For a replica function; never communicates. Weights' shape may lack the last dimensions.

        Raises:
            TypeError: an argument is not an array of real numbers.
            ValueError: the weights do not fit the values.

        Examples:
            >>> loss = hs.metrics.Mean()
            >>> loss.update_state([1.0, 2.0, 6.0], sample_weight=[1, 1, 0])  # without the last
            >>> print(loss.result())
            1.5
        """
        self._add_values(values, sample_weight)


class Sum(Mean):
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

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds the function's values, each with its weight.

        For a replica function; never communicates.

        Raises:
            TypeError: the values or the weights are not real numbers.
            ValueError: the weights do not fit the values.

        Examples:
            >>> bias = hs.metrics.MeanMetricWrapper(lambda true, pred: pred - true, name="bias")
            >>> bias.update_state(np.zeros(3), np.array([1.0, 2.0, -9.0]), sample_weight=[1, 1, 0])
            >>> print(bias.result())
            1.5
        """
        self._add_values(self._fn(y_true, y_pred), sample_weight)


class PairMean(_WeightedMean):
    """The mean of a value for each label and its prediction."""

    _kinds = REAL

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds labels and predictions, each with its weight.

        For a replica function; never communicates.

        Args:
            y_true: labels or true values, of the predictions' shape unless the class says
                otherwise.
            y_pred: predictions.
            sample_weight: weights, whose shape may lack the last dimensions.

        Raises:
            TypeError: an argument is not an array of numbers: of real ones, unless the class says
                otherwise.
            ValueError: the shapes do not fit.

        Examples:
            A weight for each example, where an example has several values:

            >>> error = hs.metrics.MeanAbsoluteError()
            >>> y_true, y_pred = np.zeros((2, 3)), np.array([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]])
            >>> error.update_state(y_true, y_pred, sample_weight=[3.0, 1.0])
            >>> print(error.result())  # (3 * 1 + 1 * 2) / (3 + 1)
            1.25
        """
        call = f"{type(self).__name__}.update_state"
        true = as_numbers(call, "y_true", y_true, self._kinds)
        predicted = as_numbers(call, "y_pred", y_pred, self._kinds)
        true, shape = self._check(call, true, predicted)
        self._add(call, self._sums, (true, predicted), sample_weight, shape)

    def _check(self, call: str, true: Array, predicted: Array) -> tuple[Array, tuple[int, ...]]:
        """Returns the labels, and the shape of the values."""
        require_equal_shapes(call, true, predicted)
        return true, true.shape

    def _sums(self, xp: Any, true: Any, predicted: Any, weights: Any = None) -> tuple[Any, Any]:
        return _sums(xp, self._values(true, predicted), weights)

    @abc.abstractmethod
    def _values(self, true: Any, predicted: Any) -> Any:
        """Computes the values, of NumPy or CuPy as the arrays."""


# ---- errors


def _errors(true: Any, predicted: Any) -> Any:
    # Cast first: differences of unsigned integers wrap around.
    return true.astype(np.complex128 if true.dtype.kind == "c" else np.float64) - predicted


class MeanAbsoluteError(PairMean):
    """The mean of the absolute errors, `|y_true - y_pred|`, of real or complex values.

    Examples:
        >>> import hpcstrat as hs
        >>> error = hs.metrics.MeanAbsoluteError()
        >>> error.update_state([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 8.0])
        >>> print(error.result())
        1.0
    """

    _kinds = REAL_OR_COMPLEX

    def _values(self, true: Any, predicted: Any) -> Any:
        return abs(_errors(true, predicted))


class MeanSquaredError(PairMean):
    """The mean of the squared errors, `|y_true - y_pred|**2`, of real or complex values.

    Examples:
        >>> import hpcstrat as hs
        >>> error = hs.metrics.MeanSquaredError()
        >>> error.update_state([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 8.0])
        >>> print(error.result())
        4.0
    """

    _kinds = REAL_OR_COMPLEX

    def _values(self, true: Any, predicted: Any) -> Any:
        error = _errors(true, predicted)
        return error.real**2 + error.imag**2 if error.dtype.kind == "c" else error**2


class RootMeanSquaredError(MeanSquaredError):
    """The square root of the mean of the squared errors, of real or complex values.

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
    """The fraction of predictions that equal their labels, real or complex.

    Examples:
        >>> import hpcstrat as hs
        >>> accuracy = hs.metrics.Accuracy()
        >>> accuracy.update_state([1, 2, 3, 4], [0, 2, 3, 4])
        >>> print(accuracy.result())
        0.75
    """

    _kinds = REAL_OR_COMPLEX

    def _values(self, true: Any, predicted: Any) -> Any:
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

    def _values(self, true: Any, predicted: Any) -> Any:
        # As in Keras, which rounds the threshold to the predictions' dtype.
        is_single = predicted.dtype.kind == "f" and predicted.dtype.itemsize < 8
        return true == (predicted > (np.float32 if is_single else np.float64)(self.threshold))


class SparseCategoricalAccuracy(PairMean):
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

    def _check(self, call: str, true: Array, predicted: Array) -> tuple[Array, tuple[int, ...]]:
        if true.ndim == predicted.ndim and true.shape[-1:] == (1,):
            true = true[..., 0]
        if true.shape != predicted.shape[:-1]:
            raise ValueError(
                f"{call}: y_true has shape {true.shape} and y_pred {predicted.shape}; y_pred must "
                "have one more dimension, the scores of the classes, and y_true the indices of the "
                "correct classes"
            )
        _require_classes(call, predicted)
        return true, true.shape

    def _values(self, true: Any, predicted: Any) -> Any:
        return predicted.argmax(axis=-1) == true


class CategoricalAccuracy(PairMean):
    """The fraction of predictions whose largest score is the label's; labels are one-hot.

    `y_true` has the shape of `y_pred`, `(..., classes)`.

    Examples:
        >>> import hpcstrat as hs
        >>> accuracy = hs.metrics.CategoricalAccuracy()
        >>> accuracy.update_state([[0, 0, 1], [0, 1, 0]], [[0.1, 0.6, 0.3], [0.05, 0.95, 0.0]])
        >>> print(accuracy.result())
        0.5
    """

    def _check(self, call: str, true: Array, predicted: Array) -> tuple[Array, tuple[int, ...]]:
        require_equal_shapes(call, true, predicted)
        _require_classes(call, predicted)
        return true, true.shape[:-1]

    def _values(self, true: Any, predicted: Any) -> Any:
        return predicted.argmax(axis=-1) == true.argmax(axis=-1)


def _require_classes(call: str, predicted: Array) -> None:
    """Raises `ValueError` unless the last dimension of the scores has classes."""
    if not predicted.ndim or not predicted.shape[-1]:
        raise ValueError(
            f"{call}: y_pred has shape {predicted.shape}; its last dimension must be that of "
            "classes"
        )
