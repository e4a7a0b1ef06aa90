"""A helper process that reports for a rank, and ends it, while C code (MPI's start) blocks Python.

The process runs this file as a script. It must start fast, so it imports only the standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_LOOK_SECONDS = 0.2
_FOLDER = "/dev/shm"
# How the names of their files there start.
MPICH = ("mpich_shm_",)
OPEN_MPI = ("sm_segment.", "vader_segment.")  # of versions 5 and 4
# Below MPICH or Open MPI; nothing opens them by name, so they have one for microseconds only.
_UCX = ("ucx_shm_posix_",)


class Deadline(NamedTuple):
    """What to do if this process is still in the guarded block after some time.

    Attributes:
        seconds: since the start of the block; `inf` means never.
        text: printed to standard error.
        ends: whether this process is killed as well, which makes the launcher end the others.
    """

    seconds: float
    text: str
    ends: bool


@contextlib.contextmanager
def watch(steps: Sequence[Deadline]) -> Iterator[None]:
    """A block during which another process takes these steps, in order, until the block ends.

    If no process can be started, the block is not guarded.
    """
    guard = None
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        # In its own session: the launcher, and Ctrl-C, end the rank's, and the guard cleans up
        # after it.
        command = [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid())]
        guard = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)
        if guard.stdin is not None:
            guard.stdin.write(json.dumps(steps).encode() + b"\n")
    try:
        yield
    finally:
        if guard is not None:
            # The guard holds nothing, and has nothing left to do.
            guard.kill()
            guard.communicate()


def unlink_segments(process: int, prefixes: tuple[str, ...] = MPICH) -> None:
    """Unlinks MPI's own segments that this process has mapped: a forced end would leave them.

    Call it only when every rank of the host has mapped them, or none will.
    """
    _unlink(_segments(process, prefixes))


def _segments(process: int, prefixes: tuple[str, ...] = MPICH) -> set[tuple[str, ...]]:
    """Inode and path of each segment that this process has mapped, and whether it is unlinked."""
    try:
        with open(f"/proc/{process}/maps") as maps:
            return {
                tuple(line.split()[4:])
                for line in maps
                if any(f" {_FOLDER}/{prefix}" in line for prefix in prefixes)
            }
    except OSError:  # no /proc
        return set()


def _unlink(segments: set[tuple[str, ...]]) -> None:
    for inode, path, *deleted in segments:
        with contextlib.suppress(OSError):
            if not deleted and os.stat(path).st_ino == int(inode):
                os.unlink(path)


def unlink_orphans(since: float) -> None:
    """Unlinks unused segments of MPI: their ranks were killed in its start, or with their guards.

    Only this user's, made after `since` (as `time.time`), that no process has open or mapped: the
    process that makes a segment has it open until it has mapped it, so there is no gap.
    """
    paths: dict[int, str] = {}  # by inode
    with contextlib.suppress(OSError):
        for entry in os.scandir(_FOLDER):
            status = entry.stat(follow_symlinks=False)
            is_own = entry.name.startswith(MPICH + OPEN_MPI + _UCX) and status.st_uid == os.getuid()
            if is_own and status.st_ctime >= since - 1:
                paths[status.st_ino] = entry.path
    for process in _processes() if paths else []:
        for inode, _ in _files(process):
            paths.pop(inode, None)
    for path in paths.values():
        with contextlib.suppress(OSError):
            os.unlink(path)


def is_mpi_starting(launcher: int | None) -> bool:
    """Whether a process below this launcher's is starting MPI, and so has segments of MPI."""
    prefixes = tuple(f"{_FOLDER}/{prefix}" for prefix in MPICH + OPEN_MPI + _UCX)
    return any(
        path.startswith(prefixes)
        for process in (_processes() if launcher is not None else [])
        if _is_below(process, launcher)
        for _, path in _files(process)
    )


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _is_below(process: int, ancestor: int | None) -> bool:
    with contextlib.suppress(OSError):  # it has ended
        while process > 1:
            process = int(_status(process)[1])
            if process == ancestor:
                return True
    return False


def _files(process: int) -> Iterator[tuple[int, str]]:
    """Inode and path of the files in shared memory that a process has open or mapped."""
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        device = os.stat(_FOLDER).st_dev
        # First the open files: the process that makes a file has it open until it has mapped it.
        for name in os.listdir(f"/proc/{process}/fd"):
            with contextlib.suppress(OSError):
                link = f"/proc/{process}/fd/{name}"
                file = os.stat(link)
                if file.st_dev == device:
                    yield file.st_ino, os.readlink(link)
        with open(f"/proc/{process}/maps") as maps:
            for line in maps:
                if f" {_FOLDER}/" in line:
                    yield int(line.split()[4]), line.split()[5]


def _status(process: int) -> list[bytes]:
    """The process's fields in /proc, from its state on."""
    with open(f"/proc/{process}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def _is_stopped(process: int) -> bool:
    try:
        return _status(process)[0] == b"T"
    except OSError:
        return False


def _main(process: int) -> None:
    steps = [Deadline(*step) for step in json.loads(sys.stdin.buffer.readline())]
    segments: set[tuple[str, ...]] = set()
    since = time.time()
    start = looked = time.monotonic()
    for step in steps:
        while (left := start + step.seconds - looked) > 0:
            if select.select([sys.stdin], [], [], min(left, _LOOK_SECONDS))[0]:
                # The process was killed: at the end of the block it would have killed this one.
                _unlink(segments)
                unlink_orphans(since)  # it may have made a segment since the last look
                return
            segments |= _segments(process)
            before, looked = looked, time.monotonic()
            if _is_stopped(process):  # a suspended job's time does not count
                # Ctrl-Z stops the rank, but not this process, which is in its own session.
                start += looked - before
        # If the process has ended, this one has another parent now.
        if os.getppid() != process:
            return
        for file in (2, 1):  # the first that is not closed
            with contextlib.suppress(OSError):
                os.write(file, step.text.encode(errors="replace"))
                break
        if step.ends:
            unlink_segments(process)
            os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
