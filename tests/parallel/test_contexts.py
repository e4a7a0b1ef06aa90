"""Scopes, replica contexts, and what a line can find out about where it runs."""

import concurrent.futures
import contextlib
import contextvars
import copy
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from strategies import STRATEGIES, strategies_for

import hpcstrat as hs

COMM = MPI.COMM_WORLD
N = COMM.size
RANK = COMM.rank
CPU = "/job:localhost/replica:0/task:0/device:CPU:0"


@pytest.fixture(params=strategies_for(N))
def strategy(request, place):
    with place.make(request.param) as made:
        yield made


def long_form(device):
    return f"/job:localhost/replica:0/task:0/device:{device}"


def replica_context() -> Any:
    return hs.get_replica_context()


def facts():
    return (
        hs.get_strategy(),
        hs.has_strategy(),
        hs.in_cross_replica_context(),
        hs.get_replica_context(),
    )


def test_the_index_of_a_replica(strategy):
    found = []
    strategy.run(lambda: found.append((hs.replica_id(), hs.get_replica_context().rank)))
    assert found == [(RANK, RANK)]
    with pytest.raises(RuntimeError, match=r"replica functions, .* hpcstrat.rank\(\) is the index"):
        hs.replica_id()
    with strategy.scope(), pytest.raises(RuntimeError, match="outside of replica functions"):
        hs.replica_id()
    assert hs.get_strategy().run(hs.replica_id) == 0


def test_outside_of_every_scope():
    default, has, cross, replica = facts()
    assert (has, cross) == (False, False)
    assert default is hs.get_strategy()
    assert default.num_replicas_in_sync == 1
    assert default.extended.worker_devices == (CPU,)
    assert replica is not None and replica.strategy is default
    assert (replica.replica_id_in_sync_group, replica.num_replicas_in_sync) == (0, 1)


OUTSIDE = {
    "all_reduce": lambda context: context.all_reduce("sum", float(RANK + 1)) == RANK + 1,
    "all_gather": lambda context: context.all_gather(np.full(2, RANK), 0).tolist() == [RANK] * 2,
    "broadcast": lambda context: context.broadcast(RANK + 1) == RANK + 1,
    "reduce_scatter": lambda context: (
        context.reduce_scatter("sum", np.full(2, RANK)).tolist() == [RANK] * 2
    ),
    "scan": lambda context: (context.scan("sum", 3), context.scan("sum", 3, True)) == (0, 3),
    "all_to_all": lambda context: context.all_to_all([np.full(2, RANK)])[0].tolist() == [RANK] * 2,
    "neighbor_exchange": lambda context: context.neighbor_exchange(1, 2) == (None, None),
    "merge_call": lambda context: context.merge_call(
        lambda strategy, x: (
            strategy is hs.get_strategy() and hs.in_cross_replica_context() and x == 3
        ),
        (3,),
    ),
}


def test_nothing_is_reduced_over_ranks_outside_of_every_scope():
    """With several ranks each would be alone, and take its own value for the sum."""
    default = hs.get_strategy()
    for name, call in OUTSIDE.items():
        for scope in (contextlib.nullcontext(), default.scope()):
            with scope:
                if N == 1:
                    assert call(replica_context()), name
                    continue
                with pytest.raises(
                    RuntimeError, match=f"^ReplicaContext.{name} .*outside of .*{N}"
                ):
                    call(replica_context())
        # One replica, as requested.
        assert default.run(lambda call=call: call(replica_context())), name


def test_the_scope_of_the_default_strategy_changes_nothing(strategy):
    default = hs.get_strategy()
    outside = facts()
    with default.scope() as entered:
        assert entered is default
        assert facts() == outside and isinstance(facts()[-1], hs.ReplicaContext)
        with default.scope():
            assert facts() == outside
        v = hs.Variable([1.0, 2.0])
        assert default.extended.variable_created_in_scope(v)
        with default.extended.colocate_vars_with(v):
            hs.Variable(1.0)
        assert default.reduce("SUM", default.run(lambda: RANK), axis=None) == RANK
        with strategy.scope():
            assert facts() == (strategy, True, True, None)
            assert strategy.extended.variable_created_in_scope(hs.Variable(1.0))
        assert facts() == outside
        assert strategy.reduce("SUM", strategy.run(lambda: RANK), axis=None) == N * (N - 1) // 2
    assert facts() == outside

    def merge(_):
        inside = facts()
        with default.scope():
            assert facts() == inside

    default.run(lambda: replica_context().merge_call(merge))
    assert facts() == outside


