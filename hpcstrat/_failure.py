"""An error on one rank ends all ranks: traceback first, tagged with the rank, non-zero exit status."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import faulthandler
import functools
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn

from hpcstrat import _guard, _launcher
from hpcstrat import _mpi as _mpi_library

_CONSEQUENCE_DELAY = 1.0  # seconds that a rank gives the cause of its exception to be reported first
_LEAD_DELAY = 0.3  # seconds that the other ranks wait, so that an error of all ranks is reported by rank 0 alone
_FORWARD_DELAY = 0.1  # seconds that mpirun gets to pass on what was printed, before its own message about the abort

_ABORT_SECONDS = 5.0  # that MPI gets to end the job; after them this rank ends itself, in C code too
_PRINT_SECONDS = 3.0  # that the launcher gets to take what is printed
_HAS_NOTES = sys.version_info >= (3, 11)
_MEET_SECONDS = 3.0  # that a rank waits in the start of MPI for those that it ends

_mpi: Any = None  # the module mpi4py.MPI, once there are several ranks
_is_connected = False
_rank = 0
_process = 0  # a forked child must not end its parent's job
_hook: Callable[..., None] | None = None  # ours, of which the last counts
_exit: tuple[FrameType, int, object] | None = None  # the outermost frame and its instruction at sys.exit, the status

before_the_end: list[Callable[[], None]] = []
"""Called when this rank ends the job, by the thread that does."""


def end_all_ranks_on_early_error() -> None:
    """From now on an uncaught exception of the main thread, or `sys.exit` with a status, ends all ranks.

    That is before MPI has started: the others wait in its start, or will. This rank then starts it too, and ends them.
    Nothing happens without a launcher of several ranks. Starts nothing.
    """
    global _rank, _process
    launcher = _launcher.find()
    if _process or launcher is None or launcher.alone or _launcher.is_child():
        return
    _rank, _process = launcher.rank, os.getpid()
    _install_hook()
    sys.exit = _noting(sys.exit)
    for name in {"exit", "quit"} & vars(builtins).keys():  # the site's
        setattr(builtins, name, _noting(getattr(builtins, name)))
    atexit.register(_end_after_exit)


def _noting(leave: Callable[[Any], NoReturn]) -> Callable[..., NoReturn]:
    def exit(status: Any = None, /) -> NoReturn:
        _note_exit(status)
        leave(status)

    return functools.update_wrapper(exit, leave)


def end_all_ranks_on_error(rank: int, mpi: Any) -> None:
    """From now on an uncaught exception, in any thread, ends all ranks.

    The hooks that are there already do the printing, so that a debugger's or a pretty printer's still works.
    """
    global _mpi, _rank, _process, _is_connected
    if sys.excepthook is not _hook:  # the user's, set since
        _install_hook()
    _mpi, _rank, _process, _is_connected = mpi, rank, os.getpid(), True
    previous = threading.excepthook

    def on_exception(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_type is SystemExit or not _ends_job():
            previous(arguments)
            return
        _wait_for_cause(arguments.exc_value)
        _print_tagged(_shown(lambda: previous(arguments), arguments.exc_value))
        _abort(1)

    threading.excepthook = on_exception
    _show_lines_of_crashes()


def _show_lines_of_crashes() -> None:
    """From now on a segmentation fault prints the lines of Python, unless the user has seen to that, or will."""
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        with contextlib.suppress(OSError, ValueError):  # closed
            # A file of its own: the number of one that the program closes may become that of its data.
            faulthandler.enable(os.dup(sys.__stderr__.fileno()))


def _install_hook() -> None:
    global _hook
    previous = sys.excepthook

    def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if _hook is not on_exception or not _ends_job():  # a later one calls this one, or there is nothing to end
            previous(kind, error, trace)
            return
        text = _shown(lambda: previous(kind, error, trace), error)
        _meet(text)
        _wait_for_cause(error)
        _print_tagged(text)
        if _mpi is not None:
            _abort(1)

    sys.excepthook = _hook = on_exception


def _meet(text: str) -> None:
    """Starts MPI, where it has not been, to end the ranks that wait in its start. Where none come, `text` is the last.

    Only where the launcher does not look at the status of a process that has not started MPI: MPICH's does not.
    """
    global _mpi
    _mpi = _mpi or _started_mpi()
    if _mpi is None and "PMI_FD" in os.environ:
        with contextlib.suppress(Exception), _guard.guarded([_guard.Step(_MEET_SECONDS, tagged(text), True)]):
            mpi = _mpi_library.load()
            _mpi_library.start(mpi)
            _mpi = mpi


def _note_exit(status: object) -> None:
    """Notes where the main thread calls `sys.exit`, which it may still catch."""
    global _exit
    if threading.current_thread() is threading.main_thread() and status is not None and status != 0:
        frame: FrameType = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
        _exit = frame, frame.f_lasti, status
        if _started_mpi() is not None:
            atexit.register(_end_after_exit)  # before mpi4py's own end, which would wait for the others


def _end_after_exit() -> None:
    """Ends all ranks where this one leaves by `sys.exit` before the ranks are connected: the others would wait."""
    if _is_connected or _exit is None or not _ends_job():
        return
    frame, instruction, status = _exit
    if frame.f_lasti != instruction:  # the outermost frame went on: the exit was caught
        return
    text = (
        f"hpcstrat: the job ends: rank {_rank} left the program by sys.exit({status!r}) before the ranks were "
        "connected; look at what it printed last"
    )
    _meet(text)
    if _mpi is not None:
        time.sleep(_LEAD_DELAY if _rank else 0)
        end_job(text, status if isinstance(status, int) else 1)


def _started_mpi() -> Any:
    """The module `mpi4py.MPI`, where somebody has started MPI already."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi if mpi is not None and mpi.Is_initialized() else None


