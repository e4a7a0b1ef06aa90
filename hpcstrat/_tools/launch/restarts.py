"""Starts the ranks, and starts them again when a rank has died, as long as the policy allows."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import threading
import time
from collections.abc import Iterator

from hpcstrat._process import guard, job_files, launchers
from hpcstrat._process.job_files import JobMemory, State
from hpcstrat._tools.launch.mpiexec import Job, LaunchError, say
from hpcstrat._tools.launch.policy import Decision, Ended, Policy, decide
from hpcstrat.checkpoint._new_file import newest_step

_LOOK_SECONDS = 0.02  # while ranks start, or end
_SEEN_SECONDS = 0.5  # when they run: a death is seen at once
_START_SECONDS = 60.0  # ranks that are not seen by then are on other hosts
_GRACE_SECONDS = 1.0  # for the processes of the previous start to end by themselves
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
            _end_processes(memory)
        if ended.status:
            unlink_segments(since)
        return ended

    ends = [start(policy.ranks)]
    while (decision := decide(policy, ends)).ranks:
        _announce(policy, ends, decision, newest_step(memory))
        _pause(job, decision.pause)
        if job.signal:  # the next start is called off
            ends.append(ends[-1]._replace(signal=job.signal))
        else:
            ends.append(start(decision.ranks))
    _announce_end(ends, decision)
    return ends[-1].status


def _announce(policy: Policy, ends: list[Ended], decision: Decision, step: int | None) -> None:
    when = f" in {decision.pause} s" if decision.pause else ""
    who = f"{decision.ranks} rank{'s' if decision.ranks > 1 else ''}"
    snapshot = "" if step is None else f"; the newest snapshot is of step {step}"
    number = f"restart {len(ends)} of {policy.restarts}"
    say(f"{ends[-1].describe()}; {number}{when}, on {who}{snapshot}")


def _announce_end(ends: list[Ended], decision: Decision) -> None:
    what = ends[-1].describe()
    if decision.why:
        first = f"; first, {ends[0].describe()}" if len(ends) > 1 else ""
        say(f"{what}; no restart: {decision.why}{first}")
    elif ends[-1].is_incomplete:
        say(f"{what}; the status is 1")


def _pause(job: Job, seconds: float) -> None:
    """Waits, at most until a signal comes."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not job.signal:
        time.sleep(_LOOK_SECONDS)


def _start(job: Job, policy: Policy, memory: JobMemory, ranks: int) -> Ended:
    memory.forget_ranks()
    # Another process that has taken a dead rank's number does not have the job's variable.
    job.processes = lambda: {note.process for note in memory.notes(ranks).values()}.intersection(
        processes_of(memory)
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
                say(f"who dies first is not seen: {error}")
            return
        notes = self._memory.notes(self._ranks).values()
        is_in_order = all(note.state == State.LEFT for note in notes)
        if not is_in_order and not self._is_over.wait(_LEFT_SECONDS):
            _end_what_ranks_started(self._memory)

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


# ---- what dead ranks leave on this host: processes with the job's variable, segments of MPI


def _end_processes(memory: JobMemory) -> None:
    """Ends the processes that the ranks left on this host, and waits for their end."""
    known: set[int] = set()

    def are_left() -> bool:
        # When a process ends, it loses its variables before it closes its files, and so before it
        # frees a GPU.
        known.update(processes_of(memory))
        return any(map(_runs, known))

    deadline = time.monotonic() + _GRACE_SECONDS
    while are_left() and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    for process in processes_of(memory):
        _kill(process)
    while are_left() and time.monotonic() < deadline + _GRACE_SECONDS:
        time.sleep(_LOOK_SECONDS)


def _end_what_ranks_started(memory: JobMemory) -> None:
    """Ends processes that dead ranks have started: mpiexec would wait for their output."""
    for process in processes_of(memory):
        if any(variable.startswith(_OF_RANKS) for variable in _variables_of(process)):
            _kill(process)


def unlink_segments(since: float) -> None:
    """Unlinks unused segments of MPI: their ranks were killed in its start, or with their guards.

    Only this user's, made after `since` (as `time.time`), that no process has open or mapped: the
    process that makes a segment has it open until it has mapped it, so there is no gap.
    """
    unused = _own_segments(since)
    for process in guard.processes() if unused else []:
        for inode in _inodes(process):
            unused.pop(inode, None)
    for path in unused.values():
        with contextlib.suppress(OSError):
            os.unlink(path)


def _own_segments(since: float) -> dict[int, str]:
    """Inode and path of MPI's segments of this user that were made after `since` (`time.time`)."""
    segments = {}
    with contextlib.suppress(OSError):
        for entry in os.scandir(guard.FOLDER):
            if entry.name.startswith(guard.ALL):
                status = entry.stat(follow_symlinks=False)
                if status.st_uid == os.getuid() and status.st_ctime >= since - 1:
                    segments[status.st_ino] = entry.path
    return segments


def _inodes(process: int) -> Iterator[int]:
    """The files in shared memory that a process has open or mapped."""
    folder = guard.FOLDER + "/"
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        # First the open files: the process that makes a file has it open until it has mapped it.
        for name in os.listdir(f"/proc/{process}/fd"):
            with contextlib.suppress(OSError):
                link = f"/proc/{process}/fd/{name}"
                if os.readlink(link).startswith(folder):
                    yield os.stat(link).st_ino
        with open(f"/proc/{process}/maps") as maps:
            yield from (int(line.split()[4]) for line in maps if f" {folder}" in line)


def processes_of(memory: JobMemory) -> list[int]:
    """The processes of this host that have the job's variable."""
    ((name, value),) = memory.environment.items()
    mark = f"{name}={value}".encode()
    return [process for process in guard.processes() if mark in _variables_of(process)]


_OF_RANKS = tuple(f"{name}=".encode() for name in launchers.RANK_NAMES)


def _variables_of(process: int) -> list[bytes]:
    try:
        with open(f"/proc/{process}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def _kill(process: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(process, signal.SIGKILL)


def _runs(process: int) -> bool:
    """Whether a process, or a thread of it, has not ended."""
    try:
        fields = guard.fields_of(process)
    except OSError:
        return False
    # Field 17 is the number of threads: they may outlive the first thread, which then is a zombie.
    return fields[0] != b"Z" or fields[17] != b"1"
