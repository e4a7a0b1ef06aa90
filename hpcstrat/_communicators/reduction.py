"""Reductions of several ranks' arrays: the dtypes they take, and sums that are in rank order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import ReduceOp
from hpcstrat._memory.intervals import Interval

# NCCL carries bool as bytes and complex numbers as pairs of reals, so each has only the reductions
# that list it. A script behaves the same on every transport, so MPI's longer list does not count.
_REALS = tuple(
    "int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64".split()
)
_COMPLEX = ("complex64", "complex128")
_HALVES = ("float16", "bfloat16")


class Reduction(NamedTuple):
    """All that transports and strategies know about a `ReduceOp`.

    Attributes:
        ufunc: combines the elements of two ranks; applied in rank order.
        nccl: NCCL's name of the operation.
        along_axes: NumPy's and CuPy's function that reduces an array's own elements.
        dtypes: the names of the dtypes that it takes.
        is_mean: whether the result is divided by the number of ranks.
        neutral: returns, for a dtype, the element that changes no result: the result of an array
            without elements.
    """

    ufunc: np.ufunc
    nccl: str
    along_axes: str
    dtypes: tuple[str, ...]
    is_mean: bool = False
    neutral: Callable[[np.dtype[Any]], Any] = lambda dtype: dtype.type(0)


def _lowest(dtype: np.dtype[Any]) -> Any:
    if dtype.kind == "b":
        return False
    return np.iinfo(dtype).min if dtype.kind in "iu" else np.asarray(-np.inf, dtype)[()]


def _highest(dtype: np.dtype[Any]) -> Any:
    if dtype.kind == "b":
        return True
    return np.iinfo(dtype).max if dtype.kind in "iu" else np.asarray(np.inf, dtype)[()]


class _Reductions(dict[ReduceOp, Reduction]):
    def __missing__(self, op: ReduceOp) -> Reduction:
        raise TypeError(
            f"{op} is not in the table of reductions; add what it computes to REDUCTIONS"
        )


REDUCTIONS: dict[ReduceOp, Reduction] = _Reductions(
    {
        ReduceOp.SUM: Reduction(np.add, "NCCL_SUM", "sum", (*_REALS, *_COMPLEX)),
        ReduceOp.MEAN: Reduction(np.add, "NCCL_SUM", "sum", (*_REALS, *_COMPLEX), is_mean=True),
        ReduceOp.MIN: Reduction(np.minimum, "NCCL_MIN", "min", (*_REALS, "bool"), neutral=_highest),
        ReduceOp.MAX: Reduction(np.maximum, "NCCL_MAX", "max", (*_REALS, "bool"), neutral=_lowest),
    }
)
"""All reductions; an operation that is not here raises `TypeError`."""


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

    The arrays are flat, of equal length and dtype. 16-bit floats are summed in `float32`, and
    rounded once.
    """
    if len(parts) == 1:
        if out is not parts[0]:
            out[...] = parts[0]
        return
    reduction = REDUCTIONS[op]
    ufunc = reduction.ufunc
    # `out` may be one of `parts`, and must not be written before that part is read.
    if len(parts) == 2 and out.itemsize > 2:
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
def reduce_flat(
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


def part_of_rank(count: int, rank: int, size: int) -> Interval:
    """The part of `count` elements that `rank` works on, in multiples of 64 elements.

    These are whole cache lines: two ranks must not write to one cache line, which would move
    between their cores with each write.
    """
    return Interval(0, count).of_rank(rank, size, 64)
