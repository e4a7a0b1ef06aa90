"""Starts the ranks, and starts them again when a rank has died, as long as the policy allows."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import sys
import threading
import time

from hpcstrat._process import job_files
from hpcstrat._process.job_files import JobMemory, State
from hpcstrat._tools.launch import leftovers
from hpcstrat._tools.launch.job import Job
from hpcstrat._tools.launch.mpiexec import LaunchError
from hpcstrat._tools.launch.policy import Decision, Ended, Policy, decide
from hpcstrat.checkpoint._new_file import newest_step

_LOOK_SECONDS = 0.02  # while ranks start
_SEEN_SECONDS = 0.5  # when they run: a death is seen at once
_START_SECONDS = 60.0  # ranks that are not seen by then are on other hosts
_LEFT_SECONDS = 3.0  # for mpiexec to end after all ranks have ended


def run(job: Job, policy: Policy) -> int:
    """Starts the ranks, again if the policy says so; returns the exit status of the last start.

    If a rank has left without telling the others, and the status is 0 nevertheless, it returns 1.

    Raises:
        LaunchError: restarts are wanted, but there is no memory that outlives the ranks.
        OSError: the launcher cannot be started.
    """
    since = time.time()
    try:
        memory = job_files.create(policy.ranks, has_snapshots=policy.restarts > 0)
    except OSError as error:
        if policy.restarts:
            raise LaunchError(
                f"--restarts: there is no memory that outlives the ranks: {error}"
            ) from None
        return job.start(policy.ranks, {})

    def start(ranks: int) -> Ended:
        ended = _start(job, policy, memory, ranks)
        if ended.status and policy.restarts:
            leftovers.end_processes(memory)
        if ended.status:
            leftovers.unlink_segments(since)
        return ended

    ends = [start(policy.ranks)]
    while (decision := decide(policy, ends)).ranks:
        _announce(policy, ends, decision, newest_step(memory))
        _pause(job, decision.pause)
        if job.signal:  # the next start is called off
            ends.append(ends[-1]._replace(signal=job.signal))
        else:
            ends.append(start(decision.ranks))
    ended = ends[-1]
    if decision.why:
        first = f"; first, {ends[0].describe()}" if len(ends) > 1 else ""
        _say(f"{ended.describe()}; no restart: {decision.why}{first}")
    elif ended.is_incomplete:
        _say(f"{ended.describe()}; the status is 1")
    return ended.status


def _announce(policy: Policy, ends: list[Ended], decision: Decision, step: int | None) -> None:
    when = f" in {decision.pause} s" if decision.pause else ""
    who = f"{decision.ranks} rank{'s' if decision.ranks > 1 else ''}"
    snapshot = "" if step is None else f"; the newest snapshot is of step {step}"
    number = f"restart {len(ends)} of {policy.restarts}"
    _say(f"{ends[-1].describe()}; {number}{when}, on {who}{snapshot}")


def _pause(job: Job, seconds: float) -> None:
    """Waits, at most until a signal comes."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not job.signal:
        time.sleep(_LOOK_SECONDS)


def _start(job: Job, policy: Policy, memory: JobMemory, ranks: int) -> Ended:
    memory.forget_ranks()
    # Another process that has taken a dead rank's number does not have the job's variable.
    job.processes = lambda: {note.process for note in memory.notes(ranks).values()}.intersection(
        leftovers.processes_of(memory)
    )
    watch = DeathWatch(memory, ranks)
    with watch if policy.restarts else contextlib.nullcontext():
        status = job.start(ranks, memory.environment)
    step, done = memory.steps()
    failure = memory.first_failure(ranks)
    first, first_seen = watch.first_deaths()
    # After the death of a rank, others may fail with errors that are only a consequence.
    if failure is not None and first and failure.rank not in first and first_seen < failure.time:
        failure = None
    notes = memory.notes(ranks)
    is_incomplete = status == 0 and any(note.state == State.CONNECTED for note in notes.values())
    return Ended(
        status=status or int(is_incomplete),
        ranks=ranks,
        step=step,
        did_steps=done > 0,
        failure=failure,
        dead=first[0] if len(first) == 1 else None,
        is_incomplete=is_incomplete,
        signal=job.signal,
        are_seen=bool(notes),
    )


