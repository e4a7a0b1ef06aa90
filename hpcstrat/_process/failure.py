"""An error on one rank ends all ranks: with its traceback, tagged with the rank, and a non-zero exit status."""

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
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, NoReturn

from hpcstrat._process import guard, job_files, launchers, mpi
from hpcstrat._process.job_files import JobMemory, State

_CONSEQUENCE_DELAY = (
    1.0  # seconds that a rank gives the cause of its exception to be reported first
)
# seconds that the other ranks wait, so that an error of all ranks is reported by rank 0 alone
_LEAD_DELAY = 0.3
# seconds that mpirun gets to pass on what was printed, before its own message about the abort
_FORWARD_DELAY = 0.1

_ABORT_SECONDS = (
    5.0  # that MPI gets to end the job; after them this rank ends itself, in C code too
)
_PRINT_SECONDS = 3.0  # that the launcher gets to take what is printed
_HAS_NOTES = sys.version_info >= (3, 11)
_MEET_SECONDS = 3.0  # that a rank waits in the start of MPI for those that it ends

_mpi: Any = None  # the module mpi4py.MPI, once there are several ranks
_is_connected = False
_others_wait = False  # perhaps, in the start of MPI, which this rank could not begin
_rank = 0
_process = 0  # a forked child must not end its parent's job
_hook: Callable[..., None] | None = None  # ours, of which the last counts
_exit: tuple[FrameType, int, object] | None = (
    None  # the outermost frame and its instruction at sys.exit, the status
)

exit_status: object = ()
"""What `sys.exit` was called with last; an empty tuple before.

Filled where a launcher started several ranks.
"""

hidden_errors: Callable[[], str] = str
"""What this rank wrote to standard error that was not shown; it is shown from now on.

Filled in from above.
"""

show_hidden_errors: Callable[[], object] = str
"""Shows what this rank wrote to standard error and was not shown, if the program ends badly.

Filled in from above.
"""

_reporting = threading.local()

before_the_end: list[Callable[[], None]] = []
"""Called when this rank ends the job, by the thread that does."""


def end_all_ranks_on_early_error() -> None:
    """From now on an uncaught exception of the main thread, or `sys.exit` with a status, ends all ranks.

    This is for the time before MPI has started, in whose start the others wait, or soon will: this
    rank then starts MPI
    too, and ends them. Does nothing unless a launcher started several ranks. The call itself starts
    nothing.
    """
    global _rank, _process
    launcher = launchers.find()
    if _process or launcher is None or launchers.is_child():
        return
    _tell_launcher(lambda memory: memory.note_rank(launcher.rank))
    if launcher.alone:
        if job_files.find() is not None:
            _install_note()
        return
    _rank, _process = launcher.rank, os.getpid()
    _install_hook()
    # Python calls no hook for SystemExit, so `sys.exit` itself has to be watched.
    sys.exit = _noting(sys.exit)
    for name in {"exit", "quit"} & vars(builtins).keys():  # the site's
        setattr(builtins, name, _noting(getattr(builtins, name)))
    atexit.register(_end_after_exit)


def _noting(leave: Callable[[Any], NoReturn]) -> Callable[..., NoReturn]:
    def exit(status: Any = None, /) -> NoReturn:
        global exit_status
        exit_status = status
        _note_exit(status)
        leave(status)

    return functools.update_wrapper(exit, leave)


