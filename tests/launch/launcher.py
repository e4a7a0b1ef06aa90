"""Starts programs under `mpirun`, each with a time limit, and checks what they leave behind."""

import contextlib
import importlib.util
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from dataclasses import dataclass

import pytest
import simulated_gpu
from internals import compiled

_MARK = "LAUNCHED_BY_TEST"  # a variable that marks a job's processes
_LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "HYDI_", "MPI_LOCAL", "SLURM_STEP")
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
_LOOK_SECONDS = 0.1
_SETTLE_SECONDS = 20


def skip_unless_it_computes(library, are_gpus_seen):
    """Skips a test of `torch` or `jax`, or of neither, that cannot compute where replicas do."""
    if library not in ("torch", "jax"):
        return
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    if are_gpus_seen and simulated_gpu.is_wanted():
        pytest.skip(f"{library} does not know simulated GPUs")
    if are_gpus_seen and not _has_cuda(library):
        pytest.skip(f"{library} is installed without CUDA")


def _has_cuda(library):
    # How it was built: CUDA must not start in the process of the tests.
    if library == "torch":
        import torch  # pyright: ignore[reportMissingImports]

        return torch.version.cuda is not None
    return any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))


@dataclass(frozen=True)
class Launched:
    """The result of a job.

    Attributes:
        status: mpirun's exit status.
        stdout: what all ranks printed.
        stderr: what all ranks printed on standard error.
        leftovers: processes of the job that still exist, and files in shared memory that its
            processes mapped.
        seconds: how long the job took.
    """

    status: int
    stdout: str
    stderr: str
    leftovers: list[str]
    seconds: float

    def tagged(self, rank):
        """The lines of standard error that carry the rank's tag, without the tag."""
        return [
            match[1] for match in re.finditer(rf"^\[rank {rank}\] (.*)$", self.stderr, re.MULTILINE)
        ]


class Launcher:
    """Starts programs, under the installed `mpirun` or without it."""

    def __init__(self, folder):
        self.folder = folder
        self.mpirun = ["mpirun"]
        self.version = subprocess.run(
            ["mpirun", "--version"], capture_output=True, text=True, check=True
        ).stdout
        self.open_mpi = "Open MPI" in self.version
        if self.open_mpi:
            self.mpirun += ["--oversubscribe"] + ["--allow-run-as-root"] * (os.geteuid() == 0)

    def __call__(self, program, ranks=None, *arguments, **options):
        """What `run` returns; pytest shows what was printed if the test fails."""
        launched = self.run(program, ranks, *arguments, **options)
        print(launched.stdout, launched.stderr, sep="\n")
        return launched

    def run(self, program, ranks=None, *arguments, timeout=90, env=None, options=(), gpus=False):
        """Runs a program on `ranks` ranks, or without `mpirun` if it is None.

        Args:
            program: its source text, or the path of its file.
            ranks: the number of ranks.
            arguments: the program's.
            timeout: seconds; a job that takes longer is killed, and the test fails.
            env: more variables; None removes one.
            options: of mpirun.
            gpus: whether it sees the host's GPUs, or simulated ones under
                HPCSTRAT_TEST_GPU=simulated.
        """
        changes = {"CUDA_VISIBLE_DEVICES": ""} if not gpus else {}
        if gpus and simulated_gpu.is_wanted():
            changes = simulated_gpu.environment()
        if compiled.compiler() is None:  # which programs would say
            changes["HPCSTRAT_COMPILE"] = "0"
        if self.open_mpi:
            # It names a folder in /tmp by its process id, and does not start where a killed job
            # with that id has left one.
            changes["PRTE_MCA_prte_tmpdir_base"] = os.fspath(self.folder)
        if isinstance(program, str):
            path = self.folder / f"program_{uuid.uuid4().hex[:8]}.py"
            path.write_text(textwrap.dedent(program))
        else:
            path = program
        job = _Job()
        command = [sys.executable, path, *arguments]
        if ranks is not None:
            command = [*self.mpirun, *options, "-n", str(ranks), *command]
        begin = time.monotonic()
        with (
            open(self.folder / "stdout", "w+b") as stdout,
            open(self.folder / "stderr", "w+b") as stderr,
        ):
            process = subprocess.Popen(
                [os.fspath(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=_environment(changes | (env or {})) | {_MARK: job.mark},
                cwd=self.folder,
                start_new_session=True,
            )
            # A wait with a limit looks only every 50 ms.
            end = threading.Thread(target=process.wait, daemon=True)
            end.start()
            while end.is_alive() and time.monotonic() - begin < timeout:
                job.look()
                end.join(_LOOK_SECONDS)
            seconds = time.monotonic() - begin
            status = None if end.is_alive() else process.returncode
            leftovers = job.leftovers(0 if status is None else _SETTLE_SECONDS)
            job.kill()
            end.join()
            stdout.seek(0)
            stderr.seek(0)
            output, errors = (file.read().decode(errors="replace") for file in (stdout, stderr))
        if status is None:
            pytest.fail(f"the job gave no result within {timeout} s\n{output}\n{errors}")
        return Launched(status, output, errors, leftovers, seconds)


def _environment(changes):
    """The environment of a user's shell, with these changes."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_LAUNCHERS)
        and name not in _THREADS
        and not name.startswith("PYTEST_")
    }
    return {name: value for name, value in (kept | changes).items() if value is not None}


class _Job:
    """A job's processes, marked by an environment variable, and the shared memory they map."""

    def __init__(self):
        self.mark = uuid.uuid4().hex
        # process -> how often it looked like another job's; at first it may not run its program yet
        self.looks = {}
        self.ours = set()
        self.files = set()

    def processes(self):
        """The job's running processes."""
        there = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self.ours &= there
        self.looks = {process: looks for process, looks in self.looks.items() if process in there}
        for process in there - self.ours:
            if self.looks.setdefault(process, 0) < 3:
                if f"{_MARK}={self.mark}".encode() in _read(process, "environ"):
                    self.ours.add(process)
                self.looks[process] += 1
        return sorted(self.ours)

    def look(self):
        """Notes the files that the job's processes map; they are mapped for as long as MPI runs."""
        for process in self.processes():
            maps = _read(process, "maps").decode(errors="replace")
            self.files.update(re.findall(r" (/dev/shm/\S+)$", maps, re.MULTILINE))

    def leftovers(self, patience):
        """What is left of the job after some seconds in which its processes remove their files."""
        deadline = time.monotonic() + patience
        while True:
            running = [
                f"process {process}: "
                f"{_read(process, 'cmdline').replace(bytes(1), b' ').decode(errors='replace')}"
                for process in self.processes()
                if _runs(process)
            ]
            if not running or time.monotonic() > deadline:
                return running + [path for path in sorted(self.files) if os.path.exists(path)]
            time.sleep(_LOOK_SECONDS)

    def kill(self):
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def _runs(process):
    """Not a zombie that waits for `init`, which may take its status only once per second."""
    fields = _read(process, "stat").rpartition(b")")[2].split()
    # Its threads may outlive the first.
    return bool(fields) and (fields[0] != b"Z" or fields[17] != b"1")


def _read(process, name):
    try:
        return pathlib.Path(f"/proc/{process}/{name}").read_bytes()
    except OSError:  # it has ended, or is another user's
        return b""
