"""Metric: each replica adds up its own totals, and `result` combines them."""

from __future__ import annotations

import abc
import re
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcstrat._core import arrays, call_name, gpu
from hpcstrat._core.types import Array, ReduceOp, as_dtype
from hpcstrat._replicas import contexts
from hpcstrat._update.rule import UpdateRule
from hpcstrat._variable.options import VariableAggregation, VariableSynchronization
from hpcstrat._variable.state import in_replica_of
from hpcstrat._variable.variable import Variable, state_of
from hpcstrat._variable.writing import RULES

REAL, REAL_OR_COMPLEX = "biuf", "biufc"
"""Kinds of dtypes that an argument may have."""


class Metric(abc.ABC):
    """The base class of metrics: totals of everything that replicas have added.

    Results are exact over uneven batches.

    Args:
        name: the metric's name; by default the class's, as `squared_loss` for `SquaredLoss`.
        dtype: the dtype of `result`, `float64` by default. The totals are `float64` in any case.
        shape: the shape of the totals.

    Attributes:
        name: the metric's name.
        totals: an `ON_READ` variable that sums: each replica's own totals.

    Examples:
        >>> import hpcstrat as hs
        >>> loss, total = hs.metrics.Mean(name="loss"), hs.metrics.Sum()
        >>> print(loss.name, total.name, loss([1.0, 3.0]))  # updates, returns
        loss sum 2.0
    """

    def __init__(
        self,
        name: str | None = None,
        dtype: npt.DTypeLike | None = None,
        shape: Sequence[int] = (2,),
    ) -> None:
        call = type(self).__name__
        if name is not None and not isinstance(name, str):
            raise TypeError(f"{call}: name is {name!r}; it must be a string")
        if name is None:
            # As Keras makes it: `F1Score` is `f1_score`, and `ROC` is `roc`.
            name = re.sub(r"(?<=.)(?=[A-Z][a-z])|(?<=[a-z])(?=[A-Z])", "_", call).lower()
        self.name: str = name
        self._dtype: np.dtype[Any] = as_dtype(call, np.float64 if dtype is None else dtype)
        # Totals, which are summed when read: results of replicas with batches of different sizes
        # could not be combined.
        self.totals: Variable = Variable(
            np.zeros(shape),
            name=self.name,
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
        """Adds to this replica's totals. For a replica function; never communicates.

        Examples:
            >>> loss = hs.metrics.Mean()
            >>> loss.update_state([1.0, 3.0])  # two examples
            >>> loss.update_state([5.0])
            >>> print(loss.result(), loss.totals.numpy())  # sum and count
            3.0 [9. 3.]
        """

    def result(self) -> Any:
        """The metric over all replicas, on the host. Collective: all ranks call this.

        Examples:
            >>> loss = hs.metrics.Mean(dtype="float32")
            >>> print(loss.result())  # before the first update
            0.0
            >>> loss.update_state([1.0, 2.0])
            >>> print(loss.result(), loss.result().dtype)
            1.5 float32
        """
        context = contexts.current.get()
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
            return np.asarray(self.combine(totals)).astype(self._dtype)[()]

    @abc.abstractmethod
    def combine(self, totals: np.ndarray[Any, Any]) -> Any:
        """Computes the result from the sum of all replicas' totals, on the host. For subclasses.

        Examples:
            >>> class Largest(hs.metrics.Mean):  # of the mean and 1
            ...     def combine(self, totals):
            ...         return max(1.0, super().combine(totals))
            >>> largest = Largest()
            >>> largest.update_state([0.25, 0.75])
            >>> print(largest.result())
            1.0
        """

    def reset_state(self) -> None:
        """Resets to zero.

        Collective in the cross-replica context; in a replica context, for this replica only.

        Examples:
            >>> loss = hs.metrics.Mean()
            >>> for epoch in range(2):
            ...     loss.update_state([epoch + 1.0, epoch + 2.0])
            ...     print(loss.result())
            ...     loss.reset_state()
            1.5
            2.5
        """
        self.totals.assign(np.zeros(self.totals.shape))

    reset_states = reset_state  # its name before TensorFlow 2.5

    @property
    def variables(self) -> list[Variable]:
        """What it keeps: its totals.

        Examples:
            >>> matrix = hs.metrics.ConfusionMatrix(num_classes=2)
            >>> matrix.variables[0].shape  # 2 x 2 counts, one of ignored and one of invalid pairs
            (6,)
        """
        return [self.totals]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r})"

    # ---- for subclasses

    def _add(
        self,
        call: str,
        compute: Callable[..., Any],
        given: tuple[Array, ...],
        sample_weight: Any,
        shape: tuple[int, ...],
    ) -> None:
        """Adds to this replica's totals, on its GPU if an array is on one.

        Args:
            call: the user's name of the method.
            compute: called with the module NumPy or CuPy, `given`, and the weights, if any. Returns
                an array of the totals' shape, or a tuple of numbers.
            given: arrays of values, or of labels and predictions.
            sample_weight: weights, or `None`.
            shape: the shape to which weights are broadcast.

        Raises:
            TypeError: the weights are not real numbers.
            ValueError: the weights have another shape.
        """
        if sample_weight is not None:
            given = (*given, _as_weights(call, sample_weight, shape))
        if gpu.array_module(*given) is np:
            self._write(np.asarray(compute(np, *given)))
            return
        state = state_of(self.totals)
        group = state.group
        stream = group.stream
        if stream is None or not in_replica_of(group):
            self._write(np.asarray(compute(np, *map(gpu.to_host, given))))
            return

        def add(totals: Array, _: Array) -> None:
            if not given[0].size:
                return  # CuPy's `argmax` refuses arrays without elements
            new = compute(stream.xp, *map(stream.here, given))
            if not isinstance(new, tuple):
                totals += new
                return
            # Making an array of them would take as many kernels more.
            for i, one in enumerate(new):
                total = totals[i : i + 1]
                total += one

        group.storage.write(state.block, state.block.array, UpdateRule(assign=add))

    def _write(self, new: np.ndarray[Any, Any]) -> None:
        """Adds a NumPy array of the totals' shape to this replica's totals."""
        state = state_of(self.totals)
        group = state.group
        if in_replica_of(group):
            # `assign_add` does the same after checks that take three times as long as summing a
            # batch.
            group.storage.write(state.block, new, RULES["assign_add"])
            return
        if state.needs_aggregation_to_read():
            raise RuntimeError(
                f"{type(self).__name__}.update_state was called in the cross-replica context, but "
                "each replica keeps its own totals; call it inside the function of Strategy.run"
            )
        self.totals.assign_add(new)


