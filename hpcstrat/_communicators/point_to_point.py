"""Bytes from rank to rank, over MPI: many messages at a time, in pieces and windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from hpcstrat._communicators.background import WINDOW, SleepingComm, wait_with_sleeps
from hpcstrat._core.types import Bytes
from hpcstrat._memory.intervals import Interval


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
