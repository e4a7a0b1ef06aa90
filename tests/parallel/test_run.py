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


def per_replica(strategy):
    """A value from each replica: its number."""
    return strategy.run(lambda: RANK)


def test_arguments_are_each_replicas_component(strategy, place):
    mine = per_replica(strategy)
    plain = object()
    array, items = place.xp.ones(3), [1, 2]

    def same(a, b, c):
        assert a is array and b is items  # not copied
        assert next(c) == 0

    strategy.run(same, [array, items, iter(range(3))])

    def replica(a, nest, *rest, keyword, fixed):
        assert a == RANK
        assert nest["list"][0] == RANK and nest["point"] == Point(RANK, 7) and nest["none"] is None
        assert nest["pair"].first == RANK and nest["frozen"].inner == [RANK]
        assert rest == (1, "text", plain)
        assert (keyword, fixed) == ({"k": (RANK,)}, 5)
        return True

    nest = {
        "list": [mine],
        "point": Point(mine, 7),
        "none": None,
        "pair": Pair(mine, 2),
        "frozen": Frozen([mine]),
    }
    done = strategy.run(
        replica, (mine, nest, 1, "text", plain), {"keyword": {"k": (mine,)}, "fixed": 5}
    )
    assert strategy.experimental_local_results(done) == (True,) * N
    # What was passed is unchanged.
    assert isinstance(nest["point"].x, int if N == 1 else hs.PerReplica)


def test_what_comes_back(strategy, place):
    with strategy.scope():
        v = hs.Variable(1.0)

    def replica():
        return {
            "number": RANK,
            "array": place.xp.full(2, RANK),
            "none": None,
            "variable": v,
            "point": Point(RANK, [float(RANK)]),
            "pair": Pair(RANK, None),
            "text": "text",
            "empty": [],
        }

    found = strategy.run(replica)
    assert found["none"] is None and found["variable"] is v and found["pair"].second is None
    point, pair = found["point"], found["pair"]
    assert type(point) is Point and type(pair) is Pair and found["empty"] == []
    leaves = [found["number"], found["array"], point.x, point.y[0], pair.first, found["text"]]
    kinds = {isinstance(leaf, hs.DistributedValues) for leaf in leaves}
    assert kinds == {N > 1} and (N == 1 or type(leaves[0]) is hs.PerReplica)
    results = strategy.experimental_local_results
    assert results(found["number"]) == tuple(range(N)) and results(found["text"]) == ("text",) * N
    assert [one.tolist() for one in results(found["array"])] == [[r, r] for r in range(N)]
    assert strategy.run(lambda: None) is None
    assert strategy.run(lambda: v) is v
    assert strategy.run(lambda: (None, v)) == (None, v)
    again = strategy.run(lambda x: x[:1] + 3, (found["array"],))
    assert [one.tolist() for one in results(again)] == [[r + 3] for r in range(N)]


class Keys(dict):
    pass


def test_a_subclass_of_dict_stays_one(strategy, place):
    value = strategy.run(lambda: Keys(loss=1.0 + RANK, more={"x": place.xp.full(2, RANK)}))
    assert type(value) is Keys and isinstance(value["loss"], float if N == 1 else hs.PerReplica)
    found = strategy.reduce("SUM", value, axis=None)
    assert type(found) is Keys and found["loss"] == N * (N + 1) / 2
    assert found["more"]["x"].tolist() == [N * (N - 1) / 2] * 2
    for rank, one in enumerate(strategy.experimental_local_results(value)):
        assert type(one) is Keys and one["loss"] == 1 + rank
    again = strategy.run(lambda keys: (type(keys) is Keys, keys["loss"]), args=(value,))
    assert strategy.experimental_local_results(again) == tuple(
        (True, 1.0 + rank) for rank in range(N)
    )


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
    found: Any = per_replica(strategy)
    assert repr(found) == f"PerReplica(replica {RANK} of {N}: {RANK})"
    assert issubclass(type(found), hs.DistributedValues)
    before = strategy.replica_group.communicator.calls.number
    for wrong in (
        lambda: found + 1,
        lambda: found[0],
        lambda: float(found),
        lambda: found < 2,
        lambda: bool(found),
    ):
        with pytest.raises(
            TypeError, match=r"^PerReplica\.__\w+__: this is one value per replica; reduce it first"
        ):
            wrong()
    assert strategy.replica_group.communicator.calls.number == before
    # As `if found:` would end a loop after its first step.
    with pytest.raises(TypeError, match="one value per replica"):
        hs.any_rank(found)
    assert strategy.reduce("SUM", found, axis=None) == N * (N - 1) // 2


