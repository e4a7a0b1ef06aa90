"""Where variables are stored: who sees them, how long, and what comes where there is no memory."""

import gc
import os
import weakref
from typing import Any

import numpy as np
import pytest
from internals import host_limits, ranks_in_words, shared_file, slabs
from mpi4py import MPI
from strategies import STRATEGIES

import hpcstrat as hs

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
        yield made


@pytest.fixture
def slab_count():
    """`slab_count()`: how many slabs of this test have memory, of those that it has seen."""
    before, seen = {*slabs._alive}, {}

    def count():
        for address in {*slabs._alive} - before:
            array = slabs._alive[address].array
            owner = array.base if isinstance(array.base, np.ndarray) else array
            seen.setdefault(address, weakref.ref(owner))
        return sum(one() is not None for one in seen.values())

    return count


def mapped_files():
    """How many shared files of the library this rank has mapped."""
    with open("/proc/self/maps") as file:
        return sum("memfd:hpcstrat" in line for line in file)


def start_of(v):
    """Where a variable starts in its slab."""
    block = v._state.block
    return block.memory.start - block.owner.address


def test_many_come_and_go(strategy):
    """All ranks draw the same sizes, and drop at times of their own; all keep their numbers."""
    random, own = np.random.default_rng(5), np.random.default_rng(RANK)
    alive: dict[int, Any] = {}
    for i in range(60):
        shape = tuple(random.integers(0, 40, random.integers(0, 3)))
        dtype = [np.float32, np.float64, np.int8, np.complex64][i % 4]
        alive[i] = hs.Variable(np.full(shape, i, dtype))
        # The same places on all ranks.
        assert len(set(COMM.allgather(start_of(alive[i])))) == 1
        while len(alive) > 20:
            del alive[int(own.choice(list(alive)))]
    for i, v in alive.items():
        assert (v.numpy() == i).all() and start_of(v) % v.dtype.itemsize == 0


@on_the_cpu
def test_memory_goes_with_the_last_variable_in_it(strategy, slab_count):
    """Of 1 MiB each: two in each slab."""
    files = mapped_files()
    made = [hs.Variable(np.ones(MIB, np.int8)) for _ in range(8)]
    assert slab_count() == 4
    assert mapped_files() - files == (4 if N > 1 else 0)
    views = []
    strategy.run(lambda: views.append(made[2].value()))
    del made[:4]  # those of the first two
    assert slab_count() == 3
    assert (views.pop() == 1).all()
    assert slab_count() == 2
    assert mapped_files() - files == (2 if N > 1 else 0)
    assert all((v.numpy() == 1).all() for v in made)
    made.clear()
    for i in range(50):  # 3 MiB in all, in slabs of 1 MiB
        made = [hs.Variable(np.full(1 << 16, i, np.int8)), *made][:1]
        assert slab_count() <= 2  # a new one is made while the last variable is alive
    assert (made[0].numpy() == 49).all()
    assert slab_count() == 1