def test_the_default_strategy_is_not_entered_within_another(strategy):
    def enter():
        with hs.get_strategy().scope():
            pass

    default = hs.get_strategy()
    for inside in (strategy.scope, default.scope):
        with inside():
            enter()
    with (
        strategy.scope(),
        pytest.raises(RuntimeError, match=r"Strategy.scope .*scope of another strategy"),
    ):
        default.scope().__enter__()
    with pytest.raises(RuntimeError, match=r"Strategy.scope was called inside a replica"):
        default.run(enter)


class Unreadable(AttributeError):
    @property
    def name(self):  # pyright: ignore[reportIncompatibleVariableOverride]
        raise TypeError("not to be asked")


def test_a_scope_is_left_however_it_ends(strategy):
    """By an error whose attributes raise, after the outer scope, or in a copy of the context."""

    def generator():
        with strategy.scope():
            yield

    outside, late = facts(), generator()
    with strategy.scope() as entered, strategy.scope():  # the same strategy's again
        assert entered is strategy and facts() == (strategy, True, True, None)
    assert facts() == outside
    with pytest.raises(Unreadable), strategy.scope():
        next(late)
        raise Unreadable
    assert facts() == outside
    late.close()
    assert facts() == outside

    def leave():
        scope.__exit__(None, None, None)
        assert facts() == outside

    def enter():
        scope.__enter__()
        assert facts() == (strategy, True, True, None)
        contextvars.copy_context().run(leave)

    scope = strategy.scope()
    contextvars.copy_context().run(enter)
    assert facts() == outside


def test_in_a_replica(strategy, place):
    def replica():
        context = replica_context()
        assert context is not None
        assert facts() == (strategy, True, False, context)
        assert context.strategy is strategy
        assert (context.replica_id_in_sync_group, context.num_replicas_in_sync) == (RANK, N)
        assert context.devices == (long_form(place.devices[RANK]),)
        assert repr(context) == f"ReplicaContext(replica {RANK} of {N})"
        return context.replica_id_in_sync_group

    outside = facts()
    found = strategy.run(replica)
    assert facts() == outside
    assert strategy.experimental_local_results(found) == tuple(range(N))
    with strategy.scope():
        strategy.run(replica)
        assert facts() == (strategy, True, True, None)