# ---- experimental_local_results


def test_local_results_of_a_nest(strategy, place):
    xp = place.xp
    found = strategy.run(
        lambda: {"a": RANK, "b": [xp.full((RANK, 3), RANK, "f4"), np.full(2, -RANK)]}
    )
    everyones = strategy.experimental_local_results(found)
    assert isinstance(everyones, tuple) and len(everyones) == N
    for rank, one in enumerate(everyones):
        device, host = one["b"]
        assert one["a"] == rank and isinstance(device, xp.ndarray) and type(host) is np.ndarray
        assert device.shape == (rank, 3) and device.dtype == np.float32 and (device == rank).all()
        assert host.tolist() == [-rank] * 2
    digests = COMM.allgather([one["b"][0].tobytes() for one in everyones])
    assert digests == [digests[0]] * N


def test_local_results_of_anything_else(strategy, place):
    array = place.xp.ones(3)
    for value in (5, "text", None, [1, 2], {"a": None}):
        assert strategy.experimental_local_results(value) == (value,)
    assert strategy.experimental_local_results(array)[0] is array
    with strategy.scope():
        v = hs.Variable(1.0)
    made = strategy.replica_group.communicator.calls.number
    assert strategy.experimental_local_results(v) == (v,)
    # Another rank may have one value per replica.
    assert strategy.replica_group.communicator.calls.number == made + (N > 1)


# ---- experimental_distribute_values_from_function


def test_values_from_a_function(strategy, place):
    contexts = []
    for module in (np, place.xp):  # an array of the host moves to the device

        def value_fn(context, module=module):
            contexts.append((context.replica_id_in_sync_group, context.num_replicas_in_sync))
            return module.full((RANK + 1, 2), context.replica_id_in_sync_group)

        found = strategy.experimental_distribute_values_from_function(value_fn)
        assert isinstance(found, place.xp.ndarray if N == 1 else hs.PerReplica)
        for rank, one in enumerate(strategy.experimental_local_results(found)):
            assert isinstance(one, place.xp.ndarray) and one.tolist() == [[rank] * 2] * (rank + 1)
        total = sum(2 * rank * (rank + 1) for rank in range(N))
        assert strategy.reduce("SUM", found, axis=(0, 1)) == total
    assert contexts == [(RANK, N)] * 2
    for number in (3, 2.5, True, np.float32(1), [1, 2]):
        found = strategy.experimental_distribute_values_from_function(lambda _, it=number: it)
        for one in strategy.experimental_local_results(found):
            assert np.array_equal(hs.asnumpy(one), number)


NESTS = {
    "tuple": lambda r: (1.0 + r, 2.0),
    "list": lambda r: [r, np.full(2, r)],
    "dict": lambda r: {"a": np.full((r, 2), r), "b": (r, True)},
    "namedtuple": lambda r: Point(r, {"z": np.float32(r)}),
    "nothing": lambda r: (),
}


@pytest.mark.parametrize("name", NESTS)
def test_a_nest_of_values_from_a_function(strategy, name):
    nest_of = NESTS[name]
    found = strategy.experimental_distribute_values_from_function(
        lambda c: nest_of(c.replica_id_in_sync_group)
    )
    mine = nest_of(RANK)
    assert type(found) is type(mine) and len(found) == len(mine)
    first = next(iter(found.values() if isinstance(found, dict) else found), None)
    assert N == 1 or first is None or isinstance(first, hs.PerReplica)
    everyones = strategy.experimental_local_results(found) if first is not None else ()
    for rank, one in enumerate(everyones):
        assert str(hs.asnumpy(one)) == str(hs.asnumpy(nest_of(rank)))
    seen = []
    strategy.run(seen.append, (found,))
    assert str(hs.asnumpy(seen[0])) == str(hs.asnumpy(mine))


