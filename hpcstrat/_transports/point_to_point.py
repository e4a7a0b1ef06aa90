"""Bytes from rank to rank, over MPI, in pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

from hpcstrat._core.types import Bytes
from hpcstrat._memory.intervals import ByteRange


@final
class PointToPoint:
    """Sends bytes to other ranks, and receives theirs at the same time.

    Args:
        comm: an MPI communicator that only one object uses.
    """

    PIECE = 1 << 20
    """Bytes that are sent at once.

    MPI moves a large message in one direction at a time, over TCP at least, which takes twice as
    long where both sides send. Many small messages at a time keep links busy in both directions.
    """

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        self._comm = comm
        self._rank: int = comm.rank
        self._size: int = comm.size
        self._wait_for: Callable[..., object] = MPI.Request.Waitall

    def swap(
        self,
        outgoing: Mapping[int, Bytes],
        incoming: Mapping[int, Bytes],
        prepare: Callable[[ByteRange], None] | None = None,
    ) -> None:
        """Sends a message to each rank of `outgoing`, and receives one from each of `incoming`.

        Piece by piece: while one of each message is on its way, `prepare` writes the next.

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
        for piece in ByteRange(0, longest).split(self.PIECE):
            if prepare is not None:
                prepare(piece)
            here = piece.slice
            now = [
                self._comm.Irecv(incoming[source][here], source)
                for source in sources
                if incoming[source].size > piece.start
            ]
            now += [
                self._comm.Isend(outgoing[target][here], target)
                for target in targets
                if outgoing[target].size > piece.start
            ]
            self._wait_for(before)  # one of two pieces is always on its way
            before = now
        self._wait_for(before)

    def _distance(self, rank: int) -> int:
        """The next rank first, so that not all ranks send to the same rank."""
        return (rank - self._rank) % self._size


def pieces(message: Bytes, size: int) -> list[Bytes]:
    """The message in pieces of `size` bytes; the last may be shorter."""
    return [message[piece.slice] for piece in ByteRange(0, message.size).split(size)]