def _say(text: str) -> None:
    print(f"hpcstrat run: {text}", file=sys.stderr, flush=True)


class DeathWatch:
    """A block during which a thread watches the processes of this host's ranks.

    It sees which rank dies first. mpiexec does not tell, and the others end as well, some with
    errors that are only a consequence. A rank that was still alive when a death was first seen did
    not die first.

    When all ranks have ended, it ends what they have started. Such processes may hold the ranks'
    standard output, and mpiexec waits for its end.
    """

    def __init__(self, memory: JobMemory, ranks: int) -> None:
        self._memory = memory
        self._ranks = ranks
        self._alive: dict[int, float] = {}  # when each known rank was last seen alive; 0 if never
        self._ended: dict[int, float] = {}  # when a rank was seen to have ended
        self._running = selectors.PollSelector()  # pidfds, each with its rank and process
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hpcstrat-restarts", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        for key in self._running.get_map().values():
            os.close(key.fd)

    def first_deaths(self) -> tuple[list[int], float]:
        """The ranks that may have died first, and when the first death was seen; 0 if none was."""
        first_seen = min(self._ended.values(), default=0.0)
        return [rank for rank in self._ended if self._alive[rank] < first_seen], first_seen

    def _watch(self) -> None:
        if not hasattr(os, "pidfd_open"):  # such as a Python that was built for an old C library
            return
        try:
            self._wait_for_all()
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EPERM):  # an old system, or a container's
                _say(f"who dies first is not seen: {error}")
            return
        notes = self._memory.notes(self._ranks).values()
        is_in_order = all(note.state == State.LEFT for note in notes)
        if not is_in_order and not self._is_over.wait(_LEFT_SECONDS):
            leftovers.end_what_ranks_started(self._memory)

    def _wait_for_all(self) -> None:
        """Waits until all ranks of this host have ended, or the block has."""
        start = time.monotonic()
        while not self._is_over.is_set():
            are_missing = len(self._alive) < self._ranks
            is_starting = are_missing and time.monotonic() - start < _START_SECONDS
            if are_missing:
                self._add_new_ranks()
            self._look(_LOOK_SECONDS if is_starting else _SEEN_SECONDS)
            if self._alive and not self._running.get_map() and not is_starting:
                break

    def _add_new_ranks(self) -> None:
        for rank, note in self._memory.notes(self._ranks).items():
            if rank in self._alive:
                continue
            try:
                file = os.pidfd_open(note.process)
                self._running.register(file, selectors.EVENT_READ, (rank, note.process))
            except ProcessLookupError:
                self._ended[rank] = time.monotonic()
            self._alive[rank] = 0.0

    def _look(self, seconds: float) -> None:
        """Waits for deaths, and sees who is alive."""
        ended = self._running.select(seconds)
        now = time.monotonic()
        for key, _ in ended:
            self._ended[key.data[0]] = now
            self._running.unregister(key.fd)
            os.close(key.fd)
        for key in self._running.get_map().values():
            rank, process = key.data
            if not (ended and _has_closed_files(process)):
                self._alive[rank] = now


def _has_closed_files(process: int) -> bool:
    """Whether a process that is ending has closed its files, or is gone.

    A process that dies closes its files, connections included, a little before its pidfd tells. In
    between, the others already end because of it. /proc shows this state: the process has no table
    of files, so the line FDSize, the size of that table, says 0.
    """
    try:
        with open(f"/proc/{process}/status", "rb") as file:
            return b"\nFDSize:\t0\n" in file.read()
    except OSError:
        return True