@on_the_cpu
def test_slots_go_with_their_optimizer(strategy, slab_count, xp):
    variables = [hs.Variable(xp.zeros(MIB // 4, np.float32)) for _ in range(4)]
    gradients = [np.ones(MIB // 4, np.float32) for _ in variables]
    before = slab_count()
    for _ in range(3):
        optimizer: Any = hs.optimizers.Adam()
        strategy.run(
            lambda optimizer=optimizer: optimizer.apply_gradients(
                zip(gradients, variables, strict=True)
            )
        )
        assert slab_count() > before
        del optimizer
        gc.collect()
        assert slab_count() - before <= 1  # the slab in which the next slot is made


def test_a_variable_for_which_there_is_no_memory(strategy, xp):
    before = hs.Variable([1.0, 2.0], aggregation="SUM")
    for shape in [(10**14,), (10**7, 10**7)]:
        with pytest.raises(MemoryError, match="bytes|Unable to allocate"):
            hs.Variable(np.broadcast_to(np.float32(0), shape))
        after = hs.Variable([3.0])
        strategy.run(lambda: before.assign(xp.ones(2)))
        assert before.numpy().tolist() == [N, N] and after.numpy().tolist() == [3]


@on_the_cpu
def test_memory_that_one_rank_does_not_get(strategy, monkeypatch):
    """The rank that commits the pages of a shared slab, or each of its own: the host has none."""
    first = hs.Variable([1.0])
    for shape in [(64 * MIB,), (192 * MIB,)]:  # in a slab with others, and in one of its own
        files = mapped_files()
        with monkeypatch.context() as patch:
            if RANK == 0:
                patch.setattr(host_limits, "available_memory", lambda: 1000)
            with pytest.raises(MemoryError, match="bytes were requested, but this host has 1,000"):
                hs.Variable(np.broadcast_to(np.int8(0), shape))
        second = hs.Variable([4.0])
        assert (first.numpy().tolist(), second.numpy().tolist()) == ([1], [4])
        assert len(set(COMM.allgather(start_of(second)))) == 1
        second.assign([5.0])
        assert second.numpy().tolist() == [5]
        assert mapped_files() - files <= (N > 1)  # the slab for the failed and later variables


@on_the_cpu
@pytest.mark.mpi(min_size=2)  # one rank alone shares nothing
@pytest.mark.parametrize("failing", [0, N - 1])
def test_a_slab_that_one_rank_cannot_map(strategy, monkeypatch, failing):
    first, files = hs.Variable([1.0]), mapped_files()

    def refuse(file, _):
        os.close(file)
        raise OSError("cannot map")

    with monkeypatch.context() as patch:
        if RANK == failing:
            patch.setattr(shared_file, "SharedFile", refuse)
        with pytest.raises(MemoryError, match=rf"memory: rank {failing}: cannot map\. Start"):
            hs.Variable(np.zeros(2 * MIB, np.int8))
    gc.collect()
    assert mapped_files() == files
    second = hs.Variable([4.0])  # right behind the first: nothing has changed
    assert start_of(second) == start_of(first) + 4
    third = hs.Variable(np.full(2 * MIB, 3, np.int8))
    assert (first.numpy().tolist(), second.numpy().tolist()) == ([1], [4])
    assert (third.numpy() == 3).all()


@on_the_cpu
def test_slots_for_which_one_rank_has_no_memory(strategy, monkeypatch):
    """The step changes nothing, and the next one is the first."""
    v = hs.Variable(np.zeros(64 * MIB, np.int8).view(np.float32))
    gradient = np.ones(v.shape, np.float32)
    optimizer = hs.optimizers.SGD(1.0, momentum=0.5)

    def step():
        strategy.run(lambda: optimizer.apply_gradients([(gradient, v)]))

    with monkeypatch.context() as patch:
        if RANK == 0:
            patch.setattr(host_limits, "available_memory", lambda: 1000)
        with pytest.raises(MemoryError, match="this host has 1,000 free"):
            step()
    assert not v.numpy().any() and optimizer.iterations == 0
    step()
    assert (v.numpy() == -N).all() and optimizer.iterations == 1


@on_the_cpu
@pytest.mark.mpi(min_size=2)  # one rank alone has no mailboxes
@pytest.mark.parametrize("strategy", STRATEGIES[:1], indirect=True)  # they share mailboxes
def test_a_message_for_which_one_rank_has_no_memory(strategy, monkeypatch):
    # More than mailboxes have room for now: strategies share them.
    size = strategy.replica_group.communicator.mailboxes._capacity // 8 + 1
    v = hs.Variable(np.zeros(size), aggregation="SUM")

    def refuse(*_):
        raise MemoryError("none left")

    with monkeypatch.context() as patch:
        if RANK == N - 1:
            patch.setattr(shared_file.SharedFile, "commit", refuse)
        with pytest.raises(MemoryError, match=f"rank {N - 1}: none left"):
            strategy.run(lambda: v.assign(np.ones(size)))
    assert not v.numpy().any()
    strategy.run(lambda: v.assign(np.ones(size)))
    assert (v.numpy() == N).all()


@pytest.mark.mpi(min_size=2)  # one rank cannot differ from another
def test_a_variable_that_fails_or_differs_on_one_rank(strategy, xp):
    for failing in range(N):

        def initial(failing=failing):
            if RANK == failing:
                raise KeyError("no such weight")
            return np.ones(3)

        with pytest.raises(KeyError, match="no such weight"):
            hs.Variable(initial)
        with pytest.raises((MemoryError, hs.ReplicaMismatchError)):
            hs.Variable(np.broadcast_to(np.float32(0), (10**14 if RANK == failing else 3,)))
    for shape in [(3,), (9_000,)]:  # with one name and one shape: only the variable differs
        v, w = (hs.Variable(np.zeros(shape), aggregation="SUM") for _ in range(2))
        mine, value = (v if RANK == 0 else w), xp.ones(shape)
        with pytest.raises(hs.ReplicaMismatchError) as caught:
            mine.assign(value)
        for ranks in ([0], range(1, N)):
            assert f"{ranks_in_words(ranks)}: Variable.assign of 'Variable'" in str(caught.value)
        with pytest.raises(hs.ReplicaMismatchError):
            strategy.run(mine.assign, (value,))
        assert not v.numpy().any() and not w.numpy().any()
