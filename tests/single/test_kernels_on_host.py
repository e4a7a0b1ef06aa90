"""The compiler of kernels for the host, which tests of GPU code rely on."""

import contextlib
import re

import ml_dtypes
import numpy as np
import pytest
from kernels_on_host import (
    CompilationError,
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


def test_raw_parameters_are_indexed_by_the_kernel():
    gather = ElementwiseKernel("raw T x, int64 row", "T y", "y = x[row] * (T)x.size() + (T)i")
    x, y = np.arange(6.0).reshape(2, 3).T, np.zeros(3)
    gather(x, np.array([5, 0, 1]), y)
    assert y.tolist() == [5 * 6 + 0, 0 * 6 + 1, 3 * 6 + 2]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_16_bit_floats_are_rounded_as_numpy_does(dtype):
    all_of_them = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    exact = np.zeros((1 << 16, 2), np.float32)[:, 1]
    ElementwiseKernel("T x", "float32 y", "y = (float)x")(all_of_them, exact)
    expected = all_of_them.astype(np.float32)
    assert np.array_equal(exact, expected, equal_nan=True)
    finite = np.sort(expected[np.isfinite(expected)])
    ties = finite[:-1] + np.diff(finite) / 2  # which round to the even neighbour
    bits = np.random.default_rng(0).integers(0, 1 << 32, 100_000, np.uint32).view(np.float32)
    wide = np.concatenate([finite, ties, bits[np.isfinite(bits)]])
    short = np.zeros(wide.size, dtype)
    ElementwiseKernel("float32 x", "T y", "y = (T)x")(wide, short)
    with np.errstate(over="ignore"):
        assert short.tobytes() == wide.astype(dtype).tobytes()


SCALE = """
struct Numbers { double factor; int count; };
extern "C" __global__ void scale(const Numbers numbers, const float* x, float* y, long long first) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < numbers.count) y[i] = numbers.factor * x[i] + first + gridDim.x;
}
"""


def test_raw_kernels_run_every_thread():
    kernel = RawKernel(SCALE, "scale")
    x, y = np.arange(10, dtype=np.float32), np.zeros(10, np.float32)
    form = np.dtype([("factor", np.float64), ("count", np.int32)], align=True)
    numbers = np.array((2.0, 9), form)
    kernel((3,), (4,), (numbers, x, y, 100))
    assert y.tolist() == [103 + 2 * i for i in range(9)] + [0]
    with pytest.raises(TypeError, match=r".16, 8, 8, 8. bytes, and .* .16, 8, 8, 4."):
        kernel((3,), (4,), (numbers, x, y, np.int32(100)))


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


def test_what_does_not_compile_says_why():
    for operation, reason in [
        ("y = undeclared", "undeclared"),
        ("__syncthreads(); y = x", "do not have __syncthreads"),
    ]:
        with pytest.raises(CompilationError, match=reason):
            ElementwiseKernel("T x", "T y", operation)(np.ones(1), np.ones(1))
