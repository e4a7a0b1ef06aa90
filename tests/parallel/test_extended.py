"""StrategyExtended: updates where a variable is stored, reductions to a place, facts."""

import contextvars
import socket
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from strategies import strategies_for

import hpcstrat as hs

COMM = MPI.COMM_WORLD
N = COMM.size
RANK = COMM.rank
CPU = "/job:localhost/replica:0/task:0/device:CPU:0"


@pytest.fixture(params=strategies_for(N))
def strategy(request, place):
    with place.make(request.param) as made, made.scope():
        yield made


def test_reduce_to_any_destination(strategy, xp):
    v, extended = hs.Variable(np.zeros(3)), strategy.extended
    value, number = strategy.run(lambda: (xp.full(3, RANK + 1.0), xp.full((), RANK, np.int32)))
    total = [N * (N + 1) / 2] * 3
    for destinations in (v, "CPU:0", [CPU], xp.zeros(3)):
        found = extended.reduce_to("SUM", value, destinations)
        assert type(found) is xp.ndarray and found.tolist() == total
    everywhere = extended.reduce_to(hs.ReduceOp.MEAN, value, destinations=value)
    assert isinstance(everywhere, xp.ndarray if N == 1 else hs.Mirrored)
    for one in strategy.experimental_local_results(everywhere):
        assert one.tolist() == [(N + 1) / 2] * 3
    before = strategy.replica_group.communicator.calls.number
    found = extended.batch_reduce_to("SUM", [(value, v), (number, v), (value, "CPU:0")])
    assert strategy.replica_group.communicator.calls.number <= before + 1  # one message
    assert (found[0].tolist(), found[1], found[2].tolist()) == (total, N * (N - 1) / 2, total)
    assert found[1].dtype == np.int32
    assert extended.batch_reduce_to("SUM", []) == []
    found = extended.broadcast_to({"a": xp.full(3, RANK + 5), "n": None}, CPU)
    assert found["a"].tolist() == [5, 5, 5] and found["n"] is None
    assert type(found["a"]) is xp.ndarray
    everywhere = extended.broadcast_to(RANK + 7, strategy.run(lambda: RANK))
    assert strategy.experimental_local_results(everywhere) == (7,) * N


def test_slices_into_themselves(strategy, xp):
    """A value is a destination of its own sum, with one replica too."""
    value = strategy.run(
        lambda: hs.IndexedSlices(xp.full((1, 1), RANK + 1.0), xp.array([RANK]), (N + 1, 1))
    )
    one = strategy.extended.reduce_to("SUM", value, value)
    two, three = strategy.extended.batch_reduce_to("MEAN", [(value, value), (value, value)])
    for found, scale in [(one, 1), (two, N), (three, N)]:
        assert isinstance(found, hs.IndexedSlices if N == 1 else hs.Mirrored)
        for slices in strategy.experimental_local_results(found):
            assert slices.indices.tolist() == list(range(N)) and slices.shape == (N + 1, 1)
            assert slices.values.ravel().tolist() == [(rank + 1) / scale for rank in range(N)]


def test_an_update_runs_on_every_rank_and_writes_any_variable(strategy, xp):
    v, passed, other = (hs.Variable(np.zeros(2), name=name) for name in ("v", "passed", "other"))
    # Outside of every scope, so each process has its own.
    foreign = contextvars.Context().run(hs.Variable, np.zeros(2), name="foreign")
    ran = []

    def fn(var, nest, *, key):
        assert hs.in_cross_replica_context() and hs.get_strategy() is strategy
        ran.append(RANK)
        for one in (var, nest["list"][0], key, other):
            one.assign_add(xp.ones(2))
        foreign.assign(np.ones(2))
        assert (other + 1).tolist() == [len(ran) + 1] * 2
        return {"sum": var.value().sum(), "none": None, "variable": var, "text": "done"}

    result = strategy.extended.update(v, fn, ({"list": [passed]},), {"key": v})
    assert result == {"sum": 4, "none": None, "variable": v, "text": "done"}
    assert result["variable"] is v
    assert [one.numpy().tolist() for one in (v, passed, other)] == [[2, 2], [1, 1], [1, 1]]
    assert COMM.allgather(foreign.numpy().tolist()) == [[1, 1]] * N
    grouped = strategy.extended.update(v, lambda var: [1, {"a": 2}], group=False)
    assert grouped == [(1,), {"a": (2,)}]
    devices = strategy.extended.non_slot_devices([v])
    result = strategy.extended.update_non_slot(devices, fn, (v, {"list": [passed]}), {"key": v})
    assert result["sum"] == 8
    assert strategy.extended.update_non_slot(devices, lambda: 4, group=False) == (4,)
    assert COMM.allgather(ran) == [[rank] * 2 for rank in range(N)]
    with pytest.raises(KeyError, match="gone"):
        strategy.extended.update_non_slot(devices, lambda: {}["gone"])


