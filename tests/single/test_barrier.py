"""How a rank waits in the barrier of flags."""

import os
import time

import numpy as np
from internals import barrier


class Comm:
    """What the barrier needs from MPI. The ranks may use these cores."""

    rank = 0

    def __init__(self, *cores):
        self.size, self._cores = len(cores), cores

    def allgather(self, _):
        return self._cores

    def Iprobe(self):
        return False


def wait(comm, monkeypatch):
    """How often a rank yields its core before its first sleep, and the seconds of that.

    The others arrive during the sleep.
    """
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


def test_ranks_with_a_core_each_poll_longer(monkeypatch):
    polls, sleep = wait(Comm({0, 1}, {0, 1}, {0, 1}), monkeypatch)
    for comm in (Comm({0, 1}, {0, 1}), Comm({0}, {1}), Comm({0, 1}, {2, 3}, {0, 1}, {2, 3})):
        assert wait(comm, monkeypatch) > (2 * polls, sleep)
    for comm in (Comm({0}, {0}), Comm({0, 1}, {1}, {0}), Comm(*4 * [{0}])):
        assert wait(comm, monkeypatch) == (polls, sleep)


def test_many_ranks_on_each_core_sleep_at_once(monkeypatch):
    _, sleep = wait(Comm({0}, {0}), monkeypatch)
    for comm in (Comm(*5 * [{0}]), Comm(*9 * [{0, 1}])):
        polls, longer = wait(comm, monkeypatch)
        assert polls == 0 and longer > sleep
