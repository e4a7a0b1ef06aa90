"""An update that a GPU cannot make is refused on all ranks, before anything has changed."""

import numpy as np
import pytest
from adamax import Adamax
from internals import device_update
from mpi4py import MPI
from strategies import STRATEGIES

import hpcstrat as hs

COMM = MPI.COMM_WORLD
N = COMM.size
RANK = COMM.rank

pytestmark = [
    pytest.mark.core,
    pytest.mark.parametrize("place", ["GPU"], indirect=True),
]


@pytest.fixture(params=STRATEGIES)
def strategy(request, place):
    with place.make(request.param) as made, made.scope():
        yield made


OF_REALS = {
    "Lion": (lambda: hs.optimizers.Lion(0.5), r"numpy\.sign of elements"),
    "Adamax": (lambda: Adamax(0.5), r"numpy\.absolute, numpy\.maximum of elements"),
    "clipvalue": (
        lambda: hs.optimizers.SGD(0.5, clipvalue=0.25, name="mine"),
        r"mine\.apply_gradients: the update with clipvalue takes numpy\.maximum, numpy\.minimum",
    ),
}


def gradient_of(xp, v, is_sparse):
    if is_sparse:
        return hs.IndexedSlices(xp.ones((2, *v.shape[1:]), v.dtype), xp.asarray([3, 1]))
    return xp.ones(v.shape, v.dtype)


def check_whole(strategy, variables, is_sparse):
    """That they have their first values on all ranks, and can be updated."""
    for v in variables:
        assert v.numpy().tobytes() == np.full(v.shape, 2, v.dtype).tobytes()
    other, xp = hs.optimizers.SGD(0.5), strategy.xp

    def step():
        pairs = [(gradient_of(xp, v, is_sparse), v) for v in variables]
        other.apply_gradients(pairs)

    strategy.run(step)
    assert other.iterations == 1
    for v in variables:
        expected = np.full(v.shape, 2, v.dtype)
        expected[[3, 1] if is_sparse else slice(None)] -= 0.5 * N
        np.testing.assert_allclose(v.numpy(), expected)


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
@pytest.mark.parametrize(
    "case, is_sparse",
    [(name, False) for name in OF_REALS] + [(name, True) for name in ("Lion", "clipvalue")],
)
def test_what_orders_numbers_takes_no_complex_ones(strategy, case, is_sparse, dtype):
    make, said = OF_REALS[case]
    variables = [hs.Variable(np.full((900, 5), 2, kind)) for kind in (np.float32, dtype)]
    optimizer = make()

    def step():
        xp = strategy.xp
        optimizer.apply_gradients(
            [(gradient_of(xp, v, is_sparse and i > 0), v) for i, v in enumerate(variables)]
        )

    for _ in range(2):
        with pytest.raises(TypeError, match=f"{said}.* of {np.dtype(dtype).name}"):
            strategy.run(step)
        assert optimizer.iterations == 0
    check_whole(strategy, variables, is_sparse)


COMPILED = {
    "dense": (lambda: hs.optimizers.SGD(0.5), False),
    "norms": (lambda: hs.optimizers.SGD(0.5, clipnorm=1e6), False),
    "sparse": (lambda: hs.optimizers.SGD(0.5), True),
}


@pytest.mark.parametrize("case", COMPILED)
def test_a_kernel_that_does_not_compile_on_one_rank(strategy, case, monkeypatch):
    make, is_sparse = COMPILED[case]
    variables = [hs.Variable(np.full((900, 5), 2, np.float32)) for _ in range(2)]
    optimizer = make()

    def fail(*_, **__):
        raise RuntimeError("it does not compile")

    def step():
        optimizer.apply_gradients([(gradient_of(strategy.xp, v, is_sparse), v) for v in variables])

    with monkeypatch.context() as patch:
        if RANK == 0:
            patch.setattr(device_update, "update_kernel", fail)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="it does not compile"):
                strategy.run(step)
            assert optimizer.iterations == 0
    check_whole(strategy, variables, is_sparse)
    strategy.run(step)
    assert optimizer.iterations == 1