def test_an_updates_exception_reaches_every_rank(strategy, xp):
    v = hs.Variable(np.zeros(2))

    def fn(var, error):
        var.assign_add(xp.ones(2))
        raise error

    for error in ValueError("of the user"), KeyError("key"):
        with pytest.raises(type(error)) as caught:
            strategy.extended.update(v, fn, (error,))
        assert str(error) in str(caught.value) and hs.get_strategy() is strategy
    assert v.numpy().tolist() == [2, 2]  # what was written stays written
    for odd in (0, N - 1, RANK):  # a wrong call, of one rank or all
        with pytest.raises(ValueError, match=r"Variable.assign of .* has shape \(3,\)"):
            strategy.extended.update(v, lambda var, odd=odd: var.assign(xp.ones(2 + (RANK == odd))))
    strategy.extended.update(v, lambda var: var.assign(xp.ones(2)))
    assert v.numpy().tolist() == [1, 1]


def counted(strategy, metric):
    strategy.run(lambda: metric.update_state([1.0, 2.0 + N * RANK]))
    return metric.result()


CALLS: dict[str, Any] = {
    "reduce": lambda s, v, x: s.reduce("SUM", x, None),
    "gather": lambda s, v, x: s.gather(x, 0),
    "run": lambda s, v, x: s.run(lambda x: x + RANK, (x,)),
    "local results": lambda s, v, x: s.experimental_local_results(x),
    "values from function": lambda s, v, x: s.experimental_distribute_values_from_function(
        lambda context: context.replica_id_in_sync_group
    ),
    "reduce_to": lambda s, v, x: s.extended.reduce_to("MEAN", x, v),
    "broadcast_to": lambda s, v, x: s.extended.broadcast_to(RANK + 3, v),
    "update": lambda s, v, x: s.extended.update(v, lambda v: v.assign_add(s.xp.ones(2)) + 0),
    "update_non_slot": lambda s, v, x: s.extended.update_non_slot(CPU, lambda: v.value() * 3),
    "new variable": lambda s, v, x: hs.Variable(2.0 + RANK) + 0,
    "metric": lambda s, v, x: counted(s, hs.metrics.Mean()),
    "optimizer": lambda s, v, x: (
        hs.optimizers.SGD(0.5).apply_gradients([(s.xp.full(2, 3.0), v)]),
        v + 0,
    ),
    "dataset": lambda s, v, x: list(
        s.experimental_distribute_dataset(
            hs.data.Dataset.from_generator(lambda: iter(range(4 * N))).batch(N)
        )
    ),
    "barrier": lambda s, v, x: hs.barrier(),
    "any_rank": lambda s, v, x: hs.any_rank(RANK == N - 1),
    "broadcast_object": lambda s, v, x: hs.broadcast_object(f"of {RANK}"),
}


def test_every_call_in_an_update_does_what_it_does_outside(strategy, xp):
    x = strategy.run(lambda: xp.full(2, float(RANK)))
    for name, call in CALLS.items():
        v = hs.Variable(np.ones(2))
        outside = call(strategy, v, x), v
        w = hs.Variable(np.ones(2))
        inside = strategy.extended.update(w, lambda w, call=call: call(strategy, w, x)), w
        assert repr(inside) == repr(outside), name  # with all values


def test_the_hosts_of_a_strategy():
    """On one host; launch/test_several_hosts.py has more."""
    choice = object()  # changes nothing
    with hs.MultiWorkerMirroredStrategy(choice, communication_options=choice) as strategy:
        if RANK == N - 1:  # nothing communicates
            resolver = strategy.cluster_resolver
            spec = resolver.cluster_spec()
            assert (resolver.task_type, resolver.task_id) == ("worker", 0)
            assert spec.as_dict() == {"worker": [socket.gethostname()]}
            assert (spec.jobs, spec.num_tasks("worker")) == (["worker"], 1)
            spec.as_dict()["worker"].append("another")
            assert spec.num_tasks("worker") == len(spec.as_dict()["worker"]) == 1
            with pytest.raises(ValueError, match="job_name is 'ps'; pass 'worker'"):
                spec.num_tasks("ps")
        value = strategy.run(lambda: RANK)
        assert strategy.extended.reduce_to("SUM", value, "CPU:0", choice) == N * (N - 1) // 2


def test_choices_of_communication_change_nothing(place):
    with place.make(hs.MirroredStrategy, object()) as strategy:
        assert int(strategy.reduce("SUM", strategy.run(lambda: np.int64(1)), None)) == N
