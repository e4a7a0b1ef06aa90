"""What only communicators of GPUs have."""

import types
from typing import Any

import numpy as np
import pytest
from internals import (
    NcclCommunicator,
    SharedMemoryCommunicator,
    SoloDevice,
    all_reduce_gradients,
    call_named,
    failure,
    ranks_in_words,
    worlds,
)
from strategies import STRATEGIES
from transports import (
    COMM,
    DEVICE,
    MAX,
    MEAN,
    MIN,
    SUM,
    check,
    close_devices,
    has,
    kind,
    on_gpus,
    parametrize,
    transport,
    values,
    works,
)

import hpcstrat as hs

pytestmark = pytest.mark.core

N = COMM.size
RANK = COMM.rank
several = pytest.mark.mpi(min_size=2)  # NCCL does nothing for one rank
on_gpu = pytest.mark.parametrize("place", ["GPU"], indirect=True)


def pytest_generate_tests(metafunc):
    parametrize(metafunc, {"communicator": DEVICE})


@pytest.fixture
def communicator(request, monkeypatch, place):
    return transport(request.param, monkeypatch, place)


@pytest.fixture
def connected(monkeypatch, place):
    """NCCL's."""
    return transport("NCCL", monkeypatch, place)


@pytest.fixture(scope="module", autouse=True)
def _closed_in_the_end():
    yield
    close_devices()


@on_gpu
@pytest.mark.parametrize("made", STRATEGIES)
def test_strategies_take_nccl_where_every_replica_is_on_a_gpu(place, made):
    with place.make(made) as strategy, place.make(made) as other:
        assert type(strategy.replica_group.communicator) is (
            NcclCommunicator if N > 1 else SoloDevice
        )
        assert other.replica_group.communicator is strategy.replica_group.communicator


@on_gpu
def test_a_strategy_that_is_refused_leaves_no_gpu_connected(place):
    with place.make(hs.MirroredStrategy) as strategy:
        communicator: Any = strategy.replica_group.communicator
        users = communicator.users
        with pytest.raises(ValueError, match="no rank computes there"):
            hs.CentralStorageStrategy(place.devices, "GPU:99")
        assert communicator.users == users


# ---- arrays of the GPU and of the host


def test_arrays_of_both_kinds_in_one_call(communicator, place):
    rank, xp = communicator.rank, place.xp
    parts = [
        [values((3, 5), np.dtype(t), r) for t in ("f4", "f8", "i4", "f4")]
        for r in range(communicator.size)
    ]
    modules = (xp, np, xp, np)
    mine = [module.asarray(part) for module, part in zip(modules, parts[rank], strict=True)]
    for op, fn in [(SUM, np.sum), (MIN, np.min), (MAX, np.max)]:
        found = communicator.all_reduce(mine, op)
        for one, module, *everyones in zip(found, modules, *parts, strict=True):
            check(one, fn(everyones, axis=0).astype(everyones[0].dtype), module)
    for one, module, *everyones in zip(
        communicator.all_gather(mine, 1), modules, *parts, strict=True
    ):
        check(one, np.concatenate(everyones, 1), module)
    (mean, total) = communicator.all_reduce([xp.array([rank]), np.array([rank])], MEAN)
    for one, module in [(mean, xp), (total, np)]:
        assert isinstance(one, module.ndarray) and one.tolist() == [(communicator.size - 1) / 2]


def test_arrays_of_both_kinds_are_sent(communicator, place):
    """Each rank sends to itself and those after it: the last ones expect most, and send least."""
    rank, size, xp = communicator.rank, communicator.size, place.xp
    modules = {"f4": xp, "i2": np, "f8": xp}
    sent = [
        (to, module.asarray(values((to, rank + 1), np.dtype(kind), rank)))
        for to in range(rank, size)
        for kind, module in modules.items()
    ]
    expected = [
        (source, module.zeros(0, kind))
        for source in range(rank + 1)
        for kind, module in modules.items()
    ]
    found = communicator.all_to_all(sent, expected)
    for (source, like), array in zip(expected, found, strict=True):
        module = xp if isinstance(like, xp.ndarray) else np
        check(array, values((rank, source + 1), like.dtype, source), module)
    # Of one kind only, which a rank that sends nothing cannot know.
    for module in (xp, np):
        is_last = rank == size - 1
        one = [] if is_last else [(size - 1, module.full(3, rank))]
        wanted = [(source, module.zeros(0, int)) for source in range(size - 1)] * is_last
        for (source, _), array in zip(wanted, communicator.all_to_all(one, wanted), strict=True):
            check(array, np.full(3, source), module)


