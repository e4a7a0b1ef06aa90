"""What is written to a variable: which arrays fit, and how each verb changes it."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hpcstrat._core.arrays import as_array, as_native, as_read_only, has_own_dtype, is_numeric
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import Array
from hpcstrat._core.values import DistributedValues
from hpcstrat._storage.base import UpdateRule
from hpcstrat._update.rows import LAST, MAXIMUM, MINIMUM, PRODUCT, SUM, Combination


def _assign(value: Array, new: Array, slots: Sequence[Array], work: Array) -> None:
    value[...] = new


def _by(ufunc: np.ufunc) -> UpdateRule:
    def apply(value: Array, new: Array, slots: Sequence[Array], work: Array) -> None:
        ufunc(value, new, out=value)

    return UpdateRule(apply)


# As rules of storage, so that an assignment takes the way of an optimizer's step: one record, one
# barrier, any storage.
RULES = {"assign": UpdateRule(_assign), "assign_add": _by(np.add), "assign_sub": _by(np.subtract)}
"""How each verb changes a variable, in the form that storage applies."""


class Scatter(NamedTuple):
    """How a verb changes some rows of a variable.

    Attributes:
        rule: how the value of a row changes it.
        combination: how several values of one row become one first.
        kinds: of the dtypes that it takes.
        is_sum: whether values of several replicas become one by the variable's aggregation, as a
            sum's do.
    """

    rule: UpdateRule
    combination: Combination
    kinds: str
    is_sum: bool = True


SCATTERS = {
    "update": Scatter(RULES["assign"], LAST, "biufcV", is_sum=False),
    "add": Scatter(RULES["assign_add"], SUM, "iufcV"),
    "sub": Scatter(RULES["assign_sub"], SUM, "iufcV"),
    "mul": Scatter(_by(np.multiply), PRODUCT, "iufcV"),
    "div": Scatter(_by(np.divide), PRODUCT, "fcV"),
    "min": Scatter(_by(np.minimum), MINIMUM, "iufV", is_sum=False),
    "max": Scatter(_by(np.maximum), MAXIMUM, "iufV", is_sum=False),
}
"""What `scatter_...` and `scatter_nd_...` do, by the end of their names."""


def as_initial_value(
    value: Any, dtype: npt.DTypeLike | None, shape: Sequence[int] | None, on_gpu: bool
) -> Array:
    """The initial value as an array, of TensorFlow's dtype where it comes from Python numbers.

    Raises:
        TypeError: it is not an array of numbers and does not become one, or is on a GPU and
            `on_gpu` is false.
        ValueError: its shape is not `shape`, or it does not fit `dtype`.
    """
    if callable(value) and not has_own_dtype(value):
        value = value()
    if isinstance(value, DistributedValues):
        raise ValueError("Variable: the initial value is one value a replica; reduce it first")
    array = as_array("Variable", value, on_gpu)
    if not is_numeric(array.dtype):
        raise TypeError(
            f"Variable: the initial value is {value!r}; it must be an array, a number, a sequence "
            "of numbers, or a callable without arguments that gives one"
        )
    if dtype is None and not has_own_dtype(value):
        # TensorFlow's defaults. NumPy's 64 bits would double the memory of every model that is
        # written with plain numbers.
        dtype = {"f": np.dtype(np.float32), "i": np.dtype(np.int32)}.get(array.dtype.kind)
    if dtype is not None:
        dtype = np.dtype(dtype)
        if not is_numeric(dtype):
            raise TypeError(f"Variable: dtype is {dtype}; it must be one of numbers or booleans")
        if not (
            _casts(array, dtype)
            if array.dtype.kind not in "iu" or dtype.kind not in "iu"
            else _fits(array, dtype)
        ):
            raise ValueError(
                f"Variable: the initial value {value!r} does not go into {dtype.name} without "
                "loss; cast it first"
            )
        array = array.astype(dtype)
    array = as_native(array)
    if shape is not None and tuple(shape) != array.shape:
        raise ValueError(
            f"Variable: the initial value has shape {array.shape}, and shape={tuple(shape)} was "
            "asked for; they must be equal"
        )
    return array


def as_written_value(
    verb: str, value: Any, shape: tuple[int, ...], dtype: np.dtype[Any], on_gpu: bool
) -> Array:
    """`value` as an array that can be written to a variable of this shape and dtype.

    Raises:
        ValueError: it cannot.
        TypeError: it is on a GPU and `on_gpu` is false.
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
    """`value` as an array of a shape that passes `check_shape`, whose dtype casts safely to a variable's.

    Raises:
        ValueError: it cannot.
        TypeError: it is on a GPU and `on_gpu` is false.
    """
    if isinstance(value, DistributedValues):
        raise ValueError(
            f"{current_call()}: the value is a {type(value).__name__}, one value a replica; reduce "
            "it first: strategy.reduce(ReduceOp.SUM, value, axis=None)"
        )
    array = as_read_only(current_call(), value, on_gpu)
    if not is_numeric(array.dtype):
        raise ValueError(
            f"{current_call()}: the value is {reprlib.repr(value)}; it must be an array, a number "
            "or a sequence of numbers"
        )
    check_shape(array)
    # A Python int is int64 only because NumPy must choose a dtype: whether it fits depends on its
    # value.
    from_python = not has_own_dtype(value)
    integers = array.dtype.kind in "iu" and dtype.kind in "iu"
    if not ((integers and from_python) or _casts(array, dtype)) or (
        integers and not _fits(array, dtype)
    ):
        raise ValueError(
            f"{current_call()}: a value of dtype {array.dtype.name} does not go into a variable of "
            f"{dtype.name} without loss; cast it first: value.astype({dtype.name!r})"
        )
    return array


def shared_out(value: Array, replicas: int) -> Array:
    """Each replica's share of a value; the shares add up to the value.

    Raises:
        ValueError: they are integers that the number of replicas does not divide.
    """
    if value.dtype.kind not in "iu":
        return value / replicas
    share = value // replicas
    # Rounded shares would sum to another number than the one that was assigned.
    if (share * replicas != value).any():
        raise ValueError(
            f"{current_call()}: the variable sums over {replicas} replicas, and {value!r} cannot "
            "be shared out to them in integers; assign a multiple, or make the variable a float one"
        )
    return share


def _casts(array: Array, dtype: np.dtype[Any]) -> bool:
    return np.can_cast(array.dtype, dtype, "same_kind")


def _fits(array: Array, dtype: np.dtype[Any]) -> bool:
    """Whether these integers are all in the range of an integer dtype."""
    if array.size == 0 or np.can_cast(array.dtype, dtype):
        return True
    bounds = np.iinfo(dtype)
    return bool(array.min() >= bounds.min and array.max() <= bounds.max)
