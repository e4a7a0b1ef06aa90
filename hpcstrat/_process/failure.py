"""An error on one rank ends all ranks: with its traceback, its rank, and a non-zero exit status.

| event                     | what this rank does                 | what the other ranks see      |
|---------------------------|-------------------------------------|-------------------------------|
| error in the main thread, | prints its traceback; exits, or     | killed wherever they are      |
| ranks not yet connected   | asks MPICH's launcher for the end   |                               |
| error, any thread, later  | prints its traceback, `MPI.Abort`   | killed in any call, silently  |
| error that another rank   | waits 1 s for the cause; is mostly  | nothing of it: the cause      |
| caused                    | killed before it prints             | ends them                     |
| `end_job`: ranks hang, or | prints the message, `MPI.Abort`     | killed in any call, silently  |
| call different things     |                                     |                               |
| `sys.exit(1)`, ranks not  | the same, and says so               | killed wherever they are      |
| yet connected             |                                     |                               |
| `sys.exit(1)`, later      | shows hidden text, tells the        | their next call ends the job: |
|                           | launcher, and leaves                | "left the program before"     |
| `raise SystemExit(1)`     | leaves                              | the same; before they are     |
|                           |                                     | connected, a time-out         |
| `os._exit(1)`             | nothing                             | killed by the launcher        |
| crash in C                | Python prints the lines of all      | killed by the launcher        |
|                           | threads                             |                               |
| the launcher is gone      | says so, cleans up, and exits       | each does the same            |
| error only logged; thread | shows the text, and continues       | nothing                       |
| fails before they connect |                                     |                               |

What the library changes in a process for this, all of it here and in `output.py`, is listed in
docs/one_program.md. Where it replaces a hook, the hook that was there still prints.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import faulthandler
import functools
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from hpcstrat._process import guard, launchers, output

_CONSEQUENCE_DELAY = 1.0  # seconds that a rank waits, so that the cause is reported first
_LEAD_DELAY = 0.3  # seconds that the other ranks give rank 0
_FORWARD_DELAY = 0.1  # seconds that mpirun gets to pass on what was printed, before MPI's message
_ABORT_SECONDS = 5.0  # that MPI gets to end the job; then this rank ends itself, even in C code
_PMI_SECONDS = 3.0  # that the launcher gets for an answer
_PMI = "PMI_FD"  # the variable with the connection to a launcher that speaks PMI, as MPICH's

before_the_end: list[Callable[[], None]] = []
"""Called when this rank ends the job, by the thread that does."""

_process = 0  # this rank's; 0 if it has no others to end
_rank = 0
_is_connected = False
_latest_hook: Callable[..., object] | None = None


def install_at_import() -> None:
    """Installs what several ranks need before they are connected. Starts nothing.

    Raises:
        RuntimeError: a variable is not as launchers set it.
        ValueError: a variable has a value that is not allowed.
    """
    launcher = launchers.find()
    if launcher is None:
        return
    # First the end of all ranks, so that an error of what follows, here or in a later import, ends
    # them: they wait in the start of MPI, or soon will.
    if not launchers.is_child():
        if not launcher.alone:
            _install_hook()
            _set_rank(launcher.rank)
            sys.exit = _Leave(sys.exit)
            for name in {"exit", "quit"} & vars(builtins).keys():  # the site's
                setattr(builtins, name, _Leave(getattr(builtins, name)))
    output.install()


def install_when_connected(rank: int) -> None:
    """Installs what several ranks need once they are connected.

    From now on an uncaught exception, in any thread, ends all ranks.
    """
    if sys.excepthook is not _latest_hook:  # the program has set its own since
        _install_hook()
    _set_rank(rank, is_connected=True)
    # Python survives a failed thread. Other ranks would hang: they wait for that thread's calls.
    threading.excepthook = functools.partial(_report_of_thread, threading.excepthook)
    # A segmentation fault prints Python's traceback, unless the user has arranged that.
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        with contextlib.suppress(OSError, ValueError):  # closed
            # A duplicate: if the program closes its own, that number may become its data's file.
            faulthandler.enable(os.dup(sys.__stderr__.fileno()))


def _set_rank(rank: int, is_connected: bool = False) -> None:
    """From now on this process is this rank."""
    global _process, _rank, _is_connected
    _process, _rank, _is_connected = os.getpid(), rank, is_connected
    output.tag_with(rank)


# ---- uncaught exceptions


def _install_hook() -> None:
    global _latest_hook
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # A later hook of ours calls this one.
        is_latest = _latest_hook is hook
        _report(error, functools.partial(previous, kind, error, trace), ends=is_latest)

    sys.excepthook = _latest_hook = hook


def _report_of_thread(
    previous: Callable[[threading.ExceptHookArgs], object], arguments: threading.ExceptHookArgs
) -> None:
    show = functools.partial(previous, arguments)
    _report(arguments.exc_value, show, ends=arguments.exc_type is not SystemExit)


def _report(error: BaseException | None, show: Callable[[], object], ends: bool) -> None:
    """Prints an uncaught exception, as `show` does, and ends all ranks if it `ends` them."""
    if error is not None:
        for explain in output.explanations:
            explain(error)
    if not ends or not _can_end_others():
        with output.reporting():
            show()
        return
    shown = output.capture(show, error)
    is_consequence = _is_consequence(error)
    if is_consequence:
        time.sleep(_CONSEQUENCE_DELAY)
    _let_rank_0_speak()
    if not is_consequence:
        shown = output.take_hidden_errors() + shown
    output.say(shown)
    if _must_abort():
        _abort(1)


def mark_as_consequence(error: BaseException) -> None:
    """Marks an error as caused by another rank's, which is then reported first."""
    # On the error itself: it may be raised again, or be reported by another hook, far from here.
    error.__dict__["_hpcstrat_consequence"] = True


