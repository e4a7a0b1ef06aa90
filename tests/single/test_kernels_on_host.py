"""The compiler of kernels for the host, which tests of GPU code rely on."""

import contextlib
import re

import numpy as np
import pytest
from kernels_on_host import (
    ElementwiseKernel,
    Fault,
    RawKernel,
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


def faults(text):
    if text is None:
        return contextlib.nullcontext()
    return pytest.raises(Fault, match=re.escape(text))


@pytest.mark.parametrize("operation", THREADS)
def test_threads_meet_by_atomic_operations_only(threads, operation):
    y = np.zeros(8)
    with faults(THREADS[operation]):
        threads[operation](y, np.arange(8.0), y)


TABLE = """
typedef unsigned long long size;
struct Table { const ulonglong2* source[2]; ulonglong2* target[2]; size length[2]; };
extern "C" __global__ void copy(const Table table, ulonglong2* y, const size each, const size apart) {
    const size i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i * apart] = table.source[i / each][i % each];
    table.target[i / each][i % each] = table.source[i / each][i % each];
}
"""


def test_raw_kernels_are_checked_too():
    kernel = RawKernel(TABLE, "copy")
    a, b, c, d, y = np.arange(4.0), np.arange(4.0, 8), np.zeros(4), np.zeros(4), np.zeros(8)
    table = np.array([*[array.ctypes.data for array in (a, b, c, d)], 2, 2], np.uint64)

    def call(text, y=y, apart=1):
        arguments = (table.tobytes(), y, 2, apart)
        assert kernel.pointed_to(arguments) == [
            *[(int(table[i]), 16 * int(table[4]), i == 2) for i in (0, 2)],
            *[(int(table[i]), 32, i == 3) for i in (1, 3)],
        ]
        with faults(text):
            kernel((2,), (2,), arguments)

    call(None)
    assert y.tolist() == [*c, *d] == list(range(8))
    twice = "which thread 0 writes: which comes first is chance"
    call(f"copy: thread 1 writes word 0 of argument 1, {twice}", apart=0)
    call("copy: thread 0 writes 16 bytes at an address that is not a mul", np.zeros(10)[1:9])
    call("copy: thread 2 writes 16 bytes at an address that is outside of what", np.zeros(4))
    table[3] = table[2]
    call(f"copy: thread 2 writes word 0 of a target, {twice}")
    table[3], table[2] = table[2], d.ctypes.data
    table[4] = 1
    call("copy: thread 1 reads 16 bytes at an address that is outside of what")
