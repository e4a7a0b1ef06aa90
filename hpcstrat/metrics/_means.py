"""Mean and Sum, and the base of means over labels and predictions: errors and accuracies."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcstrat._core import gpu
from hpcstrat._core.types import Array
from hpcstrat.metrics._metric import Metric, as_numbers, as_pair, as_weights


class _WeightedMean(Metric):
    """Its totals are the weighted sum of the values and the sum of the weights."""

    def _add_values(self, values: Any, sample_weight: Any = None) -> None:
        total, count = _sum_weighted(f"{type(self).__name__}.update_state", values, sample_weight)
        if not gpu.is_on_gpu(total):
            self._add(np.array((total, count)))
        elif self._runs_on_gpu():
            self._add_on_gpu(lambda total, totals: _add_both()(total, count, totals), total)
        else:
            self._add(np.array((float(total), float(count))))

    def _combine(self, totals: np.ndarray[Any, Any]) -> Any:
        total, count = totals
        return total / count if count else np.float64(0.0)


class Mean(_WeightedMean):
    """The mean of all values.

    Examples:
        >>> import hpcstrat as hs
        >>> loss = hs.metrics.Mean()
        >>> loss.update_state([1.0, 2.0, 6.0])
        >>> print(loss.result())
        3.0
    """

    def __init__(self, name: str = "mean", dtype: npt.DTypeLike | None = None) -> None:
        super().__init__(name, dtype)

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Adds values, an array of any shape, each with its weight.

        For a replica function; never communicates.

        Raises:
            TypeError: an argument is not an array of numbers.
            ValueError: the weights do not fit the values.
        """
        self._add_values(values, sample_weight)


class Sum(_WeightedMean):
    """The sum of all values."""

    def __init__(self, name: str = "sum", dtype: npt.DTypeLike | None = None) -> None:
        super().__init__(name, dtype)

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Adds values, an array of any shape, each times its weight.

        For a replica function; never communicates.

        Raises:
            TypeError: an argument is not an array of numbers.
            ValueError: the weights do not fit the values.
        """
        self._add_values(values, sample_weight)

    def _combine(self, totals: np.ndarray[Any, Any]) -> Any:
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
            TypeError: the values or the weights are not numbers.
            ValueError: the weights do not fit the values.
        """
        self._add_values(self._fn(y_true, y_pred), sample_weight)


class PairMean(_WeightedMean):
    """The mean of a value for each label and its prediction.

    On a GPU one kernel computes the values and adds them up. So a subclass defines the values
    twice: with NumPy, and as the kernel's statements. These set `double value` to the `j`-th value,
    from `label`, `predicted`, `option`, and `classes`, the number of predictions per label.
    """

    _KERNEL = ""
    _option: float = 0.0

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds labels and predictions, each with its weight.

        For a replica function; never communicates.

        Args:
            y_true: labels or true values, of the predictions' shape unless the class says
                otherwise.
            y_pred: predictions.
            sample_weight: weights, whose shape may lack the last dimensions.

        Raises:
            TypeError: an argument is not an array of numbers.
            ValueError: the shapes do not fit.
        """
        call = f"{type(self).__name__}.update_state"
        true, predicted, shape = self._check(call, y_true, y_pred)
        if not (gpu.is_on_gpu(true) or gpu.is_on_gpu(predicted)):
            self._add_values(self._values(true, predicted), sample_weight)
        elif self._runs_on_gpu():
            weights = None if sample_weight is None else as_weights(call, sample_weight, shape)
            self._add_on_gpu(
                functools.partial(self._launch, math.prod(shape)), true, predicted, weights
            )
        else:
            self._add_values(self._values(gpu.to_host(true), gpu.to_host(predicted)), sample_weight)

    def _check(self, call: str, y_true: Any, y_pred: Any) -> tuple[Array, Array, tuple[int, ...]]:
        """Returns labels, predictions, and the shape of the values."""
        true, predicted = as_pair(call, y_true, y_pred)
        return true, predicted, true.shape

    @abc.abstractmethod
    def _values(self, true: Any, predicted: Any) -> Any:
        """Computes the values from NumPy arrays."""

    def _statements(self, true: Array, predicted: Array) -> str:
        """The kernel's statements for arrays of these dtypes."""
        return self._KERNEL

    def _launch(
        self, size: int, true: Array, predicted: Array, weights: Array | None, totals: Array
    ) -> None:
        if size:
            threads = min(size, _THREADS)
            given = [true, predicted] if weights is None else [true, predicted, weights]
            kernel = _add_values_of(self._statements(true, predicted), weights is not None)
            kernel(
                *given, size, predicted.size // size, self._option, threads, totals, size=threads
            )


def _sum_weighted(call: str, values: Any, sample_weight: Any) -> tuple[Any, Any]:
    """The weighted sum of the values, and the sum of the weights."""
    if sample_weight is None:
        if type(values) in _SCALARS:
            return values, 1
        if type(values) is np.ndarray and values.dtype.kind in "fiu":
            return np.add.reduce(values, axis=None, dtype=np.float64), values.size
        if type(values) is np.ndarray and values.dtype.kind == "b":
            return np.count_nonzero(values), values.size
    values = as_numbers(call, "values", values)
    if sample_weight is None and gpu.is_on_gpu(values):
        if values.ndim == 0 and values.dtype.kind in "fiu":
            return values, 1
        # One kernel that casts and sums, instead of two.
        return values.sum(dtype=np.float64), values.size
    if sample_weight is None:
        return np.asarray(values, np.float64).sum(), values.size
    weights = as_weights(call, sample_weight, values.shape)
    xp = gpu.array_module(values, weights)
    array, weights = xp.asarray(values, np.float64), xp.asarray(weights)
    return (array * weights).sum(), weights.sum()


_SCALARS = (float, int, np.float64, np.float32)
"""The types of most losses."""

_THREADS = 1 << 13
"""The most threads that add up values: each ends with atomic additions to the same two numbers."""


@functools.cache
def _add_both() -> Any:
    """A kernel that adds a total and a count to the sums.

    Both may be on the GPU, so that the host need not wait for them.
    """
    return gpu.load_cupy("a metric").ElementwiseKernel(
        "T total, float64 count",
        "float64 sums",
        "sums += i ? count : (double)total;",
        "hpcstrat_metric",
        no_return=True,
    )


@functools.cache
def _add_values_of(values: str, is_weighted: bool) -> Any:
    """A kernel that adds values and their weights to a metric's totals."""
    weight = "weights[j]" if is_weighted else "1.0"
    return gpu.load_cupy("a metric").ElementwiseKernel(
        f"raw T label, raw U predicted, {'raw float64 weights, ' if is_weighted else ''}"
        "int64 size, int64 classes, float64 option, int64 threads",
        "raw float64 totals",
        f"""
double total = 0, count = 0;
for (long long j = i; j < size; j += threads) {{
    double value = 0;
    {values}
    total += value * {weight};
    count += {weight};
}}
atomicAdd(&totals[0], total);
atomicAdd(&totals[1], count);
""",
        "hpcstrat_metric_values",
        no_return=True,
    )
