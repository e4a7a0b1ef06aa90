"""Runs the ranks, start by start: passes signals on, and ends them if this process is killed."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType

from hpcstrat._process import launchers
from hpcstrat._tools.launch.mpiexec import FOLDER, LaunchError, Mpiexec, in_allocation

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1
_PRINT_VARIABLES = (
    "import json, os, sys; print(json.dumps(dict(os.environ)), flush=True); sys.stdin.read()"
)


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
    return ["sh", str(FOLDER / "share-gpu"), *([] if nccl is None else ["--nccl", nccl]), *program]


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


# ---- the command of a program


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
    is_source = first.endswith((".py", ".pyz")) or os.path.isdir(first)
    if os.path.exists(first) and (is_source or not os.access(first, os.X_OK)):
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
