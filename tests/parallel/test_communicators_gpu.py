"""What only communicators of GPUs have, and the start of NCCL, which all ranks make or refuse."""

import re
import types
from typing import Any

import numpy as np
import pytest
import transports
from internals import (
    all_reduce_gradients,
    call_named,
    connect,
    failure,
    nccl_start,
    ranks_in_words,
    worlds,
)
from strategies import STRATEGIES
from transports import COMM, MAX, MEAN, MIN, SUM, check, has, kind, values, works

import hpcstrat as hs

N = COMM.size
RANK = COMM.rank
several = pytest.mark.mpi(min_size=2)  # NCCL does nothing for one rank
on_gpu = pytest.mark.parametrize(
    "place", [pytest.param("GPU", marks=pytest.mark.gpu)], indirect=True
)
communicator = transports.communicator


def pytest_generate_tests(metafunc):
    transports.parametrize(metafunc, {"communicator": transports.DEVICE})


@pytest.fixture(autouse=True)
def _in_a_call():
    with call_named("some_call"):
        yield


@on_gpu
@pytest.mark.parametrize("made", STRATEGIES)
def test_strategies_take_nccl_where_every_replica_is_on_a_gpu(place, made):
    """And one that is refused leaves no GPU connected."""
    with place.make(made) as strategy, place.make(made) as other:
        found: Any = strategy.replica_group.communicator
        assert found is not connect() and found.control is connect()
        assert other.replica_group.communicator is found
        users = found.users
        with pytest.raises(ValueError, match="no rank computes there"):
            hs.CentralStorageStrategy(place.devices, "GPU:99")
        assert found.users == users


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


CALLS = {
    "prepare_reduce": lambda one, x: one.all_reduce([x], SUM),
    "_prepare_gather": lambda one, x: one.all_gather([x], 0),
    "prepare_broadcast": lambda one, x: one.broadcast([x], 0),
    "_prepare_messages": lambda one, x: one.all_to_all([(RANK, x)], [(RANK, x)]),
}
"""The calls, and which step of each comes before NCCL."""


@several
def test_a_signal_before_nccl_starts_is_not_waited_for(communicator, monkeypatch, place):
    """The others may be in NCCL: only this rank can end the job, at its next call."""

    def interrupt(*_):
        raise KeyboardInterrupt

    for step, call in CALLS.items():
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(type(communicator), step, interrupt)
            call(communicator, place.xp.ones(3))
        assert communicator.calls.barred is not None and communicator.calls.barred.error is not None
        communicator.calls.barred = None  # here it came to all
        works(communicator, place)


def test_gradients_of_modules_are_reduced_in_place(communicator, place):
    xp = place.xp
    kinds = [((3, 5), "f4"), ((2,), "f8"), ((), "f4"), ((0, 4), "f2"), ((7,), "f4")]
    parts = [[values(shape, np.dtype(kind), r) for shape, kind in kinds] for r in range(N)]
    modules = (xp, xp, xp, xp, np)
    for op in (SUM, MEAN):
        mine = [module.asarray(part) for module, part in zip(modules, parts[RANK], strict=True)]
        with communicator.stream.current():
            totals = all_reduce_gradients(communicator, mine, op, ["names"])
        for total, own, module, *everyones in zip(totals, mine, modules, *parts, strict=True):
            expected = np.sum(everyones, axis=0, dtype=total.dtype)
            check(total, expected / N if op is MEAN else expected, module)
            assert (total is own) == (module is not np)


@several
def test_ranks_that_disagree_on_what_is_on_the_gpu(communicator, place):
    here, there = place.xp.ones(3), np.ones(3)
    # What most ranks pass, and what one passes.
    for case in [([here], [there]), ([here, here], [here, there]), ([there, here], [here, there])]:
        for odd in range(N):
            for call in (communicator.all_reduce, communicator.all_gather):
                with pytest.raises(hs.ReplicaMismatchError, match="the same call") as caught:
                    call(case[RANK == odd], SUM if call == communicator.all_reduce else 0)
                for ranks in ([odd], [rank for rank in range(N) if rank != odd]):
                    indices = [i for i, one in enumerate(case[ranks == [odd]]) if one is here]
                    start = f"{ranks_in_words(ranks)}: some_call("
                    (line,) = [one for one in str(caught.value).splitlines() if start in one]
                    said = re.findall(r"on the GPU (\[.*?\])", line)
                    assert said == ([str(indices)] if indices else [])
    works(communicator, place)


