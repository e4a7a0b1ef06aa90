"""Reductions of ranks' arrays, which dtypes take which, and how ranks wait for each other."""

import os
import time
import types

import ml_dtypes
import numpy as np
import pytest
from internals import barrier, reduce_in_chunks

import hpcstrat as hs
from hpcstrat import ReduceOp

HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [0, 1, 7, (1 << 15) - 1, 1 << 15, (1 << 15) + 1, 1 << 16, 99_999])
def test_sums_are_made_in_rank_order(count, size):
    parts = list(np.random.default_rng(count).standard_normal((count, size)).astype(np.float32))
    expected = parts[0]
    for part in parts[1:]:
        expected = expected + part
    results = {
        ReduceOp.SUM: expected,
        ReduceOp.MEAN: expected / np.float32(count),
        ReduceOp.MIN: np.min(parts, 0),
        ReduceOp.MAX: np.max(parts, 0),
    }
    for op, result in results.items():
        out = np.full(size, -1, np.float32)
        reduce_in_chunks(out, parts, op)
        assert out.tobytes() == result.tobytes()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_16_bit_floats_are_rounded_once(dtype):
    big = 2048 if dtype == np.float16 else 256  # adding one 1 in that dtype changes nothing
    out = np.empty(3, dtype)
    reduce_in_chunks(out, [np.full(3, one).astype(dtype) for one in (big, 1, 1)], ReduceOp.SUM)
    assert out.tolist() == [big + 2] * 3


NUMBERS = "int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64".split()
ALLOWED = {np.dtype(dtype): {"SUM", "MEAN", "MIN", "MAX"} for dtype in [*NUMBERS, *HALVES]}
ALLOWED |= {np.dtype(dtype): {"SUM", "MEAN"} for dtype in ("complex64", "complex128")}
ALLOWED |= {np.dtype(bool): {"MIN", "MAX"}, np.dtype(np.longdouble): set()}


@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
def test_the_table_of_dtypes(dtype):
    strategy = hs.MirroredStrategy(["CPU:0"])
    for op in ReduceOp:
        if op.name in ALLOWED[dtype]:
            assert strategy.reduce(op, np.ones(2, dtype), None).tolist() == [1, 1]
            continue
        with pytest.raises(TypeError, match=r"^Strategy\.reduce: .*cast first"):
            strategy.reduce(op, np.ones(2, dtype), None)


# ---- the barrier of flags


def wait(monkeypatch, *cores):
    """How often a rank yields its core before its first sleep, and the seconds of that.

    The others, who may run on these cores, arrive during the sleep.
    """
    comm = types.SimpleNamespace(rank=0, size=len(cores))
    comm.allgather, comm.Iprobe = lambda _: cores, lambda: False
    flags, polls, sleeps = np.zeros(comm.size * barrier.LINE, np.uint8), [], []

    def sleep(seconds):
        sleeps.append(seconds)
        flags.view(np.int64)[:] = 1

    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", sleep)
        patch.setattr(os, "sched_yield", lambda: polls.append(None))
        barrier._FlagBarrier(flags, comm)()
    assert len(sleeps) == 1
    return len(polls), sleeps[0]


def test_ranks_with_a_core_each_poll_longer_and_many_on_one_sleep_at_once(monkeypatch):
    polls, sleep = wait(monkeypatch, {0, 1}, {0, 1}, {0, 1})
    for cores in ([{0, 1}, {0, 1}], [{0}, {1}], [{0, 1}, {2, 3}, {0, 1}, {2, 3}]):
        assert wait(monkeypatch, *cores) > (2 * polls, sleep)
    for cores in ([{0}, {0}], [{0, 1}, {1}, {0}], 4 * [{0}]):
        assert wait(monkeypatch, *cores) == (polls, sleep)
    for cores in (5 * [{0}], 9 * [{0, 1}]):
        none, longer = wait(monkeypatch, *cores)
        assert none == 0 and longer > sleep
