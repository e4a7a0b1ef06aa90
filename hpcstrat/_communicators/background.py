"""Exchanges that a thread makes while the program computes."""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar, final

from hpcstrat._calls.state import CallState
from hpcstrat._communicators.base import Communicator
from hpcstrat._watchdog.watchdog import Watchdog

C = TypeVar("C", bound=Communicator)

WINDOW = 1 << 18
"""Bytes of a section that are sent at once in the background.

What the program sends meanwhile, such as the records of its calls, goes behind them through the
same connection. Two of them take 4 ms at 1 Gbit/s; a whole layer would take 100.
"""
# MPICH moves some 8 KiB in each look, so one look between two sleeps would leave a fast network
# waiting. Measured over TCP: an exchange takes hardly longer than one that never sleeps, and a
# third of its processor time.
_LOOKS = 16
_SLEEP = 100e-6  # seconds


@final
class Background(Generic[C]):
    """Makes exchanges one after the other, in a thread of its own, by a communicator of its own.

    The ranks have agreed on each of them before, by a call. So all ranks begin the same ones in the
    same order, and these end by themselves, whatever the programs do meanwhile.

    Args:
        make: makes the communicator, of the same ranks; the thread calls it, and is the one that
            makes its calls.
        calls: of the communicator that the program uses.
        watchdog: what waits for other ranks is reported to it.
    """

    def __init__(self, make: Callable[[], C], calls: CallState, watchdog: Watchdog | None) -> None:
        self._calls = calls
        # At the end of the program Python waits for its thread before it calls what ends MPI.
        self._thread = ThreadPoolExecutor(1, "hpcstrat-exchange")
        self._communicator = self._thread.submit(make).result()
        self._begun: list[Future[None]] = []
        self._error: BaseException | None = None
        if watchdog is not None:
            watchdog.add_check(str, self._is_busy)

    def _is_busy(self) -> bool:
        return any(not one.done() for one in self._begun)

    def begin(self, exchange: Callable[[C], None]) -> None:
        """Begins an exchange, which is given the communicator; it is made behind those that have begun."""
        # In a copy of this line's context, in which the call has its name.
        self._begun.append(
            self._thread.submit(contextvars.copy_context().run, self._make, exchange)
        )

    def _make(self, exchange: Callable[[C], None]) -> None:
        if self._error is not None:  # the others may be in the midst of that one
            return
        try:
            exchange(self._communicator)
        except BaseException as error:
            self._error = error

    def wait(self) -> None:
        """Waits until all that has begun is done.

        Raises:
            Exception: what an exchange raised; those after it were not made.
        """
        with self._calls.waiting:
            for one in self._begun:
                one.result()
        self._begun.clear()
        error, self._error = self._error, None
        if error is not None:
            own = self._communicator.calls
            if own.settled == own.number:  # all ranks raise it
                self._calls.settled = self._calls.number
            raise error


@final
class PatientComm:
    """The calls of an MPI communicator that exchanges make, in which this thread sleeps until the others have come.

    MPI's own wait would take a core from the program, which computes.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.Irecv = comm.Irecv
        self.Isend = comm.Isend

    def Allgather(self, sent: Any, received: Any) -> None:
        """MPI's."""
        wait_patiently([self._comm.Iallgather(sent, received)])

    def Allgatherv(self, sent: Any, received: Any) -> None:
        """MPI's."""
        wait_patiently([self._comm.Iallgatherv(sent, received)])

    def Alltoallv(self, sent: Any, received: Any) -> None:
        """MPI's."""
        wait_patiently([self._comm.Ialltoallv(sent, received)])

    def Bcast(self, message: Any, root: int) -> None:
        """MPI's."""
        wait_patiently([self._comm.Ibcast(message, root)])

    def allgather(self, obj: Any) -> Sequence[Any]:
        """mpi4py's, which has none that does not wait."""
        wait_patiently([self._comm.Ibarrier()])
        return self._comm.allgather(obj)


def wait_patiently(requests: Sequence[Any]) -> None:
    """Waits for MPI's requests, asleep most of the time."""
    for request in requests:
        while not any(request.Test() for _ in range(_LOOKS)):
            time.sleep(_SLEEP)
