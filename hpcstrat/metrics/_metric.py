"""Metric: each replica adds up its own totals, and `result` combines them."""

from __future__ import annotations

import abc
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcstrat._core import arrays, call_name, gpu
from hpcstrat._core.types import Array, ReduceOp
from hpcstrat._replicas import contexts
from hpcstrat._update.rule import UpdateRule
from hpcstrat._variable import variable
from hpcstrat._variable.options import VariableAggregation, VariableSynchronization
from hpcstrat._variable.state import in_replica_of
from hpcstrat._variable.variable import Variable
from hpcstrat._variable.writing import RULES


class Metric(abc.ABC):
    """The base class of metrics: totals of everything that replicas have added.

    Results are exact over uneven batches.

    Args:
        name: the metric's name.
        dtype: the dtype of `result`, `float64` by default. The totals are `float64` in any case.
        shape: the shape of the totals.

    Attributes:
        name: the metric's name.
        totals: an `ON_READ` variable that sums: each replica's own totals.
    """

    def __init__(
        self, name: str, dtype: npt.DTypeLike | None = None, shape: Sequence[int] = (2,)
    ) -> None:
        self.name: str = name
        self._dtype: np.dtype[Any] = np.dtype(np.float64 if dtype is None else dtype)
        # Totals, which are summed when read: results of replicas with batches of different sizes
        # could not be combined.
        self.totals: Variable = Variable(
            np.zeros(shape),
            name=name,
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.SUM,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls `update_state`, then `result`. Collective, as `result` is.

        In a step, `update_state` alone is faster.
        """
        self.update_state(*args, **kwargs)
        return self.result()

    @abc.abstractmethod
    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Adds to this replica's totals. For a replica function; never communicates."""

    def result(self) -> Any:
        """The metric over all replicas, on the host. Collective: all ranks call this."""
        context = contexts.context()
        if isinstance(context, contexts.InUpdate) and context.group.communicator.size > 1:
            # In an update the totals would be this replica's only.
            contexts.require_cross_replica(context.group, f"{type(self).__name__}.result")
        if isinstance(context, contexts.InReplica) and context.group.communicator.size > 1:
            communicator = context.group.communicator
            with call_name.call_named(f"{type(self).__name__}.result"):
                totals = gpu.to_host(
                    communicator.all_reduce([self.totals.value()], ReduceOp.SUM)[0]
                )
        else:
            totals = self.totals.numpy()
        # An overflow is inf on all ranks, instead of an exception on a rank that enabled it.
        with np.errstate(all="ignore"):
            return np.asarray(self._combine(totals)).astype(self._dtype)[()]

    def reset_state(self) -> None:
        """Resets to zero.

        Collective in the cross-replica context; in a replica context, for this replica only.
        """
        self.totals.assign(np.zeros(self.totals.shape))

    reset_states = reset_state  # its name before TensorFlow 2.5

    def merge_state(self, metrics: Iterable[Metric]) -> None:
        """Adds the totals of other metrics of the same class, on each replica its own.

        Never communicates.

        Raises:
            TypeError: a metric is of another class.
            ValueError: its totals have another shape, or it belongs to another strategy. Nothing
                has changed.
        """
        call, metrics = f"{type(self).__name__}.merge_state", list(metrics)
        state = variable.state_of(self.totals)
        for other in metrics:
            if type(other) is not type(self):
                raise TypeError(
                    f"{call}: {other!r} is a {type(other).__name__}; pass metrics of the same class"
                )
            if (
                other.totals.shape != self.totals.shape
                or variable.state_of(other.totals).group is not state.group
            ):
                raise ValueError(
                    f"{call}: {other!r} differs in its options or its strategy; they must be the "
                    "same"
                )
        for other in metrics:
            state.storage.local.write(
                state.block, variable.state_of(other.totals).block.array, RULES["assign_add"]
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r})"

    # ---- for subclasses

    @abc.abstractmethod
    def _combine(self, totals: np.ndarray[Any, Any]) -> Any:
        """Computes the result from the sum of all replicas' totals."""

    def _add(self, new: np.ndarray[Any, Any]) -> None:
        """Adds a NumPy array of the totals' shape to this replica's totals."""
        state = variable.state_of(self.totals)
        if state.group.stream is None and in_replica_of(state.group):
            # `assign_add` does the same after checks that take three times as long as summing a
            # batch.
            state.storage.local.write(state.block, new, RULES["assign_add"])
            return
        if state.needs_aggregation_to_read():
            raise RuntimeError(
                f"{type(self).__name__}.update_state was called in the cross-replica context, but "
                "each replica keeps its own totals; call it inside the function of Strategy.run"
            )
        self.totals.assign_add(new)

    def _runs_on_gpu(self) -> bool:
        """True in a replica function with totals on a GPU, to which a kernel may add."""
        group = variable.state_of(self.totals).group
        return group.stream is not None and in_replica_of(group)

    def _add_on_gpu(self, launch: Callable[..., None], *arrays: Array) -> None:
        """Calls `launch(*arrays, totals)`, which launches a kernel, with arrays on one GPU."""
        state = variable.state_of(self.totals)
        stream = state.group.stream
        assert stream is not None

        def apply(totals: Array, *_: Any) -> None:
            launch(*[None if array is None else stream.here(array) for array in arrays], totals)

        state.storage.local.write(state.block, state.block.array, UpdateRule(apply))


