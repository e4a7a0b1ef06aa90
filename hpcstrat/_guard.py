"""A process beside this one, which speaks for it, and ends it, while C code holds Python: MPI's start waits so.

The process runs this file, as a script of its own: it must start fast, and imports the standard library alone.
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


class Step(NamedTuple):
    """What is done if this process is still in the guarded block then.

    Attributes:
        seconds: from the block's begin; `inf` is never.
        text: goes to standard error.
        ends: whether this process is killed then, which makes the launcher end the others.
    """

    seconds: float
    text: str
    ends: bool


@contextlib.contextmanager
def guarded(steps: Sequence[Step]) -> Iterator[None]:
    """A block beside which another process takes these steps, in their order, until the block ends.

    Where no process can be started, nothing guards the block.
    """
    guard = None
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        # A session of its own: the launcher, and Ctrl-C, end the rank's, and the guard cleans up after it.
        command = [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid())]
        guard = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)
        if guard.stdin is not None:
            guard.stdin.write(json.dumps(steps).encode() + b"\n")
    try:
        yield
    finally:
        if guard is not None:
            guard.kill()
            guard.communicate()


def unlink_segments(process: int, prefix: str = "/dev/shm/mpich_shm_") -> None:
    """Unlinks MPI's own segments, which an end by force would leave behind: those that this process has mapped.

    By default MPICH's; only where every rank of the host has mapped it, or none will any more.
    """
    _unlink(_segments(process, prefix))


def _segments(process: int, prefix: str = "/dev/shm/mpich_shm_") -> set[tuple[str, ...]]:
    """Inode and path of each segment that this process has mapped, and whether it is unlinked."""
    try:
        with open(f"/proc/{process}/maps") as maps:
            return {tuple(line.split()[4:]) for line in maps if f" {prefix}" in line}
    except OSError:  # no /proc
        return set()


def _unlink(segments: set[tuple[str, ...]]) -> None:
    for inode, path, *deleted in segments:
        with contextlib.suppress(OSError):
            if not deleted and os.stat(path).st_ino == int(inode):
                os.unlink(path)


def _is_stopped(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"T"
    except OSError:
        return False


def _main(process: int) -> None:
    steps = [Step(*step) for step in json.loads(sys.stdin.buffer.readline())]
    segments: set[tuple[str, ...]] = set()
    begin = looked = time.monotonic()
    for step in steps:
        while (left := begin + step.seconds - looked) > 0:
            if select.select([sys.stdin], [], [], min(left, _LOOK_SECONDS))[0]:
                _unlink(segments)  # the process was killed: at the block's end it kills this one
                return
            segments |= _segments(process)
            before, looked = looked, time.monotonic()
            if _is_stopped(process):  # a suspended job's time does not count
                begin += looked - before
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
