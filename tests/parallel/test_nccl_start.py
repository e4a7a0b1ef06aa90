"""NCCL that is missing, old, of two versions, or does not connect: all ranks raise, and say why."""

import threading
import types

import pytest
from internals import (
    HierarchicalCommunicator,
    NcclCommunicator,
    call_named,
    gpu,
    nccl_start,
    ranks_in_words,
)
from mpi4py import MPI

from hpcstrat import ReduceOp

COMM = MPI.COMM_WORLD
RANK, N = COMM.rank, COMM.size

pytestmark = pytest.mark.parametrize("place", ["GPU"], indirect=True)
several = pytest.mark.mpi(min_size=2)


class Connected:
    """NCCL's communicator as those who start it see it."""

    def __init__(self, failing=""):
        self.is_aborted = False
        self.calls = []
        self._failing = failing

    def abort(self):
        self.is_aborted = True

    def __getattr__(self, name):
        return lambda *arguments: 1 / 0 if name == self._failing else self.calls.append(name)


@pytest.fixture
def nccl(monkeypatch):
    """A function that makes a module the loaded one."""

    def use(version=23007, available=True, connect=lambda: Connected()):
        module = types.SimpleNamespace(
            available=available,
            get_version=lambda: version,
            get_unique_id=lambda: (1, 2),
            NCCL_UINT8=1,
            NCCL_SUM=0,
            groupStart=lambda: None,
            groupEnd=lambda: None,
            NcclCommunicator=lambda size, identity, rank: connect(),
        )
        monkeypatch.setattr(nccl_start, "load_nccl", lambda: module)

    return use


@pytest.fixture
def start(place):
    """Starts what is loaded, on this rank's GPU."""
    control = HierarchicalCommunicator(COMM.Dup(), MPI.COMM_SELF)
    stream = gpu.Stream(int(place.devices[RANK].removeprefix("GPU:")))
    return lambda: nccl_start.start(control, stream)


@pytest.mark.parametrize(
    ("version", "available", "shared", "enabled", "reason"),
    [
        (23007, True, True, "1", ""),
        (21000, True, False, "", ""),
        (0, False, False, "", "CuPy finds no NCCL"),
        (20906, True, False, "", "NCCL is 2.9.6, and hpcstrat needs 2.10.0 or later"),
        (
            22907,
            True,
            True,
            "1",
            "several ranks share a GPU, which takes NCCL 2.30.0 or later, but this is 2.29.7",
        ),
        (
            23007,
            True,
            True,
            "",
            "several ranks share a GPU, which NCCL allows only with NCCL_MULTI_RANK_GPU_ENABLE=1",
        ),
    ],
    ids=[
        "a shared GPU",
        "a GPU each",
        "no NCCL",
        "too old",
        "too old to share",
        "not enabled to share",
    ],
)
def test_why_it_cannot_be_used(
    place, nccl, monkeypatch, version, available, shared, enabled, reason
):
    nccl(version, available)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", enabled)
    found = nccl_start.why_not(shared)
    assert found.startswith(reason) and bool(found) is bool(reason)


def test_it_is_connected(place, nccl, start):
    mine = Connected()
    nccl(connect=lambda: mine)
    assert start() is mine and not mine.is_aborted
    assert mine.calls == [
        "allReduce",
        "reduce",
        "broadcast",
        "reduceScatter",
        "allGather",
        "send",
        "recv",
    ]


@several
def test_one_rank_fails_in_a_call_after_it_has_connected(place, nccl, start):
    mine = Connected("" if RANK else "allGather")
    nccl(connect=lambda: mine)
    with pytest.raises(RuntimeError, match=f"does not connect the {N} ranks") as caught:
        start()
    others = ranks_in_words(range(1, N))
    assert f"\n  rank 0: ZeroDivisionError: division by zero\n  {others}: connected\n" in str(
        caught.value
    )
    assert mine.is_aborted is (RANK > 0)


@several
@pytest.mark.parametrize("at_start", ["0", "1"])
def test_later_calls_find_the_ranks_connected(place, monkeypatch, at_start):
    """Except for messages to non-neighbors: the host waits in no call without a time limit."""
    xp = place.xp
    if not hasattr(xp, "_faults"):
        pytest.skip("only simulated GPUs tell how often the host waits in NCCL")
    monkeypatch.setenv("NCCL_RUNTIME_CONNECT", at_start)
    stream = gpu.Stream(int(place.devices[RANK].removeprefix("GPU:")))
    communicator = NcclCommunicator(HierarchicalCommunicator(COMM.Dup(), MPI.COMM_SELF), stream)
    before = xp._faults.counted["nccl connects"]
    with call_named("some_call"):
        communicator.all_reduce([xp.ones(3)], ReduceOp.SUM)
        communicator.all_gather([xp.ones(3)], 0)
        with stream.current():
            flat = xp.zeros(4 * N)
            communicator.reduce_flat(flat, flat, ReduceOp.SUM, 0)
            communicator.broadcast_flat(flat, N - 1)
    assert xp._faults.counted["nccl connects"] == before
    with call_named("some_call"):
        communicator.all_gather([xp.ones(RANK)], 0)  # of several sizes, so by messages
    assert (xp._faults.counted["nccl connects"] > before) is (N > 2)
    communicator.close()


@several
def test_versions_that_differ(place, nccl, start):
    nccl(23007 if RANK else 22803)
    with pytest.raises(
        RuntimeError, match=r"different versions of NCCL: 2\.28\.3 on rank 0; 2\.30\.7 on ranks? 1"
    ):
        start()


@several
def test_one_rank_fails_to_connect(place, nccl, start):
    """The others would connect, to no rank: they give up."""
    mine = Connected()

    def connect():
        if RANK == N - 1:
            raise OSError("no such device")
        return mine

    nccl(connect=connect)
    with pytest.raises(RuntimeError, match=f"does not connect the {N} ranks") as caught:
        start()
    assert f"\n  rank {N - 1}: OSError: no such device\n" in str(caught.value)
    assert f"\n  {ranks_in_words(range(N - 1))}: connected\n" in str(caught.value)
    assert mine.is_aborted is (RANK < N - 1)


@several
def test_one_rank_waits_too_long(place, nccl, start, monkeypatch):
    """Its thread is left behind in NCCL: so the process must not destroy NCCL at its end."""
    skipped, registered, release = [], [], threading.Event()
    monkeypatch.setattr(nccl_start, "START_SECONDS", 0.1)
    monkeypatch.setattr(nccl_start, "_skip_exit_handlers", lambda: skipped.append(RANK))
    monkeypatch.setattr(nccl_start.atexit, "register", registered.append)
    mine = Connected()

    def connect():
        if RANK == 0:
            release.wait()
        return mine

    nccl(connect=connect)
    with pytest.raises(RuntimeError, match="\n  rank 0: waits too long\n  ranks? 1.*: connected\n"):
        start()
    release.set()
    assert mine.is_aborted is (RANK > 0)
    assert skipped == [0][: RANK == 0] and len(registered) == (RANK == 0)