@several
def test_memory_that_one_rank_alone_lacks(communicator, place):
    """The others must not wait for it in NCCL; also where it reduces in another dtype."""

    def full(size):
        raise MemoryError("no room on the GPU")

    calls = [(call, place.xp.ones(3)) for call in CALLS.values()]
    calls += [
        (lambda one, x, op=op: one.all_reduce([x, x], op), place.xp.ones(3, name))
        for name, op in [("float32", MEAN), ("float16", SUM), ("float16", MEAN), ("int16", SUM)]
    ]
    for lacking in range(N):
        for call, here in calls:
            allocate = full if lacking == RANK else place.xp.get_default_memory_pool().malloc
            with (
                place.xp.cuda.using_allocator(allocate),
                pytest.raises(MemoryError, match="no room on the GPU") as caught,
            ):
                call(communicator, here)
            assert lacking == RANK or f"(found by rank {lacking})" in str(caught.value)
    works(communicator, place)


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


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "int32", "uint8", "complex64"])
def test_flat_arrays_as_storage_moves_them(communicator, place, name):
    """They are reduced in place, or from where they are; for all ranks, or for one."""
    xp, n, dtype = place.xp, communicator.size, kind(name)
    if not has(xp, dtype):
        pytest.skip(f"CuPy {xp.__version__} does not compute with {name}")
    for size in (0, 1, 70_001):
        numbers = (np.arange(size) % 5 * n).astype(dtype)
        total = numbers * (n * (n + 1) // 2)
        means = [] if dtype.kind in "iuc" else [(MEAN, total / dtype.type(n))]
        for op, expected in [(SUM, total), *means]:
            for root, is_in_place in [(None, True), (None, False), (0, False), (n - 1, True)]:
                with communicator.stream.current():
                    mine = xp.asarray(numbers * (communicator.rank + 1))
                    out = mine if is_in_place else xp.full(size, 1, dtype)
                    communicator.reduce_flat("a sum", mine, out, op, root)
                if root in (None, communicator.rank):
                    check(out, expected.astype(dtype), xp)
                if not is_in_place:
                    check(mine, numbers * (communicator.rank + 1), xp)
        with communicator.stream.current():
            mine = xp.asarray(numbers + RANK)
            communicator.broadcast_flat(mine, n - 1)
        check(mine, numbers + dtype.type(n - 1), xp)


# ---- life and death of NCCL


@pytest.fixture
def control():
    comm: Any = worlds.start().comm
    transport: Any = type(connect())
    return connect() if N == 1 else transport(comm.Dup())


@pytest.fixture
def stream(mirrored):
    """A new one of this rank's GPU."""
    used: Any = mirrored.replica_group.stream
    return type(used)(used.ordinal)


@pytest.fixture
def alone(mirrored, control, stream) -> Any:
    """NCCL's communicator, of which no other test knows."""
    made: Any = type(mirrored.replica_group.communicator)(control, stream)
    yield made
    made.close()


@several
@on_gpu
def test_a_closed_communicator(place, alone):
    works(alone, place)
    for _ in range(2):
        alone.close()
    for call in CALLS.values():
        with pytest.raises(RuntimeError, match="some_call: .* NCCL communicator is closed; make"):
            call(alone, place.xp.ones(3))
    assert alone.all_gather_obj(RANK) == list(range(N))  # it does not need NCCL


# CuPy has no name for NCCL's timeout, and raises KeyError(8).
@several
@on_gpu
@pytest.mark.parametrize("result", [2, 8])
def test_an_error_of_nccl_says_what_to_do_and_ends_the_job(place, alone, monkeypatch, result):
    """The ranks have agreed on the call, so another rank may wait in it for good."""
    works(alone, place)

    def fail(*args):
        raise alone._nccl.NcclError(result)

    class Ended(BaseException):
        """In place of the end."""

    def end_job(text):
        raise Ended(text)

    names = ("allReduce", "allGather", "broadcast", "send", "recv")
    text = rf"the job ends: NCCL failed on rank {RANK} of {N}: .*\(NCCL \d.*, CuPy .*, driver \d+\)\. Start with"
    with monkeypatch.context() as patched:
        patched.setattr(failure, "end_job", end_job)
        patched.setattr(alone, "_comm", types.SimpleNamespace(**dict.fromkeys(names, fail)))
        for call in CALLS.values():
            with pytest.raises(Ended, match=text):
                call(alone, place.xp.ones(3))
            assert not alone.calls.waiting.depth
            alone.calls.barred = None
    works(alone, place)


# ---- the start of NCCL


@pytest.fixture
def nccl(monkeypatch):
    """A function that makes a module the loaded one."""

    def use(version):
        module = types.SimpleNamespace(
            available=version > 0,
            get_version=lambda: version,
            get_unique_id=lambda: (1, 2),
        )
        monkeypatch.setattr(nccl_start, "load_nccl", lambda: module)

    return use


# The version, whether ranks share a GPU, whether that is enabled, and why it cannot be used.
VERSIONS = [
    (23007, True, "1", ""),
    (21000, False, "", ""),
    (0, False, "", "CuPy finds no NCCL"),
    (20906, False, "", "NCCL is 2.9.6, and hpcstrat needs 2.10.0 or later"),
    (22907, True, "1", "several ranks share a GPU, which takes NCCL 2.30.0 .* this is 2.29.7"),
    (23007, True, "", "several ranks share a GPU, .* only with NCCL_MULTI_RANK_GPU_ENABLE=1"),
]


@on_gpu
def test_why_it_cannot_be_used(place, nccl, monkeypatch):
    for version, is_shared, enabled, reason in VERSIONS:
        nccl(version)
        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", enabled)
        assert re.fullmatch(f"{reason}.*" if reason else "", nccl_start.why_not(is_shared), re.S)


@several
@on_gpu
def test_one_rank_that_cannot_use_it_or_has_another_version(nccl, control, stream, monkeypatch):
    nccl(23007 if RANK else 22803)
    message = r"different versions of NCCL: 2\.28\.3 on rank 0; 2\.30\.7 on ranks? 1"
    with pytest.raises(RuntimeError, match=message):
        nccl_start.start(control, stream)
    problem = "" if RANK else "it is too old"
    monkeypatch.setattr(nccl_start, "why_not", lambda shared: problem)
    message = "^some_call: .*:\n  rank 0: it is too old\nOr start one"
    with pytest.raises(RuntimeError, match=message):
        nccl_start.require_nccl(control, shared=False)
    control.barrier()


@several
@on_gpu
@pytest.mark.parametrize("at_start", ["0", "1"])
def test_later_calls_find_the_ranks_connected(
    place, mirrored, control, stream, monkeypatch, at_start
):
    """Except for messages to non-neighbors: the host waits in no call without a time limit."""
    xp = place.xp
    if not hasattr(xp, "_faults"):
        pytest.skip("only simulated GPUs tell how often the host waits in NCCL")
    monkeypatch.setenv("NCCL_RUNTIME_CONNECT", at_start)
    communicator: Any = type(mirrored.replica_group.communicator)(control, stream)
    before = xp._faults.counted["nccl connects"]
    communicator.all_reduce([xp.ones(3)], SUM)
    communicator.all_gather([xp.ones(3)], 0)
    with stream.current():
        flat = xp.zeros(4 * N)
        communicator.reduce_flat("a sum", flat, flat, SUM, 0)
        communicator.broadcast_flat(flat, N - 1)
    assert xp._faults.counted["nccl connects"] == before
    communicator.all_gather([xp.ones(RANK)], 0)  # of several sizes, so by messages
    assert (xp._faults.counted["nccl connects"] > before) is (N > 2)
    communicator.close()
