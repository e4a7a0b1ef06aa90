"""Reductions of several ranks' arrays: the dtypes they take, and sums in rank order, whatever the timing."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat._types import ReduceOp

_NUMBERS = "int8 int32 int64 uint8 uint32 uint64 float16 bfloat16 float32 float64"
# NCCL carries bool as bytes and complex numbers as pairs of reals, which leaves each the operations named here; it
# has no 16-bit integers. A script behaves the same on every transport, so MPI's longer list does not count.
_OPERATIONS: dict[str, tuple[ReduceOp, ...]] = {
    **dict.fromkeys(_NUMBERS.split(), tuple(ReduceOp)),
    **dict.fromkeys(("complex64", "complex128"), (ReduceOp.SUM, ReduceOp.MEAN)),
    "bool": (ReduceOp.MIN, ReduceOp.MAX),
}
_HALVES = ("float16", "bfloat16")


@functools.cache
def check_reducible(call: str, dtype: np.dtype[Any], op: ReduceOp) -> None:
    """Checks that values of this dtype can be reduced by `op`.

    Raises:
        TypeError: they cannot; the message says what can be.
    """
    if dtype.name not in _OPERATIONS:
        raise TypeError(
            f"{call}: values of dtype {dtype.name} cannot be reduced; it takes {', '.join(_OPERATIONS)}: cast first"
        )
    if op not in _OPERATIONS[dtype.name]:
        allowed = ", ".join(one.name for one in _OPERATIONS[dtype.name])
        raise TypeError(f"{call}: {op.name} of {dtype.name} is not defined; {dtype.name} takes {allowed}: cast first")


@functools.cache
def accumulator(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which values of `dtype` are summed: `float32` for the 16-bit floats, else `dtype` itself."""
    return np.dtype(np.float32) if dtype.name in _HALVES else dtype


CHUNK = 1 << 15
"""Elements that are reduced, and updated, while they are in cache."""

_UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}


def reduce_chunk(out: np.ndarray[Any, Any], parts: Sequence[np.ndarray[Any, Any]], op: ReduceOp) -> None:
    """Writes the reduction of `parts`, flat arrays of one length and dtype, to `out`, which may be one of them.

    16-bit floats are summed in `float32` and rounded once.
    """
    if len(parts) == 1:
        if out is not parts[0]:
            out[...] = parts[0]
        return
    ufunc = _UFUNCS[op]
    # `out` may be one of `parts`, and must not be written before that part was read.
    if len(parts) == 2 and out.itemsize > 2:
        total = ufunc(parts[0], parts[1], out=out)
    else:
        total = ufunc(parts[0], parts[1], dtype=accumulator(out.dtype))
    for part in parts[2:]:
        ufunc(total, part, out=total)
    if op is ReduceOp.MEAN:
        np.divide(total, len(parts), out=total)
    if total is not out:
        out[...] = total


def reduce_flat(out: np.ndarray[Any, Any], parts: Sequence[np.ndarray[Any, Any]], op: ReduceOp) -> None:
    """`reduce_chunk` over flat arrays of any length, a chunk at a time.

    An overflow gives inf, as on a GPU. It must not become an exception on the one rank whose slice it is in.
    """
    with np.errstate(all="ignore"):
        if out.size <= CHUNK:
            reduce_chunk(out, parts, op)
            return
        for start in range(0, out.size, CHUNK):
            reduce_chunk(out[start : start + CHUNK], [part[start : start + CHUNK] for part in parts], op)


def slice_of(count: int, rank: int, size: int) -> slice:
    """The part of `count` elements that `rank` works on, in whole multiples of 64 elements, so of cache lines."""
    lines = -(-count // 64)
    return slice(min(count, 64 * (lines * rank // size)), min(count, 64 * (lines * (rank + 1) // size)))
