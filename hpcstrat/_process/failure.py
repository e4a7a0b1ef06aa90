"""An error on one rank ends all ranks: with its traceback, its rank, and a non-zero exit status.

| event                     | what this rank does                 | what the other ranks see      |
|---------------------------|-------------------------------------|-------------------------------|
| error in the main thread, | prints its traceback; starts MPI to | killed in MPI's start         |
| ranks not yet connected   | meet the others (MPICH), or exits   |                               |
| error, any thread, later  | prints its traceback, `MPI.Abort`   | killed in any call, silently  |
| error that another rank   | waits 1 s for the cause; is mostly  | nothing of it: the cause      |
| caused                    | killed before it prints             | ends them                     |
| `end_job`: ranks hang, or | prints the message, `MPI.Abort`     | killed in any call, silently  |
| call different things     |                                     |                               |
| `sys.exit(1)`, ranks not  | says so as Python ends; aborts, or  | killed in MPI's start         |
| yet connected             | exits with that status              |                               |
| `sys.exit(1)`, later      | shows hidden text, tells the        | their next call ends the job: |
|                           | launcher, and leaves                | "left the program before"     |
| `os._exit(1)`             | shows hidden text                   | killed by the launcher        |
| crash in C                | Python prints the lines of all      | killed by the launcher        |
|                           | threads                             |                               |
| the launcher is gone      | says so, cleans up, and exits       | each does the same            |
| error only logged; thread | shows the text, and continues       | nothing                       |
| fails before they connect |                                     |                               |

`install_at_import` and `install_when_connected` install every hook of the library, also those of
output, in an order that matters: a hook calls the one that it found.

Python calls our `sys.excepthook`. It captures the text of the previous hook, and writes it in one
piece (`reports.say`). Then it calls `MPI.Abort` or `os._exit`, which shows what is still hidden.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from hpcstrat._process import guard, job_files, launchers, mpi, output, reports
from hpcstrat._process.error_gate import ErrorGate
from hpcstrat._process.exits import ExitWatch
from hpcstrat._process.job_end import JobEnd
from hpcstrat._process.job_files import JobMemory, State

# Seconds that a rank waits, so that the cause of its exception is reported first.
_CONSEQUENCE_DELAY = 1.0
# Seconds that the other ranks wait, so that an error of all ranks is reported by rank 0 alone.
_LEAD_DELAY = 0.3

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
_ThreadHook = Callable[[threading.ExceptHookArgs], object]

_job = JobEnd()
_exits = ExitWatch()
_error_gate = ErrorGate()


# ---- the hooks, in the order of their installation


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
    if not _job.process and not launchers.is_child():
        _tell_launcher(lambda memory: memory.note_rank(launcher.rank))
        if not launcher.alone:
            _job.set_rank(launcher.rank)
            _job.install_hook(_hook_that_ends_all_ranks)
            _exits.watch(_repeat_end_after_exit)
            atexit.register(_end_after_exit)
        elif job_files.find() is not None:
            sys.excepthook = _hook_that_tells_launcher(sys.excepthook)
    # Then `sys.stdout`, and on ranks that hide output `Thread.start`; where `sys.stderr` is hidden
    # too, its `write`, logging and `os._exit`.
    output.install()
    if not launcher.alone and _error_gate.install():
        # The last registered runs first: before `_end_after_exit`, whose report has the text.
        atexit.register(show_hidden_errors)


def install_when_connected(rank: int, MPI: Any) -> None:
    """Installs what several ranks need once they are connected.

    From now on an uncaught exception, in any thread, ends all ranks.
    """
    # Again, if the program has set its own since: existing hooks do the printing, so a debugger's
    # or a pretty printer's still works.
    _job.install_hook(_hook_that_ends_all_ranks)
    _job.set_rank(rank, MPI)
    _tell_launcher(lambda memory: memory.note_connected(rank))
    # Python survives a failed thread. Other ranks would hang: they wait for that thread's calls.
    threading.excepthook = _thread_hook_that_ends_all_ranks(threading.excepthook)
    # A segmentation fault prints Python's traceback, unless the user has arranged that.
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        with contextlib.suppress(OSError, ValueError):  # closed
            # A duplicate: if the program closes its own, that number may become its data's file.
            faulthandler.enable(os.dup(sys.__stderr__.fileno()))


# ---- uncaught exceptions


def _hook_that_ends_all_ranks(previous: _Hook) -> _Hook:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # A later hook of ours calls this one, or there is nothing to end.
        if _job.hook is not hook or not _job.can_end_others():
            with reports.reporting():
                previous(kind, error, trace)
            return
        # A Ctrl-C comes to all ranks; before they are connected, rank 0 cannot end the others
        # before they speak.
        if isinstance(error, KeyboardInterrupt) and _job.rank > 0 and not _job.is_connected:
            shown = reports.summarize(error)
        else:
            shown = reports.capture(lambda: previous(kind, error, trace), error)
        text = _take_hidden_errors(error) + shown
        _job.meet_others(text)
        _wait_for_cause(error)
        _tell_launcher_of(error)
        reports.say(text)
        if _job.reaches_others():
            _job.abort(1)

    return hook


def _thread_hook_that_ends_all_ranks(previous: _ThreadHook) -> _ThreadHook:
    def hook(arguments: threading.ExceptHookArgs) -> None:
        error = arguments.exc_value
        if arguments.exc_type is SystemExit or not _job.can_end_others():
            with reports.reporting():
                previous(arguments)
            return
        _wait_for_cause(error)
        _tell_launcher_of(error)
        hidden = _take_hidden_errors(error)
        reports.say(hidden + reports.capture(lambda: previous(arguments), error))
        _job.abort(1)

    return hook


def _hook_that_tells_launcher(previous: _Hook) -> _Hook:
    """The hook of a rank alone, which ends no others."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _tell_launcher_of(error)
        previous(kind, error, trace)

    return hook


