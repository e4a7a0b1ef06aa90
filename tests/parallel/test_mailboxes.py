"""Memory that ranks share: who may write when, updates by messages in it, and what is freed."""

import gc
import itertools
import os

import ml_dtypes
import numpy as np
import pytest
from internals import CHUNK, barrier, mailboxes, records
from mpi4py import MPI
from strategies import STRATEGIES

import hpcstrat as hs

N, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
SUM = N * (N + 1) / 2  # of the replicas' gradients: rank r has r + 1
# Of floats in a record, in the first mailbox, and in larger ones.
SIZES = [5, 40_000, 7, 300_000, 41_000, 1_200_000, 300_001]


# ---- who may write when


class Lag:
    """Lets a slow rank wait until the others wait for it: they are as far ahead as they can get."""

    def __init__(self):
        self.is_slow = False

    def barrier(self, flags, comm):
        """A barrier after which it does so."""
        wait = barrier.barrier(flags, comm)
        self.arrivals = flags.view(np.int64)[1 :: barrier.LINE // 8]  # behind the flags

        def meet():
            self.arrivals[RANK] += 1
            wait()
            self()

        return meet

    def __call__(self):
        while self.is_slow and np.delete(self.arrivals, RANK).min() <= self.arrivals[RANK]:
            os.sched_yield()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("slow", sorted({0, N - 1}))
def test_no_rank_overwrites_what_a_slow_one_reads(monkeypatch, slow):
    """In calls of each kind after those of any other; and none reads before a slow one writes."""
    lag = Lag()
    monkeypatch.setattr(mailboxes, "barrier", lag.barrier)
    boxes = mailboxes.Mailboxes(MPI.COMM_WORLD.Dup())
    sizes = {
        "mailboxes": [1000] * N,
        "records": [5] * N,
        "both": [(5, 1000)[rank % 2] for rank in range(N)],
        "shared": [1000] * N,
    }
    orders = itertools.product(sizes, repeat=3)
    for number, kind in enumerate(itertools.chain.from_iterable(orders)):
        marks = [(N * number + rank) % 251 for rank in range(N)]  # what each rank sends
        own, nbytes = marks[RANK], sizes[kind][RANK]

        def write(message, own=own, nbytes=nbytes):
            lag.is_slow = RANK == slow  # not before: the first call makes the mailboxes
            lag()
            message[:nbytes] = own

        if kind == "shared":
            found = boxes.share(write)
        else:
            posted = boxes.post(bytes([own]) * records.WHOLE, nbytes, write)
            found = boxes.collect(sizes[kind], write)
            assert [set(record) for record in posted] == [{mark} for mark in marks]
        assert [
            set(message[:size].tolist()) for message, size in zip(found, sizes[kind], strict=True)
        ] == [{mark} for mark in marks]
    lag.is_slow = False
    boxes.sync()


# ---- updates


@pytest.fixture(params=STRATEGIES)
def strategy(request, place):
    with place.make(request.param) as made, made.scope():
        yield made


def made(sizes, **options):
    """A variable and an optimizer of its own for each size."""
    return [
        (hs.Variable(np.zeros(size, np.float32)), hs.optimizers.SGD(1.0, **options))
        for size in sizes
    ]


def step(strategy, variable, optimizer):
    gradient = strategy.xp.full(variable.shape, RANK + 1.0, np.float32)
    strategy.run(lambda: optimizer.apply_gradients([(gradient, variable)]))


@pytest.mark.parametrize(("steps", "clip"), [(1, None), (4, "global_clipnorm")], ids=str)
def test_updates_by_messages_that_grow(strategy, steps, clip):
    """By plans that keep mailboxes after several steps of each variable before the next."""
    networks = made(SIZES, momentum=0.5, **({clip: 1e9} if clip else {}))
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


def mapped_files():
    """How many shared files of the library this rank has mapped, without garbage."""
    gc.collect()
    with open("/proc/self/maps") as file:
        return sum("memfd:hpcstrat" in line for line in file)


@pytest.mark.parametrize("place", ["CPU"], indirect=True)
@pytest.mark.mpi(min_size=2)  # one rank has no mailboxes
def test_mailboxes_and_buffers_that_are_freed(strategy):
    """Larger mailboxes are in place of the old ones, and buffers go with their optimizer."""
    capacity = strategy.replica_group.communicator.mailboxes._capacity
    networks = made([capacity // 4 + n * 100_000 for n in (1, 2, 3)])
    step(strategy, *networks[0])
    files = mapped_files()
    for network in networks:
        step(strategy, *network)
        assert mapped_files() == files
    assert strategy.replica_group.communicator.mailboxes._capacity > capacity
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


# ---- one copy for all ranks, of which each updates a slice

# None, fewer than ranks, and such as no number of ranks divides.
SHAPES = [(0,), (1,), (), (N - 1,), (N + 1,), (2, 0), (7, 11), (1009,), (CHUNK * N + 1,), (40_009,)]
DTYPES = [np.float32, np.float16, np.float64, ml_dtypes.bfloat16, np.complex64]


def pattern(shape, dtype):
    """Small integers, of which all sums and products here are exact in each dtype."""
    return (np.arange(np.prod(shape, dtype=int)) % 4).reshape(shape).astype(dtype)


def test_updates_of_slices(strategy, xp):
    """With momentum 1: after k steps the velocity is k sums, and the variable 1 + ... + k of them."""
    for dtypes in (DTYPES[:1], DTYPES):
        forms = [(shape, dtypes[i % len(dtypes)]) for i, shape in enumerate(SHAPES)]
        variables = [hs.Variable(np.zeros(*form)) for form in forms]
        gradients = [xp.asarray(pattern(*form) * (RANK + 1)) for form in forms]
        optimizer = hs.optimizers.SGD(1.0, momentum=1.0)
        for steps in (1, 2, 3):
            pairs = [*zip(gradients, variables, strict=True)]
            strategy.run(lambda o=optimizer, given=pairs: o.apply_gradients(given))
            for v in variables:
                expected = -SUM * steps * (steps + 1) / 2 * pattern(v.shape, np.float64)
                np.testing.assert_array_equal(v.numpy(), expected.astype(v.dtype), strict=True)
