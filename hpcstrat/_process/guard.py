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

_LOOK_SECONDS = 0.05
FOLDER = "/dev/shm"
# How the names of their files there start.
MPICH = ("mpich_shm_",)
OPEN_MPI = ("sm_segment.", "vader_segment.")  # of versions 5 and 4
# The last are of UCX, below both; nothing opens them by name: they have one for microseconds only.
ALL = (*MPICH, *OPEN_MPI, "ucx_shm_posix_")


@contextlib.contextmanager
def watch(steps: Sequence[tuple[float, str]]) -> Iterator[None]:
    """A block during which another process takes these steps, in order, until the block ends.

    If no process can be started, the block is not guarded.

    Args:
        steps: seconds from the block's start (`inf`: never), and the text that is then printed to
            standard error. After the last step this process is killed too, which makes the launcher
            end the others.
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
                if any(f" {FOLDER}/{prefix}" in line for prefix in prefixes)
            }
    except OSError:  # no /proc
        return set()


def _unlink(segments: set[tuple[str, ...]]) -> None:
    for inode, path, *deleted in segments:
        with contextlib.suppress(OSError):
            if not deleted and os.stat(path).st_ino == int(inode):
                os.unlink(path)


def is_mpi_starting(launcher: int) -> bool:
    """Whether a process below this launcher's is starting MPI, and so has segments of MPI."""
    return any(_is_below(process, launcher) and _segments(process, ALL) for process in processes())


def processes() -> list[int]:
    """All processes of this host."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _is_below(process: int, ancestor: int) -> bool:
    with contextlib.suppress(OSError):  # it has ended
        while process > 1:
            process = int(fields_of(process)[1])
            if process == ancestor:
                return True
    return False


def fields_of(process: int) -> list[bytes]:
    """The process's state, parent and so on, from /proc; OSError if it has ended."""
    with open(f"/proc/{process}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def _main(process: int) -> None:
    steps: list[tuple[float, str]] = json.loads(sys.stdin.buffer.readline())
    segments: set[tuple[str, ...]] = set()
    start = time.monotonic()
    for seconds, text in steps:
        while (left := start + seconds - time.monotonic()) > 0:
            segments |= _segments(process)
            if select.select([sys.stdin], [], [], min(left, _LOOK_SECONDS))[0]:
                # The process was killed: at the end of the block it would have killed this one.
                _unlink(segments)
                return
        # If the process has ended, this one has another parent now.
        if os.getppid() != process:
            return
        for file in (2, 1):  # the first that is not closed
            with contextlib.suppress(OSError):
                os.write(file, text.encode(errors="replace"))
                break
    unlink_segments(process)
    os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