def mark_as_consequence(error: BaseException) -> None:
    """Notes that another rank's error caused this one: should it end the job, the other is reported first."""
    error.__dict__["_hpcstrat_consequence"] = True


def end_job(message: str, status: int = 1, consequence: bool = False) -> NoReturn:
    """Ends all ranks: prints the message to standard error, tagged with the rank, and exits with this status.

    A consequence of what another rank reports comes after that, and so is not printed if that rank ends the job first.
    """
    if consequence:
        time.sleep(_CONSEQUENCE_DELAY)
    _print_tagged(message)
    _abort(status)


def end_rank(message: str) -> NoReturn:
    """Ends this rank, where there is no launcher any more that could end the others."""
    _print_tagged(message)
    _end_well()
    _guard.unlink_segments(os.getpid(), "/dev/shm/sm_segment.")  # Open MPI's, else its launcher's to unlink
    os._exit(1)


def say(message: str) -> None:
    """Prints a message to standard error, tagged with the rank."""
    _print_tagged(message)


def add_note(error: BaseException, note: str) -> None:
    """As `BaseException.add_note`; Python 3.10, which has none, shows it where the error ends the job."""
    if _HAS_NOTES:
        error.add_note(note)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        vars(error).setdefault("__notes__", []).append(note)


def _ends_job() -> bool:
    mpi = _started_mpi()
    return os.getpid() == _process and (mpi is None or not mpi.Is_finalized())


def _wait_for_cause(error: BaseException | None) -> None:
    consequence = (_mpi is not None and isinstance(error, _mpi.Exception)) or getattr(
        error, "_hpcstrat_consequence", False
    )
    if consequence:
        time.sleep(_CONSEQUENCE_DELAY)
    if _rank > 0:
        time.sleep(_LEAD_DELAY)


def _shown(show: Callable[[], object], error: BaseException | None) -> str:
    """What `show` prints to standard error; the plain traceback if that is nothing."""
    text = io.StringIO()
    with contextlib.suppress(Exception), contextlib.redirect_stderr(text):
        show()
    shown = text.getvalue()
    if not shown.strip() and error is not None:
        shown = "".join(traceback.format_exception(error))
    if not _HAS_NOTES:
        shown += "".join(f"{note}\n" for note in getattr(error, "__notes__", ()))
    return shown


def tagged(text: str) -> str:
    """The text's lines, each with the rank in front where there are several."""
    tag = f"[rank {_rank}] " if _process else ""
    return "".join(f"{tag}{line}\n" for line in text.splitlines())


def _print_tagged(text: str) -> None:
    """Prints it, unless nobody reads: where the launcher's output stands still, so would this rank."""
    printing = threading.Thread(target=_print, args=(tagged(text),), name="hpcstrat-print", daemon=True)
    try:
        printing.start()
    except RuntimeError:  # no more threads, or Python ends
        _print(tagged(text))
    else:
        printing.join(_PRINT_SECONDS)


def _print(lines: str) -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    for stream in (sys.stderr, sys.__stderr__):
        with contextlib.suppress(Exception):
            stream.write(lines)  # pyright: ignore[reportOptionalMemberAccess]
            stream.flush()  # pyright: ignore[reportOptionalMemberAccess]
            return
    with contextlib.suppress(Exception):  # standard error is closed: better there than nowhere
        os.write(sys.__stdout__.fileno(), lines.encode(errors="replace"))  # pyright: ignore[reportOptionalMemberAccess]


def _end_well() -> None:
    for last in before_the_end:
        with contextlib.suppress(Exception):
            last()
    if _process:
        _guard.unlink_segments(os.getpid())


def _abort(status: int) -> NoReturn:
    """Ends all ranks, or this process where it is alone."""
    status = status or 1
    _end_well()
    if _mpi is not None and _ends_job():
        main = threading.current_thread() is threading.main_thread()
        if main or _mpi.Query_thread() == _mpi.THREAD_MULTIPLE:
            time.sleep(_FORWARD_DELAY)
            if signal.getsignal(signal.SIGALRM) == signal.SIG_DFL:  # Open MPI waits for its launcher, maybe for ever
                signal.setitimer(signal.ITIMER_REAL, _ABORT_SECONDS)
            _mpi.COMM_WORLD.Abort(status)
    os._exit(status)  # which makes the launcher end the others
