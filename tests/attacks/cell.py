"""Cells: programs that run isolated from all others, so that everything they leave is visible."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time
import uuid

import pytest
from internals import launchers

_INIT = pathlib.Path(__file__).with_name("init.py")
_MARK = "CELL"  # a variable that marks a cell's processes
_KEPT = ("PATH", "LANG", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "OPENBLAS_CORETYPE")
_SECONDS = 60  # for a command that hangs
_SETTLE_SECONDS = 10  # for processes that are about to end


def _unshare():
    """The command that makes namespaces, with rights that the user may have only in a namespace."""
    words = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return words if os.geteuid() == 0 else [*words, "--map-root-user"]


def why_not():
    """Why cells do not work here; empty if they do."""
    try:
        result = subprocess.run([*_unshare(), "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "there is no unshare here"
    return f"no namespaces can be made here: {result.stderr.strip()}" if result.returncode else ""


class Cell:
    """A mount and a PID namespace with their own `/dev/shm`, home and temporary folder.

    Args:
        folder: in which programs run.

    Attributes:
        folder: see the argument.
        home: a folder inside.
        python: the Python of the tests.
    """

    def __init__(self, folder):
        self.folder = folder
        self.python = sys.executable
        self.home = folder / "home"
        self.home.mkdir()
        self._mark = uuid.uuid4().hex
        self._temporary = folder / "tmp"
        self._temporary.mkdir()

    def write(self, text, name="program.py"):
        """Writes a program."""
        (self.folder / name).write_text(textwrap.dedent(text))

    def start(self, *words, leaves=(), shm="1g", before="", stdin="", stdout=None, **env):
        """Starts a command.

        Args:
            words: the command; `hpcstrat` and `python` are those of the tests.
            leaves: prefixes of the paths of files, or of the commands of processes, that may be
                left.
            shm: the size of `/dev/shm`.
            before: shell commands that run in the cell first.
            stdin: a text.
            stdout: a path that standard output goes to, instead of a file that is read.
            env: more variables.
        """
        words = [sys.executable, *words[1:]] if words[0] == "python" else list(words)
        if words[0] == "hpcstrat":
            words = [sys.executable, "-m", *words]
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        own = {
            "HOME": self.home,
            "TMPDIR": self._temporary,
            "CUDA_VISIBLE_DEVICES": "",
            _MARK: self._mark,
        }
        options = [self.folder / "left", _SETTLE_SECONDS, "\n".join(leaves), shm, before]
        init = [sys.executable, "-I", "-S", _INIT, *options, *words]
        self.write(stdin, "stdin")
        with (  # files, not pipes, which would be full before they are read
            open(self.folder / "stdin") as file,
            open(stdout or self.folder / "stdout", "w") as output,
            open(self.folder / "stderr", "w") as errors,
        ):
            process = subprocess.Popen(
                [*_unshare(), *map(str, init)],
                stdin=file,
                stdout=output,
                stderr=errors,
                cwd=self.folder,
                env={name: str(value) for name, value in (kept | own | env).items()},
                start_new_session=True,
            )
        return Attacked(self, process)

    def __call__(self, *words, seconds=_SECONDS, **options):
        """Runs a command to its end; see `start` and `Attacked.end`."""
        return self.start(*words, **options).end(seconds)

    def processes(self):
        """The variables of each process of the cell, by its PID outside."""
        found = {}
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                variables = pathlib.Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
                if f"{_MARK}={self._mark}".encode() in variables:
                    found[int(name)] = dict(
                        one.decode().split("=", 1) for one in variables if b"=" in one
                    )
        return found

    def kill(self):
        """Ends the processes that still run."""
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


class Attacked:
    """A command that runs in a cell.

    Attributes:
        status: its exit status, 128 + n if signal n ended it.
        stdout, stderr: what was printed.
        said: the lines of standard error that are hpcstrat's own.
    """

    def __init__(self, cell, process):
        self._cell = cell
        self._process = process
        self.status = None

    @property
    def stdout(self):
        path = self._cell.folder / "stdout"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def stderr(self):
        return (self._cell.folder / "stderr").read_text(errors="replace")

    @property
    def said(self):
        return [
            line
            for line in self.stderr.splitlines()
            if "hpcstrat" in line and not line.startswith(" ")
        ]

    def wait_for(self, name):
        """Waits until the program has made this file in its folder."""
        self._wait(lambda: (self._cell.folder / name).exists(), f"the file {name}")

    def _wait(self, condition, what):
        deadline = time.monotonic() + _SECONDS
        while not (found := condition()):
            if self._process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{what} has not come\n{self.stdout}\n{self.stderr}")
            time.sleep(0.01)
        return found

    def rank(self, number):
        """The process of a rank: the one with its variable whose parent has none."""
        names = launchers.RANK_NAMES

        def find():
            there = self._cell.processes().items()
            ranks = {process for process, env in there if str(number) in map(env.get, names)}
            return sorted(process for process in ranks if _parent(process) not in ranks)

        return self._wait(find, f"rank {number}")[0]

    def launcher(self):
        """The process that was started."""

        def find():
            own = {
                process for process, env in self._cell.processes().items() if "CELL_COMMAND" in env
            }
            return sorted(process for process in own if _parent(process) not in own)

        return self._wait(find, "the command")[0]

    def wait_for_death(self, process):
        """Waits until a process has ended."""
        self._wait(
            lambda: not pathlib.Path(f"/proc/{process}").exists(), f"the end of process {process}"
        )

    def pause(self, seconds):
        """Lets the command run for that long, or to its end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def signal(self, process, name):
        """Sends a signal, unless the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, getattr(signal, name))

    def end(self, seconds=_SECONDS):
        """Waits for the end, and checks that the command left nothing behind.

        Args:
            seconds: after them, it counts as hanging.
        """
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"no end after {seconds} s")
        finally:
            # pytest shows it if the test fails.
            print(self.stdout[-10_000:], self.stderr[-10_000:], sep="\n")
        report = json.loads((self._cell.folder / "left").read_text())
        self.status = report["status"]
        assert report["left"] == []
        return self


def _parent(process):
    try:
        return int(pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
