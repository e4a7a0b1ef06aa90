"""StrategyExtended: updates where a variable is stored, reductions to a place, facts."""

import contextvars
import socket
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from strategies import STRATEGIES, stores_once

import hpcstrat as hs

COMM = MPI.COMM_WORLD
N = COMM.size
RANK = COMM.rank
CPU = "/job:localhost/replica:0/task:0/device:CPU:0"


@pytest.fixture(params=STRATEGIES)
def strategy(request, place):
    with place.make(request.param) as made, made.scope():
        yield made


def replica_context() -> Any:
    return hs.get_replica_context()


def ran_on(flag):
    """The ranks on which the flag is set."""
    return [rank for rank, one in enumerate(COMM.allgather(bool(flag))) if one]


def where_updates_run(strategy, xp):
    return [0] if stores_once(strategy, xp) else list(range(N))


def test_facts(strategy, place):
    extended = strategy.extended
    v = hs.Variable([1.0, 2.0])
    assert extended.non_slot_devices([v]) == (
        f"/job:localhost/replica:0/task:0/device:{place.devices[0]}",
    )
    assert (extended.should_checkpoint, extended.should_save_summary) == (True, True)
    assert (extended.experimental_require_static_shapes, extended.experimental_between_graph) == (
        False,
        False,
    )
    assert extended.value_container(v) is v
    assert extended.read_var(v).tolist() == [1, 2]
    with extended.colocate_vars_with(v):
        w = hs.Variable(1.0)
    assert extended.variable_created_in_scope(w)


@pytest.mark.core
def test_call_for_each_replica(strategy):
    found = strategy.extended.call_for_each_replica(lambda x, y: x + y + RANK, (1,), {"y": 2})
    assert strategy.experimental_local_results(found) == tuple(3 + rank for rank in range(N))


# ---- reduce_to and friends


@pytest.mark.core
def test_reduce_to(strategy, xp):
    value = strategy.run(lambda: xp.full(3, RANK + 1.0))
    v = hs.Variable(np.zeros(3))
    total = [N * (N + 1) / 2] * 3
    for destinations in (v, "CPU:0", [CPU], xp.zeros(3)):
        assert strategy.extended.reduce_to("SUM", value, destinations).tolist() == total
    everywhere = strategy.extended.reduce_to(hs.ReduceOp.SUM, value, destinations=value)
    assert isinstance(everywhere, xp.ndarray if N == 1 else hs.Mirrored)
    for one in strategy.experimental_local_results(everywhere):
        assert one.tolist() == total
    assert strategy.run(lambda x: x.tolist() == total, (everywhere,)) is not None
    assert (
        strategy.experimental_local_results(
            strategy.run(lambda x: x.tolist() == total, (everywhere,))
        )
        == (True,) * N
    )
    assert strategy.extended.reduce_to("MEAN", 4.0, v) == 4


def test_batch_reduce_to_is_one_message(strategy, xp):
    v, w = hs.Variable(np.zeros(3)), hs.Variable(np.zeros((), np.int32))
    first, second = strategy.run(lambda: (xp.full(3, RANK + 1.0), xp.full((), RANK, np.int32)))
    before = strategy._group.communicator.calls.number
    found = strategy.extended.batch_reduce_to("SUM", [(first, v), (second, w), (first, "CPU:0")])
    assert strategy._group.communicator.calls.number <= before + 1
    assert isinstance(found, list)
    total = [N * (N + 1) / 2] * 3
    assert (found[0].tolist(), found[1], found[2].tolist()) == (total, N * (N - 1) / 2, total)
    assert found[1].dtype == np.int32
    assert strategy.extended.batch_reduce_to("SUM", []) == []


@pytest.mark.core
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


