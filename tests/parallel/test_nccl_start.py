"""NCCL that is missing, old or of two versions: all ranks raise, and say why."""

import types

import pytest
from internals import NcclCommunicator, SharedMemoryCommunicator, call_named, gpu, nccl_start
from mpi4py import MPI

from hpcstrat import ReduceOp

COMM = MPI.COMM_WORLD
RANK, N = COMM.rank, COMM.size

pytestmark = pytest.mark.parametrize("place", ["GPU"], indirect=True)
several = pytest.mark.mpi(min_size=2)


class Connected:
    """NCCL's communicator as those who start it see it."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *_: self.calls.append(name)


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
def control():
    return SharedMemoryCommunicator(COMM.Dup())


@pytest.fixture
def start(place, control):
    """Starts what is loaded, on this rank's GPU."""
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


@several
def test_one_rank_that_cannot_use_it(place, control, monkeypatch):
    problem = "" if RANK else "it is too old"
    monkeypatch.setattr(nccl_start, "why_not", lambda shared: problem)
    with (
        call_named("some_call"),
        pytest.raises(RuntimeError, match="^some_call: .*:\n  rank 0: it is too old\nOr start one"),
    ):
        nccl_start.require_nccl(control, shared=False)
    control.barrier()


def test_it_is_connected(place, nccl, start):
    mine = Connected()
    nccl(connect=lambda: mine)
    assert start() is mine
    assert mine.calls == ["allReduce", "reduce", "broadcast", "allGather", "send", "recv"]


@several
@pytest.mark.parametrize("at_start", ["0", "1"])
def test_later_calls_find_the_ranks_connected(place, control, monkeypatch, at_start):
    """Except for messages to non-neighbors: the host waits in no call without a time limit."""
    xp = place.xp
    if not hasattr(xp, "_faults"):
        pytest.skip("only simulated GPUs tell how often the host waits in NCCL")
    monkeypatch.setenv("NCCL_RUNTIME_CONNECT", at_start)
    stream = gpu.Stream(int(place.devices[RANK].removeprefix("GPU:")))
    communicator = NcclCommunicator(control, stream)
    before = xp._faults.counted["nccl connects"]
    with call_named("some_call"):
        communicator.all_reduce([xp.ones(3)], ReduceOp.SUM)
        communicator.all_gather([xp.ones(3)], 0)
        with stream.current():
            flat = xp.zeros(4 * N)
            communicator.reduce_flat("a sum", flat, flat, ReduceOp.SUM, 0)
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
