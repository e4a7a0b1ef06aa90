"""Starts the ranks again when one has died, and decides when that would help nobody."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from hpcstrat import _guard, _job_memory
from hpcstrat._job_memory import Failure, JobMemory
from hpcstrat._memory.segment import physical_memory
from hpcstrat.checkpoint._snapshot import newest_step

_GRACE_SECONDS = 1.0  # that processes of the start before get to end by themselves
_LOOK_SECONDS = 0.02
_START_SECONDS = 60.0  # after them ranks that are not seen are on other hosts
_SEEN_SECONDS = 0.5  # a death is noticed so late at most
_PAUSES_SECONDS = (2, 4, 8)  # before the restarts after failures before a step, which follow each other
_WANTED = {os.EX_TEMPFAIL} | {base + one for base in (0, 128) for one in (signal.SIGINT, signal.SIGTERM)}
_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


class Starter(Protocol):
    """What starts the ranks.

    Attributes:
        signal: the last signal that the launcher was sent; 0 where there was none.
    """

    signal: int

    def start(self, ranks: int, environment: dict[str, str]) -> int:
        """Starts so many ranks with these variables, and returns their exit status when all have ended."""
        ...


class Ended(NamedTuple):
    """How one start of the ranks ended.

    Attributes:
        status: their exit status.
        ranks: how many they were.
        step: the number of the last step that is known of.
        did_steps: whether any was done since the start.
        failure: the exception that ended it; `None` where a rank died without one.
        dead: the rank that was seen to die first; `None` where several were at once.
    """

    status: int
    ranks: int
    step: int
    did_steps: bool
    failure: Failure | None
    dead: int | None

    @property
    def is_wanted(self) -> bool:
        """Whether all is done, the checkpoint is saved before a preemption, or somebody has asked the ranks to end."""
        if self.failure is not None and self.failure.text.startswith((_job_memory.PREEMPTED, "KeyboardInterrupt")):
            return True
        return self.status == 0 or self.status in _WANTED

    @property
    def is_killed(self) -> bool:
        """Whether a signal ended a rank; by the exit status, which launchers make of its number in two ways."""
        return self.failure is None and any(self.status in (one, 128 + one) for one in _SIGNALS)

    @property
    def fails_early(self) -> bool:
        """Whether it ended by itself before a step was done."""
        return not (self.did_steps or self.is_killed or self.is_wanted)

    def describe(self) -> str:
        """What happened, in a sentence."""
        if self.failure is not None:
            return f"rank {self.failure.rank} failed after step {self.step} with {self.failure.text}"
        if not self.is_killed:  # the watch has ended the job, or a rank has left it by os._exit
            return f"the ranks ended after step {self.step} with status {self.status}"
        name = next(one.name for one in _SIGNALS if self.status in (one, 128 + one))
        who = "a rank" if self.dead is None else f"rank {self.dead}"
        return f"{who} died after step {self.step} of {name}"


class Policy:
    """Decides what comes after each start of the ranks.

    Args:
        ranks: how many are wanted.
        restarts: how often they are started again at most.
        min_ranks: how few will do; `None` for no fewer than are wanted.

    Attributes:
        ranks: how many the next start has.
        done: how many restarts there have been, with the next.
        pause: seconds to wait before the next start.
    """

    def __init__(self, ranks: int, restarts: int, min_ranks: int | None = None) -> None:
        self.ranks = self._wanted = ranks
        self.restarts = restarts
        self.min_ranks: int = ranks if min_ranks is None else min_ranks
        self.done = 0
        self.pause = 0
        self._ends: list[Ended] = []

    def reason_to_end(self, ended: Ended) -> str | None:
        """Why the job is not started again; empty where there is nothing to say, `None` where it is.

        Where it is started again, `ranks`, `done` and `pause` say how.
        """
        before, self._ends = self._ends, [*self._ends, ended]
        self.pause = 0
        if ended.is_wanted or self.restarts == 0:
            return ""
        if self._has_failed_so(ended, before):
            return "it has failed in the same way at the same step before"
        if ended.fails_early:
            if any(one.did_steps for one in before):
                # A GPU, or MPS, whose ranks were killed is not free at once.
                times = len(list(itertools.takewhile(lambda one: one.fails_early, reversed(self._ends))))
                if times > len(_PAUSES_SECONDS) and (ended.failure is not None or ended.ranks <= self.min_ranks):
                    return f"it has ended {times} times in a row before it had done a step"
                self.pause = _PAUSES_SECONDS[min(times, len(_PAUSES_SECONDS)) - 1]
            elif ended.failure is not None:
                return "it failed before it had done a step"
            elif ended.ranks <= self.min_ranks and before and before[-1].status == ended.status:
                return "it has ended twice before it had done a step"
        if self.done == self.restarts:
            return f"it has been restarted {self.restarts} times (--restarts)"
        self.done += 1
        # All ranks again first: most faults are gone with the process. One that is not is a host's, or a GPU's.
        if ended.did_steps:
            self.ranks = self._wanted
        elif ended.failure is None and before and ended.ranks > self.min_ranks:
            self.ranks = ended.ranks - 1
        return None

    @staticmethod
    def _has_failed_so(ended: Ended, before: Sequence[Ended]) -> bool:
        """Whether an exception came again; not where both came before a step, which prove nothing."""
        return ended.failure is not None and any(
            other.failure is not None
            and (other.failure.text, other.step) == (ended.failure.text, ended.step)
            and (other.did_steps or ended.did_steps)
            for other in before
        )

    def first_failure(self) -> str:
        """How the first start ended, where there were several."""
        return self._ends[0].describe()


def run(starter: Starter, policy: Policy, variables: Callable[[int], Mapping[str, str]]) -> int:
    """Starts the ranks, and again for as long as the policy wants; returns the exit status of the last start.

    Args:
        starter: starts them.
        policy: when, and how many.
        variables: gives their variables, by how many they are.

    Raises:
        OSError: the launcher cannot be started.
    """
    memory = _job_memory.create(physical_memory())
    begin = time.time()
    while True:
        ended = _start(starter, policy.ranks, memory, variables(policy.ranks))
        reason = policy.reason_to_end(ended)
        if reason is None and not starter.signal:
            _end_stale(memory, begin)
            step = newest_step(memory)
            snapshot = "" if step is None else f"; the newest snapshot is of step {step}"
            when = f" in {policy.pause} s" if policy.pause else ""
            _say(
                f"{ended.describe()}; restart {policy.done} of {policy.restarts}{when}, on {policy.ranks} "
                f"rank{'s' if policy.ranks > 1 else ''}{snapshot}"
            )
            _pause(starter, policy.pause)
            if not starter.signal:
                continue
        if ended.status:
            _end_stale(memory, begin)
        if reason and not starter.signal:
            first = f"; first, {policy.first_failure()}" if policy.done else ""
            _say(f"{ended.describe()}; no restart: {reason}{first}")
        return ended.status


def _pause(starter: Starter, seconds: float) -> None:
    """Waits, until a signal comes."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not starter.signal:
        time.sleep(_LOOK_SECONDS)


