"""An error on one rank ends all ranks: with its traceback, its rank, and a non-zero exit status.

Hooks are installed in this order:

1. `import hpcstrat`, several ranks: `sys.excepthook`, `sys.exit`, `builtins.exit` and `quit`, and
   `_end_after_exit` at Python's exit. First, so that an error of any later import ends all ranks.
2. `output.install`, still in the import: the writes of the streams; on ranks that hide output also
   thread start, logging, `os._exit`, and a last look at Python's exit. That look runs before
   `_end_after_exit`, because the last registered runs first, and leaves the text to its report.
3. The ranks are connected: `sys.excepthook` again if the program has replaced it since, because its
   hook does the printing, and `threading.excepthook`: only from now on do others depend on threads.

Who calls whom: `sys.excepthook` -> the previous hook, whose text is captured -> `reports.say` ->
the stream's write -> `MPI.Abort` or `os._exit` -> what is still hidden.

| event                     | what this rank does                 | what the other ranks see      |
|---------------------------|-------------------------------------|-------------------------------|
| error in the main thread, | prints its traceback; starts MPI to | killed in MPI's start         |
| ranks not yet connected   | meet the others (MPICH), or exits   |                               |
| error, any thread, later  | prints its traceback, `MPI.Abort`   | killed in any call, silently  |
| error that another rank   | waits 1 s for the cause; is mostly  | nothing of it: the cause      |
| caused                    | killed before it prints             | ends them                     |
| `sys.exit(1)`, ranks not  | says so as Python ends; aborts, or  | killed in MPI's start         |
| yet connected             | exits with that status              |                               |
| `sys.exit(1)`, later      | tells the launcher, and leaves      | their next call ends the job: |
|                           |                                     | "left the program before"     |
| `os._exit(1)`, crash in C | shows hidden output; Python's lines | killed by the launcher        |
| error only logged; thread | shows the text, and continues       | nothing                       |
| fails before they connect |                                     |                               |
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import faulthandler
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn

from hpcstrat._process import guard, job_files, launchers, mpi, reports
from hpcstrat._process.job_files import JobMemory, State

# Seconds that a rank waits, so that the cause of its exception is reported first.
_CONSEQUENCE_DELAY = 1.0
# Seconds that the other ranks wait, so that an error of all ranks is reported by rank 0 alone.
_LEAD_DELAY = 0.3
# Seconds that mpirun gets to pass on what was printed, before its own message about the abort.
_FORWARD_DELAY = 0.1
# Seconds that MPI gets to end the job; then this rank ends itself, even in C code.
_ABORT_SECONDS = 5.0
# Seconds that a rank waits in the start of MPI for those that it ends.
_MEET_SECONDS = 3.0

_mpi: Any = None  # the module mpi4py.MPI, once there are several ranks
_is_connected = False
_others_wait = False  # perhaps, in the start of MPI, which this rank could not complete
_rank = 0
_process = 0  # a forked child must not end its parent's job
_hook: Callable[..., None] | None = None  # ours, the latest of them
# At the last `sys.exit`: the outermost frame and its instruction, the status.
_exit: tuple[FrameType, int, object] | None = None

exit_status: object = ()
"""The last status passed to `sys.exit`, where a launcher started several ranks; first `()`."""

hidden_errors: Callable[[], str] = str
"""Returns this rank's hidden standard error, which counts as shown from then on. Set from above."""

show_hidden_errors: Callable[[], object] = str
"""Shows this rank's hidden standard error if the program ends badly. Set from above."""

before_the_end: list[Callable[[], None]] = []
"""Called when this rank ends the job, by the thread that does."""


def end_all_ranks_on_early_error() -> None:
    """Lets an uncaught exception of the main thread, or `sys.exit` with a status, end all ranks.

    For the time before MPI has started: the others wait in its start, or soon will, so this rank
    starts MPI too, and ends them. Does nothing unless a launcher started several ranks. The call
    itself starts nothing.
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
    reports.tag_with(_rank)
    _install_hook()
    # Python calls no hook for SystemExit, so `sys.exit` itself has to be watched.
    sys.exit = _note_calls_of(sys.exit)
    for name in {"exit", "quit"} & vars(builtins).keys():  # the site's
        setattr(builtins, name, _note_calls_of(getattr(builtins, name)))
    atexit.register(_end_after_exit)


def _note_calls_of(leave: Callable[[Any], NoReturn]) -> Callable[..., NoReturn]:
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
    reports.tag_with(rank)
    _tell_launcher(lambda memory: memory.note_connected(rank))
    # Python survives a failed thread. Other ranks would hang: they wait for that thread's calls.
    previous = threading.excepthook

    def on_exception(arguments: threading.ExceptHookArgs) -> None:
        error = arguments.exc_value
        if arguments.exc_type is SystemExit or not _ends_job():
            with reports.reporting():
                previous(arguments)
            return
        _wait_for_cause(error)
        _note(error)
        reports.say(_take_hidden(error) + reports.capture(lambda: previous(arguments), error))
        _abort(1)

    threading.excepthook = on_exception
    _show_lines_of_crashes()


def _show_lines_of_crashes() -> None:
    """Makes a segmentation fault print Python's traceback, unless the user has arranged that."""
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        with contextlib.suppress(OSError, ValueError):  # closed
            # A duplicate: if the program closes its own, that number may become its data's file.
            faulthandler.enable(os.dup(sys.__stderr__.fileno()))


