"""Messages that grow: the values of updates by plans that keep old mailboxes, and what is freed."""

import gc

import numpy as np
import pytest
from mpi4py import MPI
from strategies import STRATEGIES

import hpcstrat as hs

pytestmark = pytest.mark.core

N, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
SUM = N * (N + 1) / 2  # of the replicas' gradients: rank r has r + 1
# In a record, in the first mailbox, and in larger ones.
SIZES = [5, 40_000, 7, 300_000, 41_000, 1_200_000, 300_001]
on_the_cpu = pytest.mark.parametrize("place", ["CPU"], indirect=True)


@pytest.fixture(params=STRATEGIES)
def strategy(request, place):
    with place.make(request.param) as made, made.scope():
        yield made


def mapped_files():
    """How many shared files of the library this rank has mapped, without garbage."""
    gc.collect()
    with open("/proc/self/maps") as file:
        return sum("memfd:hpcstrat" in line for line in file)


def made(sizes, **options):
    """A variable and an optimizer of its own for each size."""
    return [
        (hs.Variable(np.zeros(size, np.float32)), hs.optimizers.SGD(1.0, **options))
        for size in sizes
    ]


def step(strategy, variable, optimizer):
    gradient = strategy.xp.full(variable.shape, RANK + 1.0, np.float32)
    strategy.run(lambda: optimizer.apply_gradients([(gradient, variable)]))


@pytest.mark.parametrize("steps", [1, 4])  # of each before the next, so that plans keep mailboxes
@pytest.mark.parametrize("clip", [{}, {"clipnorm": 1e9}, {"global_clipnorm": 1e9}], ids=str)
def test_updates_by_messages_that_grow(strategy, steps, clip):
    networks = made(SIZES, momentum=0.5, **clip)
    expected = velocity = 0.0
    for _ in range(2):
        for _ in range(steps):
            velocity = 0.5 * velocity + SUM
            expected -= velocity
        for network in networks:
            for _ in range(steps):
                step(strategy, *network)
        for variable, _ in networks:
            np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-6)


def test_other_messages_between_updates(strategy, xp):
    """Assignments by one rank's message, sums and gathered rows, each larger than before."""
    networks = made([20_000, 50_000, 90_000])
    w = hs.Variable(np.zeros(100_000), aggregation="ONLY_FIRST_REPLICA")
    for round_, size in enumerate((10_000, 60_000, 100_000)):
        for network in networks:
            step(strategy, *network)
        strategy.run(lambda value=round_: w.assign(xp.full(100_000, 10.0 * value + RANK)))
        assert (w.numpy() == 10 * round_).all()
        total = strategy.reduce("SUM", strategy.run(lambda n=size: xp.full(n, RANK + 1.0)), None)
        assert total.shape == (size,) and (total == SUM).all()
        rows = strategy.gather(strategy.run(lambda n=size: xp.full(n * (RANK + 1), RANK)), 0)
        assert [int((rows == rank).sum()) for rank in range(N)] == [
            size * (rank + 1) for rank in range(N)
        ]
    for variable, _ in networks:
        assert (variable.numpy() == -3 * SUM).all()


@on_the_cpu
@pytest.mark.mpi(min_size=2)  # one rank has no mailboxes
def test_larger_mailboxes_are_in_place_of_the_old_ones(strategy):
    """There is one file for all mailboxes, whatever plans have used; none is slab or buffer."""
    capacity = strategy._group.communicator.mailboxes._capacity
    networks = made([capacity // 4 + n * 100_000 for n in (1, 2, 3)])
    step(strategy, *networks[0])
    files = mapped_files()
    for network in networks:
        step(strategy, *network)
        assert mapped_files() == files
    assert strategy._group.communicator.mailboxes._capacity > capacity


@on_the_cpu
@pytest.mark.mpi(min_size=2)
def test_buffers_go_with_their_optimizer(strategy):
    ((variable, optimizer),) = made([100_000])
    files = mapped_files()
    for _ in range(3):
        optimizer = hs.optimizers.SGD(1.0)
        gradient = optimizer.gradient_buffers([variable])
        assert mapped_files() == files + 1
        gradient[0][...] = RANK + 1.0
        strategy.run(
            lambda one=optimizer, of=gradient: one.apply_gradients(zip(of, [variable], strict=True))
        )
        del optimizer, gradient
        assert mapped_files() == files
    assert (variable.numpy() == -3 * SUM).all()
