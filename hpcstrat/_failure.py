"""An error on one rank ends all ranks: traceback first, tagged with the rank, non-zero exit status."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

_CONSEQUENCE_DELAY = 1.0  # seconds that a rank gives the cause of its exception to be reported first
_LEAD_DELAY = 0.3  # seconds that the other ranks wait, so that an error of all ranks is reported by rank 0 alone
_FORWARD_DELAY = 0.1  # seconds that mpirun gets to pass on what was printed, before its own message about the abort

_mpi: Any = None  # the module mpi4py.MPI, once there are several ranks
_rank = 0
_process = 0  # a forked child must not end its parent's job

before_the_end: list[Callable[[], None]] = []
"""Called when this rank ends the job, by the thread that does."""


def end_all_ranks_on_error(rank: int, mpi: Any) -> None:
    """From now on an uncaught exception, in any thread, ends all ranks.

    The hooks that are there already do the printing, so that a debugger's or a pretty printer's still works.
    """
    global _mpi, _rank, _process
    _mpi, _rank, _process = mpi, rank, os.getpid()
    previous, previous_thread = sys.excepthook, threading.excepthook

    def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not _ends_job():
            previous(kind, error, trace)
            return
        _wait_for_cause(error)
        _report(lambda: previous(kind, error, trace), error)
        _abort(1)

    def on_thread_exception(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_type is SystemExit or not _ends_job():
            previous_thread(arguments)
            return
        _wait_for_cause(arguments.exc_value)
        _report(lambda: previous_thread(arguments), arguments.exc_value)
        _abort(1)

    sys.excepthook = on_exception
    threading.excepthook = on_thread_exception


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


def say(message: str) -> None:
    """Prints a message to standard error, tagged with the rank."""
    _print_tagged(message)


def _ends_job() -> bool:
    return os.getpid() == _process and not _mpi.Is_finalized()


def _wait_for_cause(error: BaseException | None) -> None:
    consequence = isinstance(error, _mpi.Exception) or getattr(error, "_hpcstrat_consequence", False)
    if consequence:
        time.sleep(_CONSEQUENCE_DELAY)
    if _rank > 0:
        time.sleep(_LEAD_DELAY)


def _report(show: Callable[[], object], error: BaseException | None) -> None:
    """Prints what `show` prints to standard error, tagged and in one piece; the plain traceback if that is nothing."""
    text = io.StringIO()
    with contextlib.suppress(Exception), contextlib.redirect_stderr(text):
        show()
    shown = text.getvalue()
    if not shown.strip() and error is not None:
        shown = "".join(traceback.format_exception(error))
    _print_tagged(shown)


def _print_tagged(text: str) -> None:
    tag = f"[rank {_rank}] " if _mpi is not None else ""
    lines = "".join(f"{tag}{line}\n" for line in text.splitlines())
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    with contextlib.suppress(Exception):
        sys.stderr.write(lines)
        sys.stderr.flush()


def _abort(status: int) -> NoReturn:
    """Ends all ranks, or this process where it is alone."""
    status = status or 1
    for last in before_the_end:
        with contextlib.suppress(Exception):
            last()
    if _mpi is not None and _ends_job():
        main = threading.current_thread() is threading.main_thread()
        if main or _mpi.Query_thread() == _mpi.THREAD_MULTIPLE:
            time.sleep(_FORWARD_DELAY)
            _mpi.COMM_WORLD.Abort(status)
    os._exit(status)  # which makes the launcher end the others
