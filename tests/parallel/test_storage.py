"""Where variables are stored: the ranks stay in step, and memory is reused."""

import contextvars
import gc
import itertools
import os
from typing import Any

import numpy as np
import pytest
from internals import private_memory, ranks_in_words, segment
from mpi4py import MPI
from strategies import STRATEGIES

import hpcstrat as hs

pytestmark = pytest.mark.core

COMM = MPI.COMM_WORLD
N = COMM.size
RANK = COMM.rank
MIB = 1 << 20
on_the_cpu = pytest.mark.parametrize("place", ["CPU"], indirect=True)


@pytest.fixture(autouse=True)
def _no_garbage_of_other_tests():
    gc.collect()
    gc.freeze()  # so that the next collections need not visit what all tests keep


@pytest.fixture(params=STRATEGIES)
def strategy(request, place):
    with place.make(request.param) as made, made.scope():
        settle()
        yield made


@pytest.fixture
def central(place):
    with place.make(hs.CentralStorageStrategy) as made, made.scope():
        settle()
        yield made


@pytest.fixture
def no_collection():
    gc.disable()
    yield
    gc.enable()


def settle():
    """Tells storage of all variables that died: creating the next variable does."""
    hs.Variable(0.0)
    hs.Variable(0.0)


def start_of(v):
    return v._state.block.memory.start


def test_many_come_and_go(strategy):
    """All ranks draw the same sizes and times of death; each variable keeps its numbers."""
    random = np.random.default_rng(5)
    alive = {}
    for i in range(300):
        shape = tuple(random.integers(0, 40, random.integers(0, 3)))
        dtype = [np.float32, np.float64, np.int8, np.complex64][i % 4]
        alive[i] = hs.Variable(np.full(shape, i % 100, dtype))
        while len(alive) > 20:
            del alive[int(random.choice(list(alive)))]
    for i, v in alive.items():
        assert (v.numpy() == i % 100).all()
    spans = sorted(
        (start_of(v), start_of(v) + v.size * v.dtype.itemsize) for v in alive.values() if v.size
    )
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))
    assert all(start_of(v) % v.dtype.itemsize == 0 for v in alive.values())


def test_memory_is_used_again(strategy):
    fence = hs.Variable(np.ones(3))
    first = hs.Variable(np.ones(10_000))
    start = start_of(first)
    del first
    second = hs.Variable(np.full(10_000, 2.0))
    assert start_of(second) == start
    assert (second.numpy() == 2).all() and (fence.numpy() == 1).all()


@on_the_cpu
def test_memory_goes_back_to_the_system(strategy):
    big = hs.Variable(np.ones(MIB))
    COMM.Barrier()
    full = backed(strategy)
    COMM.Barrier()
    del big
    settle()
    COMM.Barrier()
    left = backed(strategy)
    assert full - left >= 7 * MIB


def backed(strategy):
    """The bytes of the segment that holds the strategy's variables."""
    communicator: Any = strategy._group.communicator
    shared = isinstance(strategy, hs.CentralStorageStrategy) and N > 1
    found = communicator.segment if shared else private_memory().segment
    return os.fstat(found._file).st_blocks * 512


@on_the_cpu
def test_a_place_is_used_again_once_all_ranks_have_told(central, no_collection):
    """Garbage collection comes at different times: here on rank 0 first, then on the others."""
    fence = hs.Variable(0.0)
    ring: list[Any] = [hs.Variable(np.full(5_000, 3.0))]
    ring.append(ring)  # dies only when the collector finds it
    start = start_of(ring[0])
    del ring
    for collector in range(N):
        if RANK == collector:
            gc.collect()
        settle()
        other = hs.Variable(np.full(5_000, float(collector)))
        assert len(set(COMM.allgather(start_of(other)))) == 1
        assert (start_of(other) == start) == (collector == N - 1)
        assert (other.numpy() == collector).all()
        del other
        settle()
    assert fence.numpy() == 0


@pytest.mark.slow
@pytest.mark.parametrize("collector", range(N))
def test_many_in_rings_with_collection_on_one_rank_only(strategy, place, no_collection, collector):
    keep = []
    for i in range(60):
        ring: list[Any] = [hs.Variable(np.full(1 + 97 * i % 3000, float(i)), aggregation="SUM")]
        ring.append(ring)
        if i % 10 == 0:
            keep.append((i, ring[0]))
        if collector == RANK and i % 7 == 0:
            gc.collect()
        strategy.run(lambda ring=ring: ring[0].assign_add(place.xp.ones(ring[0].shape)))
        del ring
    for i, v in keep:
        assert (v.numpy() == i + N).all()
        # One memory for all ranks.
        if isinstance(strategy, hs.CentralStorageStrategy) and place.kind == "CPU":
            assert len(set(COMM.allgather(start_of(v)))) == 1


def test_dead_variables_are_told_also_after_a_failure(central):
    fence = hs.Variable(1.0)
    first = hs.Variable(np.ones(10_000))
    start = start_of(first)
    del first
    if N > 1:
        with pytest.raises(hs.ReplicaMismatchError):  # the call that would have reported it
            hs.Variable(np.ones(3 + RANK))
    with pytest.raises(MemoryError):
        hs.Variable(np.broadcast_to(np.float32(0), (10**14,)))
    second = hs.Variable(np.full(10_000, 2.0))
    assert start_of(second) == start
    assert fence.numpy() == 1


