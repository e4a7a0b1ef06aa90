"""How this rank ends all ranks: through MPI, which it may have to start for that, or by dying."""

from __future__ import annotations

import contextlib
import os
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
# Seconds that a rank waits in the start of MPI for those that it ends.
_MEET_SECONDS = 3.0

before_the_end: list[Callable[[], None]] = []
"""Called when this rank ends the job, by the thread that does."""


class JobEnd:
    """What this rank needs to know to end the others.

    Attributes:
        process: this rank's process; 0 if it has no others to end.
        rank: this rank.
        mpi: the module `mpi4py.MPI`, once the others can be reached through it.
        others_wait: whether others perhaps wait in the start of MPI, which failed on this rank.
    """

    def __init__(self) -> None:
        self.process = 0
        self.rank = 0
        self.mpi: Any = None
        self.others_wait = False

    def set_rank(self, rank: int, MPI: Any = None) -> None:
        """From now on this process is this rank, connected to the others if given `mpi4py.MPI`."""
        self.rank, self.process, self.mpi = rank, os.getpid(), MPI
        reports.tag_with(rank)

    def can_end_others(self) -> bool:
        """Whether this process can end others: it is the rank's own, and MPI has not ended."""
        MPI = mpi.find()
        # A forked child must not end its parent's job.
        return os.getpid() == self.process and (MPI is None or not MPI.Is_finalized())

    def reaches_others(self) -> bool:
        """Whether others are in MPI, or in its start, so that `abort` ends them."""
        return self.mpi is not None or self.others_wait

    def meet_others(self, text: str) -> None:
        """Starts MPI if necessary, to end the ranks that wait in its start.

        If none come, `text` is printed last. Only for launchers that ignore the exit status of a
        process that has not started MPI, as MPICH's does.
        """
        self.mpi = self.mpi or mpi.find()
        if self.mpi is not None or "PMI_FD" not in os.environ:
            return
        # While MPI starts no Python thread runs, so another process ends this one if no rank comes.
        end = guard.Deadline(_MEET_SECONDS, reports.tag(text), True)
        with contextlib.suppress(Exception), guard.watch([end]):
            MPI = mpi.load()
            mpi.check_launcher(MPI)
            self.others_wait = True  # what fails from here on may fail on this rank alone
            mpi.start(MPI)
            self.mpi = MPI

    def abort(self, status: int) -> NoReturn:
        """Ends all ranks, or this process if it is alone; the status is never 0."""
        status = status or 1
        self.clean_up()
        if self.mpi is not None and self.can_end_others():
            self._abort_mpi(status)
        if self.mpi is None and self.others_wait:
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(status)  # a non-zero status or a signal makes the launcher end the others

    def _abort_mpi(self, status: int) -> None:
        # Only the thread that started MPI may call it, unless it was started for any thread.
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main and self.mpi.Query_thread() != self.mpi.THREAD_MULTIPLE:
            return
        time.sleep(_FORWARD_DELAY)
        # Open MPI waits for its launcher, maybe forever.
        if signal.getsignal(signal.SIGALRM) == signal.SIG_DFL:
            signal.setitimer(signal.ITIMER_REAL, _ABORT_SECONDS)
        self.mpi.COMM_WORLD.Abort(status)

    def clean_up(self) -> None:
        """Saves what others have asked to save, and removes what MPI would leave behind."""
        for call in before_the_end:
            with contextlib.suppress(Exception):
                call()
        if not self.process:
            return
        prefixes = guard.MPICH  # after an abort its segment stays in /dev/shm
        MPI = mpi.find()
        # So does Open MPI's of a rank that was started without a launcher.
        if MPI is not None and self.can_end_others() and MPI.COMM_WORLD.size == 1:
            prefixes += guard.OPEN_MPI
        guard.unlink_segments(os.getpid(), prefixes)
