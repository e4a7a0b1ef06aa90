"""Strategy.run: arguments and results; local results; values from functions; old names."""

import collections
import dataclasses
import re
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpcstrat as hs

COMM = MPI.COMM_WORLD
N = COMM.size
RANK = COMM.rank


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Pair:
    first: Any
    second: Any

    def __post_init__(self):
        assert not isinstance(self.first, str), "made anew through its checks"


@dataclasses.dataclass(frozen=True)
class Frozen:
    inner: Any
    label: str = "label"


class Keys(dict):
    pass


def test_arguments_are_each_replicas_component(strategy, place):
    mine = strategy.run(lambda: RANK)
    array, items = place.xp.ones(3), [1, 2]

    def replica(a, b, c, *, keyword):
        assert a is array and b is items and next(c) == 0  # not copied
        pair, point, frozen, keys = keyword
        assert (pair, point, frozen) == (Pair(RANK, 2), Point(RANK, None), Frozen([RANK]))
        assert type(keys) is Keys and keys["k"] == (RANK,)

    nest = [Pair(mine, 2), Point(mine, None), Frozen([mine]), Keys(k=(mine,))]
    strategy.run(replica, [array, items, iter(range(3))], {"keyword": nest})
    # What was passed is unchanged.
    assert isinstance(nest[1].x, int if N == 1 else hs.PerReplica)


def test_what_comes_back(strategy, place):
    with strategy.scope():
        v = hs.Variable(1.0)

    def replica():
        return {
            "variable": v,
            "point": Point(RANK, [float(RANK)]),
            "pair": Pair(RANK, None),
            "keys": Keys(loss=1.0 + RANK, x=place.xp.full(2, RANK)),
            "text": "text",
            "empty": [],
        }

    found, results = strategy.run(replica), strategy.experimental_local_results
    point, pair, keys = found["point"], found["pair"], found["keys"]
    assert (type(point), type(pair), type(keys)) == (Point, Pair, Keys)
    assert found["variable"] is v and pair.second is None and found["empty"] == []
    leaves = [point.x, point.y[0], pair.first, keys["x"], found["text"]]
    kinds = {isinstance(leaf, hs.DistributedValues) for leaf in leaves}
    assert kinds == {N > 1} and (N == 1 or type(leaves[0]) is hs.PerReplica)
    assert results(point.x) == tuple(range(N)) and results(found["text"]) == ("text",) * N
    assert [one.tolist() for one in results(keys["x"])] == [[r, r] for r in range(N)]
    total = strategy.reduce("SUM", keys, axis=None)
    assert type(total) is Keys and total["loss"] == N * (N + 1) / 2
    for rank, one in enumerate(results(keys)):
        assert type(one) is Keys and one["loss"] == 1 + rank
    assert strategy.run(lambda: None) is None
    assert strategy.run(lambda: v) is v
    assert strategy.run(lambda: (None, v)) == (None, v)


def test_replicas_work_on_what_the_caller_computes_and_the_caller_on_theirs(strategy, place):
    """Enough work that the processor is far ahead of a device that it does not wait for."""
    turn = place.xp.roll(place.xp.eye(300), 1, 0)
    array = place.xp.arange(300.0) * (RANK + 1)
    for _ in range(5):
        for _ in range(30):
            array = turn @ array
        array = strategy.run(lambda array: turn @ (turn @ array) + 1, (array,))
        (array,) = strategy.experimental_local_results(array)[RANK : RANK + 1]
    assert array.tolist() == [(k - 5 * 32) % 300 * (RANK + 1) + 5 for k in range(300)]


@pytest.mark.mpi(min_size=2)  # plain values with one replica
def test_a_distributed_value_is_no_number(strategy):
    found: Any = strategy.run(lambda: RANK)
    assert repr(found) == f"PerReplica(replica {RANK} of {N}: {RANK})"
    before = strategy.replica_group.communicator.calls.number
    for program in ("found + 1", "found[0]", "float(found)", "found < 2", "bool(found)"):
        with pytest.raises(
            TypeError, match=r"^PerReplica\.__\w+__: this is one value per replica; reduce it first"
        ):
            eval(program, {"found": found})
    assert strategy.replica_group.communicator.calls.number == before
    # As `if found:` would end a loop after its first step.
    with pytest.raises(TypeError, match="one value per replica"):
        hs.any_rank(found)
    assert strategy.reduce("SUM", found, axis=None) == N * (N - 1) // 2


def test_local_results_of_anything_else(strategy, place):
    with strategy.scope():
        v = hs.Variable(1.0)
    made = strategy.replica_group.communicator.calls.number
    for value in (5, "text", None, place.xp.ones(3), v):
        (found,) = strategy.experimental_local_results(value)
        assert found is value
    # Another rank may have one value per replica.
    assert strategy.replica_group.communicator.calls.number == made + 5 * (N > 1)


