"""Reductions of several ranks' arrays: what each operation computes, and sums in rank order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcstrat._core import gpu
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import Array, ReduceOp
from hpcstrat._memory.intervals import ElementRange

# NCCL carries bool as bytes and complex numbers as pairs of reals, so each has only the reductions
# that list it: on all transports, because a script behaves the same on each.
_REALS = tuple(
    "int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64".split()
)
_NUMBERS = (*_REALS, "complex64", "complex128")
_ORDERED = (*_REALS, "bool")
_HALVES = ("float16", "bfloat16")


class Reduction(NamedTuple):
    """What a `ReduceOp` computes: all that transports and strategies know about it.

    Along axes, each rank first reduces its own elements, to totals that may be wider than the
    elements. These are combined over the ranks, as are their counts, and finished.

    Attributes:
        ufunc: combines the elements of two ranks; applied in rank order.
        nccl: NCCL's name of the operation.
        dtypes: the names of the dtypes that it takes.
        along_axes: returns the totals of an array along axes, given as non-negative ints.
        finish: returns the result along axes of all ranks' totals; given these, the number of
            elements in each, and the elements' dtype.
        is_mean: whether the result is divided by the number of ranks.
    """

    ufunc: np.ufunc
    nccl: str
    dtypes: tuple[str, ...]
    along_axes: Callable[[Array, tuple[int, ...]], Array]
    finish: Callable[[Array, Array, np.dtype[Any]], Array]
    is_mean: bool = False


def _sum(array: Array, axes: tuple[int, ...]) -> Array:
    wide = accumulator(array.dtype)
    # Sums of 8- and 16-bit integers soon overflow: the pixels of an image do.
    if array.dtype.kind in "iu" and array.dtype.itemsize <= 2:
        wide = np.dtype(f"{array.dtype.kind}8")
    return array.sum(axis=axes, dtype=wide)


def _finish_sum(total: Array, _: Array, dtype: np.dtype[Any]) -> Array:
    return total if dtype.kind in "iu" else total.astype(dtype, copy=False)


def _sum_for_mean(array: Array, axes: tuple[int, ...]) -> Array:
    wide = np.dtype(np.float64) if array.dtype.kind in "iu" else accumulator(array.dtype)
    return array.sum(axis=axes, dtype=wide)


def _finish_mean(total: Array, count: Array, dtype: np.dtype[Any]) -> Array:
    mean = total / np.float64(count) if count else total * np.nan
    return mean.astype(mean_dtype(dtype), copy=False)


def _min(array: Array, axes: tuple[int, ...]) -> Array:
    return array.min(axis=axes) if array.size else _neutral(array, axes, highest=True)


def _max(array: Array, axes: tuple[int, ...]) -> Array:
    return array.max(axis=axes) if array.size else _neutral(array, axes, highest=False)


def _neutral(array: Array, axes: tuple[int, ...], highest: bool) -> Array:
    """Extremes of no elements: the highest or lowest number, which changes no other rank's."""
    value: Any = np.inf if highest else -np.inf
    if array.dtype.kind == "b":
        value = highest
    elif array.dtype.kind in "iu":
        limits = np.iinfo(array.dtype)
        value = limits.max if highest else limits.min
    shape = [n for i, n in enumerate(array.shape) if i not in axes]
    return gpu.array_module(array).full(shape, value, array.dtype)


def _finish_extreme(name: str, total: Array, count: Array, dtype: np.dtype[Any]) -> Array:
    if count:
        return total
    # Floats have nan for the result without elements; integers have nothing like it.
    if dtype.kind in "iub":
        raise ValueError(
            f"{current_call()}: {name} along an axis that has no elements on any replica; pass at "
            "least one element"
        )
    return gpu.array_module(total).full_like(total, np.nan)


_finish_min = functools.partial(_finish_extreme, "MIN")
_finish_max = functools.partial(_finish_extreme, "MAX")

REDUCTIONS: dict[ReduceOp, Reduction] = {
    ReduceOp.SUM: Reduction(np.add, "NCCL_SUM", _NUMBERS, _sum, _finish_sum),
    ReduceOp.MEAN: Reduction(np.add, "NCCL_SUM", _NUMBERS, _sum_for_mean, _finish_mean, True),
    ReduceOp.MIN: Reduction(np.minimum, "NCCL_MIN", _ORDERED, _min, _finish_min),
    ReduceOp.MAX: Reduction(np.maximum, "NCCL_MAX", _ORDERED, _max, _finish_max),
}
"""All reductions: to add one, add a row."""


