"""cuBLAS, called by its C functions: products of NumPy, as work on a stream."""

import ctypes
import functools
import hashlib
import os
import pathlib

import kernels_on_host
import numpy as np

from . import _checker, _memory, _streams

_SOURCE = pathlib.Path(__file__).parents[1] / "libcublas.cpp"
_DTYPES = {0: np.float32, 1: np.float64, 2: np.float16}
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
_MULTIPLY = ctypes.CFUNCTYPE(
    _INT,
    *(_POINTER, _INT, _INT, _INT, _INT, _INT),
    *(_POINTER, _INT, _POINTER, _INT, _POINTER, _INT, _INT),
)


@functools.cache
def load():
    """The path of the library, which is loaded."""
    source = _SOURCE.read_text()
    name = f"libcublas-{hashlib.sha256(source.encode()).hexdigest()[:16]}.so"
    path = kernels_on_host.cache() / name
    if not path.exists():
        kernels_on_host.build(source, path, ("-O2", "-fPIC", "-shared"))
    _POINTER.in_dll(ctypes.CDLL(os.fspath(path)), "multiply").value = ctypes.cast(
        _multiply, _POINTER
    ).value
    return os.fspath(path)


@_MULTIPLY
def _multiply(stream, op_a, op_b, m, n, k, a, lead_a, b, lead_b, c, lead_c, kind):
    try:
        queue = next(one for one in _streams.queues() if one.address == (stream or 0))
        dtype = np.dtype(_DTYPES[kind])
        places = [(k, m, a, lead_a) if op_a else (m, k, a, lead_a)]
        places += [(n, k, b, lead_b) if op_b else (k, n, b, lead_b), (m, n, c, lead_c)]
        queue.start()
        left, right, out = [
            _matrix(queue, dtype, *place, writes=i == 2) for i, place in enumerate(places)
        ]
        left, right = left.T if op_a else left, right.T if op_b else right
        # In rows, as the program's own product: with the same bits.
        queue.put(lambda: np.copyto(out.T, np.matmul(right.T, left.T)))
    except Exception as error:
        _checker.report_later(f"the simulated GPU: cuBLAS: {error}")
        return 14  # CUBLAS_STATUS_INTERNAL_ERROR
    return 0


def _matrix(queue, dtype, rows, columns, address, lead, writes):
    """A matrix in column order, as an array over a GPU's memory."""
    block, start = _memory.block_at(address), 0
    size = ((columns - 1) * lead + rows) * dtype.itemsize
    if block is None or block.is_free or address + size > block.ptr + block.size:
        raise ValueError(f"{size:,} bytes at {address:#x} are not memory of a GPU")
    start = address - block.ptr
    block.history.access(queue, start, start + size, writes)
    flat = block.buffer[start : start + size].view(dtype)
    steps = (dtype.itemsize, lead * dtype.itemsize)
    return np.lib.stride_tricks.as_strided(flat, (rows, columns), steps)
