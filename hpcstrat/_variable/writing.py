"""Writing a variable: which arrays fit, and how each verb changes the variable."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hpcstrat._communicators.reduction import check_reducible, mean_dtype
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
from hpcstrat._process.reports import add_note
from hpcstrat._replicas.group import ReplicaGroup
from hpcstrat._storage.base import UpdateRule
from hpcstrat._variable.options import NO_AGGREGATION, OPERATIONS, VariableAggregation
from hpcstrat._variable.state import VariableState


def _by(ufunc: np.ufunc) -> UpdateRule:
    return UpdateRule(assign=lambda value, new: ufunc(value, new, out=value))


# As storage's update rules, so that an assignment takes the same path as an optimizer's step: one
# record, one barrier, any storage.
RULES = {"assign": UpdateRule(), "assign_add": _by(np.add), "assign_sub": _by(np.subtract)}
"""The rule by which storage applies each verb to a variable."""


class Scatter(NamedTuple):
    """How a verb changes some rows of a variable.

    Attributes:
        rule: how a value changes its row.
        combination: how several values for one row are combined before that; `None` takes the last.
        kinds: the kinds of dtypes that it takes.
        is_sum: whether the variable's aggregation may combine the values of several replicas.
    """

    rule: UpdateRule
    combination: np.ufunc | None
    kinds: str
    is_sum: bool = True


SCATTERS = {
    "update": Scatter(RULES["assign"], None, "biufcV", is_sum=False),
    "add": Scatter(RULES["assign_add"], np.add, "iufcV"),
    "sub": Scatter(RULES["assign_sub"], np.add, "iufcV"),
    "mul": Scatter(_by(np.multiply), np.multiply, "iufcV"),
    "div": Scatter(_by(np.divide), np.multiply, "fcV"),
    "min": Scatter(_by(np.minimum), np.minimum, "iufV", is_sum=False),
    "max": Scatter(_by(np.maximum), np.maximum, "iufV", is_sum=False),
}
"""How each `scatter_...` and `scatter_nd_...` changes rows, by the last word of its name."""


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
        if not (
            _casts(array, dtype)
            if array.dtype.kind not in "iu" or dtype.kind not in "iu"
            else _fits(array, dtype)
        ):
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


def as_written_value(
    verb: str, value: Any, shape: tuple[int, ...], dtype: np.dtype[Any], on_gpu: bool
) -> Array:
    """`value` as an array that can be written to a variable of this shape and dtype.

    Raises:
        ValueError: `value` cannot be written to it.
        TypeError: `value` is on a GPU and `on_gpu` is false.
    """

    def check_shape(array: Array) -> None:
        if array.shape != shape:
            raise ValueError(
                f"{current_call()}: the value has shape {array.shape} and the variable {shape}; "
                "nothing is broadcast into a variable, so pass an array of exactly its shape"
            )

    array = as_castable_value(value, dtype, on_gpu, check_shape)
    if dtype.kind == "b" and verb != "assign":
        raise ValueError(f"{current_call()}: booleans are neither added nor subtracted; use assign")
    return array


def as_castable_value(
    value: Any, dtype: np.dtype[Any], on_gpu: bool, check_shape: Callable[[Array], None]
) -> Array:
    """`value` as an array whose shape passes `check_shape` and whose dtype casts safely to `dtype`.

    Raises:
        ValueError: `value` is not such an array and cannot become one.
        TypeError: `value` is on a GPU and `on_gpu` is false.
    """
    if isinstance(value, DistributedValues):
        raise ValueError(
            f"{current_call()}: the value is a {type(value).__name__}, one value per replica; "
            "reduce it first: strategy.reduce(ReduceOp.SUM, value, axis=None)"
        )
    array = as_read_only(current_call(), value, on_gpu)
    if not is_numeric(array.dtype):
        raise ValueError(
            f"{current_call()}: the value is {reprlib.repr(value)}; it must be an array, a number "
            "or a sequence of numbers"
        )
    check_shape(array)
    # A Python int is int64 only because NumPy must choose a dtype: its value decides if it fits.
    from_python = not has_own_dtype(value)
    integers = array.dtype.kind in "iu" and dtype.kind in "iu"
    if not ((integers and from_python) or _casts(array, dtype)) or (
        integers and not _fits(array, dtype)
    ):
        raise ValueError(
            f"{current_call()}: a value of dtype {array.dtype.name} cannot be cast to the "
            f"variable's {dtype.name} without loss; cast it by value.astype({dtype.name!r})"
        )
    return array


def write_operation(
    aggregation: VariableAggregation, dtype: np.dtype[Any], scatter: Scatter | None = None
) -> Aggregation:
    """The operation that combines the values, or the rows of a scatter, that replicas write.

    Raises:
        ValueError: the aggregation is `NONE`, or means of this dtype do not fit it.
        TypeError: values of this dtype cannot be reduced.
        NotImplementedError: the aggregation cannot combine the rows of this scatter.
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
    if scatter is not None and not scatter.is_sum:
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


