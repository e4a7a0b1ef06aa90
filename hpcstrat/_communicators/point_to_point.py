"""Bytes from rank to rank, over MPI: in pieces and windows, and while the program computes."""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar, final

from hpcstrat._calls.collective import CallState
from hpcstrat._communicators.base import Communicator
from hpcstrat._core.types import Bytes
from hpcstrat._memory.intervals import Interval
from hpcstrat._watchdog.watchdog import Watchdog

C = TypeVar("C", bound=Communicator)

WINDOW = 1 << 18
"""Bytes of a section that are sent at once in the background.

What the program sends meanwhile, such as the records of its calls, queues behind them in the same
connection. Two windows take 4 ms at 1 Gbit/s; a whole layer would take 100 ms.
"""
# MPICH moves about 8 KiB per poll, so a single poll between two sleeps would leave a fast network
# idle. Measured over TCP: an exchange takes almost as long as without sleeps, and a third of the
# processor time.
_POLLS = 16
_SLEEP = 100e-6  # seconds


@final
class PointToPoint:
    """Sends bytes to other ranks, and receives theirs at the same time.

    Args:
        comm: an MPI communicator that only one object uses.

    Attributes:
        comm: the communicator.
        window: bytes of a message that are on their way at once.
    """

    PIECE = 1 << 20
    """Bytes that are sent at once.

    MPI moves a large message in one direction at a time, over TCP at least, which takes twice as
    long where both sides send. Many small messages at a time keep links busy in both directions.
    """

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        self.comm: Any = comm
        self._rank: int = comm.rank
        self._size: int = comm.size
        self.window: int = self.PIECE
        self._wait_for: Callable[[Sequence[Any]], object] = MPI.Request.Waitall

    def sleep(self) -> None:
        """Waits asleep from now on, in small windows, so that the program keeps the core."""
        self.comm = SleepingComm(self.comm)
        self.window = WINDOW
        self._wait_for = wait_with_sleeps

    def swap(
        self,
        outgoing: Mapping[int, Bytes],
        incoming: Mapping[int, Bytes],
        prepare: Callable[[Interval], None] | None = None,
    ) -> None:
        """Sends a message to each rank of `outgoing`, and receives one from each of `incoming`.

        In windows: while one is on its way, `prepare` writes the next.

        Args:
            outgoing: the message for each rank; what is for this rank itself is not moved.
            incoming: where each rank's message goes; as many bytes as that rank sends.
            prepare: writes some bytes of every outgoing message, before they are sent.
        """
        sizes = [message.size for message in (*outgoing.values(), *incoming.values())]
        longest = max(sizes, default=0)
        sources = sorted(incoming.keys() - {self._rank}, key=self._distance, reverse=True)
        targets = sorted(outgoing.keys() - {self._rank}, key=self._distance)
        before: list[Any] = []
        for window in Interval(0, longest).split(self.window):
            if prepare is not None:
                prepare(window)
            now = [
                self.comm.Irecv(piece, source)
                for source in sources
                for piece in pieces(incoming[source][window.slice], self.PIECE)
            ]
            now += [
                self.comm.Isend(piece, target)
                for target in targets
                for piece in pieces(outgoing[target][window.slice], self.PIECE)
            ]
            self._wait_for(before)  # one of two windows is always on its way
            before = now
        self._wait_for(before)

    def _distance(self, rank: int) -> int:
        """The next rank first, so that not all ranks send to the same rank."""
        return (rank - self._rank) % self._size


def pieces(message: Bytes, size: int) -> list[Bytes]:
    """The message in pieces of `size` bytes; the last may be shorter."""
    return [message[piece.slice] for piece in Interval(0, message.size).split(size)]


@final
class SleepingComm:
    """An MPI communicator whose calls poll with sleeps, so that the other thread keeps the core.

    It has the calls that exchanges make. MPI's own wait would occupy a core.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.Irecv = comm.Irecv
        self.Isend = comm.Isend

    def Allgather(self, sent: Any, received: Any) -> None:
        """MPI's."""
        wait_with_sleeps([self._comm.Iallgather(sent, received)])

    def Allreduce(self, sent: Any, received: Any, op: Any) -> None:
        """MPI's."""
        wait_with_sleeps([self._comm.Iallreduce(sent, received, op)])

    def Allgatherv(self, sent: Any, received: Any) -> None:
        """MPI's."""
        wait_with_sleeps([self._comm.Iallgatherv(sent, received)])

    def Alltoallv(self, sent: Any, received: Any) -> None:
        """MPI's."""
        wait_with_sleeps([self._comm.Ialltoallv(sent, received)])

    def Bcast(self, message: Any, root: int) -> None:
        """MPI's."""
        wait_with_sleeps([self._comm.Ibcast(message, root)])

    def allgather(self, obj: Any) -> Sequence[Any]:
        """mpi4py's, which has no nonblocking form."""
        wait_with_sleeps([self._comm.Ibarrier()])
        return self._comm.allgather(obj)


def wait_with_sleeps(requests: Sequence[Any]) -> None:
    """Waits for MPI's requests, mostly asleep."""
    for request in requests:
        while not any(request.Test() for _ in range(_POLLS)):
            time.sleep(_SLEEP)


@final
class Background(Generic[C]):
    """Makes exchanges one after the other, in its own thread, with its own communicator.

    The ranks have agreed on each exchange before, in a call. So all ranks start the same exchanges
    in the same order, and these end by themselves, whatever the programs do meanwhile.

    Args:
        make: makes the communicator, of the same ranks; only the thread uses it.
        calls: those of the communicator that the program uses.
        watchdog: hears whether an exchange is under way.
    """

    def __init__(self, make: Callable[[], C], calls: CallState, watchdog: Watchdog | None) -> None:
        self._calls = calls
        # At the end of the program Python waits for this thread before the hook that ends MPI.
        self._thread = ThreadPoolExecutor(1, "hpcstrat-exchange")
        self._communicator = self._thread.submit(make).result()
        self._started: list[Future[None]] = []
        self._error: BaseException | None = None
        if watchdog is not None:
            watchdog.add_check(str, self._is_busy)

    def _is_busy(self) -> bool:
        return any(not exchange.done() for exchange in self._started)

    def start(self, exchange: Callable[[C], None]) -> None:
        """Starts an exchange, called with the communicator; it runs after those started before."""
        # In a copy of this context, which holds the name of the call.
        self._started.append(
            self._thread.submit(contextvars.copy_context().run, self._make, exchange)
        )

    def _make(self, exchange: Callable[[C], None]) -> None:
        if self._error is not None:  # the others may still be in the exchange that failed
            return
        try:
            exchange(self._communicator)
        except BaseException as error:
            self._error = error

    def wait(self) -> None:
        """Waits until all started exchanges are done.

        Raises:
            Exception: what an exchange raised; those after it were not made.
        """
        with self._calls.waiting:
            for exchange in self._started:
                exchange.result()
        self._started.clear()
        error, self._error = self._error, None
        if error is not None:
            if self._communicator.calls.all_raise:
                self._calls.note_shared_error()
            raise error
