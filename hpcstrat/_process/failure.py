"""An error on one rank ends all ranks: with its traceback, its rank, and a non-zero exit status.

| event on a rank                | what that rank does                 | what the others see      |
|--------------------------------|-------------------------------------|--------------------------|
| uncaught error, main thread    | `sys.excepthook`: prints it, and    | killed wherever they are |
|                                | ends the job                        |                          |
| uncaught error, other thread   | `threading.excepthook`: the same,   | the same                 |
|                                | once the ranks are connected        |                          |
| either, caused by another rank | waits 1 s for the cause; is mostly  | nothing: the cause ends  |
|                                | killed before it prints             | them                     |
| ranks hang, or calls differ    | `end_job`: prints why, and ends the | killed wherever they are |
|                                | job                                 |                          |
| the program's end, `sys.exit`  | leaves; before the ranks are        | their next call ends the |
|                                | connected, after rank 0 may print   | job: "left the program"  |
| `os._exit`, a signal, a crash  | nothing; Python prints the lines of | killed by the launcher,  |
|                                | all threads at a crash in C         | or the watchdog          |
| the launcher is gone           | `end_rank`: says so, and exits      | each does the same       |

Where the library replaces a hook, the hook that was there still prints. `hpcstrat/_start.py` lists
all that is replaced.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from hpcstrat._process import output, pmi, reports, segments

_CONSEQUENCE_DELAY = 1.0  # seconds that a rank waits, so that the cause is reported first
_LEAD_DELAY = 0.3  # seconds that the other ranks give rank 0
_FORWARD_DELAY = 0.1  # seconds that mpirun gets to pass on what was printed, before MPI's message
_ABORT_SECONDS = 5.0  # that MPI gets to end the job; then this rank ends itself, even in C code

_process = 0  # this rank's; 0 if it has no others to end
_rank = 0
_is_connected = False
_latest_hook: Callable[..., object] | None = None


def install(rank: int) -> None:
    """From now on an uncaught exception in this rank's main thread ends all ranks."""
    _set_rank(rank)
    _install_hook()
    atexit.register(_let_rank_0_print)


def install_when_connected(rank: int) -> None:
    """From now on an uncaught exception in any thread ends all ranks, which are connected."""
    global _is_connected
    if sys.excepthook is not _latest_hook:  # the program has set its own since
        _install_hook()
    _set_rank(rank)
    _is_connected = True
    # Python survives a failed thread. Other ranks would hang: they wait for that thread's calls.
    threading.excepthook = functools.partial(_report_of_thread, threading.excepthook)
    # A segmentation fault prints Python's traceback, unless the user has arranged that.
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        with contextlib.suppress(OSError, ValueError):  # closed
            # A duplicate: if the program closes its own, that number may become its data's file.
            faulthandler.enable(os.dup(sys.__stderr__.fileno()))


def _let_rank_0_print() -> None:
    """As the program ends: rank 0 prints what this rank has hidden, before it may be killed."""
    # Open MPI's launcher kills all when a rank leaves with an error and has not started MPI.
    if not _is_connected and os.getpid() == _process and output.has_hidden_errors():
        time.sleep(_LEAD_DELAY)


def _set_rank(rank: int) -> None:
    """From now on this process is this rank."""
    global _process, _rank
    _process, _rank = os.getpid(), rank
    reports.tag_with(rank)


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
    if not ends or not _can_end_others():
        with reports.reporting():
            show()
        return
    shown = reports.capture(show, error)
    is_consequence = _is_consequence(error)
    if is_consequence:
        time.sleep(_CONSEQUENCE_DELAY)
    if _rank > 0:  # rank 0 alone reports what all ranks would
        time.sleep(_LEAD_DELAY)
    reports.say(shown if is_consequence else output.take_hidden_errors() + shown)
    # An exit status alone might not end the others: MPI does not end them, nor does a launcher that
    # ignores the status of a process that has not started MPI, as MPICH's does.
    if _started_mpi() is not None or pmi.VARIABLE in os.environ:
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


# ---- the end of the job


def end_job(message: str, consequence: bool = False) -> NoReturn:
    """Ends all ranks: prints the message, tagged, to standard error, and exits with status 1.

    A consequence waits for the rank that reports the cause, and is not printed if that rank ends
    the job first.
    """
    if consequence:
        time.sleep(_CONSEQUENCE_DELAY)
    reports.say(message)
    _abort(1)


def end_rank(message: str) -> NoReturn:
    """Ends this rank when its launcher, which could end the others, is gone."""
    reports.say(message)
    segments.unlink(segments.MPICH + segments.OPEN_MPI)  # the latter's launcher would do it
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
    """Ends all ranks, or this process if it is alone."""
    if _can_end_others():
        time.sleep(_FORWARD_DELAY)
    segments.unlink_all()  # after an abort MPICH's would stay
    if _can_end_others():
        if (MPI := _started_mpi()) is not None:
            _abort_mpi(MPI, status)
        else:
            pmi.abort(status)
    os._exit(status)  # a non-zero status makes other launchers end the others


def _abort_mpi(MPI: Any, status: int) -> None:
    # Only the thread that started MPI may call it, unless it was started for any thread.
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main and MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        return
    # Open MPI waits for its launcher, maybe forever.
    if signal.getsignal(signal.SIGALRM) == signal.SIG_DFL:
        signal.setitimer(signal.ITIMER_REAL, _ABORT_SECONDS)
    MPI.COMM_WORLD.Abort(status)
