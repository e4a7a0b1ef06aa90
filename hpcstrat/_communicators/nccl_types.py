"""What NCCL calls arrays and operations, and in which dtype it reduces."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from hpcstrat._communicators import nccl_start
from hpcstrat._communicators.reduction import REDUCTIONS, accumulator
from hpcstrat._core.types import Array, ReduceOp

_TYPES = {
    "int8": "NCCL_INT8",
    "int32": "NCCL_INT32",
    "int64": "NCCL_INT64",
    "uint8": "NCCL_UINT8",
    "uint32": "NCCL_UINT32",
    "uint64": "NCCL_UINT64",
    "float16": "NCCL_FLOAT16",
    "bfloat16": "NCCL_BFLOAT16",
    "float32": "NCCL_FLOAT32",
    "float64": "NCCL_FLOAT64",
    # What NCCL does not have travels as what it has: booleans as bytes, complex numbers as twice as
    # many reals.
    "bool": "NCCL_UINT8",
    "complex64": "NCCL_FLOAT32",
    "complex128": "NCCL_FLOAT64",
}


def resolve(array: Array) -> tuple[int, int, int]:
    """Where NCCL finds an array: its address, number of elements, and NCCL's type of them."""
    count = 2 * array.size if array.dtype.kind == "c" else array.size
    return array.data.ptr, count, _type(array.dtype)


# Cached: names of dtypes and attributes of a C module are slow to look up at each step.
@functools.cache
def _type(dtype: np.dtype[Any]) -> int:
    return getattr(nccl_start.load_nccl(), _TYPES[dtype.name])


@functools.cache
def operation_of(op: ReduceOp) -> int:
    return getattr(nccl_start.load_nccl(), REDUCTIONS[op].nccl)


@functools.cache
def dtype_to_reduce(dtype: np.dtype[Any], op: ReduceOp) -> np.dtype[Any]:
    """The dtype in which NCCL reduces `dtype`; the result is cast back."""
    # NCCL does not have these. A sum that is cast back is the same modulo 2**16.
    if dtype.kind in "iu" and dtype.itemsize == 2:
        return np.dtype(np.int32)
    # The sum of 16-bit floats may overflow where their mean does not.
    return accumulator(dtype) if REDUCTIONS[op].is_mean else dtype
