"""One copy for all ranks of a host, of which each updates a slice: all see what any has written."""

import ml_dtypes
import numpy as np
import pytest
from internals import CHUNK
from mpi4py import MPI
from strategies import STRATEGIES

import hpcstrat as hs

pytestmark = pytest.mark.core

COMM = MPI.COMM_WORLD
N, RANK = COMM.size, COMM.rank
SUM = N * (N + 1) // 2  # of the replicas' gradients: rank r has r + 1 parts
# None, fewer than ranks, and such as no number of ranks divides.
SHAPES = [(0,), (1,), (), (N - 1,), (N + 1,), (2, 0), (7, 11), (1009,), (CHUNK * N + 1,), (40_009,)]
DTYPES = [np.float16, np.float32, np.float64, ml_dtypes.bfloat16, np.complex64]


@pytest.fixture(params=STRATEGIES)
def strategy(request, place):
    with place.make(request.param) as made, made.scope():
        yield made


def pattern(shape, dtype):
    """Small integers, of which all sums and products here are exact in each dtype."""
    return (np.arange(np.prod(shape, dtype=int)) % 4).reshape(shape).astype(dtype)


def check(variables, factor):
    """That each variable is its pattern, times a factor, on all ranks."""
    for v in variables:
        expected = (factor * pattern(v.shape, np.float64)).astype(v.dtype)
        assert (v.shape, v.dtype) == (expected.shape, expected.dtype)
        assert np.array_equal(v.numpy(), expected)


@pytest.mark.parametrize("dtypes", [[np.float32], DTYPES], ids=["one dtype", "all dtypes"])
def test_updates(strategy, xp, dtypes):
    """With momentum 1: after k steps the velocity is k sums, and the variable 1 + ... + k of them."""
    forms = [(shape, dtypes[i % len(dtypes)]) for i, shape in enumerate(SHAPES)]
    variables = [hs.Variable(np.zeros(*form)) for form in forms]
    gradients = [xp.asarray(pattern(*form) * (RANK + 1)) for form in forms]
    optimizer = hs.optimizers.SGD(1.0, momentum=1.0)
    for steps in (1, 2, 3):
        strategy.run(lambda: optimizer.apply_gradients(zip(gradients, variables, strict=True)))
        check(variables, -SUM * steps * (steps + 1) / 2)


def test_assignments_of_all_kinds(strategy, xp):
    for shape in SHAPES:
        v, w = (hs.Variable(np.zeros(shape), aggregation=how) for how in ("SUM", "MEAN"))
        own = xp.asarray(pattern(shape, np.float64) * (RANK + 1))
        strategy.run(lambda v=v, own=own: v.assign(own))
        check([v], SUM)
        strategy.run(lambda v=v, own=own: v.assign_sub(own))
        check([v], 0)
        strategy.run(lambda w=w, own=own: w.assign_add(2 * own))
        check([w], N + 1)
        w.assign(pattern(shape, np.float64))  # outside of replicas
        check([w], 1)
        strategy.extended.update(w, lambda w, xp=xp: w.assign_add(2 * w.value()))
        check([w], 3)


@pytest.mark.parametrize("count", [0, 1, 5, 1009])
def test_rows_that_ranks_share_out(strategy, xp, count):
    """Of each rank other rows, and one of all ranks; an empty gradient of the last."""
    v = hs.Variable(np.zeros((count + N, 3)))
    rows = np.arange(count) + RANK if RANK < N - 1 or N == 1 else np.arange(0)
    gradient = hs.IndexedSlices(xp.ones((rows.size, 3)), xp.asarray(rows), v.shape)
    optimizer = hs.optimizers.SGD(1.0)
    for _ in range(2):
        strategy.run(lambda: optimizer.apply_gradients([(gradient, v)]))
    expected = np.zeros(v.shape)
    for rank in range(max(N - 1, 1)):
        expected[rank : rank + count] -= 2
    assert v.numpy().tolist() == expected.tolist()
