"""CuPy arrays over host memory: calls pass all of CuPy's checks, then fail for lack of a GPU."""

from typing import Any

import numpy as np
import pytest
from internals import gpu

import hpcstrat as hs

if gpu.visible_gpus():
    pytest.skip(
        "a GPU must not touch these tests' arrays, which are in host memory: "
        "`CUDA_VISIBLE_DEVICES= pytest tests/real_cupy`",
        allow_module_level=True,
    )
pytest.importorskip("cupy", reason="CuPy is not installed: pip install '.[cuda13]'")
cupy: Any = gpu.load_cupy("a test")


def array(shape, dtype: Any = np.float32) -> Any:
    """A C-contiguous CuPy array of zeros."""
    host = np.zeros(max(int(np.prod(shape)), 1), dtype)
    memory = cupy.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, 0)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


def variable(shape, dtype: Any = np.float32) -> Any:
    """A variable with a CuPy array."""
    made: Any = hs.Variable(np.zeros(shape, dtype))
    made._state.block.array, made._state.block.view, made._state.interface = (
        array(shape, dtype),
        array(shape, dtype),
        None,
    )
    return made


def reaches_cuda(call) -> bool:
    """Whether a call fails in CUDA; false if it does not need CUDA.

    Raises what CuPy raises if it refuses the call.
    """
    try:
        call()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        assert "cudaErrorInsufficientDriver" in str(error) or "cudaErrorNoDevice" in str(error), (
            error
        )
        return True
    return False