def mark_as_consequence(error: BaseException) -> None:
    """Marks an error as caused by another rank's, which is then reported first."""
    # On the error itself: it may be raised again, or be reported by another hook, far from here.
    error.__dict__["_hpcstrat_consequence"] = True


def _is_consequence(error: BaseException | None) -> bool:
    return (_job.mpi is not None and isinstance(error, _job.mpi.Exception)) or getattr(
        error, "_hpcstrat_consequence", False
    )


def _wait_for_cause(error: BaseException | None) -> None:
    if _is_consequence(error):
        time.sleep(_CONSEQUENCE_DELAY)
    if _job.rank > 0:
        time.sleep(_LEAD_DELAY)


def _take_hidden_errors(error: BaseException | None = None) -> str:
    """This rank's hidden standard error, which may explain its failure."""
    text = "" if _is_consequence(error) else _error_gate.take()
    return f"{text.rstrip()}\n" if text.strip() else ""


# ---- sys.exit


def _repeat_end_after_exit() -> None:
    if mpi.find() is not None:
        # Again, to run before mpi4py's own end, which would wait for the others.
        atexit.register(_end_after_exit)


def _end_after_exit() -> None:
    """Ends all ranks if this one leaves early: the others would wait."""
    if not _leaves():
        return
    status = _exits.failure_status
    _tell_launcher(lambda memory: memory.note_failure(_job.rank, f"sys.exit({status!r})"))
    if _job.is_connected:
        return
    text = (
        f"hpcstrat: the job ends: rank {_job.rank} left the program by sys.exit({status!r}) before "
        "the ranks were connected; look at what it printed last"
    )
    hidden = _take_hidden_errors()
    _job.meet_others(hidden + text)
    time.sleep(_LEAD_DELAY if _job.rank else 0)
    if _job.reaches_others():
        end_job(hidden + text, status if isinstance(status, int) else 1)
    elif hidden:  # the launcher ends the others, because of this rank's status
        reports.say(hidden)


def show_hidden_errors() -> None:
    """Shows this rank's hidden standard error if the program ends badly."""
    leaves_early = _leaves() and not _job.is_connected  # then its report has it
    if not leaves_early and not _exits.ended_well():
        _error_gate.show()


def _leaves() -> bool:
    """Whether a `sys.exit` with a status ends the program, while others depend on this rank."""
    return _exits.is_failing() and _job.can_end_others()


# ---- the end of the job


def end_job(message: str, status: int = 1, consequence: bool = False) -> NoReturn:
    """Ends all ranks: prints the message, tagged, to standard error, and exits with this status.

    A consequence waits for the rank that reports the cause, and is not printed if that rank ends
    the job first.
    """
    if consequence:
        time.sleep(_CONSEQUENCE_DELAY)
    reports.say(message)
    _job.abort(status)


def end_rank(message: str) -> NoReturn:
    """Ends this rank when its launcher, which could end the others, is gone."""
    reports.say(message)
    _job.clean_up()
    guard.unlink_segments(os.getpid(), guard.OPEN_MPI)  # which Open MPI leaves to its launcher
    os._exit(1)


# ---- what the launcher is told


def note_left() -> None:
    """Tells the launcher that this rank leaves in order: what ends it later ends no other rank."""
    _tell_launcher(lambda memory: memory.note_left(_job.rank))


def _tell_launcher_of(error: BaseException | None) -> None:
    """Tells the launcher what ends this rank, unless another rank caused it."""
    if error is not None and not _is_consequence(error):
        state = State.INTERRUPTED if isinstance(error, KeyboardInterrupt) else State.FAILED
        _tell_launcher(
            lambda memory: memory.note_failure(_job.rank, reports.summarize(error), state)
        )


def _tell_launcher(tell: Callable[[JobMemory], None]) -> None:
    with contextlib.suppress(Exception):
        if (memory := job_files.find()) is not None:
            tell(memory)
