"""Runs the ranks, start by start: passes signals on, and ends them if this process is killed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1


class Job:
    """The ranks of one program, which may be started more than once.

    Args:
        command: see the attribute.
        end_signal: the signal that ends the ranks; if this process is killed, it is sent to the
            command's process.
        kept: signals that would end the command's process, and so are sent to the ranks directly.
        around: makes a block for each start, which yields more variables for the ranks. If it
            raises `subprocess.CalledProcessError`, the start has failed with that status.

    Attributes:
        command: returns the command line for a number of ranks and the variables that they get in
            addition to this process's.
        signal: the last signal that this process was sent to end the job; 0 if there was none.
        processes: returns the processes of the ranks, as far as they are known.
    """

    def __init__(
        self,
        command: Callable[[int, dict[str, str]], list[str]],
        end_signal: int,
        kept: Collection[int],
        around: Callable[[], AbstractContextManager[dict[str, str]]],
    ) -> None:
        self.signal = 0
        self.processes: Callable[[], Iterable[int]] = tuple
        self._pending = 0  # a signal that came between two starts, for the ranks of the next start
        self.command = command
        self._end_signal = end_signal
        self._kept = kept
        self._around = around
        self._process: subprocess.Popen[bytes] | None = None

    @contextlib.contextmanager
    def passing_signals_on(self) -> Iterator[None]:
        """A block during which signals go to the ranks, instead of ending this process."""
        handlers = {number: self._pass_on for number in _PASSED_ON}
        handlers |= {signal.SIGTSTP: self._suspend}
        # A signal that is ignored, as under nohup, stays ignored; the ranks inherit that.
        previous = {
            number: signal.getsignal(number)
            for number in handlers
            if signal.getsignal(number) != signal.SIG_IGN
        }
        for number in previous:
            signal.signal(number, handlers[number])
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def start(self, ranks: int, environment: dict[str, str]) -> int:
        """Starts the ranks, waits for their end and returns the exit status.

        The status is 128 + n if signal n ended the launcher.

        Args:
            ranks: the number of ranks.
            environment: variables that the ranks get in addition to this process's.

        Raises:
            OSError: the launcher cannot be started.
        """
        try:
            with self._around() as variables:
                status = self._start(self.command(ranks, environment), variables | environment)
        except subprocess.CalledProcessError as error:
            status = error.returncode
        return status if status >= 0 else 128 - status

    def _start(self, command: list[str], environment: dict[str, str]) -> int:
        launcher = os.getpid()

        def die_with_launcher() -> None:
            # Only a C function: between fork and exec, another thread's lock may be held for ever.
            _prctl(_PR_SET_PDEATHSIG, self._end_signal)
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

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if number in _ENDING:
            self.signal = number
        self._pending = number if self._process is None else 0
        if self._process is None:
            return
        if number not in self._kept:
            self._process.send_signal(number)
            return
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