def _is_consequence(error: BaseException | None) -> bool:
    MPI = _started_mpi() if _is_connected else None
    return (MPI is not None and isinstance(error, MPI.Exception)) or getattr(
        error, "_hpcstrat_consequence", False
    )


# ---- sys.exit, for which Python calls no hook


class _Exit(SystemExit):
    """A `SystemExit` that notices when it ends the program."""

    @property
    def code(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The status."""
        status = super().code
        # Python itself asks, and no line of the program: nothing has caught it.
        if sys._getframe().f_back is None and status is not None and status != 0:
            # Registered last it runs first: before mpi4py's own end, which would wait for others.
            atexit.register(_end_after_exit, status)
        return status


class _Leave:
    """`sys.exit`, `exit` or `quit`, which from the main thread raises `_Exit`."""

    def __init__(self, leave: Callable[..., object]) -> None:
        self._leave = leave
        functools.update_wrapper(self, leave)

    def __repr__(self) -> str:  # which the prompt shows for `exit`
        return repr(self._leave)

    def __call__(self, code: Any = None) -> NoReturn:
        try:
            self._leave(code)
        except SystemExit as error:
            if threading.current_thread() is threading.main_thread():
                raise _Exit(*error.args) from None
            raise
        raise AssertionError


def _end_after_exit(status: object) -> None:
    """Ends all ranks if this one leaves early: the others would wait."""
    if not _can_end_others():
        return
    text = output.take_hidden_errors()
    if text or not _is_connected:
        # Open MPI's launcher may crash if a rank ends while another connects to it.
        _let_rank_0_speak()
    if not _is_connected and _must_abort():
        end_job(
            f"{text}hpcstrat: the job ends: rank {_rank} left the program by "
            f"sys.exit({status!r}) before the ranks were connected; look at what it printed last",
            status if isinstance(status, int) else 1,
        )
    if text:  # the others' next call ends them, or the launcher, because of this status
        output.say(text)


def _let_rank_0_speak() -> None:
    """Gives rank 0 time to end the job, so that it alone reports what all ranks would."""
    if _rank > 0:
        time.sleep(_LEAD_DELAY)


# ---- the end of the job


def end_job(message: str, status: int = 1, consequence: bool = False) -> NoReturn:
    """Ends all ranks: prints the message, tagged, to standard error, and exits with this status.

    A consequence waits for the rank that reports the cause, and is not printed if that rank ends
    the job first.
    """
    if consequence:
        time.sleep(_CONSEQUENCE_DELAY)
    output.say(message)
    _abort(status)


def end_rank(message: str) -> NoReturn:
    """Ends this rank when its launcher, which could end the others, is gone."""
    output.say(message)
    _clean_up()
    guard.unlink_segments(os.getpid(), guard.OPEN_MPI)  # which Open MPI leaves to its launcher
    os._exit(1)


def _started_mpi() -> Any:
    """The module `mpi4py.MPI` if MPI has been started, else None."""
    MPI = sys.modules.get("mpi4py.MPI")
    # A thread that ends the job may come here while the main thread imports it.
    if MPI is None or getattr(MPI.__spec__, "_initializing", False):
        return None
    return MPI if MPI.Is_initialized() else None


def _can_end_others() -> bool:
    """Whether this process can end others: it is the rank's own, and MPI has not ended."""
    MPI = _started_mpi()
    # A forked child must not end its parent's job.
    return os.getpid() == _process and (MPI is None or not MPI.Is_finalized())


def _abort(status: int) -> NoReturn:
    """Ends all ranks, or this process if it is alone; the status is never 0."""
    status = status or 1
    _clean_up()
    if _can_end_others():
        time.sleep(_FORWARD_DELAY)
        if (MPI := _started_mpi()) is not None:
            _abort_mpi(MPI, status)
        elif _PMI in os.environ:
            with contextlib.suppress(OSError, ValueError):
                _abort_pmi(int(os.environ[_PMI]), status)
    os._exit(status)  # a non-zero status makes other launchers end the others


def _clean_up() -> None:
    """Saves what others have asked to save, and removes what MPI would leave behind."""
    for call in before_the_end:
        with contextlib.suppress(Exception):
            call()
    guard.unlink_segments(os.getpid())  # after an abort MPICH's stays in /dev/shm


def _must_abort() -> bool:
    """Whether an exit status alone might not end the others.

    MPI does not end them, nor does a launcher that ignores the status of a process that has not
    started MPI, as MPICH's does.
    """
    return _started_mpi() is not None or _PMI in os.environ


def _abort_mpi(MPI: Any, status: int) -> None:
    # Only the thread that started MPI may call it, unless it was started for any thread.
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main and MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        return
    # Open MPI waits for its launcher, maybe forever.
    if signal.getsignal(signal.SIGALRM) == signal.SIG_DFL:
        signal.setitimer(signal.ITIMER_REAL, _ABORT_SECONDS)
    MPI.COMM_WORLD.Abort(status)


def _abort_pmi(connection: int, status: int) -> None:
    """Says what MPI says to the launcher as it starts, and then as it aborts."""
    os.write(connection, b"cmd=init pmi_version=1 pmi_subversion=1\n")
    if select.select([connection], [], [], _PMI_SECONDS)[0]:
        os.read(connection, 1 << 10)
    os.write(connection, f"cmd=abort exitcode={status}\n".encode())
    select.select([connection], [], [], _PMI_SECONDS)  # the launcher kills this process, too
