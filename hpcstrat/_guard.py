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

_LONGEST_WAIT = 86_400.0  # seconds, of which the system's calls take only so many


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
        command = [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid())]
        guard = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0)
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
    try:
        with open(f"/proc/{process}/maps") as maps:
            segments = {tuple(line.split()[4:]) for line in maps if f" {prefix}" in line}
    except OSError:  # no /proc
        return
    for inode, path, *deleted in segments:
        with contextlib.suppress(OSError):
            if not deleted and os.stat(path).st_ino == int(inode):
                os.unlink(path)


def _main(process: int) -> None:
    steps = [Step(*step) for step in json.loads(sys.stdin.buffer.readline())]
    begin = time.monotonic()
    for step in steps:
        while (left := begin + step.seconds - time.monotonic()) > 0:
            if select.select([sys.stdin], [], [], min(left, _LONGEST_WAIT))[0]:
                return  # the process has ended
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
