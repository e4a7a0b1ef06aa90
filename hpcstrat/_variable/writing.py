"""Writing a variable: which arrays fit, and how each verb changes the variable."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcstrat._core.arrays import as_array, as_native, as_read_only, has_own_dtype, is_numeric
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import (
    FIRST_REPLICA,
    Aggregation,
    Array,
    DistributedValues,
    IndexedSlices,
    ReduceOp,
    as_dtype,
)
from hpcstrat._replicas.group import ReplicaGroup
from hpcstrat._storage.base import UpdateRule
from hpcstrat._transports.reduction import check_reducible, mean_dtype
from hpcstrat._variable.options import NO_AGGREGATION, OPERATIONS, VariableAggregation
from hpcstrat._variable.state import VariableState

# As storage's update rules, so that an assignment takes the same path as an optimizer's step: one
# record, one barrier, any storage.
RULES = {
    "assign": UpdateRule(),
    "assign_add": UpdateRule(assign=lambda value, new: np.add(value, new, out=value)),
    "assign_sub": UpdateRule(assign=lambda value, new: np.subtract(value, new, out=value)),
}
"""The rule by which storage applies each verb to a variable."""


def as_initial_value(
    value: Any, dtype: npt.DTypeLike | None, shape: Sequence[int] | None, on_gpu: bool
) -> Array:
    """The initial value as an array; Python numbers take TensorFlow's default dtypes.

    Raises:
        TypeError: the value cannot become a numeric array, or is on a GPU and `on_gpu` is false.
        ValueError: its shape is not `shape`, or it does not fit `dtype`.
    """
    if callable(value) and not has_own_dtype(value):
        value = value()
    if isinstance(value, DistributedValues):
        raise ValueError("Variable: the initial value is one value per replica; reduce it first")
    array = as_array("Variable", value, on_gpu)
    if not is_numeric(array.dtype):
        raise TypeError(
            f"Variable: the initial value is {value!r}; it must be an array, a number, a sequence "
            "of numbers, or a callable without arguments that returns one"
        )
    if dtype is None and not has_own_dtype(value):
        # TensorFlow's defaults. NumPy's 64 bits would double the memory of every model whose
        # initial values are plain numbers.
        dtype = {"f": np.dtype(np.float32), "i": np.dtype(np.int32)}.get(array.dtype.kind)
    if dtype is not None:
        dtype = as_dtype("Variable", dtype)
        if not is_numeric(dtype):
            raise TypeError(f"Variable: dtype is {dtype}; it must be a numeric or boolean dtype")
        if not _is_castable(array, dtype, from_python=True):
            raise ValueError(
                f"Variable: the initial value {value!r} cannot be cast to {dtype.name} without "
                "loss; cast it explicitly first"
            )
        array = array.astype(dtype)
    array = as_native(array)
    if shape is not None and tuple(shape) != array.shape:
        raise ValueError(
            f"Variable: the initial value has shape {array.shape}, but shape={tuple(shape)} was "
            "requested; they must be equal"
        )
    return array


def as_written_value(verb: str, value: Any, state: VariableState) -> Array:
    """`value` as an array that can be written to this variable.

    Raises:
        ValueError: `value` cannot be written to it.
        TypeError: `value` is on a GPU, and the variable is not.
    """
    shape, dtype = state.block.view.shape, state.block.view.dtype
    array = _as_numeric(value, state.group)
    if array.shape != shape:
        raise ValueError(
            f"{current_call()}: the value has shape {array.shape} and the variable {shape}; "
            "nothing is broadcast into a variable, so pass an array of exactly its shape"
        )
    _require_castable(array, dtype, value)
    if dtype.kind == "b" and verb != "assign":
        raise ValueError(f"{current_call()}: booleans are neither added nor subtracted; use assign")
    return array


def _as_numeric(value: Any, group: ReplicaGroup) -> Array:
    if isinstance(value, DistributedValues):
        raise ValueError(
            f"{current_call()}: the value is a {type(value).__name__}, one value per replica; "
            "reduce it first: strategy.reduce(ReduceOp.SUM, value, axis=None)"
        )
    array = as_read_only(current_call(), value, group.stream is not None)
    if not is_numeric(array.dtype):
        raise ValueError(
            f"{current_call()}: the value is {reprlib.repr(value)}; it must be an array, a number "
            "or a sequence of numbers"
        )
    return array


def _require_castable(array: Array, dtype: np.dtype[Any], value: Any) -> None:
    if not _is_castable(array, dtype, from_python=not has_own_dtype(value)):
        raise ValueError(
            f"{current_call()}: a value of dtype {array.dtype.name} cannot be cast to the "
            f"variable's {dtype.name} without loss; cast it by value.astype({dtype.name!r})"
        )


def _is_castable(array: Array, dtype: np.dtype[Any], from_python: bool) -> bool:
    """Whether the array is cast to the dtype without loss, except of digits."""
    integers = array.dtype.kind in "iu" and dtype.kind in "iu"
    # A Python int is int64 only because NumPy must choose a dtype: its value decides if it fits.
    if not (integers and from_python) and not np.can_cast(array.dtype, dtype, "same_kind"):
        return False
    if not integers or array.size == 0 or np.can_cast(array.dtype, dtype):
        return True
    bounds = np.iinfo(dtype)
    return bool(array.min() >= bounds.min and array.max() <= bounds.max)


def write_operation(
    aggregation: VariableAggregation, dtype: np.dtype[Any], sets_rows: bool = False
) -> Aggregation:
    """The operation that combines the values, or the rows, that replicas write.

    Raises:
        ValueError: the aggregation is `NONE`, or means of this dtype do not fit it.
        TypeError: values of this dtype cannot be reduced.
        NotImplementedError: the replicas' rows are set, and are not the first replica's.
    """
    if aggregation is VariableAggregation.NONE:
        raise ValueError(f"{current_call()} in a replica context: {NO_AGGREGATION}")
    op = OPERATIONS[aggregation]
    if op is FIRST_REPLICA:
        return op
    check_reducible(dtype, op)
    if op is ReduceOp.MEAN and dtype.kind in "iu":
        raise ValueError(
            f"{current_call()}: the mean of the replicas' values is {mean_dtype(dtype)} and does "
            f"not fit {dtype.name}; make it a float variable, or aggregate by SUM or "
            "ONLY_FIRST_REPLICA"
        )
    if sets_rows:
        raise NotImplementedError(
            f"{current_call()} in a replica context: the variable's aggregation is "
            f"{aggregation.name}, and it needs ONLY_FIRST_REPLICA; make the variable with that, or "
            "call it outside of Strategy.run"
        )
    return op


def share_out(value: Array, replicas: int) -> Array:
    """Each replica's share of a value; the shares add up to the value.

    Raises:
        ValueError: the value is of integers that the number of replicas does not divide.
    """
    if value.dtype.kind not in "iu":
        return value / replicas
    share = value // replicas
    # Rounded shares would not add up to the assigned value.
    if (share * replicas != value).any():
        raise ValueError(
            f"{current_call()}: the variable sums over {replicas} replicas, and {value!r} cannot "
            f"be divided among them in integers; assign a multiple of {replicas}, or make it a "
            "float variable"
        )
    return share


# ---- rows


def as_row_numbers(indices: Any, shape: tuple[int, ...], group: ReplicaGroup) -> Array:
    """`indices` as an array of `int64` on the device of the group's variables.

    Raises:
        ValueError: they are not integers, one is out of range, or `shape` has no rows.
    """
    array = as_read_only(current_call(), indices, group.stream is not None)
    if array.dtype.kind not in "iu" and array.size:
        raise ValueError(f"{current_call()}: the indices are of dtype {array.dtype}; pass integers")
    if not shape:
        raise ValueError(
            f"{current_call()}: the variable has shape () and no rows; use assign and read_value"
        )
    with group.on_stream():
        rows = (array if group.stream is None else group.stream.here(array)).astype(np.int64)
        if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < shape[0]:
            raise ValueError(
                f"{current_call()}: an index is not in 0..{shape[0] - 1}; all must be, because "
                f"the variable has shape {shape}"
            )
    return rows


def parse_slices(verb: str, slices: Any, state: VariableState) -> tuple[Array, Array]:
    """The numbers of rows and a value for each, on the variable's device and in its dtype."""
    shape, dtype, group = state.block.view.shape, state.block.view.dtype, state.group
    if state.is_on_read:
        raise NotImplementedError(
            f"{current_call()}: the variable is ON_READ, one value per replica, and rows of it "
            "cannot be written; use assign"
        )
    if not isinstance(slices, IndexedSlices):
        raise TypeError(
            f"{current_call()}: sparse_delta is of type {type(slices).__name__}; pass "
            "IndexedSlices(values, indices)"
        )
    if dtype.kind == "b" and verb != "assign":
        raise ValueError(
            f"{current_call()}: it is not defined for {dtype.name}; use scatter_update or assign"
        )
    rows = as_row_numbers(slices.indices, shape, group)
    wanted = (*rows.shape, *shape[1:])
    values = _as_numeric(slices.values, group)
    if values.shape not in (wanted, ()):
        raise ValueError(
            f"{current_call()}: the values have shape {values.shape}; for indices of shape "
            f"{rows.shape} and a variable of shape {shape} it must be {wanted}"
        )
    _require_castable(values, dtype, slices.values)
    values = group.xp.asarray(values if group.stream is None else group.stream.here(values), dtype)
    values = group.xp.broadcast_to(values, wanted).reshape(rows.size, *shape[1:])
    return rows.reshape(-1), group.xp.ascontiguousarray(values)


def gather_rows(
    group: ReplicaGroup, rows: Array, values: Array, op: Aggregation, in_replica: bool
) -> tuple[Array, Array]:
    """The rows and values of all replicas, in rank order, prepared for the aggregation."""
    communicator = group.communicator
    # Outside a replica all ranks have the same rows, so the same number; replicas may differ.
    must_match = () if in_replica else (f"{rows.size} rows",)
    if op is FIRST_REPLICA and communicator.rank:
        rows, values = rows[:0], values[:0]
    rows, values = communicator.all_gather([rows, values], 0, *must_match)
    if op is ReduceOp.MEAN:
        # Overflow is ignored, as in the update itself.
        with group.on_stream(), np.errstate(all="ignore"):
            values = (values / communicator.size).astype(values.dtype, copy=False)
    return rows, values