def _install_hook() -> None:
    global _hook
    previous = sys.excepthook

    def on_exception(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        # A later hook of ours calls this one, or there is nothing to end.
        if _hook is not on_exception or not _ends_job():
            with reports.reporting():
                previous(kind, error, trace)
            return
        # A Ctrl-C comes to all ranks; before they are connected, rank 0 cannot end the others
        # before they speak.
        is_brief = isinstance(error, KeyboardInterrupt) and _rank > 0 and not _is_connected
        shown = (
            reports.summarize(error)
            if is_brief
            else reports.capture(lambda: previous(kind, error, trace), error)
        )
        text = _take_hidden(error) + shown
        _meet(text)
        _wait_for_cause(error)
        _note(error)
        reports.say(text)
        if _mpi is not None or _others_wait:
            _abort(1)

    sys.excepthook = _hook = on_exception


def _install_note() -> None:
    """The hook of a rank alone, which ends no others."""
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
        _tell_launcher(lambda memory: memory.note_failure(_rank, reports.summarize(error), state))


def note_left() -> None:
    """Tells the launcher that this rank leaves in order: what ends it later ends no other rank."""
    _tell_launcher(lambda memory: memory.note_left(_rank))


def _tell_launcher(tell: Callable[[JobMemory], None]) -> None:
    with contextlib.suppress(Exception):
        if (memory := job_files.find()) is not None:
            tell(memory)


def _meet(text: str) -> None:
    """Starts MPI if necessary, to end the ranks that wait in its start.

    If none come, `text` is printed last. Only for launchers that ignore the exit status of a
    process that has not started MPI, as MPICH's does.
    """
    global _mpi, _others_wait
    _mpi = _mpi or _find_mpi()
    # While MPI starts no Python thread runs, so another process ends this one if no rank comes.
    if _mpi is None and "PMI_FD" in os.environ:
        with (
            contextlib.suppress(Exception),
            guard.watch([guard.Deadline(_MEET_SECONDS, reports.tag(text), True)]),
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
        # If the exit is caught, the outermost frame continues, and its instruction changes.
        _exit = frame, frame.f_lasti, status
        if _find_mpi() is not None:
            # Again, to run before mpi4py's own end, which would wait for the others.
            atexit.register(_end_after_exit)


def leaves_early() -> bool:
    """Whether a `sys.exit` with a status, before the ranks are connected, will end all ranks."""
    return not _is_connected and _leaves()


def _leaves() -> bool:
    if _exit is None or not _ends_job():
        return False
    frame, instruction, _ = _exit
    return frame.f_lasti == instruction  # else the outermost frame continued: the exit was caught


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
    hidden = _take_hidden(None)
    _meet(hidden + text)
    time.sleep(_LEAD_DELAY if _rank else 0)
    if _mpi is not None or _others_wait:
        end_job(hidden + text, status if isinstance(status, int) else 1)
    elif hidden:  # the launcher ends the others, because of this rank's status
        reports.say(hidden)


def _find_mpi() -> Any:
    """The module `mpi4py.MPI` if MPI has been started, else None."""
    MPI = sys.modules.get("mpi4py.MPI")
    return MPI if MPI is not None and MPI.Is_initialized() else None


def mark_as_consequence(error: BaseException) -> None:
    """Marks an error as caused by another rank's, which is then reported first."""
    # On the error itself: it may be raised again, or be reported by another hook, far from here.
    error.__dict__["_hpcstrat_consequence"] = True


def end_job(message: str, status: int = 1, consequence: bool = False) -> NoReturn:
    """Ends all ranks: prints the message, tagged, to standard error, and exits with this status.

    A consequence waits for the rank that reports the cause, and is not printed if that rank ends
    the job first.
    """
    if consequence:
        time.sleep(_CONSEQUENCE_DELAY)
    reports.say(message)
    _abort(status)


def end_rank(message: str) -> NoReturn:
    """Ends this rank when its launcher, which could end the others, is gone."""
    reports.say(message)
    _end_well()
    guard.unlink_segments(os.getpid(), guard.OPEN_MPI)  # which Open MPI leaves to its launcher
    os._exit(1)


def _ends_job() -> bool:
    MPI = _find_mpi()
    return os.getpid() == _process and (MPI is None or not MPI.Is_finalized())


def _take_hidden(error: BaseException | None) -> str:
    """This rank's hidden standard error, which may explain its failure."""
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


def _end_well() -> None:
    for call in before_the_end:
        with contextlib.suppress(Exception):
            call()
    if _process:
        # After an abort MPICH's segment stays in /dev/shm, as does Open MPI's of a rank that was
        # started without a launcher.
        is_single = (MPI := _find_mpi()) is not None and _ends_job() and MPI.COMM_WORLD.size == 1
        guard.unlink_segments(os.getpid(), guard.MPICH + (guard.OPEN_MPI if is_single else ()))


def _abort(status: int) -> NoReturn:
    """Ends all ranks, or this process if it is alone."""
    status = status or 1
    _end_well()
    if _mpi is not None and _ends_job():
        # Only the thread that started MPI may call it, unless it was started for any thread.
        main = threading.current_thread() is threading.main_thread()
        if main or _mpi.Query_thread() == _mpi.THREAD_MULTIPLE:
            time.sleep(_FORWARD_DELAY)
            # Open MPI waits for its launcher, maybe forever.
            if signal.getsignal(signal.SIGALRM) == signal.SIG_DFL:
                signal.setitimer(signal.ITIMER_REAL, _ABORT_SECONDS)
            _mpi.COMM_WORLD.Abort(status)
    if _mpi is None and _others_wait:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(status)  # a non-zero status or a signal makes the launcher end the others
