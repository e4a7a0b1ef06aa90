"""Scopes, replica contexts, and what a line can find out about where it runs."""

import concurrent.futures
import contextlib
import contextvars
import copy
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from strategies import strategies_for

import hpcstrat as hs

COMM = MPI.COMM_WORLD
N = COMM.size
RANK = COMM.rank


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


def test_in_a_replica(strategy, place):
    def replica():
        context = replica_context()
        assert facts() == (strategy, True, False, context) and context.strategy is strategy
        assert (context.replica_id_in_sync_group, context.num_replicas_in_sync) == (RANK, N)
        assert hs.replica_id() == context.rank == RANK
        assert context.devices == (long_form(place.devices[RANK]),)
        assert repr(context) == f"ReplicaContext(replica {RANK} of {N})"

    with strategy.scope():
        v = hs.Variable(np.arange(3.0))
        strategy.run(replica)
        assert facts() == (strategy, True, True, None)
        with pytest.raises(RuntimeError, match="outside of replica functions"):
            hs.replica_id()
    with pytest.raises(RuntimeError, match=r"replica functions, .* hpcstrat.rank\(\) is the index"):
        hs.replica_id()
    assert hs.get_strategy().run(hs.replica_id) == 0
    total, most, yes = strategy.run(
        lambda: (
            [replica_context().all_reduce(*one) for one in (("SUM", v), ("MAX", RANK))]
            + [replica_context().all_reduce("MAX", True)]
        )
    )
    for one in strategy.experimental_local_results(total):
        assert type(one) is place.xp.ndarray and one.tolist() == [0, N, 2 * N]
    assert strategy.experimental_local_results(most) == (N - 1,) * N
    assert strategy.experimental_local_results(yes) == (True,) * N


def test_the_scope_of_the_default_strategy_changes_nothing(strategy):
    default, outside = hs.get_strategy(), facts()
    assert outside[1:3] == (False, False) and isinstance(outside[3], hs.ReplicaContext)
    with default.scope() as entered, default.scope():
        assert entered is default and facts() == outside
        v = hs.Variable([1.0, 2.0])
        assert default.extended.variable_created_in_scope(v)
        with default.extended.colocate_vars_with(v):
            hs.Variable(1.0)
        assert default.reduce("SUM", default.run(lambda: RANK), axis=None) == RANK
        with strategy.scope():
            assert facts() == (strategy, True, True, None)
        assert facts() == outside
        assert strategy.reduce("SUM", strategy.run(lambda: RANK), axis=None) == N * (N - 1) // 2

    def merge(_):
        inside = facts()
        with default.scope():
            assert facts() == inside

    default.run(lambda: replica_context().merge_call(merge))
    assert facts() == outside
    with (
        strategy.scope(),
        pytest.raises(RuntimeError, match=r"Strategy.scope .*scope of another strategy"),
    ):
        default.scope().__enter__()
    with pytest.raises(RuntimeError, match=r"Strategy.scope was called inside a replica"):
        default.run(lambda: default.scope().__enter__())


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


def test_a_thread_starts_outside_and_may_take_a_context_along(strategy):
    with strategy.scope(), concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(hs.has_strategy).result() is False
        context = contextvars.copy_context()
        assert pool.submit(context.run, facts).result() == (strategy, True, True, None)


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


OUTSIDE = {
    "all_reduce": "context.all_reduce('sum', RANK + 1.5) == RANK + 1.5",
    "all_gather": "context.all_gather(np.full(2, RANK), 0).tolist() == [RANK] * 2",
    "broadcast": "context.broadcast(RANK + 1) == RANK + 1",
    "reduce_scatter": "context.reduce_scatter('sum', np.full(2, RANK)).tolist() == [RANK] * 2",
    "scan": "(context.scan('sum', 3), context.scan('sum', 3, True)) == (0, 3)",
    "all_to_all": "context.all_to_all([np.full(2, RANK)])[0].tolist() == [RANK] * 2",
    "neighbor_exchange": "context.neighbor_exchange(1, 2) == (None, None)",
    "merge_call": "context.merge_call(lambda s, x: s is default and x == 3, (3,))",
}


def test_nothing_is_reduced_over_ranks_outside_of_every_scope():
    """With several ranks each would be alone, and take its own value for the sum."""
    default = hs.get_strategy()

    def call(program):
        names = {"context": replica_context(), "default": default, "np": np, "RANK": RANK}
        return eval(program, names)

    for name, program in OUTSIDE.items():
        for scope in (contextlib.nullcontext(), default.scope()):
            with scope:
                if N == 1:
                    assert call(program), name
                    continue
                facts = f"^ReplicaContext.{name} .*outside of .*{N}"
                with pytest.raises(RuntimeError, match=facts):
                    call(program)
        assert default.run(call, (program,)), name  # one replica, as requested