def test_a_run_on_one_rank_does_not_count_as_a_fault_later(strategy):
    def fail():
        raise KeyError("every replica")

    if RANK == 0:
        strategy.run(lambda: None)  # it calls nothing that communicates
    for _ in range(2):
        with pytest.raises(KeyError):
            strategy.run(fail)
        assert strategy.experimental_local_results(strategy.run(lambda: RANK)) == tuple(range(N))


def test_flags_of_any_rank(strategy, xp):
    with pytest.raises(ValueError, match="truth value"):
        hs.any_rank(np.ones(2, bool) if RANK == N - 1 else True)
    with pytest.raises(TypeError, match="any_rank: flag is 'no'"):
        hs.any_rank("no" if RANK == N - 1 else False)
    assert hs.any_rank(RANK == N - 1) is True
    assert hs.any_rank(False) is False
    with strategy.scope():
        found = [
            hs.Variable(True),
            xp.arange(N)[RANK] == N - 1,
            np.bool_(RANK == 0),
            int(RANK == 0),
            np.int8(RANK == 0),
        ]
    assert [hs.any_rank(one) for one in found] == [True] * 5
    assert [hs.any_rank(one) for one in (hs.Variable(False), xp.zeros((), bool), np.False_, 0)] == [
        False
    ] * 4


# ---- HPCSTRAT_CHECK


@pytest.fixture
def checked(strategy, monkeypatch):
    """A strategy of a job with `HPCSTRAT_CHECK=1`."""
    monkeypatch.setattr(strategy.replica_group.communicator, "checks", N > 1)
    return strategy


DIFFERING = {
    "an array": (lambda: ((np.arange(4) + RANK,), {}), "args[0] differs"),
    "its last element": (lambda: ((1, np.arange(10**6) == RANK),), "args[1] differs"),
    "a number": (lambda: ((0,), {"rate": 0.1 * RANK}), "kwargs['rate'] differs"),
    "a dtype": (
        lambda: ((), {"x": {"y": np.zeros(2, "i4" if RANK == 0 else "i8")}}),
        "kwargs['x'] differs",
    ),
    "a shape": (lambda: ((np.zeros((2, 3) if RANK == 0 else (3, 2)),), {}), "args[0] differs"),
    "a scalar": (lambda: ((np.float32(RANK),), {}), "args[0] differs"),
    "a count": (lambda: (tuple(range(1 + (RANK == 0))), {}), "args[1] differs"),
}


@pytest.mark.mpi(min_size=2)  # one rank cannot differ from another
def test_plain_arguments_that_differ_are_found_where_it_is_asked(checked):
    for name, (make, text) in DIFFERING.items():
        with pytest.raises(hs.ReplicaMismatchError) as caught:
            checked.run(lambda *args, **kwargs: 0, *make())
        message = str(caught.value)
        assert message.startswith("Strategy.run: ") and text in message, name
        assert re.search(r" on rank 0; .* on ranks? 1\b.*hs.broadcast_object", message), name
    with pytest.raises(TypeError, match="it must be a tuple"):  # refused first
        checked.run(lambda x: x, args=checked.run(lambda: np.zeros(0)))


def test_what_may_differ_between_replicas_is_not_compared(checked, place):
    with checked.scope():
        own = hs.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
    mine = checked.run(lambda: place.xp.full(3, RANK))
    equal = place.xp.asarray(np.array([np.nan, 1], np.float32))
    others = {
        "text": str(RANK),
        "object": object(),
        "objects": np.array([object()]),
        "iterator": iter([RANK]),
    }

    def replica(variable, distributed, equal, scale, *, others):
        variable.assign_add(float(RANK))
        return distributed[0] * scale + equal[1] + next(others["iterator"])

    results = checked.run(replica, (own, mine, equal, 2), {"others": others})
    assert [hs.asnumpy(x) for x in checked.experimental_local_results(results)] == [
        3.0 * r + 1 for r in range(N)
    ]
    assert own.numpy() == sum(range(N))
