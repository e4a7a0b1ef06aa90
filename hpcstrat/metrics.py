"""Metrics: each replica keeps its own totals, and `result` combines them."""

from __future__ import annotations

import functools
import reprlib
from typing import Any

import numpy as np

from hpcstrat import _arrays, _context, _edge, _gpu, _variable_state, _variables
from hpcstrat._storage.rule import UpdateRule
from hpcstrat._types import ReduceOp
from hpcstrat._variable_options import VariableAggregation, VariableSynchronization
from hpcstrat._variable_writing import RULES
from hpcstrat._variables import Variable


class Metric:
    """A total and a count over everything that replicas have added; exact over uneven batches.

    Args:
        name: the metric's name.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        # Both numbers are summed over replicas when read. A mean per replica could not be combined exactly, as replicas
        # have batches of different sizes.
        self._sums = Variable(
            np.zeros(2),
            name=name,
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.SUM,
        )

    def result(self) -> Any:
        """The metric over all replicas, a `float64` on the host. Collective: all ranks call this."""
        context = _context.context()
        if isinstance(context, _context.InReplica) and context.group.communicator.size > 1:
            communicator = context.group.communicator
            with _edge.call_named(f"{type(self).__name__}.result"):
                total, count = _gpu.to_host(communicator.all_reduce([self._sums.value()], ReduceOp.SUM)[0])
        else:
            total, count = self._sums.numpy()
        return self._combine(total, count)

    def reset_state(self) -> None:
        """Resets to zero. Collective in the cross-replica context; in a replica context, for this replica only."""
        self._sums.assign(np.zeros(2))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r})"

    def _add(self, total: Any, count: Any) -> None:
        state = _variables.state_of(self._sums)
        is_on_gpu = _gpu.is_on_gpu(total)
        if _variable_state.in_replica_of(state.group) and is_on_gpu is (state.group.stream is not None):
            # What `assign_add` does in the end; its checks take three times as long as the sum of a batch.
            if is_on_gpu:
                add = _add_both()
                state.storage.write(state.block, total, UpdateRule(lambda sums, total, *_: add(total, count, sums)))
            else:
                state.storage.write(state.block, np.array((total, count)), RULES["assign_add"])
            return
        if state.needs_aggregation_to_read():
            raise RuntimeError(
                f"{type(self).__name__}.update_state was called in the cross-replica context, but each replica keeps "
                "its own totals; call it inside the function of Strategy.run"
            )
        self._sums.assign_add([float(total), float(count)])

    def _combine(self, total: Any, count: Any) -> Any:
        return total / count if count else np.float64(0.0)


@functools.cache
def _add_both() -> Any:
    """A kernel that adds a total and a count to the sums. Both may be on the GPU: the host need not wait for them."""
    return _gpu.load_cupy("a metric").ElementwiseKernel(
        *("T total, float64 count", "float64 sums", "sums += i ? count : (double)total;", "hpcstrat_metric"),
        no_return=True,
    )


_SCALARS = (float, int, np.float64, np.float32)
"""The types of most losses."""


def _as_numbers(call: str, argument: str, value: Any) -> Any:
    array = _arrays.as_array(call, value, on_gpu=True)
    if not _arrays.is_numeric(array.dtype):
        try:
            array = array.astype(np.float64)  # Python objects, such as fractions
        except (TypeError, ValueError) as error:
            raise TypeError(f"{call}: {argument} is {reprlib.repr(value)}; it must be an array of numbers") from error
    return array


def _weighted(call: str, values: Any, sample_weight: Any) -> tuple[Any, Any]:
    """The weighted sum of the values, and the sum of the weights."""
    if sample_weight is None:
        if type(values) in _SCALARS:
            return values, 1
        if type(values) is np.ndarray and values.dtype.kind in "fiu":
            return np.add.reduce(values, axis=None, dtype=np.float64), values.size
        if type(values) is np.ndarray and values.dtype.kind == "b":
            return np.count_nonzero(values), values.size
    values = _as_numbers(call, "values", values)
    sample_weight = None if sample_weight is None else _as_numbers(call, "sample_weight", sample_weight)
    if sample_weight is None and _gpu.is_on_gpu(values):
        if values.ndim == 0 and values.dtype.kind in "fiu":
            return values, 1
        return values.sum(dtype=np.float64), values.size  # one kernel that casts and sums, instead of two
    xp = _gpu.array_module(values, sample_weight)
    array = xp.asarray(values, np.float64)
    if sample_weight is None:
        return array.sum(), array.size
    weights = xp.asarray(sample_weight, np.float64)
    # As in TensorFlow, weights may lack the last dimensions of the values.
    weights = xp.broadcast_to(weights.reshape(weights.shape + (1,) * (array.ndim - weights.ndim)), array.shape)
    return (array * weights).sum(), weights.sum()


def _pair(call: str, y_true: Any, y_pred: Any) -> tuple[Any, Any]:
    if type(y_true) is np.ndarray and type(y_pred) is np.ndarray and y_true.shape == y_pred.shape:
        return y_true, y_pred
    y_true, y_pred = (_arrays.as_array(call, values, on_gpu=True) for values in (y_true, y_pred))
    xp = _gpu.array_module(y_true, y_pred)
    true, predicted = xp.asarray(y_true), xp.asarray(y_pred)
    if true.shape != predicted.shape:
        raise ValueError(f"{call}: y_true has shape {true.shape} and y_pred {predicted.shape}; they must be equal")
    return true, predicted


class Mean(Metric):
    """The mean of all values."""

    def __init__(self, name: str = "mean") -> None:
        super().__init__(name)

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Adds values, an array of any shape, each with its weight. For a replica function; never communicates.

        Raises:
            TypeError: an argument is not an array of numbers.
        """
        self._add(*_weighted(f"{type(self).__name__}.update_state", values, sample_weight))


class Sum(Metric):
    """The sum of all values."""

    def __init__(self, name: str = "sum") -> None:
        super().__init__(name)

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Adds values, an array of any shape, each times its weight. For a replica function; never communicates.

        Raises:
            TypeError: an argument is not an array of numbers.
        """
        self._add(*_weighted(f"{type(self).__name__}.update_state", values, sample_weight))

    def _combine(self, total: Any, count: Any) -> Any:
        return total


class Accuracy(Metric):
    """The fraction of predictions that equal their labels."""

    def __init__(self, name: str = "accuracy") -> None:
        super().__init__(name)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds labels and predictions, arrays of equal shapes. For a replica function; never communicates.

        Raises:
            ValueError: the shapes differ.
        """
        call = "Accuracy.update_state"
        true, predicted = _pair(call, y_true, y_pred)
        self._add(*_weighted(call, true == predicted, sample_weight))


class MeanSquaredError(Metric):
    """The mean of the squared errors."""

    def __init__(self, name: str = "mean_squared_error") -> None:
        super().__init__(name)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds true and predicted values, arrays of equal shapes. For a replica function; never communicates.

        Raises:
            TypeError: an argument is not an array of numbers.
            ValueError: the shapes differ.
        """
        call = "MeanSquaredError.update_state"
        true, predicted = _pair(call, _as_numbers(call, "y_true", y_true), _as_numbers(call, "y_pred", y_pred))
        errors = true.astype(np.float64) - predicted  # cast first: differences of unsigned integers wrap around
        self._add(*_weighted(call, errors**2, sample_weight))
