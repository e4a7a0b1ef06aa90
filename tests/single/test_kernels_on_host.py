"""The compiler of kernels for the host, which tests of GPU code rely on."""

import contextlib
import re

import numpy as np
import pytest
from kernels_on_host import (
    ElementwiseKernel,
    Fault,
    compile_together,
    is_available,
)

pytestmark = [
    pytest.mark.skipif(not is_available(), reason="there is no C++ compiler"),
    pytest.mark.xdist_group("kernels_on_host"),  # in one process, to compile once
]


CHANCE = "which comes first is chance"
OUTSIDE = "8 bytes at an address that is outside of what its arguments say"
THREADS = {
    "atomicAdd(&y[0], x)": None,
    "y[i] = x; y[i] += y[i]": None,
    "double own[4] = {}; own[i % 4] = x; own[(int)x % 4] += 1; y[i] = own[(int)x % 3]": None,
    "if (i) atomicAdd(&y[0], y[i])": None,
    "y[0] += x": f"thread 1 reads word 0 of y, which thread 0 writes: {CHANCE}",
    "y[i / 2] = x": f"thread 1 writes word 0 of y, which thread 0 writes: {CHANCE}",
    "y[i] = x; x = y[7 - i]": f"thread 4 writes word 4 of y, which thread 3 reads: {CHANCE}",
    # the same memory
    "y[i] = z[i + 1]": f"thread 1 writes word 1 of y, which thread 0 reads: {CHANCE}",
    "atomicAdd(&y[0], x); x = y[0]": "thread 1 adds by an atomic operation to word 0 of y, which thread 0 writes",
    "atomicAdd(&y[i % 2], x); if (i == 6) x = y[1]": "thread 6 reads word 1 of y, which another thread adds by an atomic",
    "y[i + 1] = x": f"thread 7 writes {OUTSIDE}",
    "x = z[-i]": f"thread 1 reads {OUTSIDE}",
    "y[i] = *(double*)((char*)&z[0] + 4)": "thread 0 reads 8 bytes at an address that is not a multiple of them",
}


@pytest.fixture(scope="module")
def threads():
    """The kernels of `THREADS`, compiled in one run of the compiler."""
    parameters = "raw float64 z", "float64 x, raw float64 y"
    made = {text: ElementwiseKernel(*parameters, text) for text in THREADS}
    compile_together([(one, (np.dtype(np.float64),) * 3) for one in made.values()])
    return made


@pytest.mark.parametrize("operation", THREADS)
def test_threads_meet_by_atomic_operations_only(threads, operation):
    y, fault = np.zeros(8), THREADS[operation]
    expects = pytest.raises(Fault, match=re.escape(fault)) if fault else contextlib.nullcontext()
    with expects:
        threads[operation](y, np.arange(8.0), y)