def test_values_from_a_function(strategy, place):
    contexts, distribute = [], strategy.experimental_distribute_values_from_function

    def nest_of(r, xp=np):  # an array of the host moves to the device
        return {"a": xp.full((r, 2), r), "b": (r, True, 2.5), "c": [Point(r, {"z": np.float32(r)})]}

    for module in (np, place.xp):

        def value_fn(context, module=module):
            contexts.append((context.replica_id_in_sync_group, context.num_replicas_in_sync))
            return nest_of(context.replica_id_in_sync_group, module)

        found, seen = distribute(value_fn), []
        assert isinstance(found["a"], place.xp.ndarray if N == 1 else hs.PerReplica)
        assert type(found["c"][0]) is Point
        for rank, one in enumerate(strategy.experimental_local_results(found)):
            assert isinstance(one["a"], place.xp.ndarray)
            assert str(hs.asnumpy(one)) == str(hs.asnumpy(nest_of(rank)))
        strategy.run(seen.append, (found,))
        assert str(hs.asnumpy(seen[0])) == str(hs.asnumpy(nest_of(RANK)))
    assert contexts == [(RANK, N)] * 2
    assert distribute(lambda _: ()) == ()


def test_a_run_on_one_rank_does_not_count_as_a_fault_later(strategy):
    if RANK == 0:
        strategy.run(lambda: None)  # it calls nothing that communicates
    with pytest.raises(KeyError):
        strategy.run(lambda: {}["every replica"])
    assert strategy.experimental_local_results(strategy.run(lambda: RANK)) == tuple(range(N))


def test_flags_of_any_rank(strategy, xp):
    last, lead = RANK == N - 1, RANK == 0
    with pytest.raises(ValueError, match="truth value"):
        hs.any_rank(np.ones(2, bool) if last else True)
    with pytest.raises(TypeError, match="any_rank: flag is 'no'"):
        hs.any_rank("no" if last else False)
    assert hs.any_rank(last) is True
    assert hs.any_rank(False) is False
    with strategy.scope():
        yes, no = hs.Variable(True), hs.Variable(False)
    for one in (yes, xp.arange(N)[RANK] == N - 1, np.bool_(lead), int(lead), np.int8(lead)):
        assert hs.any_rank(one) is True
    for one in (no, xp.zeros((), bool), np.False_, 0):
        assert hs.any_rank(one) is False


@pytest.fixture
def checked(strategy, monkeypatch):
    """A strategy of a job with `HPCSTRAT_CHECK=1`."""
    monkeypatch.setattr(strategy.replica_group.communicator, "checks", N > 1)
    return strategy


DIFFERING = {
    "args[0]": [
        lambda: ((np.arange(4) + RANK,), {}),
        lambda: ((np.zeros((2, 3) if RANK == 0 else (3, 2)),), {}),
        lambda: ((np.float32(RANK),), {}),
    ],
    "args[1]": [
        lambda: ((1, np.arange(10**6) == 10**6 - 1 - RANK),),  # its last elements
        lambda: (tuple(range(1 + (RANK == 0))), {}),
    ],
    "kwargs['x']": [
        lambda: ((0,), {"x": 0.1 * RANK}),
        lambda: ((), {"x": {"y": np.zeros(2, "i4" if RANK == 0 else "i8")}}),
    ],
}


@pytest.mark.mpi(min_size=2)  # one rank cannot differ from another
def test_plain_arguments_that_differ_are_found_where_it_is_asked(checked):
    for name, makers in DIFFERING.items():
        for make in makers:
            with pytest.raises(hs.ReplicaMismatchError) as caught:
                checked.run(lambda *args, **kwargs: 0, *make())
            message = str(caught.value)
            assert message.startswith("Strategy.run: ") and f"{name} differs" in message
            assert re.search(r" on rank 0; .* on ranks? 1\b.*hs.broadcast_object", message), name
    with pytest.raises(TypeError, match="it must be a tuple"):  # refused first
        checked.run(lambda x: x, args=checked.run(lambda: np.zeros(0)))


def test_what_may_differ_between_replicas_is_not_compared(checked, place):
    with checked.scope():
        own = hs.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
    mine = checked.run(lambda: place.xp.full(3, RANK))
    equal = place.xp.asarray(np.array([np.nan, 1], np.float32))
    others = [str(RANK), object(), np.array([object()]), iter([RANK])]

    def replica(variable, distributed, equal, scale, *, others):
        variable.assign_add(float(RANK))
        return distributed[0] * scale + equal[1] + next(others[3])

    results = checked.run(replica, (own, mine, equal, 2), {"others": others})
    for rank, one in enumerate(checked.experimental_local_results(results)):
        assert hs.asnumpy(one) == 3.0 * rank + 1
    assert own.numpy() == sum(range(N))
