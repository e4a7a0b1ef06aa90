"""Tests that start programs under `mpirun`, each with a time limit, and look at what they leave behind."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from dataclasses import dataclass

import pytest

_MARK = "LAUNCHED_BY_TEST"  # a variable that tells a job's processes from all others
_LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "HYDI_", "MPI_LOCAL", "SLURM_STEP")
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
_SHARED_MEMORY = pathlib.Path("/dev/shm")
_SETTLE_SECONDS = 3


@dataclass(frozen=True)
class Launched:
    """What came of a job.

    Attributes:
        status: mpirun's exit status.
        stdout: what all ranks printed.
        stderr: the same of standard error.
        seconds: how long it ran.
        leftovers: processes of the job that are still there, and new files in shared memory that nobody has open.
    """

    status: int
    stdout: str
    stderr: str
    seconds: float
    leftovers: list[str]

    def tagged(self, rank):
        """The lines of standard error that carry the rank's tag, without it."""
        return [match[1] for match in re.finditer(rf"^\[rank {rank}\] (.*)$", self.stderr, re.MULTILINE)]


class Launcher:
    """Starts programs, under the `mpirun` that is installed or without one."""

    def __init__(self, folder):
        self.folder = folder
        self.mpirun = ["mpirun"]
        version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout
        self.open_mpi = "Open MPI" in version
        if self.open_mpi:
            self.mpirun += ["--oversubscribe"] + ["--allow-run-as-root"] * (os.geteuid() == 0)

    def __call__(self, program, ranks=None, *arguments, timeout=30, env=None, options=()):
        """Runs a program on so many ranks, or without `mpirun` where `ranks` is None.

        Args:
            program: its source text, or the path of its file.
            ranks: the number of ranks.
            arguments: the program's.
            timeout: seconds; a job that takes longer is killed, and the test fails.
            env: more variables; None takes one away.
            options: of mpirun.
        """
        if isinstance(program, str):
            path = self.folder / f"program_{uuid.uuid4().hex[:8]}.py"
            path.write_text(textwrap.dedent(program))
        else:
            path = program
        mark = uuid.uuid4().hex
        command = [sys.executable, path, *arguments]
        if ranks is not None:
            command = [*self.mpirun, *options, "-n", str(ranks), *command]
        files_before = _shared_files()
        begin = time.monotonic()
        with open(self.folder / "stdout", "w+b") as stdout, open(self.folder / "stderr", "w+b") as stderr:
            process = subprocess.Popen(
                [os.fspath(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=_environment(env or {}) | {_MARK: mark},
                cwd=self.folder,
                start_new_session=True,
            )
            try:
                status = process.wait(timeout)
            except subprocess.TimeoutExpired:
                status = None
            seconds = time.monotonic() - begin
            leftovers = _leftovers(mark, files_before, 0 if status is None else _SETTLE_SECONDS)
            _kill(mark)
            process.wait()
            stdout.seek(0)
            stderr.seek(0)
            output, errors = (file.read().decode(errors="replace") for file in (stdout, stderr))
        if status is None:
            pytest.fail(f"the job gave no result within {timeout} s\n{output}\n{errors}")
        print(output, errors, sep="\n")  # pytest shows it where the test fails
        return Launched(status, output, errors, seconds, leftovers)


@pytest.fixture
def launch(tmp_path):
    """Starts programs under mpirun: `launch(source, ranks)`."""
    if shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun here")
    return Launcher(tmp_path)


def _environment(changes):
    """The environment of a user at the shell, with these changes."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_LAUNCHERS) and name not in _THREADS and not name.startswith("PYTEST_")
    }
    return {name: value for name, value in (kept | changes).items() if value is not None}


def _processes(mark):
    """The processes whose environment carries the mark."""
    for folder in pathlib.Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                found = f"{_MARK}={mark}".encode() in (folder / "environ").read_bytes()
            except OSError:  # gone, or another user's
                continue
            if found:
                yield int(folder.name)


def _kill(mark):
    for process in _processes(mark):
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            pass


def _shared_files():
    return {path.name for path in _SHARED_MEMORY.iterdir()} if _SHARED_MEMORY.exists() else set()


def _open_by_nobody(name):
    """Whether no process has the file in shared memory mapped: then it is not of a job that still runs."""
    for maps in pathlib.Path("/proc").glob("[0-9]*/maps"):
        try:
            if f"{_SHARED_MEMORY / name}\n" in maps.read_text():
                return False
        except OSError:
            continue
    return True


def _leftovers(mark, files_before, patience):
    """What is still there of a job when it has had some seconds to go."""
    deadline = time.monotonic() + patience
    while True:
        found = [f"process {process}: {_command_line(process)}" for process in _processes(mark)]
        found += [f"/dev/shm/{name}" for name in sorted(_shared_files() - files_before) if _open_by_nobody(name)]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def _command_line(process):
    try:
        return pathlib.Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "(gone meanwhile)"