# ---- rows and elements


def as_indices(indices: Any, group: ReplicaGroup) -> Array:
    """`indices` as an array of `int64` on the device of the group's variables.

    Raises:
        ValueError: they are not integers.
    """
    array = as_read_only(current_call(), indices, group.stream is not None)
    if array.dtype.kind not in "iu" and array.size:
        raise ValueError(f"{current_call()}: the indices are of dtype {array.dtype}; pass integers")
    with group.on_stream():
        return (array if group.stream is None else group.stream.here(array)).astype(np.int64)


def row_numbers(
    indices: Array, shape: tuple[int, ...], group: ReplicaGroup
) -> tuple[Array, tuple[int, ...]]:
    """The flat row numbers of indices of shape `(..., k)`, and the shape of a row.

    A row number counts over the first k dimensions of `shape`, flattened into one.

    Raises:
        ValueError: an index is out of range, or k is more than the number of dimensions.
    """
    depth = indices.shape[-1]
    if depth > len(shape):
        raise ValueError(
            f"{current_call()}: indices of {depth} dimensions, and the variable has shape {shape}; "
            f"pass at most {len(shape)}"
        )
    count = math.prod(indices.shape[:-1])
    rows = group.xp.zeros(count, np.int64)
    for index, size in zip(indices.reshape(count, depth).T, shape, strict=False):
        if count and not 0 <= int(index.min()) <= int(index.max()) < size:
            raise ValueError(
                f"{current_call()}: an index is not in 0..{size - 1}; all must be, because the "
                f"variable has shape {shape}"
            )
        rows = rows * size + index
    return rows, shape[depth:]


def parse_slices(
    method: str, scatter: Scatter, slices: Any, state: VariableState
) -> tuple[Array, Array]:
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
    if dtype.kind not in scatter.kinds:
        raise ValueError(
            f"{current_call()}: it is not defined for {dtype.name}; use scatter_update or assign"
        )
    indices, is_nd = as_indices(slices.indices, group), method.startswith("scatter_nd")
    rows, row = row_numbers(indices if is_nd else indices[..., None], shape, group)
    wanted = (*(indices.shape[:-1] if is_nd else indices.shape), *row)

    def check_shape(array: Array) -> None:
        if array.shape != wanted and (is_nd or array.shape != ()):
            raise ValueError(
                f"{current_call()}: the values have shape {array.shape}; for indices of shape "
                f"{indices.shape} and a variable of shape {shape} it must be {wanted}"
            )

    values = as_castable_value(slices.values, dtype, group.stream is not None, check_shape)
    values = group.xp.asarray(values if group.stream is None else group.stream.here(values), dtype)
    if scatter is SCATTERS["div"] and not values.all():
        raise ValueError(f"{current_call()}: a value is 0; divide by other numbers")
    values = group.xp.broadcast_to(values, wanted).reshape(rows.size, *row)
    return rows, group.xp.ascontiguousarray(values)


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


# ---- dtypes


def _casts(array: Array, dtype: np.dtype[Any]) -> bool:
    return np.can_cast(array.dtype, dtype, "same_kind")


def _fits(array: Array, dtype: np.dtype[Any]) -> bool:
    """Whether these integers are all in the range of an integer dtype."""
    if array.size == 0 or np.can_cast(array.dtype, dtype):
        return True
    bounds = np.iinfo(dtype)
    return bool(array.min() >= bounds.min and array.max() <= bounds.max)


# ---- notes


def explain_read_only(error: BaseException) -> None:
    """Adds a note to NumPy's error of a write to a read-only array."""
    if isinstance(error, ValueError) and str(error).endswith("read-only"):
        add_note(
            error,
            "In a replica context a variable's value() is its memory, which other ranks may be "
            "reading: change the variable by assign, assign_add or assign_sub, or change a copy, "
            "read_value().",
        )


# A subclass of arrays could have the methods, but scalars could not, and all reads would pay.
def explain_assign(error: BaseException) -> None:
    """Adds a note to NumPy's or CuPy's error of `v[i].assign(x)`."""
    if isinstance(error, AttributeError) and error.name in RULES:
        if type(error.obj).__module__.partition(".")[0] in ("numpy", "cupy"):
            add_note(
                error,
                "An indexed variable is a plain array: write elements by "
                "v.scatter_nd_update(indices, values), rows by "
                "v.scatter_update(IndexedSlices(values, indices)), or all of it by v.assign(new).",
            )