def as_numbers(call: str, argument: str, value: Any, kinds: str = REAL) -> Any:
    """`value` as an array of numbers, on the host or the GPU where it is.

    Raises:
        TypeError: it is not an array of numbers; or of complex ones, which `kinds` lacks.
    """
    if type(value) is np.ndarray and value.dtype.kind in kinds:
        return value
    array = arrays.as_array(call, value, on_gpu=True)
    if array.dtype.kind in kinds:
        return array
    if array.dtype == object:
        # Such as fractions. NumPy would turn text into numbers, and `None` into nan.
        if all(isinstance(item, complex) or hasattr(item, "__float__") for item in array.flat):
            is_complex = any(map(np.iscomplexobj, array.flat))
            array = array.astype(np.complex128 if is_complex else np.float64)
    elif arrays.is_numeric(array.dtype) and array.dtype.kind != "c":
        # Few functions of CuPy take the dtypes of `ml_dtypes`, which have 16 bits or fewer.
        array = array.astype(np.float32)
    if array.dtype.kind in kinds:
        return array
    if array.dtype.kind == "c":
        raise TypeError(
            f"{call}: {argument} has dtype {array.dtype}, and must be real; pass abs({argument}), "
            f"or {argument}.real and {argument}.imag to two metrics"
        )
    raise TypeError(f"{call}: {argument} is {reprlib.repr(value)}; it must be an array of numbers")


def require_equal_shapes(call: str, true: Array, predicted: Array) -> None:
    """Raises `ValueError` unless labels and predictions have one shape."""
    if true.shape != predicted.shape:
        raise ValueError(
            f"{call}: y_true has shape {true.shape} and y_pred {predicted.shape}; they must be "
            "equal"
        )


def _as_weights(call: str, sample_weight: Any, shape: tuple[int, ...]) -> Any:
    """Weights as `float64`, broadcast to this shape: they may lack its last dimensions."""
    weights = as_numbers(call, "sample_weight", sample_weight).astype(np.float64, copy=False)
    if weights.shape == shape:
        return weights
    reshaped = weights.reshape(arrays.shape_of_weights(call, weights.shape, shape))
    return gpu.array_module(weights).broadcast_to(reshaped, shape)