def test_devices_in_any_form(place):
    expected = tuple(map(long_form, place.devices))
    for form in (str.upper, str.lower, "/{}".format, "/device:{}".format, long_form):
        devices = [form(device) for device in place.devices]
        with hs.CentralStorageStrategy(devices, devices[-1]) as strategy:
            assert strategy.extended.worker_devices == expected
            assert strategy.extended.parameter_devices == expected[-1:]
        with hs.MirroredStrategy(devices) as strategy:
            assert strategy.extended.worker_devices == expected
            assert strategy.extended.parameter_devices == expected[:1]
            assert strategy.num_replicas_in_sync == N and strategy.xp is place.xp


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["GPU"], indirect=True)
def test_the_stream_of_the_strategy_is_current_in_replicas_only(strategy, place):
    cuda = place.xp.cuda
    own, device = strategy.replica_group.stream.raw, cuda.Device()
    assert device.id == int(place.devices[RANK].removeprefix("GPU:"))

    def merge(strategy):
        strategy.run(check)

    def check():
        assert (cuda.get_current_stream(), cuda.Device()) == (own, device)

    def replica():
        check()
        replica_context().merge_call(merge)
        check()

    for outer in (cuda.Stream.null, cuda.Stream(non_blocking=True), own):
        with outer:
            strategy.run(replica)
            with pytest.raises(KeyError):
                strategy.run(lambda: {}["gone"])
            strategy.reduce("SUM", strategy.run(lambda: place.xp.ones(3)), None)
            assert cuda.get_current_stream() == outer
    assert cuda.get_current_stream() != own


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["GPU"], indirect=True)
def test_blocks_of_other_streams_in_a_replica(strategy, place):
    """CuPy takes such blocks itself, as in `get` of an array that is not contiguous."""
    cuda = place.xp.cuda
    own, used = strategy.replica_group.stream.raw, cuda.Stream(non_blocking=True)

    def replica():
        with cuda.Stream(non_blocking=True):
            replica_context().all_reduce("SUM", place.xp.ones(3))
        assert cuda.get_current_stream() == own
        place.xp.ones((3, 3))[:, 0].get()
        assert cuda.get_current_stream() == own

    strategy.run(replica)
    used.use()
    try:
        strategy.run(replica)
        assert cuda.get_current_stream() == used
    finally:
        cuda.Stream.null.use()


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["GPU"], indirect=True)
def test_another_gpu_is_left_current_in_a_replica(strategy, place):
    """What was current before is current again: the device, and the stream of each."""
    cuda = place.xp.cuda
    count, device = cuda.runtime.getDeviceCount(), cuda.Device()
    if count == 1:
        pytest.skip("there is one GPU")
    other = cuda.Device((device.id + 1) % count)

    def replica():
        total = replica_context().all_reduce("SUM", place.xp.ones(3))
        other.use()
        return [total, replica_context().all_reduce("SUM", place.xp.ones(3))]

    for before in (device, other):
        for outer in (cuda.Stream.null, cuda.Stream(non_blocking=True)):
            with device, outer:
                before.use()
                totals = strategy.run(replica)
                assert cuda.Device() == before
                assert [cuda.get_current_stream(one.id) for one in (device, other)] == [
                    outer,
                    cuda.Stream.null,
                ]
                for one in strategy.experimental_local_results(totals):
                    assert [total.tolist() for total in one] == [[N] * 3] * 2


# ---- merge_call