@pytest.mark.core
def test_broadcast_to(strategy, xp):
    found = strategy.extended.broadcast_to({"a": xp.full(3, RANK + 5), "n": None}, CPU)
    assert found["a"].tolist() == [5, 5, 5] and found["n"] is None
    assert type(found["a"]) is xp.ndarray
    everywhere = strategy.run(lambda: RANK)
    found = strategy.extended.broadcast_to(RANK + 7, everywhere)
    assert strategy.experimental_local_results(found) == (7,) * N


# ---- update


@pytest.mark.core
def test_update_runs_where_the_variable_lives(strategy, xp):
    v = hs.Variable(np.zeros(3))
    ran = []

    def fn(var, value, *, scale):
        assert var is v
        assert hs.in_cross_replica_context() and hs.get_strategy() is strategy
        ran.append(RANK)
        var.assign_add(value * scale)
        assert var.value().tolist() == [2, 4, 6]
        return {"sum": var.value().sum(), "none": None, "variable": var, "text": "done"}

    result = strategy.extended.update(v, fn, args=(xp.array([1.0, 2.0, 3.0]),), kwargs={"scale": 2})
    assert ran_on(ran) == where_updates_run(strategy, xp)
    assert result == {"sum": 12, "none": None, "variable": v, "text": "done"}
    assert result["variable"] is v
    assert v.numpy().tolist() == [2, 4, 6]
    grouped = strategy.extended.update(v, lambda var: [1, {"a": 2}], group=False)
    assert grouped == [(1,), {"a": (2,)}]


@pytest.mark.core
def test_update_takes_what_reduce_to_gives(strategy, xp):
    v = hs.Variable(np.zeros(2))
    gradient = strategy.run(lambda: xp.full(2, float(RANK)))
    total = strategy.extended.reduce_to("SUM", gradient, gradient)
    strategy.extended.update(v, lambda var, g: var.assign_sub(g), (total,))
    assert v.numpy().tolist() == [-N * (N - 1) / 2] * 2


def test_an_updates_large_result_is_the_same_everywhere(strategy, xp):
    v = hs.Variable(np.zeros(3))
    result = strategy.extended.update(v, lambda var: xp.full(50_000, 3.5))
    assert type(result) is xp.ndarray and (result == 3.5).all()
    result[0] = 4  # this rank's own
    result[0] = 3.5
    assert len(set(COMM.allgather(result.tobytes()))) == 1


@pytest.mark.parametrize(
    "error", [ValueError("of the user"), KeyError("key"), ZeroDivisionError("zero")], ids=repr
)
def test_an_updates_exception_reaches_every_rank(strategy, xp, error):
    v = hs.Variable(np.zeros(3))

    def fn(var):
        var.assign(xp.ones(3))
        raise error

    with pytest.raises(type(error)) as caught:
        strategy.extended.update(v, fn)
    assert str(error) in str(caught.value)
    assert hs.get_strategy() is strategy
    assert v.numpy().tolist() == [1, 1, 1]  # what was written stays written
    strategy.extended.update(v, lambda var: var.assign(xp.zeros(3)))
    assert v.numpy().tolist() == [0, 0, 0]


@pytest.mark.core
def test_an_updates_result_that_cannot_travel(strategy, xp):
    v = hs.Variable(np.zeros(3))
    if where_updates_run(strategy, xp) == [0] and N > 1:
        with pytest.raises(TypeError, match="StrategyExtended.update: .*cannot travel"):
            strategy.extended.update(v, lambda var: lambda: 0)
    else:
        assert callable(strategy.extended.update(v, lambda var: lambda: 0))
    assert strategy.extended.update(v, lambda var: 5) == 5


def test_an_update_writes_the_variables_passed_to_it_only(strategy, xp):
    v, passed, other = (hs.Variable(np.zeros(2), name=name) for name in ("v", "passed", "other"))

    def fn(var, nest, *, key):
        for one in (var, nest["list"][0], key):
            one.assign_add(xp.ones(2))
        assert other.numpy().tolist() == [0, 0]  # reading is free
        assert (other + 1).tolist() == [1, 1]

    strategy.extended.update(v, fn, ({"list": [passed]},), {"key": v})
    assert (v.numpy().tolist(), passed.numpy().tolist()) == ([2, 2], [1, 1])
    with pytest.raises(
        RuntimeError, match="Variable.assign of 'other': this update may write only the variables"
    ):
        strategy.extended.update(v, lambda var: other.assign(xp.ones(2)))
    assert other.numpy().tolist() == [0, 0]


