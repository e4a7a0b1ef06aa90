"""The dtypes that values of several replicas are reduced in, the same for every transport."""

from __future__ import annotations

import functools
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