_NUMBERS = "fiub"
"""The kinds of dtypes of most labels and predictions."""


def as_numbers(call: str, argument: str, value: Any) -> Any:
    """`value` as an array of numbers, on the host or the GPU where it is.

    Raises:
        TypeError: it is not an array of numbers.
    """
    array = arrays.as_array(call, value, on_gpu=True)
    if arrays.is_numeric(array.dtype):
        return array
    # Python objects, such as fractions. NumPy would turn text into numbers, and `None` into nan.
    if array.dtype != object or not all(hasattr(item, "__float__") for item in array.flat):
        raise TypeError(
            f"{call}: {argument} is {reprlib.repr(value)}; it must be an array of numbers"
        )
    return array.astype(np.float64)


def as_pair(call: str, y_true: Any, y_pred: Any) -> tuple[Any, Any]:
    """Labels and predictions as arrays of equal shapes, each where it is.

    Raises:
        TypeError: an argument is not an array of numbers.
        ValueError: the shapes differ.
    """
    if type(y_true) is type(y_pred) is np.ndarray and y_true.shape == y_pred.shape:
        if y_true.dtype.kind in _NUMBERS and y_pred.dtype.kind in _NUMBERS:
            return y_true, y_pred
    true, predicted = as_numbers(call, "y_true", y_true), as_numbers(call, "y_pred", y_pred)
    if true.shape != predicted.shape:
        raise ValueError(
            f"{call}: y_true has shape {true.shape} and y_pred {predicted.shape}; they must be "
            "equal"
        )
    return true, predicted


def as_weights(call: str, sample_weight: Any, shape: tuple[int, ...]) -> Any:
    """Weights as `float64`, broadcast to this shape: they may lack its last dimensions.

    Raises:
        TypeError: they are not numbers.
        ValueError: they have another shape.
    """
    weights = as_numbers(call, "sample_weight", sample_weight).astype(np.float64, copy=False)
    if weights.ndim == len(shape) + 1 and weights.shape[-1] == 1:
        weights = weights[..., 0]
    xp = gpu.array_module(weights)
    try:
        return xp.broadcast_to(
            weights.reshape(weights.shape + (1,) * (len(shape) - weights.ndim)), shape
        )
    except ValueError as error:
        raise ValueError(
            f"{call}: sample_weight has shape {weights.shape} and the values {shape}; pass a "
            "weight for each value, or for each index of their first dimensions"
        ) from error