def test_an_update_on_one_rank_writes_no_variable_of_another_group(strategy, xp):
    v, values = hs.Variable(np.zeros(2)), xp.ones(2)
    # Outside of every scope, so each process has its own.
    foreign = contextvars.Context().run(hs.Variable, np.zeros(2), name="foreign")

    def fn(var, other):
        var.assign(values)
        other.assign(np.ones(2))

    if N > 1 and stores_once(strategy, xp):
        with pytest.raises(RuntimeError, match="'foreign': this update may write only"):
            strategy.extended.update(v, fn, (foreign,))
        expected = [0, 0]
    else:
        strategy.extended.update(v, fn, (foreign,))
        expected = [1, 1]
    assert COMM.allgather(foreign.numpy().tolist()) == [expected] * N


def test_wrong_values_in_an_update(strategy, xp):
    v = hs.Variable(np.zeros(2))
    for value, message in [
        (xp.ones(3), r"has shape \(3,\)"),
        (xp.array([1j, 2]), "complex128 cannot be cast to"),
    ]:
        with pytest.raises(ValueError, match=message):
            strategy.extended.update(v, lambda var, value=value: var.assign(value))
    assert v.numpy().tolist() == [0, 0]


def collectives(strategy):
    xp = strategy.xp
    ready = strategy.run(lambda: xp.full(2, float(RANK)))
    w = hs.Variable(np.zeros(2), aggregation="SUM")
    metric = hs.metrics.Mean()
    optimizer = hs.optimizers.SGD(0.1)
    dataset = strategy.experimental_distribute_dataset(
        hs.data.Dataset.from_generator(lambda: iter(range(8))).batch(4)
    )
    return {
        "reduce": lambda v: strategy.reduce("SUM", ready, None),
        "gather": lambda v: strategy.gather(ready, 0),
        "run": lambda v: strategy.run(lambda: 0),
        "scope": lambda v: strategy.scope().__enter__(),
        "local results": lambda v: strategy.experimental_local_results(ready),
        "values from function": lambda v: strategy.experimental_distribute_values_from_function(
            lambda c: 1
        ),
        "reduce_to": lambda v: strategy.extended.reduce_to("SUM", ready, v),
        "broadcast_to": lambda v: strategy.extended.broadcast_to(1, v),
        "update": lambda v: strategy.extended.update(v, lambda var: None),
        "update_non_slot": lambda v: strategy.extended.update_non_slot(CPU, lambda: None),
        "metric": lambda v: metric.result(),
        "new variable": lambda v: hs.Variable(1.0),
        "optimizer": lambda v: optimizer.apply_gradients([(xp.ones(2), w)]),
        "dataset": lambda v: list(dataset),
        "barrier": lambda v: hs.barrier(),
        "any_rank": lambda v: hs.any_rank(True),
        "broadcast_object": lambda v: hs.broadcast_object(1),
        "close": lambda v: strategy.close(),
    }


COMMUNICATING = [
    *(
        "reduce",
        "gather",
        "run",
        "scope",
        "values from function",
        "reduce_to",
        "broadcast_to",
        "update",
    ),
    *(
        "update_non_slot",
        "new variable",
        "optimizer",
        "barrier",
        "any_rank",
        "broadcast_object",
        "close",
    ),
]
if N > 1:  # with one replica these have nothing to ask others for
    COMMUNICATING += ["local results", "metric", "dataset"]


