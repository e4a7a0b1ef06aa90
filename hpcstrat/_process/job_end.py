"""How this rank ends all ranks: through MPI, or through the launcher before MPI has started."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from hpcstrat._process import guard, mpi, reports

# Seconds that mpirun gets to pass on what was printed, before its own message about the abort.
_FORWARD_DELAY = 0.1
# Seconds that MPI gets to end the job; then this rank ends itself, even in C code.
_ABORT_SECONDS = 5.0
_PMI_SECONDS = 3.0  # that the launcher gets for an answer
_PMI = "PMI_FD"  # the variable with the connection to a launcher that speaks PMI, as MPICH's

before_the_end: list[Callable[[], None]] = []
"""Called when this rank ends the job, by the thread that does."""


class JobEnd:
    """What this rank needs to know to end the others.

    Attributes:
        process: this rank's process; 0 if it has no others to end.
        rank: this rank.
        is_connected: whether the ranks are connected.
    """

    def __init__(self) -> None:
        self.process = 0
        self.rank = 0
        self.is_connected = False

    def set_rank(self, rank: int, is_connected: bool = False) -> None:
        """From now on this process is this rank."""
        self.rank, self.process, self.is_connected = rank, os.getpid(), is_connected
        reports.tag_with(rank)

    def can_end_others(self) -> bool:
        """Whether this process can end others: it is the rank's own, and MPI has not ended."""
        MPI = mpi.find()
        # A forked child must not end its parent's job.
        return os.getpid() == self.process and (MPI is None or not MPI.Is_finalized())

    def abort(self, status: int) -> NoReturn:
        """Ends all ranks, or this process if it is alone; the status is never 0."""
        status = status or 1
        self.clean_up()
        if self.can_end_others():
            time.sleep(_FORWARD_DELAY)
            if (MPI := mpi.find()) is not None:
                _abort_mpi(MPI, status)
            elif must_abort():
                with contextlib.suppress(OSError, ValueError):
                    _abort_pmi(int(os.environ[_PMI]), status)
        os._exit(status)  # a non-zero status makes other launchers end the others

    def clean_up(self) -> None:
        """Saves what others have asked to save, and removes what MPI would leave behind."""
        for call in before_the_end:
            with contextlib.suppress(Exception):
                call()
        guard.unlink_segments(os.getpid())  # after an abort MPICH's stays in /dev/shm


def must_abort() -> bool:
    """Whether an exit status alone might not end the others.

    MPI does not end them, nor does a launcher that ignores the status of a process that has not
    started MPI, as MPICH's does.
    """
    return mpi.find() is not None or _PMI in os.environ


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