def test_devices_in_any_form(place):
    expected = tuple(map(long_form, place.devices))
    for form in (str.upper, str.lower, "/{}".format, "/device:{}".format, long_form):
        devices = [form(device) for device in place.devices]
        with hs.MirroredStrategy(devices) as mirrored:
            assert mirrored.extended.worker_devices == expected
            assert mirrored.extended.parameter_devices == expected[:1]
        with hs.CentralStorageStrategy(devices, devices[-1]) as central:
            assert central.extended.parameter_devices == expected[-1:]


# ---- on GPUs


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["GPU"], indirect=True)
def test_the_stream_of_the_strategy_is_current_in_replicas_only(strategy, place):
    """CuPy takes blocks of other streams itself, as in `get` of what is not contiguous."""
    cuda, ones = place.xp.cuda, place.xp.ones((3, 3))
    own, device = strategy.replica_group.stream.raw, cuda.Device()
    assert device.id == int(place.devices[RANK].removeprefix("GPU:"))

    def check():
        assert (cuda.get_current_stream(), cuda.Device()) == (own, device)

    def replica():
        check()
        replica_context().merge_call(lambda strategy: strategy.run(check))
        check()
        with cuda.Stream(non_blocking=True):
            replica_context().all_reduce("SUM", ones)
        check()
        ones[:, 0].get()
        check()

    used = cuda.Stream(non_blocking=True)
    for outer in (cuda.Stream.null, cuda.Stream(non_blocking=True), own):
        with outer:
            strategy.run(replica)
            with pytest.raises(KeyError):
                strategy.run(lambda: {}["gone"])
            strategy.reduce("SUM", strategy.run(lambda: place.xp.ones(3)), None)
            assert cuda.get_current_stream() == outer
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
    cuda, null = place.xp.cuda, place.xp.cuda.Stream.null
    count, device = cuda.runtime.getDeviceCount(), cuda.Device()
    if count == 1:
        pytest.skip("there is one GPU")
    other = cuda.Device((device.id + 1) % count)

    def replica():
        total = replica_context().all_reduce("SUM", place.xp.ones(3))
        other.use()
        return [total, replica_context().all_reduce("SUM", place.xp.ones(3))]

    for before in (device, other):
        for outer in (null, cuda.Stream(non_blocking=True)):
            with device, outer:
                before.use()
                totals = strategy.run(replica)
                assert cuda.Device() == before
                streams = [cuda.get_current_stream(one.id) for one in (device, other)]
                assert streams == [outer, null]
                for one in strategy.experimental_local_results(totals):
                    assert [total.tolist() for total in one] == [[N] * 3] * 2


def test_strategies_share_a_communicator(strategy, place):
    """Each closes by itself; a deep copy is another strategy."""
    other = copy.deepcopy(strategy)
    assert other is not strategy and other.extended is not strategy.extended
    with other.scope():
        assert hs.get_strategy() is other
        v = hs.Variable(place.xp.zeros(2), aggregation="MEAN")
    assert other.extended.variable_created_in_scope(v)
    assert not strategy.extended.variable_created_in_scope(v)
    other.run(lambda: v.assign(place.xp.full(2, 3.0)))
    assert v.numpy().tolist() == [3, 3]
    with place.make(type(strategy)) as closed:
        before = strategy.replica_group.communicator.calls.number
    assert strategy.replica_group.communicator.calls.number == before + 1  # a barrier
    with pytest.raises(KeyError), closed as again:
        raise KeyError(again is closed)
    made = [other, *(place.make(type(strategy)) for _ in range(3)), strategy]
    assert len({id(one.replica_group.communicator) for one in made}) == 1
    for one in made:
        assert one.reduce("SUM", one.run(lambda: place.xp.ones(2)), None).tolist() == [N, N]
        one.close()
    found = copy.deepcopy({"strategy": strategy, "again": strategy})
    assert found["strategy"] is found["again"] is not strategy


def test_the_repr_tells_the_replicas_and_where_they_are(place):
    replicas = f"{N} replica{'s' if N > 1 else ''} on {', '.join(dict.fromkeys(place.devices))}"
    where = "" if N == 1 else f", variables on {place.devices[0]}"
    with place.make(hs.MirroredStrategy) as mirrored:
        assert repr(mirrored) == f"MirroredStrategy({replicas})"
    with place.make(hs.CentralStorageStrategy) as central:
        assert repr(central) == f"CentralStorageStrategy({replicas}{where})"
    assert repr(mirrored) == f"MirroredStrategy({replicas}, closed)"
    assert repr(hs.get_strategy()) == "DefaultStrategy(1 replica on CPU:0)"
