"""Starts the programs of gpu_hazards.py with time limits, and records when lines were printed."""

import contextlib
import ctypes
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

PROGRAMS = pathlib.Path(__file__).resolve().with_name("gpu_hazard_programs.py")
LIMIT = "GPU_HAZARDS_SECONDS"
"""The variable by which a program knows its time limit."""


class Job:
    """A command that has run: its `status` (None if it timed out) and the lines that it printed.

    It ended after `seconds`. After `gone`, none of its processes was left except those that
    `stayed`.
    """

    def __init__(self, command, log, limit, **variables):
        # PR_SET_CHILD_SUBREAPER: processes that it leaves behind become this process's children.
        ctypes.CDLL(None).prctl(36, 1)
        self.lines, self._rest, self._begin = [], "", time.monotonic()
        variables |= {LIMIT: str(limit), "HPCSTRAT_OUTPUT": "all", "PYTHONUNBUFFERED": "1"}
        with open(log, "w") as output, open(log, errors="replace") as self._output:
            files = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
            command = [*map(str, command)]
            process = subprocess.Popen(
                command, env=os.environ | variables, start_new_session=True, **files
            )
            try:
                self._follow(limit, lambda: process.poll() is not None)
                self.status, self.seconds = process.poll(), time.monotonic() - self._begin
                if self.status is None:
                    process.terminate()  # share-gpu ends its daemon on this signal
                    self._follow(15, lambda: process.poll() is not None)
                self._follow(10, lambda: not children())
                self.stayed, self.gone = len(children()), time.monotonic() - self._begin
            finally:
                deadline = time.monotonic() + 5  # a process stuck in the kernel outlives it
                while (left := children()) and time.monotonic() < deadline:  # then their children
                    for child in left:
                        os.kill(child, signal.SIGKILL)
                    time.sleep(0.05)
        pathlib.Path(log).write_text("".join(f"{at:8.2f} {line}\n" for at, line in self.lines))

    def _follow(self, seconds, is_over):
        """Notes the lines that come within `seconds`, or until the command has ended."""
        deadline, ends = time.monotonic() + seconds, False
        while not ends:
            time.sleep(0.05)
            ends = is_over() or time.monotonic() > deadline
            *lines, self._rest = (self._rest + self._output.read()).split("\n")
            self.lines += [(time.monotonic() - self._begin, line) for line in lines]

    def when(self, text, after=0.0):
        """The seconds at which a line with this text came; None if none did."""
        return next((at for at, line in self.lines if text in line and at >= after), None)

    def how(self):
        """How it ended, in words."""
        end = "NO END in time" if self.status is None else f"status {self.status}"
        return f"{end}, {f'{self.stayed} PROCESSES' if self.stayed else 'no process'} stayed"


def children():
    """This process's children, except those that have ended."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if int(path.read_bytes().rpartition(b")")[2].split()[1]) == os.getpid():
                found.append(int(path.parent.name))
    return [child for child in found if os.waitpid(child, os.WNOHANG)[0] == 0]


def since(begin, end):
    """From one line's seconds to another's, in words."""
    return "NEVER" if begin is None or end is None else f"after {end - begin:.1f} s"


def inside(*words):
    """The command of one program."""
    return [sys.executable, PROGRAMS, *map(str, words)]


def mpirun(ranks, *words):
    """The command that starts one program on `ranks` ranks."""
    launcher = shlex.split(os.environ.get("MPIRUN", "mpirun"))
    if (
        "Open MPI"
        in subprocess.run(
            [*launcher, "--version"], capture_output=True, text=True, check=True
        ).stdout
    ):
        wanted = ["--oversubscribe"] + ["--allow-run-as-root"] * (os.geteuid() == 0)
        launcher += [word for word in wanted if word not in launcher]
    return [*launcher, "-n", ranks, *inside(*words)]