@several
@on_gpu
@pytest.mark.parametrize(
    "step, call",
    [
        ("prepare_reduce", lambda one, x: one.all_reduce([x], SUM)),
        ("_prepare_gather", lambda one, x: one.all_gather([x], 0)),
        ("prepare_broadcast", lambda one, x: one.broadcast([x], 0)),
        ("_prepare_messages", lambda one, x: one.all_to_all([(RANK, x)], [(RANK, x)])),
    ],
    ids=["reduction", "gathering", "broadcast", "sending"],
)
def test_a_signal_before_nccl_starts_is_not_waited_for(connected, monkeypatch, place, step, call):
    """The others may be in NCCL: only this rank can end the job, at its next call."""

    def interrupt(*_):
        raise KeyboardInterrupt

    array = place.xp.ones(3)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(type(connected), step, interrupt)
        call(connected, array)
    assert connected.calls.barred is not None and connected.calls.barred.error is not None
    connected.calls.barred = None  # here it came to all
    (found,) = call(connected, array)
    assert float(found.sum()) in (3, 3 * N)


@pytest.mark.parametrize("op", [SUM, MEAN])
def test_gradients_of_modules_are_reduced_in_place(communicator, place, op):
    rank, xp = communicator.rank, place.xp
    kinds = [((3, 5), "f4"), ((2,), "f8"), ((), "f4"), ((0, 4), "f2"), ((7,), "f4")]
    parts = [
        [values(shape, np.dtype(kind), r) for shape, kind in kinds]
        for r in range(communicator.size)
    ]
    modules = (xp, xp, xp, xp, np)
    mine = [module.asarray(part) for module, part in zip(modules, parts[rank], strict=True)]
    with communicator.stream.current():
        totals = all_reduce_gradients(communicator, mine, op, ["names"])
    for total, own, module, *everyones in zip(totals, mine, modules, *parts, strict=True):
        expected = np.sum(everyones, axis=0, dtype=total.dtype)
        check(total, expected / N if op is MEAN else expected, module)
        assert (total is own) == (module is not np)


@pytest.fixture(autouse=True)
def _in_a_call():
    with call_named("some_call"):
        yield


PLACES = {
    "an array": (lambda here: [here], lambda here: [np.ones(3)]),
    "one of two": (lambda here: [here, here], lambda here: [here, np.ones(3)]),
    "the other way": (lambda here: [np.ones(3), here], lambda here: [here, np.ones(3)]),
}


@several
@on_gpu
@pytest.mark.parametrize("case", PLACES)
def test_ranks_that_disagree_on_what_is_on_the_gpu(connected, place, case):
    here = place.xp.ones(3)
    for odd in range(N):
        mine = PLACES[case][connected.rank == odd](here)
        for call in (
            lambda mine=mine: connected.all_reduce(mine, SUM),
            lambda mine=mine: connected.all_gather(mine, 0),
        ):
            with pytest.raises(hs.ReplicaMismatchError, match="must make the same call") as caught:
                call()
            for ranks in ([odd], [rank for rank in range(N) if rank != odd]):
                indices = [
                    i for i, one in enumerate(PLACES[case][ranks == [odd]](here)) if one is here
                ]
                (line,) = [
                    one
                    for one in str(caught.value).splitlines()
                    if f"{ranks_in_words(ranks)}: some_call(" in one
                ]
                assert f"on the GPU {indices}" in line if indices else "on the GPU" not in line
        works(connected, place)