def test_a_variable_for_which_there_is_no_memory(strategy, xp):
    before = hs.Variable([1.0, 2.0], aggregation="SUM")
    for shape in [(10**14,), (10**7, 10**7)]:
        with pytest.raises(MemoryError, match="bytes"):
            hs.Variable(np.broadcast_to(np.float32(0), shape))
        after = hs.Variable([3.0])
        strategy.run(lambda: before.assign(xp.ones(2)))
        assert before.numpy().tolist() == [N, N] and after.numpy().tolist() == [3]


@on_the_cpu
def test_memory_that_one_rank_does_not_get(strategy, monkeypatch):
    """Less than what is reserved, so the system refuses, on the rank that asks it."""
    first = hs.Variable([1.0])
    with monkeypatch.context() as patch:
        if RANK == 0:
            patch.setattr(segment, "available_memory", lambda: 1000)
        with pytest.raises(MemoryError, match="67,108,864 .* but this host has 1,000 free"):
            hs.Variable(np.broadcast_to(np.int8(0), (64 * MIB,)))
    second = hs.Variable([4.0])
    assert (first.numpy().tolist(), second.numpy().tolist()) == ([1], [4])
    if isinstance(strategy, hs.CentralStorageStrategy) and N > 1:  # nothing was lost
        assert start_of(second) - start_of(first) < MIB


@on_the_cpu
def test_a_message_for_which_one_rank_has_no_memory(place, monkeypatch):
    def refuse(*_):
        raise MemoryError("none left")

    with place.make(hs.MirroredStrategy) as strategy:
        with strategy.scope():
            v = hs.Variable(np.zeros(3), aggregation="SUM")
        with monkeypatch.context() as patch:
            if RANK == N - 1:
                patch.setattr(strategy._group.storage._messages, "_allocate", refuse)
            with pytest.raises(MemoryError, match="none left"):
                strategy.run(lambda: v.assign(np.ones(3)))
        strategy.run(lambda: v.assign(np.ones(3)))
        assert v.numpy().tolist() == [N] * 3


@pytest.mark.mpi(min_size=2)  # one rank cannot differ from another
def test_an_initial_value_that_fails_on_one_rank(strategy):
    for failing in range(N):

        def initial(failing=failing):
            if RANK == failing:
                raise KeyError("no such weight")
            return np.ones(3)

        with pytest.raises(KeyError, match="no such weight"):
            hs.Variable(initial)
        with pytest.raises((MemoryError, hs.ReplicaMismatchError)):
            hs.Variable(np.broadcast_to(np.float32(0), (10**14 if RANK == failing else 3,)))
    assert hs.Variable([4.0]).numpy().tolist() == [4]


@pytest.mark.mpi(min_size=2)  # one rank cannot differ from another
def test_ranks_that_write_different_variables_are_told(strategy, xp):
    """With one name and one shape: only the variable itself differs."""
    for shape in [(3,), (9_000,)]:
        v, w = (hs.Variable(np.zeros(shape), aggregation="SUM") for _ in range(2))
        with pytest.raises(hs.ReplicaMismatchError) as caught:
            (v if RANK == 0 else w).assign(xp.ones(shape))
        for ranks in ([0], range(1, N)):
            assert f"{ranks_in_words(ranks)}: Variable.assign of 'Variable'" in str(caught.value)
        with pytest.raises(hs.ReplicaMismatchError):
            strategy.run(
                lambda v=v, w=w, shape=shape: (v if RANK == 0 else w).assign(xp.ones(shape))
            )
        assert not v.numpy().any() and not w.numpy().any()


def test_strategies_share_one_memory_and_keep_apart(central, place):
    v = hs.Variable(np.full(1000, 1.0), aggregation="SUM")
    with place.make(hs.CentralStorageStrategy) as other:
        w = None

        def make():
            nonlocal w
            w = hs.Variable(np.full(1000, 2.0), aggregation="SUM")

        outside(other, make)
        assert w is not None
        assert (v.numpy() == 1).all() and (w.numpy() == 2).all()
        if N > 1:
            assert abs(start_of(v) - start_of(w)) >= 8000


def outside(strategy, fn):
    """Runs `fn` in the scope of another strategy than the one around this line."""

    def run():
        with strategy.scope():
            fn()

    contextvars.Context().run(run)


def test_numbers_of_one_rank_are_seen_by_all_at_once(central, xp):
    """After each write every rank reads the new numbers, whichever rank wrote that part."""
    v = hs.Variable(np.zeros(40_000), aggregation="SUM")

    def replica():
        for step in range(20):
            v.assign_add(xp.full(40_000, float(RANK + step)))
            total = sum(N * s + N * (N - 1) / 2 for s in range(step + 1))
            view = v.value()
            assert view[0] == view[-1] == view.min() == view.max() == total

    central.run(replica)
