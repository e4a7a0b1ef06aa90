"""The communicators of every transport, and the arrays that tests move by them."""

import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from internals import connect, hosts, worlds
from mpi4py import MPI

import hpcstrat as hs
from hpcstrat import ReduceOp, asnumpy

COMM = MPI.COMM_WORLD
SUM, MEAN, MIN, MAX = ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MIN, ReduceOp.MAX
ARITHMETIC = (SUM, MEAN, MIN, MAX)
OPERATIONS = {
    **dict.fromkeys(
        "int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split(),
        ARITHMETIC,
    ),
    "bfloat16": ARITHMETIC,
    "complex64": (SUM, MEAN),
    "complex128": (SUM, MEAN),
    "bool": (MIN, MAX),
}
HOST = ("shared memory", "hosts", "hosts of one rank", "many ranks")
DEVICE = ("NCCL",)
if COMM.size == 1:
    HOST, DEVICE = ("solo",), ("solo device",)
_made = {}


def parametrize(metafunc, transports):
    """Runs a test with one of these fixtures on each transport; `place` is where the arrays are."""
    for fixture in transports.keys() & set(metafunc.fixturenames):
        cases = [
            pytest.param("GPU", name, id=name, marks=pytest.mark.gpu)
            if name in DEVICE
            else pytest.param("CPU", name, id=name)
            for name in transports[fixture]
        ]
        mark = pytest.mark.parametrize(("place", fixture), cases, indirect=True)
        # It takes precedence over the parameters that `place` has itself.
        metafunc.definition.add_marker(mark)


@pytest.fixture
def communicator(request, monkeypatch, place) -> Any:
    """The communicator of this name; for test files, which parametrize it."""
    if place.kind == "GPU":
        with place.make(hs.MirroredStrategy) as made:  # `place` keeps the GPUs connected
            return made.replica_group.communicator
    return (
        connect()
        if request.param in ("shared memory", "solo")
        else on_hosts(request.param, monkeypatch)
    )


def on_hosts(name, monkeypatch):
    """The communicator of ranks as if on several hosts."""
    if name == "hosts of one rank":
        monkeypatch.setattr(hosts, "PIECE", 5003)
        monkeypatch.setattr(hosts, "SMALL_BYTES", 30_000)  # pieces of int8 are small, of floats not
        # Such pieces cut elements.
        monkeypatch.setattr(hosts.HostsCommunicator, "LARGEST", 70_001)
    if name == "many ranks":  # which agree in another way
        monkeypatch.setattr(hosts, "FEW_RANKS", 0)
    if name not in _made:
        comm: Any = worlds.start().comm
        parts = {  # the last rank alone on its host, each alone, and in turns on two hosts
            "hosts": lambda: comm.Split(comm.rank == comm.size - 1),
            "hosts of one rank": lambda: MPI.COMM_SELF,
            "many ranks": lambda: comm.Split(comm.rank % 2),
        }
        _made[name] = hosts.HostsCommunicator(comm.Dup(), parts[name]())
    return _made[name]


def kind(name):
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def values(shape, dtype, rank) -> Any:
    """Small whole numbers, exact in every dtype, that differ by rank and by place."""
    size = int(np.prod(shape))
    numbers = (np.arange(size) * 5 + 3 * rank + rank * np.arange(size)) % 11
    if dtype.kind in "if":
        numbers -= 4
    if dtype.kind == "b":
        return (numbers % 3 > 0).reshape(shape)
    array = numbers.astype(dtype)
    if dtype.kind == "c":
        array += (1j * ((numbers + rank) % 5)).astype(dtype)
    return array.reshape(shape)


def reduced(parts, op):
    """What the values of `values` must reduce to."""
    dtype = parts[0].dtype
    exact = [part.astype(np.complex128 if dtype.kind == "c" else np.float64) for part in parts]
    if op is MIN or op is MAX:
        pick = np.min if op is MIN else np.max
        return pick(exact, axis=0).astype(dtype)
    total = np.sum(exact, axis=0)
    if op is SUM:
        return total.astype(dtype)
    if dtype.kind in "iu":
        mean = total / len(parts)  # TensorFlow's dtypes
        return (
            mean.astype(np.float32 if dtype.itemsize < 4 else np.float64)
            if len(parts) > 1
            else parts[0]
        )
    narrow = {"float16": np.float32, "bfloat16": np.float32}.get(dtype.name, dtype)
    return (total.astype(narrow) / np.asarray(len(parts), narrow)).astype(dtype)


def combined(communicator, parts, ufunc):
    """The parts of all ranks, combined in the order in which this transport does it."""
    in_turns = communicator is _made.get("many ranks")
    by_host = [parts[::2], parts[1::2]] if in_turns else [parts]
    return functools.reduce(ufunc, [functools.reduce(ufunc, host) for host in by_host if host])


def check(found, expected, xp=np):
    assert isinstance(found, xp.ndarray)
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    host = asnumpy(found)
    # The zeros of either sign.
    assert host.tobytes() == expected.tobytes() or np.array_equal(host, expected)


def has(xp, dtype):
    """Whether NumPy, or this version of CuPy, computes with the dtype."""
    try:
        return dtype.kind == "b" or (xp.asarray(np.ones(1, dtype)) * 1).dtype == dtype
    except (TypeError, ValueError):
        return False


def works(communicator, place):
    """The call after one that failed."""
    rank, size = communicator.rank, communicator.size
    (total,) = communicator.all_reduce([place.xp.full(7000, float(rank + 1))], SUM)
    assert total.tolist() == [size * (size + 1) / 2] * 7000
    assert communicator.all_gather_obj(rank) == list(range(size))
