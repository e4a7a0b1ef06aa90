"""A barrier of the ranks of a host: flags in the memory that they share."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from typing import Any

import numpy as np

LINE = 64
"""Bytes of a rank's flag: a whole cache line."""

# Polls before the core is offered to another rank, if every rank has its own. Where ranks share
# cores it is offered at once, or the rank that is waited for may not run.
_SPINS = 20
# Polls before the rank sleeps: then another rank computes, perhaps on this core.
_YIELDS = 300
# The same if every rank has its own core: about a millisecond, many times the cost of a wake-up.
_YIELDS_ON_CORES = 1500
_SLEEP = 50e-6  # seconds
# With more ranks than this for each core, all their polls and wake-ups take the time that the rank
# needs which has not arrived: then they sleep at once, and longer. 64 ranks on 2 cores then meet
# in about a third of the time.
_CROWD = 4
_SLEEP_IN_CROWD = 200e-6
_PROGRESS = 64  # polls between two chances for MPI


def barrier(flags: np.ndarray[Any, np.dtype[np.uint8]], comm: Any) -> Callable[[], object]:
    """A function that returns when all ranks of `comm` have called it.

    Args:
        flags: `LINE * comm.size` bytes of zeros, shared by the ranks.
        comm: an MPI communicator that only this function uses.
    """
    # Only on these machines do all processors see one's writes in the order in which it made them.
    # Others need fences, which Python does not have.
    if platform.machine() in ("x86_64", "AMD64"):
        return _FlagBarrier(flags, comm)
    return comm.Barrier


class _FlagBarrier:
    """Each rank counts its calls in its flag, and waits until the others have counted as many."""

    def __init__(self, flags: np.ndarray[Any, np.dtype[np.uint8]], comm: Any) -> None:
        # A memoryview: its elements are read faster than those of a NumPy array.
        self._flags = memoryview(flags.view(np.int64))  # pyright: ignore[reportArgumentType]
        indices = [rank * LINE // 8 for rank in range(comm.size)]
        # Each flag has its own cache line. On a shared line each write would take the line away
        # from the ranks that poll it.
        self._own = indices.pop(comm.rank)
        self._others = indices
        self._progress = comm.Iprobe
        cores = set().union(*comm.allgather(os.sched_getaffinity(0)))
        self._spins, self._yields, self._sleep = 0, _YIELDS, _SLEEP
        if comm.size <= len(cores):
            self._spins, self._yields = _SPINS, _YIELDS_ON_CORES
        elif comm.size > _CROWD * len(cores):
            self._spins, self._yields, self._sleep = _SPINS, _SPINS, _SLEEP_IN_CROWD
        self.calls = 0

    def __call__(self) -> None:
        # Counts only grow: no flag is ever reset, and a rank may be one call ahead.
        self.calls += 1
        flags, calls = self._flags, self.calls
        flags[self._own] = calls
        for index in self._others:
            if flags[index] < calls:
                self._wait(index)

    def _wait(self, index: int) -> None:
        flags, calls, spins, yields = self._flags, self.calls, self._spins, self._yields
        polls = 0
        while flags[index] < calls:
            polls += 1
            if polls > yields:
                time.sleep(self._sleep)
            elif polls > spins:
                os.sched_yield()
            if polls > yields or polls % _PROGRESS == 0:
                # A message that the other rank waits to send moves only in a call of MPI.
                self._progress()