def _start(starter: Starter, ranks: int, memory: JobMemory, environment: Mapping[str, str]) -> Ended:
    memory.begin(ranks)
    with _watching(memory, ranks) as deaths:
        status = starter.start(ranks, {**environment, **memory.environment})
    step, done = memory.steps()
    failure = memory.first_failure(ranks)
    begin = min([one.seen for one in deaths.values()], default=0.0)
    first = [rank for rank, one in deaths.items() if one.alive < begin]
    # What others meet when a rank has died may look like an error of their own.
    if failure is not None and first and failure.rank not in first and begin < failure.time:
        failure = None
    return Ended(status, ranks, step, done > 0, failure, first[0] if len(first) == 1 else None)


class _Death(NamedTuple):
    """A process has ended between two looks, by `time.monotonic`.

    Attributes:
        alive: when it was still alive; 0 where it never was.
        seen: when it was seen to have ended.
    """

    alive: float
    seen: float


@contextlib.contextmanager
def _watching(memory: JobMemory, ranks: int) -> Iterator[dict[int, _Death]]:
    """A block during which the deaths of the ranks of this host are noted."""
    deaths: dict[int, _Death] = {}
    is_over = threading.Event()
    begin = time.monotonic()

    def watch() -> None:
        files: dict[int, tuple[int, int]] = {}  # of each: its rank and its process
        poll = select.poll()
        seen: set[int] = set()
        alive: dict[int, float] = {}
        while not is_over.is_set():
            is_starting = len(seen) < ranks and time.monotonic() - begin < _START_SECONDS
            if len(seen) < ranks:
                for rank, process in memory.processes(ranks).items():
                    if rank not in seen:
                        seen.add(rank)
                        try:
                            file = os.pidfd_open(process)
                        except OSError:  # it is gone already
                            deaths[rank] = _Death(0.0, time.monotonic())
                            continue
                        files[file] = (rank, process)
                        poll.register(file, select.POLLIN)
            ended = poll.poll(1000 * (_LOOK_SECONDS if is_starting else _SEEN_SECONDS))
            now = time.monotonic()
            for file, _ in ended:
                rank, _ = files.pop(file)
                deaths[rank] = _Death(alive.get(rank, 0.0), now)
                poll.unregister(file)
                os.close(file)
            # One that has died closes its connections, by which the others are ended, a little before it is gone.
            alive |= {rank: now for rank, process in files.values() if not (ended and _has_closed_files(process))}
            if not files and len(seen) == ranks:
                break
        for file in files:
            os.close(file)

    thread = threading.Thread(target=watch, name="hpcstrat-restarts", daemon=True)
    thread.start()
    try:
        yield deaths
    finally:
        is_over.set()
        thread.join()


def _has_closed_files(process: int) -> bool:
    """Whether a process has got so far on its way out, or is gone."""
    try:
        with open(f"/proc/{process}/status", "rb") as file:
            return b"\nFDSize:\t0\n" in file.read()
    except OSError:
        return True


def _end_stale(memory: JobMemory, begin: float) -> None:
    """Ends what the ranks have left on this host: processes that have the job's variable, and then their segments."""
    known: set[int] = set()

    def are_left() -> bool:
        # On its way out a process loses its variables before it closes its files, and so before it frees a GPU.
        known.update(_processes_of(memory))
        return any(map(_runs, known))

    deadline = time.monotonic() + _GRACE_SECONDS
    while are_left() and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    for process in _processes_of(memory):
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)
    while are_left() and time.monotonic() < deadline + _GRACE_SECONDS:
        time.sleep(_LOOK_SECONDS)
    _guard.unlink_orphans(begin)


def _runs(process: int) -> bool:
    """Whether a process, or a thread of it, has not ended."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return False
    return fields[0] != b"Z" or fields[17] != b"1"  # the number of threads, which may outlive the first


def _processes_of(memory: JobMemory) -> list[int]:
    ((name, value),) = memory.environment.items()
    mark = f"{name}={value}".encode()
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open(f"/proc/{process}/environ", "rb") as file:
                if mark in file.read().split(b"\0"):
                    found.append(int(process))
    return found


def _say(text: str) -> None:
    print(f"hpcstrat run: {text}", file=sys.stderr, flush=True)