def check_reducible(dtype: np.dtype[Any], op: ReduceOp) -> None:
    """Checks that values of this dtype can be reduced by `op`.

    Raises:
        TypeError: they cannot; the message lists what can.
    """
    if _is_reducible(dtype, op):
        return
    allowed = [
        other.name for other, reduction in REDUCTIONS.items() if dtype.name in reduction.dtypes
    ]
    if not allowed:
        names = dict.fromkeys(
            name for reduction in REDUCTIONS.values() for name in reduction.dtypes
        )
        raise TypeError(
            f"{current_call()}: values of dtype {dtype.name} cannot be reduced; it takes "
            f"{', '.join(names)}: cast first"
        )
    count = ", to count by x.astype(np.int64)" if dtype.kind == "b" else ""
    raise TypeError(
        f"{current_call()}: {op.name} of {dtype.name} is not defined; {dtype.name} takes "
        f"{', '.join(allowed)}: cast first{count}"
    )


@functools.cache
def _is_reducible(dtype: np.dtype[Any], op: ReduceOp) -> bool:
    return dtype.name in REDUCTIONS[op].dtypes  # cached: NumPy builds the name on each access


@functools.cache
def accumulator(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which `dtype` is summed: `float32` for 16-bit floats, else `dtype` itself."""
    return np.dtype(np.float32) if dtype.name in _HALVES else dtype


@functools.cache
def mean_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of a mean of `dtype`, as in TensorFlow.

    It is `float32` for integers of up to 16 bits and `float64` for wider integers.
    """
    if dtype.kind not in "iu":
        return dtype
    return np.dtype(np.float32 if dtype.itemsize <= 2 else np.float64)


CHUNK = 1 << 15
"""This many elements are reduced, and updated, while they are in cache."""


def reduce_chunk(
    out: np.ndarray[Any, Any], parts: Sequence[np.ndarray[Any, Any]], op: ReduceOp
) -> None:
    """Writes the reduction of `parts` to `out`, which may be one of them.

    The arrays are flat, of equal length. 16-bit floats are summed in `float32`, and rounded once,
    unless `out` is wider than they are.
    """
    if len(parts) == 1:
        if out is not parts[0]:
            out[...] = parts[0]
        return
    reduction = REDUCTIONS[op]
    ufunc = reduction.ufunc
    # `out` may be one of `parts`, and must not be written before that part is read.
    if len(parts) == 2 and accumulator(out.dtype) == parts[0].dtype:
        total = ufunc(parts[0], parts[1], out=out)
    else:
        # Rank by rank, always in this order: floating-point addition is not associative, and all
        # ranks must get the same bits in every run.
        total = ufunc(parts[0], parts[1], dtype=accumulator(out.dtype))
    for part in parts[2:]:
        ufunc(total, part, out=total)
    if reduction.is_mean:
        np.divide(total, len(parts), out=total)
    if total is not out:
        out[...] = total


@np.errstate(all="ignore")  # a decorator takes half the time of a block
def reduce_in_chunks(
    out: np.ndarray[Any, Any], parts: Sequence[np.ndarray[Any, Any]], op: ReduceOp
) -> None:
    """`reduce_chunk` for flat arrays of any length, chunk by chunk.

    An overflow gives inf, as on a GPU. It must not raise only on the rank whose slice it is in.
    """
    if out.size <= CHUNK:
        reduce_chunk(out, parts, op)
        return
    for start in range(0, out.size, CHUNK):
        reduce_chunk(
            out[start : start + CHUNK], [part[start : start + CHUNK] for part in parts], op
        )


@np.errstate(all="ignore")  # as in `reduce_in_chunks`
def reduce_rows(rows: Array, op: ReduceOp) -> Array:
    """The reduction of the rows of an array, one by one; the operation's neutral of no rows."""
    reduction = REDUCTIONS[op]
    if not len(rows):
        total = reduction.along_axes(rows, (0,))
    else:
        total = functools.reduce(reduction.ufunc, rows.astype(accumulator(rows.dtype), copy=False))
    return total.astype(rows.dtype)


def part_of_rank(count: int, rank: int, size: int) -> ElementRange:
    """The part of `count` elements that `rank` works on, in multiples of 64 elements.

    These are whole cache lines: two ranks must not write to one cache line, which would move
    between their cores with each write.
    """
    return ElementRange(0, count).of_rank(rank, size, 64)
