"""Matrix products for CUDA graphs: what real CuPy's arrays and operators give cuBLAS."""

import ctypes
import types
from typing import Any

import numpy as np
import pytest
from internals import cublas
from on_host import array, cupy

DTYPES = {0: np.float32, 1: np.float64, 2: np.float16}


class Library:
    """cuBLAS on the host."""

    calls = 0

    def cublasGemmEx(self, _, op_a, op_b, m, n, k, alpha, *given):
        a, kind, lead_a, b, kind_b, lead_b, beta, c, kind_c, lead_c, *to = given
        self.calls += 1
        assert to == [{0: 68, 1: 70, 2: 68}[kind], -1] and kind == kind_b == kind_c
        assert (alpha._obj.value, beta._obj.value) == (1, 0)
        left = memory(a, kind, *((k, m) if op_a else (m, k)), lead_a)
        right = memory(b, kind, *((n, k) if op_b else (k, n)), lead_b)
        out = memory(c, kind, m, n, lead_c)
        out[...] = (left.T if op_a else left) @ (right.T if op_b else right)


def memory(place, kind, rows, columns, lead):
    """A matrix in column order."""
    dtype = np.dtype(DTYPES[kind])
    nbytes = dtype.itemsize * ((columns - 1) * lead + rows)
    strides = (dtype.itemsize, dtype.itemsize * lead)
    return strided(place.value, nbytes, dtype, (rows, columns), strides)


def on_host(values):
    """The elements of a CuPy array over host memory."""
    return strided(values.data.ptr, values.nbytes, values.dtype, values.shape, values.strides)


def strided(place, nbytes, dtype, shape, strides):
    raw: Any = (ctypes.c_uint8 * nbytes).from_address(place)
    return np.lib.stride_tricks.as_strided(np.frombuffer(raw, dtype), shape, strides)


def filled(shape, dtype=np.float32):
    made = array(shape, dtype)
    on_host(made)[...] = np.random.default_rng(0).integers(-3, 4, shape)
    return made


@pytest.fixture
def products(monkeypatch):
    made: Any = cublas.GraphProducts.__new__(cublas.GraphProducts)
    raw = types.SimpleNamespace(ptr=5)
    cuda = types.SimpleNamespace(get_current_stream=lambda: raw)
    made._stream = types.SimpleNamespace(xp=cupy, cuda=cuda, raw=raw)
    made._library, made._handle = Library(), None
    monkeypatch.setattr(cupy, "empty", array)
    with made.replace_cupys():
        yield made._library


SHAPES = [((2, 3), (3, 4)), ((3,), (3, 4)), ((2, 3), (3,)), ((1, 3), (3, 2)), ((2, 1), (1, 5))]


@pytest.mark.parametrize(("left", "right"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES.values())
def test_shapes_and_dtypes(products, left, right, dtype):
    a, b = filled(left, dtype), filled(right, dtype)
    for result in (a @ b, cupy.matmul(a, b), cupy.dot(a, b), np.matmul(a, b)):
        assert type(result) is cupy.ndarray and result.dtype == dtype
        np.testing.assert_array_equal(on_host(result), on_host(a) @ on_host(b))
    assert products.calls == 4


def test_orders(products):
    a, b = filled((4, 3)), filled((5, 4))
    for left, right in [(a.T, b.T), (a.T, filled((4, 2))), (filled((2, 4)), b.T)]:
        np.testing.assert_array_equal(on_host(left @ right), on_host(left) @ on_host(right))
    out = array((3, 5))
    assert cupy.matmul(a.T, b.T, out=out) is out
    np.testing.assert_array_equal(on_host(out), on_host(a).T @ on_host(b).T)
    assert products.calls == 4


@pytest.mark.parametrize(
    ("left", "right", "dtype"),
    [
        ((2, 2, 3), (2, 3, 2), np.float32),
        ((2, 3), (3, 2), np.int64),
        ((2, 3), (3, 2), np.complex64),
        ((3,), (3,), np.float32),
        ((2, 3), (4, 2), np.float32),
    ],
    ids=["batches", "integers", "complex", "vectors", "shapes"],
)
def test_what_is_left_to_cupy(products, left, right, dtype):
    with pytest.raises((cupy.cuda.runtime.CUDARuntimeError, ValueError)):
        cupy.matmul(array(left, dtype), array(right, dtype))
    assert products.calls == 0


def test_the_library_that_cupy_uses():
    assert ctypes.CDLL(cublas._path(cupy.cuda)).cublasGemmEx


def test_calls_that_a_capture_watches():
    streams = [(cupy.cuda.Stream, name) for name in ("__enter__", "use")]
    random = [(cupy.random.RandomState, "_get_seed"), (cupy.random.BitGenerator, "__init__")]
    for owner, name in [*streams, *random]:
        before = getattr(owner, name)
        with cublas.replaced(owner, name, lambda call, *given: (call, given)):
            assert getattr(owner, name)(1, 2) == (before, (1, 2))
        assert getattr(owner, name) is before
        assert (name in vars(owner)) is (owner is not cupy.cuda.Stream)
