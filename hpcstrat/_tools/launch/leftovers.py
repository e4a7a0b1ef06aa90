"""The processes that the ranks of a job left on this host: they have the job's variable."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

from hpcstrat._process import guard, launchers
from hpcstrat._process.job_files import JobMemory

_GRACE_SECONDS = 1.0  # for the processes of the previous start to end by themselves
_LOOK_SECONDS = 0.02


def end_processes(memory: JobMemory) -> None:
    """Ends them, and waits for their end."""
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


def end_what_ranks_started(memory: JobMemory) -> None:
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
