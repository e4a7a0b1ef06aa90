"""How a rank waits in the barrier of flags."""

import os
import time

import numpy as np
from internals import shared_memory


class Comm:
    """What the barrier needs from MPI. The ranks may use these cores."""

    rank = 0

    def __init__(self, *cores):
        self.size, self._cores = len(cores), cores

    def allgather(self, _):
        return self._cores

    def Iprobe(self):
        return False


def polls_before_sleep(comm, monkeypatch):
    """How often a rank yields its core before its first sleep, during which the others arrive."""
    flags, polls, sleeps = np.zeros(comm.size * shared_memory.LINE, np.uint8), [], []

    def sleep(seconds):
        sleeps.append(seconds)
        flags.view(np.int64)[:] = 1

    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", sleep)
        patch.setattr(os, "sched_yield", lambda: polls.append(None))
        shared_memory._FlagBarrier(flags, comm)()
    assert len(sleeps) == 1
    return len(polls)


def test_ranks_with_a_core_each_poll_longer(monkeypatch):
    shared = polls_before_sleep(Comm({0, 1}, {0, 1}, {0, 1}), monkeypatch)
    for comm in (Comm({0, 1}, {0, 1}), Comm({0}, {1}), Comm({0, 1}, {2, 3}, {0, 1}, {2, 3})):
        assert polls_before_sleep(comm, monkeypatch) > 2 * shared
    for comm in (Comm({0}, {0}), Comm({0, 1}, {1}, {0})):
        assert polls_before_sleep(comm, monkeypatch) == shared