def end_all_ranks_on_error(rank: int, MPI: Any) -> None:
    """From now on an uncaught exception, in any thread, ends all ranks.

    Existing hooks do the printing, so a debugger's or a pretty printer's still works.
    """
    global _mpi, _rank, _process, _is_connected
    if sys.excepthook is not _hook:  # the user's, set since
        _install_hook()
    _mpi, _rank, _process, _is_connected = MPI, rank, os.getpid(), True
    _tell_launcher(lambda memory: memory.note_connected(rank))
    # Python goes on when a thread fails. The ranks would not: they wait for what that thread was to
    # do.
    previous = threading.excepthook

    def on_exception(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_type is SystemExit or not _ends_job():
            with reporting():
                previous(arguments)
            return
        _wait_for_cause(arguments.exc_value)
        _note(arguments.exc_value)
        _print_tagged(
            _hidden(arguments.exc_value) + _shown(lambda: previous(arguments), arguments.exc_value)
        )
        _abort(1)

    threading.excepthook = on_exception
    _show_lines_of_crashes()


def _show_lines_of_crashes() -> None:
    """From now on a segmentation fault prints Python's traceback, unless the user has arranged that already."""
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        with contextlib.suppress(OSError, ValueError):  # closed
            # A file of its own: the number of one that the program closes may become that of its
            # data.
            faulthandler.enable(os.dup(sys.__stderr__.fileno()))


def _install_hook() -> None:
    global _hook
    previous = sys.excepthook

    def on_exception(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if (
            _hook is not on_exception or not _ends_job()
        ):  # a later one calls this one, or there is nothing to end
            with reporting():
                previous(kind, error, trace)
            return
        # A Ctrl-C comes to all ranks; before they are connected, rank 0 cannot end the others
        # before they speak.
        is_brief = isinstance(error, KeyboardInterrupt) and _rank > 0 and not _is_connected
        shown = _summary(error) if is_brief else _shown(lambda: previous(kind, error, trace), error)
        text = _hidden(error) + shown
        _meet(text)
        _wait_for_cause(error)
        _note(error)
        _print_tagged(text)
        if _mpi is not None or _others_wait:
            _abort(1)

    sys.excepthook = _hook = on_exception


def _install_note() -> None:
    """Of a rank alone, which ends no others."""
    previous = sys.excepthook

    def on_exception(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        _note(error)
        previous(kind, error, trace)

    sys.excepthook = on_exception


def _note(error: BaseException | None) -> None:
    """Tells the launcher what ends this rank, unless another rank caused it."""
    if error is not None and not _is_consequence(error):
        state = State.INTERRUPTED if isinstance(error, KeyboardInterrupt) else State.FAILED
        _tell_launcher(lambda memory: memory.note_failure(_rank, _summary(error), state))


def _summary(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = os.path.dirname(__file__)
    frame = next((one for one in reversed(frames) if not one.filename.startswith(own)), None)
    place = (
        ""
        if frame is None
        else f", at {os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}"
    )
    return "".join(traceback.format_exception_only(error)).strip() + place


def note_left() -> None:
    """Tells the launcher that this rank leaves the program in order: what ends it later ends no other rank."""
    _tell_launcher(lambda memory: memory.note_left(_rank))


def _tell_launcher(tell: Callable[[JobMemory], None]) -> None:
    with contextlib.suppress(Exception):
        if (memory := job_files.find()) is not None:
            tell(memory)


def _meet(text: str) -> None:
    """Starts MPI if necessary, to end the ranks that wait in its start.

    If none come, `text` is printed last.

    Only for launchers that ignore the exit status of a process that has not started MPI, as MPICH's
    does.
    """
    global _mpi, _others_wait
    _mpi = _mpi or _started_mpi()
    # While MPI starts no Python thread runs, so a process beside this one ends it if the others
    # never come.
    if _mpi is None and "PMI_FD" in os.environ:
        with (
            contextlib.suppress(Exception),
            guard.guarded([guard.Deadline(_MEET_SECONDS, tagged(text), True)]),
        ):
            MPI = mpi.load()
            mpi.check_launcher(MPI)
            _others_wait = True  # what fails from here on may fail on this rank alone
            mpi.start(MPI)
            _mpi = MPI


def _note_exit(status: object) -> None:
    """Records where the main thread calls `sys.exit`; the program may still catch it."""
    global _exit
    if threading.current_thread() is threading.main_thread() and status is not None and status != 0:
        frame: FrameType = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
        # If the exit is caught, the outermost frame goes on, which its instruction will show.
        _exit = frame, frame.f_lasti, status
        if _started_mpi() is not None:
            atexit.register(
                _end_after_exit
            )  # before mpi4py's own end, which would wait for the others


def leaves_early() -> bool:
    """Whether this rank leaves by `sys.exit` with a status before the ranks are connected, and will end them."""
    return not _is_connected and _leaves()


def _leaves() -> bool:
    if _exit is None or not _ends_job():
        return False
    frame, instruction, _ = _exit
    return frame.f_lasti == instruction  # else the outermost frame went on: the exit was caught


def _end_after_exit() -> None:
    """Ends all ranks if this one leaves early: the others would wait."""
    if _exit is None or not _leaves():
        return
    status = _exit[2]
    _tell_launcher(lambda memory: memory.note_failure(_rank, f"sys.exit({status!r})"))
    if _is_connected:
        return
    text = (
        f"hpcstrat: the job ends: rank {_rank} left the program by sys.exit({status!r}) before the "
        "ranks were connected; look at what it printed last"
    )
    hidden = _hidden(None)
    _meet(hidden + text)
    time.sleep(_LEAD_DELAY if _rank else 0)
    if _mpi is not None or _others_wait:
        end_job(hidden + text, status if isinstance(status, int) else 1)
    elif hidden:  # the launcher ends the others, by this one's status
        _print_tagged(hidden)


def _started_mpi() -> Any:
    """The module `mpi4py.MPI` if MPI has been started, else None."""
    MPI = sys.modules.get("mpi4py.MPI")
    return MPI if MPI is not None and MPI.Is_initialized() else None


def mark_as_consequence(error: BaseException) -> None:
    """Marks an error as caused by another rank's: if it ends the job, the other is reported first."""
    # On the error itself: it may be raised again, or be reported by another hook, far from here.
    error.__dict__["_hpcstrat_consequence"] = True


def end_job(message: str, status: int = 1, consequence: bool = False) -> NoReturn:
    """Ends all ranks: prints the message to standard error, tagged with the rank, and exits with this status.

    A consequence waits for the rank that reports the cause, and is not printed if that rank ends
    the job first.
    """
    if consequence:
        time.sleep(_CONSEQUENCE_DELAY)
    _print_tagged(message)
    _abort(status)


def end_rank(message: str) -> NoReturn:
    """Ends this rank when its launcher, which could end the others, is gone."""
    _print_tagged(message)
    _end_well()
    guard.unlink_segments(os.getpid(), guard.OPEN_MPI)  # which it leaves to its launcher
    os._exit(1)


def say(message: str) -> None:
    """Prints a message to standard error, tagged with the rank."""
    _print_tagged(message)


def add_note(error: BaseException, note: str) -> None:
    """`BaseException.add_note`; for Python 3.10, which lacks it, the note is shown if the error ends the job."""
    if _HAS_NOTES:
        error.add_note(note)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        vars(error).setdefault("__notes__", []).append(note)


def _ends_job() -> bool:
    MPI = _started_mpi()
    return os.getpid() == _process and (MPI is None or not MPI.Is_finalized())


@contextlib.contextmanager
def reporting() -> Iterator[None]:
    """A block in which this thread reports a failure: what it writes to standard error is shown, on any rank."""
    before = is_reporting()
    _reporting.is_on = True
    try:
        yield
    finally:
        _reporting.is_on = before


def is_reporting() -> bool:
    """Whether this thread reports a failure."""
    return getattr(_reporting, "is_on", False)


def _hidden(error: BaseException | None) -> str:
    """What this rank wrote to standard error that was not shown, which may explain its failure."""
    text = "" if _is_consequence(error) else hidden_errors()
    return f"{text.rstrip()}\n" if text.strip() else ""


def _is_consequence(error: BaseException | None) -> bool:
    return (_mpi is not None and isinstance(error, _mpi.Exception)) or getattr(
        error, "_hpcstrat_consequence", False
    )


def _wait_for_cause(error: BaseException | None) -> None:
    if _is_consequence(error):
        time.sleep(_CONSEQUENCE_DELAY)
    if _rank > 0:
        time.sleep(_LEAD_DELAY)


def _shown(show: Callable[[], object], error: BaseException | None) -> str:
    """What `show` prints to standard error, or the plain traceback if it prints nothing."""
    text = io.StringIO()
    # Caught, to be printed in one piece with the rank in front of each line: the ranks share one
    # standard error.
    with contextlib.suppress(Exception), contextlib.redirect_stderr(text):
        show()
    shown = text.getvalue()
    if not shown.strip() and error is not None:
        shown = "".join(traceback.format_exception(error))
    if not _HAS_NOTES:  # though the package exceptiongroup makes Python 3.10 show them too
        shown += "".join(
            f"{note}\n" for note in getattr(error, "__notes__", ()) if f"{note}\n" not in shown
        )
    return shown


def tagged(text: str) -> str:
    """The text's lines, each prefixed with the rank if there are several."""
    tag = f"[rank {_rank}] " if _process else ""
    return "".join(f"{tag}{line}\n" for line in text.splitlines())


def _print_tagged(text: str) -> None:
    """Prints the text, but gives up if nobody reads it: a launcher whose output is blocked must not block this rank."""
    printing = threading.Thread(
        target=_print, args=(tagged(text),), name="hpcstrat-print", daemon=True
    )
    try:
        printing.start()
    except RuntimeError:  # no more threads, or Python ends
        _print(tagged(text))
    else:
        # A thread that still writes is left behind. Ending the job matters more than its last
        # lines.
        printing.join(_PRINT_SECONDS)


def _print(lines: str) -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    # The program may have replaced or closed one of them.
    for stream in (sys.stderr, sys.__stderr__):
        with contextlib.suppress(Exception), reporting():
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
        # After an abort MPICH's segment stays in /dev/shm, and Open MPI's of a rank that no
        # launcher of its own knows.
        is_single = (MPI := _started_mpi()) is not None and _ends_job() and MPI.COMM_WORLD.size == 1
        guard.unlink_segments(os.getpid(), guard.MPICH + (guard.OPEN_MPI if is_single else ()))


def _abort(status: int) -> NoReturn:
    """Ends all ranks, or this process where it is alone."""
    status = status or 1
    _end_well()
    if _mpi is not None and _ends_job():
        # MPI may only be called from the thread that started it, unless it was started for any.
        main = threading.current_thread() is threading.main_thread()
        if main or _mpi.Query_thread() == _mpi.THREAD_MULTIPLE:
            time.sleep(_FORWARD_DELAY)
            if (
                signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
            ):  # Open MPI waits for its launcher, maybe forever
                signal.setitimer(signal.ITIMER_REAL, _ABORT_SECONDS)
            _mpi.COMM_WORLD.Abort(status)
    if _mpi is None and _others_wait:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(status)  # which, as a signal, makes the launcher end the others