def test_merge_call(strategy):
    with strategy.scope():
        v = hs.Variable(1.0)

    def merge(given, value, nest, variable, *, keyword):
        assert given is strategy and variable is v
        assert facts() == (strategy, True, True, None)
        assert strategy.experimental_local_results(value) == tuple(range(N))
        total = strategy.reduce("SUM", {"v": value, "k": keyword}, axis=None)
        inner = strategy.run(lambda x: x * 2, args=(nest["a"][0],))  # run is allowed here
        return {"total": total, "own": value, "inner": inner, "plain": v, "none": None}

    def replica():
        context = replica_context()
        found = context.merge_call(merge, (RANK, {"a": [RANK + 10]}, v), {"keyword": 1.0})
        assert hs.get_replica_context() is context
        assert found == {
            "total": {"v": N * (N - 1) // 2, "k": N},
            "own": RANK,
            "inner": 2 * (RANK + 10),
            "plain": v,
            "none": None,
        }
        return found["own"]

    assert strategy.experimental_local_results(strategy.run(replica)) == tuple(range(N))


def test_an_exception_in_merge_call_leaves_the_context_right(strategy):
    def replica():
        context = replica_context()
        with pytest.raises(KeyError, match="gone"):
            context.merge_call(lambda strategy: {}["gone"])
        assert hs.get_replica_context() is context
        return context.all_reduce("SUM", 1)

    assert strategy.experimental_local_results(strategy.run(replica)) == (N,) * N


# ---- communication in a replica


def test_all_reduce_of_a_nest(strategy, place):
    xp = place.xp
    with strategy.scope():
        v = hs.Variable(np.arange(3.0))

    def replica():
        value = {
            "array": xp.full((2, 3), RANK, np.float32),
            "none": None,
            "number": RANK + 1,
            "list": [xp.arange(4) * RANK, (True,)],
        }
        reduce = replica_context().all_reduce
        return reduce(hs.ReduceOp.MAX, value), reduce("mean", value["array"]), reduce("SUM", v)

    for most, mean, total in strategy.experimental_local_results(strategy.run(replica)):
        assert all(isinstance(one, xp.ndarray) for one in (most["array"], most["list"][0], mean))
        assert most["array"].tolist() == [[N - 1] * 3] * 2 and most["array"].dtype == np.float32
        assert (most["none"], most["number"]) == (None, N)
        assert most["list"][0].tolist() == [0, N - 1, 2 * N - 2, 3 * N - 3]
        assert most["list"][1] == (True,) and total.tolist() == [0, N, 2 * N]
        assert mean.tolist() == [[(N - 1) / 2] * 3] * 2 and mean.dtype == np.float32


def test_all_gather_of_a_nest(strategy, place):
    xp = place.xp

    def replica():
        value = [xp.full((RANK + 1, 2), RANK), {"x": xp.full((1, RANK), 1.0)}]
        context = replica_context()
        return context.all_gather(value[0], axis=0), context.all_gather(value[1], axis=-1)

    for rows, columns in strategy.experimental_local_results(strategy.run(replica)):
        assert isinstance(rows, xp.ndarray) and isinstance(columns["x"], xp.ndarray)
        assert rows[:, 0].tolist() == [rank for rank in range(N) for _ in range(rank + 1)]
        assert columns["x"].tolist() == [[1.0] * (N * (N - 1) // 2)]


def test_random_generators_are_each_replicas_own(strategy, place):
    def replica(seed):
        numbers = replica_context().random_generator(seed).random(4)
        assert isinstance(numbers, place.xp.ndarray)
        return hs.asnumpy(numbers)

    first, again, other = (
        strategy.experimental_local_results(strategy.run(replica, (seed,))) for seed in (1, 1, 2)
    )
    assert np.array_equal(first, again)
    assert len({one.tobytes() for one in (*first, *other)}) == 2 * N


# ---- threads


def test_a_thread_starts_outside_and_may_take_a_context_along(strategy):
    with strategy.scope(), concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(hs.has_strategy).result() is False
        context = contextvars.copy_context()
        assert pool.submit(context.run, facts).result() == (strategy, True, True, None)


# ---- life


def test_a_strategy_is_closed_by_its_block_or_by_a_call(place):
    with place.make(hs.CentralStorageStrategy) as strategy:
        with strategy.scope():
            v = hs.Variable([1.0, 2.0])
        before = strategy.replica_group.communicator.calls.number
    assert strategy.replica_group.communicator.calls.number == before + 1  # a barrier
    with pytest.raises(KeyError):
        with strategy as again:
            assert again is strategy
            raise KeyError
    strategy.close()
    assert v.numpy().tolist() == [1, 2]


def test_a_deep_copy(strategy, place):
    other = copy.deepcopy(strategy)
    assert other is not strategy
    assert other.extended is not strategy.extended
    assert other.replica_group.communicator is strategy.replica_group.communicator
    with other.scope():
        assert hs.get_strategy() is other
        v = hs.Variable(place.xp.zeros(2), aggregation="MEAN")
    assert other.extended.variable_created_in_scope(v)
    assert not strategy.extended.variable_created_in_scope(v)
    other.run(lambda: v.assign(place.xp.full(2, 3.0)))
    assert v.numpy().tolist() == [3, 3]
    assert hs.get_strategy() is not other
    other.close()
    assert strategy.reduce("SUM", strategy.run(lambda: place.xp.ones(2)), None).tolist() == [N, N]
    found = copy.deepcopy({"strategy": strategy, "again": strategy})
    assert found["strategy"] is found["again"] is not strategy


def test_many_strategies_one_communicator(place):
    made = [place.make(kind) for kind in STRATEGIES for _ in range(4)]
    assert len({id(one.replica_group.communicator) for one in made}) == 1
    for one in made:
        assert one.reduce("SUM", one.run(lambda: place.xp.ones(2)), axis=None).tolist() == [N, N]
        one.close()


def test_the_repr_tells_the_replicas_and_where_they_are(place):
    short = ", ".join(dict.fromkeys(place.devices))
    replicas = f"{N} replica{'s' if N > 1 else ''}"
    with (
        place.make(hs.MirroredStrategy) as mirrored,
        place.make(hs.CentralStorageStrategy) as central,
    ):
        assert repr(mirrored) == f"MirroredStrategy({replicas} on {short})"
        where = "" if N == 1 else f", variables on {place.devices[0]}"
        assert repr(central) == f"CentralStorageStrategy({replicas} on {short}{where})"
    assert repr(mirrored) == f"MirroredStrategy({replicas} on {short}, closed)"
    assert repr(hs.get_strategy()) == "DefaultStrategy(1 replica on CPU:0)"
