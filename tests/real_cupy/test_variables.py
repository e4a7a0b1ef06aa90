"""How CuPy's operators and functions treat a variable."""

import operator

import numpy as np
import pytest
from on_host import array, cupy, reaches_cuda, variable

import hpcstrat as hs

UNARY = [operator.neg, operator.pos, abs, np.exp, np.isnan, np.square, cupy.exp, cupy.square]
UNARY += [np.add.reduce, np.add.accumulate, cupy.asarray, cupy.array, cupy.linalg.norm, repr]
UNARY += [hs.asnumpy, cupy.from_dlpack]
WRITTEN_OUT = [
    lambda v: cupy.asarray(v, np.float64),
    lambda v: v[0],
    lambda v: v[...],
    lambda v: v[None],
    lambda v: v[[1, 0]],
    lambda v: v[v > 1],
    lambda v: cupy.where(v > 1, v, 0),
    lambda v: cupy.concatenate([v, v]),
    lambda v: [v.numpy(), v.value(), v.read_value()],
]
BINARY = [operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv]
BINARY += [operator.mod, operator.pow, operator.lt, operator.le, operator.gt, operator.ge]
BINARY += [operator.eq, operator.ne, divmod, np.maximum, np.hypot, np.logaddexp, cupy.maximum]
BINARY += [cupy.hypot]


@pytest.fixture(params=["cross-replica", "replica"])
def reaches(request):
    """Whether a call with these arguments, in the context of that name, fails in CUDA."""
    run = hs.get_strategy().run if request.param == "replica" else lambda body: body()

    def call(function, *arguments, **options):
        return run(lambda: reaches_cuda(lambda: function(*arguments, **options)))

    return call


def test_unary(reaches):
    for function in [*UNARY, *WRITTEN_OUT]:
        reaches(function, variable((2, 2)))


def test_binary(reaches):
    v, w, a = variable((2, 2)), variable((2, 2), np.float64), array((2, 2))
    for function in BINARY:
        for pair in [(v, w), (v, a), (a, v), (v, 2), (2, v)]:
            assert reaches(function, *pair), function


def test_matrix_products(reaches):
    x, w = array((3, 2)), variable((2, 2))
    for function in (operator.matmul, np.matmul, cupy.matmul, cupy.dot):
        for pair in [(x, w), (w, array((2, 3))), (w, w), (array((2,)), w)]:
            assert reaches(function, *pair)
    assert reaches(cupy.matmul, x, w, out=array((3, 2)))


def test_in_place(reaches):
    a, v = array((2, 2)), variable((2, 2))
    assert reaches(operator.iadd, a, v)
    assert reaches(np.multiply, v, v, out=a)
    assert reaches(operator.setitem, a, slice(None), v)
    assert reaches(operator.getitem, array((5,)), variable((2,), np.int32))