@pytest.mark.parametrize("name", COMMUNICATING)
def test_nothing_communicates_in_an_update(strategy, xp, name):
    v = hs.Variable(np.zeros(2))
    call = collectives(strategy)[name]
    with pytest.raises(RuntimeError, match="update"):
        strategy.extended.update(v, call)
    assert hs.get_strategy() is strategy
    v.assign(xp.ones(2))
    assert strategy.reduce("SUM", strategy.run(lambda: 1), None) == N
    assert v.numpy().tolist() == [1, 1]


def test_update_non_slot(strategy, xp):
    v = hs.Variable(np.zeros(2))
    state = {"steps": 0}
    ran = []

    def fn(variable, *, add):
        ran.append(RANK)
        state["steps"] += add
        variable.assign_add(xp.ones(2))
        return state["steps"]

    devices = strategy.extended.non_slot_devices([v])
    assert strategy.extended.update_non_slot(devices, fn, (v,), {"add": 3}) == 3
    assert strategy.extended.update_non_slot(devices, lambda: 4, group=False) == (4,)
    assert ran_on(ran) == where_updates_run(strategy, xp)
    assert v.numpy().tolist() == [1, 1]
    with pytest.raises(KeyError, match="gone"):
        strategy.extended.update_non_slot(devices, lambda: {}["gone"])


@pytest.mark.core
def test_updates_within_merge_call(strategy, xp):
    v = hs.Variable(np.zeros(2))

    def merge(strategy, gradient):
        total = strategy.extended.reduce_to("SUM", gradient, v)
        return strategy.extended.update(v, lambda var, g: var.assign_add(g), (total,))

    def replica():
        assert replica_context().merge_call(merge, (xp.full(2, RANK + 1.0),)) is v
        return v.value()

    for one in strategy.experimental_local_results(strategy.run(replica)):
        assert one.tolist() == [N * (N + 1) / 2] * 2


# ---- version 1


@pytest.mark.core
@pytest.mark.parametrize(
    "kind", [hs.compat.v1.MirroredStrategy, hs.compat.v1.CentralStorageStrategy]
)
def test_steps_of_an_iterator(place, kind):
    """The values of the last step are those of TensorFlow 2.15.1's MirroredStrategy on 2 replicas."""
    size = max(4, N)  # of a batch
    with place.make(kind) as strategy:
        with strategy.scope():
            total = hs.Variable(np.int64(0), aggregation="SUM")
        iterator = strategy.make_dataset_iterator(hs.data.Dataset.range(3 * size).batch(size))

        def step(batch):
            total.assign_add(batch.sum())
            return batch.sum()

        for passes in 1, 2:
            iterator.initialize()
            *_, result = (strategy.experimental_run(step, iterator) for _ in range(3))
            with pytest.raises(StopIteration):
                strategy.experimental_run(step, iterator)
            assert total.numpy() == passes * sum(range(3 * size))
            assert strategy.reduce("SUM", result) == sum(range(2 * size, 3 * size))
            each = strategy.experimental_local_results(result)
            assert N != 2 or [int(part) for part in each] == [17, 21]


# ---- TensorFlow's choices of how and with whom to communicate


def test_choices_of_communication_change_nothing(place):
    choice = object()
    with place.make(hs.MirroredStrategy, choice) as strategy:
        assert int(strategy.reduce("SUM", strategy.run(lambda: np.int64(1)), None)) == N
    with hs.MultiWorkerMirroredStrategy(choice, communication_options=choice) as strategy:
        assert strategy.num_replicas_in_sync == N
        value = strategy.run(lambda: np.int64(1))
        assert strategy.extended.reduce_to("SUM", value, "CPU:0", choice) == N


@pytest.mark.core
def test_the_hosts_of_a_strategy():
    """On one host; launch/test_several_hosts.py has more."""
    with hs.MultiWorkerMirroredStrategy() as strategy:
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
        assert strategy.reduce("SUM", strategy.run(lambda: RANK), None) == N * (N - 1) // 2
