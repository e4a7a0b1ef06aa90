"""How CuPy's operators and functions treat a variable."""

import operator

import numpy as np
import pytest
from on_host import array, cupy, reaches_cuda, variable

import hpcstrat as hs

UNARY = [
    operator.neg,
    operator.pos,
    abs,
    np.exp,
    np.isnan,
    np.square,
    cupy.exp,
    cupy.square,
    cupy.asarray,
    cupy.array,
]
UNARY += [np.add.reduce, np.add.accumulate, cupy.linalg.norm, repr, hs.asnumpy]
WRITTEN_OUT = {
    "cupy.asarray(v, float64)": lambda v: cupy.asarray(v, np.float64),
    "v[0]": lambda v: v[0],
    "v[...]": lambda v: v[...],
    "v[None]": lambda v: v[None],
    "v[[1, 0]]": lambda v: v[[1, 0]],
    "v[v > 1]": lambda v: v[v > 1],
    "cupy.where(v > 1, v, 0)": lambda v: cupy.where(v > 1, v, 0),
    "cupy.concatenate([v, v])": lambda v: cupy.concatenate([v, v]),
    "cupy.from_dlpack(v)": lambda v: cupy.from_dlpack(v),
    "v.numpy()": lambda v: v.numpy(),
    "v.value()": lambda v: v.value(),
    "v.read_value()": lambda v: v.read_value(),
}
BINARY = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.mod,
    operator.pow,
]
BINARY += [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne, divmod]
BINARY += [np.maximum, np.hypot, np.logaddexp, cupy.maximum, cupy.hypot]
MATRICES = [operator.matmul, np.matmul, cupy.matmul, cupy.dot]


def name(function):
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__name__', function)}"


@pytest.fixture(params=["cross-replica", "replica"])
def within(request):
    """Runs a function in the context of that name."""
    if request.param == "cross-replica":
        return lambda body: body()
    strategy = hs.get_strategy()
    return lambda body: strategy.run(body)


@pytest.mark.parametrize(
    "function", [*UNARY, *WRITTEN_OUT.values()], ids=[*map(name, UNARY), *WRITTEN_OUT]
)
def test_unary(function, within):
    v = variable((2, 2))
    within(lambda: reaches_cuda(lambda: function(v)))


@pytest.mark.parametrize("function", BINARY, ids=name)
def test_binary(function, within):
    v, w, a = variable((2, 2)), variable((2, 2), np.float64), array((2, 2))
    for pair in [(v, w), (v, a), (a, v), (v, 2), (2, v)]:
        assert within(lambda pair=pair: reaches_cuda(lambda: function(*pair)))


@pytest.mark.parametrize("function", MATRICES, ids=name)
def test_matrix_products(function, within):
    x, w = array((3, 2)), variable((2, 2))
    for pair in [(x, w), (w, array((2, 3))), (w, w), (array((2,)), w)]:
        assert within(lambda pair=pair: reaches_cuda(lambda: function(*pair)))
    out = array((3, 2))
    assert within(lambda: reaches_cuda(lambda: cupy.matmul(x, w, out=out)))
    assert within(lambda: reaches_cuda(lambda: cupy.dot(x, w, out=out)))


def test_in_place(within):
    a, v = array((2, 2)), variable((2, 2))

    def body():
        assert reaches_cuda(lambda: operator.iadd(a, v))
        assert reaches_cuda(lambda: np.multiply(v, v, out=a))
        assert reaches_cuda(lambda: operator.setitem(a, slice(None), v))
        assert reaches_cuda(lambda: operator.getitem(array((5,)), variable((2,), np.int32)))

    within(body)
