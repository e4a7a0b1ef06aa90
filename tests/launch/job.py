"""Starts programs: each with a time limit, and what they leave behind is found.

job = Job("training.py", 3, folder=tmp_path, launcher="run", namespaces=True).start()
job.wait_for("step-4")
job.signal(job.rank(1), "SIGKILL")
result = job.end()
"""

import contextlib
import functools
import os
import pathlib
import re
import select
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass

import pytest
import simulated_gpu
from processes import Processes, parent

_HERE = pathlib.Path(__file__).parent
_FIRST = [sys.executable, "-I", "-S", str(_HERE / "first_process.py")]
_NOT_THE_USERS = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "HYDI_", "MPI_LOCAL", "SLURM_", "PYTEST_")
_NOT_THE_USERS += ("TORCHELASTIC_", "OMP_NUM_", "OPENBLAS_NUM_", "MKL_NUM_", "BLIS_NUM_")
_SECONDS = 90  # for a job that hangs, on a machine that does other work too


@functools.cache
def version():
    """What the installed `mpirun` says of itself; empty if there is none."""
    if shutil.which("mpirun") is None:
        return ""
    command = ["mpirun", "--version"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def is_open_mpi():
    return "Open MPI" in version()


def mpirun():
    """The words that start `mpirun`, with more ranks than cores."""
    if not is_open_mpi():
        return ["mpirun"]
    return ["mpirun", "--oversubscribe", *["--allow-run-as-root"] * (os.geteuid() == 0)]


@functools.cache
def _unshare():
    """The command that makes namespaces; the test is skipped where none can be made."""
    words = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if os.geteuid():
        words.append("--map-root-user")  # who has the rights only in the namespaces
    mount = "mount -t tmpfs tmpfs /dev/shm".split()
    if not shutil.which("unshare") or subprocess.run([*words, *mount], check=False).returncode:
        pytest.skip("no namespaces can be made here")
    return words


@dataclass(frozen=True)
class Result:
    """What became of a job: status 128 + n if signal n ended it; processes and files that it left."""

    status: int
    out: str
    err: str
    leftovers: list[str]

    @property
    def restarts(self):
        """The lines in which `hpcstrat run` tells of a restart."""
        return re.findall(r"hpcstrat run: .*; restart \d+ of \d+$", self.err, re.MULTILINE)


class Job:
    """A program on some ranks.

    Args:
        program: the name of a file in `programs/`, a path, a source text, or a whole command as a
            list of words, which ignores `ranks`.
        ranks: the number of ranks; `None` starts the program without a launcher.
        arguments: the program's.
        folder: in which it runs, and where its output lies in `stdout` and `stderr`.
        env: more variables; None removes one.
        launcher: `mpirun`, or `run` for `hpcstrat run`.
        options: of the launcher.
        wrap: words before the whole command.
        gpus: whether it sees the host's GPUs, or simulated ones under HPCSTRAT_TEST_GPU=simulated.
        stdin: a text, or a file.
        namespaces: whether it has its own processes, mounts, `/dev/shm`, home and temporary folder.
        before: shell commands that run in the namespaces first.
        leaves: prefixes of what may be left.
    """

    def __init__(
        self,
        program,
        ranks=None,
        *arguments,
        folder,
        env=None,
        launcher="mpirun",
        options=(),
        wrap=(),
        gpus=False,
        stdin=subprocess.DEVNULL,
        namespaces=False,
        before="",
        leaves=(),
    ):
        self.folder = folder
        self._unshare = [*_unshare(), *_FIRST] if namespaces else []
        self._before = before
        self._leaves = tuple(leaves)
        if isinstance(stdin, str):
            (folder / "stdin").write_text(stdin)
            wrap, stdin = [*wrap, "sh", "-c", 'exec "$@" <stdin', "sh"], subprocess.DEVNULL
        self._stdin = stdin
        self._processes = Processes()
        command = self._command(program, ranks, launcher, options, arguments)
        self._words = [*wrap, *map(str, command)]
        self._env = self._environment(gpus, env or {})

    def _command(self, program, ranks, launcher, options, arguments):
        if isinstance(program, list):
            return [*program, *arguments]
        if isinstance(program, str) and re.fullmatch(r"\w+\.py", program):
            program = _HERE / "programs" / program
        elif isinstance(program, str):
            source, number = program, len(list(self.folder.glob("program_*.py")))
            program = self.folder / f"program_{number}.py"
            program.write_text(textwrap.dedent(source))
        if ranks is None:
            return [sys.executable, program, *arguments]
        if launcher == "run":
            start = [sys.executable, "-m", "hpcstrat", "run", "-n", ranks, *options]
            return [*start, program, *arguments]
        return [*mpirun(), *options, "-n", ranks, sys.executable, program, *arguments]

    def _environment(self, gpus, changes):
        """That of a user's shell, with these changes."""
        own = {} if gpus else {"CUDA_VISIBLE_DEVICES": ""}
        if gpus and simulated_gpu.is_wanted():
            own = simulated_gpu.environment()
        path = own.get("PYTHONPATH") or os.environ.get("PYTHONPATH")
        # For what programs have in common.
        own["PYTHONPATH"] = os.pathsep.join(filter(None, [path, f"{_HERE}/programs"]))
        if not shutil.which((os.environ.get("CC") or "cc").split()[0]):  # which programs would say
            own["HPCSTRAT_COMPILE"] = "0"
        if is_open_mpi():
            # Otherwise by its process id in /tmp, where a killed job may have left such a folder.
            own["PRTE_MCA_prte_tmpdir_base"] = os.fspath(self.folder)
        if self._unshare:
            for name, variable in (("home", "HOME"), ("tmp", "TMPDIR")):
                (self.folder / name).mkdir(exist_ok=True)
                own[variable] = os.fspath(self.folder / name)
        else:
            own.update([self._processes.mark])
        kept = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_THE_USERS)}
        return {k: str(v) for k, v in (kept | own | changes).items() if v is not None}

    def run(self, timeout=_SECONDS):
        return self.start().end(timeout)

    def start(self):
        command, told, tell = self._words, None, -1
        if self._unshare:
            told, tell = os.pipe()
            mark = "=".join(self._processes.mark)
            command = [*self._unshare, str(tell), self._before, mark, *command]
        # Not pipes, which would be full before a reader comes.
        with open(self.folder / "stdout", "w") as out, open(self.folder / "stderr", "w") as err:
            self._process = subprocess.Popen(
                command,
                stdin=self._stdin,
                stdout=out,
                stderr=err,
                env=self._env,
                cwd=self.folder,
                start_new_session=True,
                pass_fds=[tell] if self._unshare else [],
            )
        # Readable at the end. A wait with a limit would look only every 50 ms.
        self._end = os.pidfd_open(self._process.pid) if told is None else told
        if told is not None:
            os.close(tell)
        return self

    @property
    def out(self):
        """What has been printed until now."""
        return (self.folder / "stdout").read_text(errors="replace")

    @property
    def err(self):
        return (self.folder / "stderr").read_text(errors="replace")

    def wait_until(self, condition, what="a condition"):
        """Returns the condition's value once it is true; fails if the job ends before."""
        deadline = time.monotonic() + _SECONDS
        is_over = False
        while not (found := condition()):
            if is_over:
                pytest.fail(f"{what} has not come\n{self.out}\n{self.err}")
            is_over = self._has_ended(0.02) or time.monotonic() > deadline
        return found

    def wait_for(self, *names):
        """Waits until the program has made these files in its folder."""
        self.wait_until(lambda: all((self.folder / name).exists() for name in names), f"{names}")

    def pause(self, seconds):
        """Lets it run for that long, or to its end."""
        self._has_ended(seconds)

    def rank(self, number):
        """The process of a rank: the one with its variable whose parent has none."""

        def find():
            names = f"PMI_RANK={number}", f"OMPI_COMM_WORLD_RANK={number}"
            of_rank = self._processes.with_variable(*names)
            return [process for process in of_rank if parent(process) not in of_rank]

        return self.wait_until(find, f"rank {number}")[0]

    def launcher(self):
        """The process that was started, in the namespaces if there are any."""
        if not self._unshare:
            return self._process.pid

        def find():
            ours = self._processes.all()
            return min((one for one in ours if parent(one) not in ours), default=None)

        return self.wait_until(find, "the command")

    def processes(self):
        return self._processes.running()

    def signal(self, process, name):
        """Sends a signal, unless the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, getattr(signal, name))

    def end(self, timeout=_SECONDS):
        """Waits for its end, and looks for what it left; kills it after so many seconds, and fails."""
        deadline = time.monotonic() + timeout
        while not (ended := self._has_ended(0.1)) and time.monotonic() < deadline:
            self._processes.look()
        status = self._status() if ended else None
        leftovers = self._leftovers() if status is not None else []
        self.kill()
        print(self.out[-10_000:], self.err[-10_000:], sep="\n")  # pytest shows it if the test fails
        if status is None:
            pytest.fail(f"the job gave no result within {timeout} s")
        return Result(status, self.out, self.err, leftovers)

    def kill(self):
        for process in [*self._processes.all(), self._process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._process.wait()
        if self._end >= 0:
            os.close(self._end)
            self._end = -1

    def _leftovers(self):
        folders = []
        if self._unshare:
            pid = self._process.pid
            first = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().strip()
            folders = [f"/proc/{first}/root/dev/shm", self.folder / "tmp"]
        left = self._processes.leftovers(folders)
        return [one for one in left if not one.startswith(self._leaves)]

    def _has_ended(self, seconds):
        return bool(select.select([self._end], [], [], seconds)[0])

    def _status(self):
        told = os.read(self._end, 10) if self._unshare else self._process.wait()
        if told == b"":
            return None
        status = int(told)
        return status if status >= 0 else 128 - status


class Launch:
    """`launch(program, ranks, *arguments, ...)` runs a job in the test's folder."""

    def __init__(self, folder):
        self.folder = folder
        self.open_mpi = is_open_mpi()
        self.mpirun = mpirun()
        self._started = []

    def __call__(self, program, ranks=None, *arguments, timeout=_SECONDS, **options):
        """Runs a job to its end; see `Job` for the options."""
        return self.start(program, ranks, *arguments, **options).end(timeout)

    def start(self, program, ranks=None, *arguments, **options):
        """Starts a job, which the test ends by `end`."""
        job = Job(program, ranks, *arguments, folder=self.folder, **options).start()
        self._started.append(job)
        return job

    def kill(self):
        for job in self._started:
            job.kill()