@several
@on_gpu
def test_memory_that_one_rank_alone_lacks(connected, place, monkeypatch):
    """The others must not wait for it in NCCL."""

    def full(*args):
        raise MemoryError("no room on the GPU")

    here = place.xp.ones(3)
    for lacking in range(N):
        for call in (
            lambda: connected.all_reduce([here, here], SUM),
            lambda: connected.all_gather([here], 0),
            lambda: connected.all_to_all([(RANK, here)], [(RANK, here)]),
        ):
            with (
                monkeypatch.context() as patch,
                pytest.raises(MemoryError, match="no room on the GPU") as caught,
            ):
                if connected.rank == lacking:
                    patch.setattr(place.xp, "empty", full)
                call()
            assert connected.rank == lacking or f"(found by rank {lacking})" in str(caught.value)
        works(connected, place)


@several
@on_gpu
@pytest.mark.parametrize("name", ["float32", "float16", "int16"])
@pytest.mark.parametrize("op", [SUM, MEAN])
def test_memory_is_taken_before_the_ranks_agree(connected, place, monkeypatch, name, op):
    """What NCCL does not reduce, it reduces in another dtype: that takes memory too."""
    events = []

    def allocate(size):
        events.append("memory")
        return place.xp.get_default_memory_pool().malloc(size)

    exchange, reduce = connected.exchange, connected.reduce_flat
    monkeypatch.setattr(
        connected, "exchange", lambda *args: (events.append("agreed"), exchange(*args))[1]
    )
    monkeypatch.setattr(
        connected,
        "reduce_flat",
        lambda *args: (reduce(*args), events.append("reduced"))[0],
    )
    arrays = [place.xp.full(5, 2, name), place.xp.full((2, 3), 2, name)]
    for mine in (arrays, arrays[:1]):
        events.clear()
        with place.xp.cuda.using_allocator(allocate):
            results = connected.all_reduce(mine, op)
        assert events[0] == "memory" and events.count("reduced") == 1
        assert events[events.index("agreed") : events.index("reduced")] == ["agreed"]
        for result in results:
            assert set(result.reshape(-1).tolist()) == {2 if op is MEAN else 2 * N}


@several
@on_gpu
def test_an_error_in_a_broadcast_names_the_users_call(connected, place, monkeypatch):
    named = []
    launch = connected.launch

    def note(what, moves):
        named.append(what)
        launch(what, moves)

    monkeypatch.setattr(connected, "launch", note)
    check(connected.broadcast([place.xp.full(3, RANK)], N - 1)[0], np.full(3, N - 1), place.xp)
    assert named == ["some_call"]


# ---- the caller's stream


def test_calls_are_ordered_with_whatever_stream_is_current(communicator, place):
    """The processor runs ahead: work that is not waited for returns old numbers."""
    xp, n = place.xp, communicator.size
    for stream in (xp.cuda.Stream.null, xp.cuda.Stream(non_blocking=True), communicator.stream.raw):
        with stream:
            array = xp.zeros(100_000)
            for _ in range(10):
                array += communicator.rank + 1
                (array,) = communicator.all_reduce([array], MEAN)
                array = array * 2 - array
            whole = communicator.all_gather([array[:1000] + communicator.rank], 0)[0] + 1
            assert array.tolist() == [10 * (n + 1) / 2] * 100_000
            assert whole.tolist() == [
                10 * (n + 1) / 2 + 1 + rank for rank in range(n) for _ in range(1000)
            ]


# ---- flat arrays, in place, as storage moves them


@pytest.mark.parametrize(
    "name", ["float32", "float64", "float16", "bfloat16", "int32", "uint8", "complex64"]
)
@pytest.mark.parametrize("size", [0, 1, 70_001])
def test_flat_arrays_are_reduced_in_place(communicator, place, name, size):
    xp, n = place.xp, communicator.size
    if not has(xp, kind(name)):
        pytest.skip(f"CuPy {xp.__version__} does not compute with {name}")
    numbers = (np.arange(size) % 5 * n).astype(kind(name))
    total = numbers * (n * (n + 1) // 2)
    means = [] if numbers.dtype.kind in "iuc" else [(MEAN, total / kind(name).type(n))]
    for op, expected in [(SUM, total), *means]:
        for root in (None, *range(n)):
            with communicator.stream.current():
                mine = xp.asarray(numbers * (communicator.rank + 1))
                communicator.reduce_flat("a sum", mine, mine, op, root)
            if root in (None, communicator.rank):
                check(mine, expected, xp)


@pytest.mark.parametrize("op", [SUM, MEAN])
@pytest.mark.parametrize("name", ["float32", "float16"])
def test_arrays_are_reduced_from_where_they_are(communicator, place, name, op):
    n = communicator.size
    numbers = (np.arange(35) % 5 * n).astype(name).reshape(5, 7)
    total = (numbers * (n * (n + 1) // 2)).reshape(-1)
    expected = total if op is SUM else total / kind(name).type(n)
    for root in (None, *range(n)):
        with communicator.stream.current():
            mine = place.xp.asarray(numbers * (communicator.rank + 1))
            out = place.xp.full(35, -1, name)
            communicator.reduce_flat("a sum", mine, out, op, root)
        check(mine, numbers * (communicator.rank + 1), place.xp)
        if root in (None, communicator.rank):
            check(out, expected.astype(name), place.xp)


@pytest.mark.parametrize("name", ["float32", "bool", "int16", "complex128"])
@pytest.mark.parametrize("size", [0, 1, 70_001])
def test_flat_arrays_are_broadcast_in_place(communicator, place, name, size):
    for root in range(communicator.size):
        parts = [values((size,), np.dtype(name), rank) for rank in range(communicator.size)]
        with communicator.stream.current():
            mine = place.xp.asarray(parts[communicator.rank])
            communicator.broadcast_flat(mine, root)
        check(mine, parts[root], place.xp)


# ---- life and death of NCCL


@several
@on_gpu
def test_a_closed_communicator(place):
    comm: Any = worlds.start().comm
    communicator = on_gpus("NCCL", SharedMemoryCommunicator(comm.Dup()), place)
    works(communicator, place)
    for _ in range(2):
        communicator.close()
    for call in (
        lambda: communicator.all_reduce([place.xp.ones(3)], SUM),
        lambda: communicator.all_gather([place.xp.ones(3)], 0),
        lambda: communicator.all_to_all([(RANK, place.xp.ones(3))], [(RANK, place.xp.ones(3))]),
    ):
        with pytest.raises(
            RuntimeError,
            match="some_call: the strategy's NCCL communicator is closed; make another",
        ):
            call()
    assert communicator.all_gather_obj(RANK) == list(range(N))  # it does not need NCCL


# CuPy has no name for NCCL's timeout, and raises KeyError(8).
@several
@on_gpu
@pytest.mark.parametrize("result", [2, 8])
def test_an_error_of_nccl_says_what_to_do_and_ends_the_job(place, monkeypatch, result):
    """The ranks have agreed on the call, so another rank may wait in it for good."""
    comm: Any = worlds.start().comm
    communicator = on_gpus("NCCL", SharedMemoryCommunicator(comm.Dup()), place)
    works(communicator, place)
    real = communicator._comm

    def fail(*args):
        raise communicator._nccl.NcclError(result)

    class Ended(BaseException):
        """In place of the end."""

    def end_job(text):
        raise Ended(text)

    monkeypatch.setattr(failure, "end_job", end_job)
    communicator._comm = types.SimpleNamespace(allReduce=fail, allGather=fail, send=fail, recv=fail)
    text = rf"the job ends: NCCL failed on rank {RANK} of {N}: .*\(NCCL \d.*, CuPy .*, driver \d+\)\. Start with"
    for call in (
        lambda: communicator.all_reduce([place.xp.ones(3)], SUM),
        lambda: communicator.all_gather([place.xp.ones(RANK)], 0),
    ):
        with pytest.raises(Ended, match=text):
            call()
        assert not communicator.calls.waiting.depth
        communicator.calls.barred = None
    communicator._comm = real
    works(communicator, place)
    communicator.close()
