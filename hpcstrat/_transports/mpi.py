"""What communicators of ranks on several hosts have in common: records and messages over MPI."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcstrat._agreement.records import HEADER, PAYLOAD, RECORD, WHOLE, CallSignature
from hpcstrat._core.ranks_in_words import list_by_rank
from hpcstrat._core.timeline import WAITING, span
from hpcstrat._core.types import Bytes
from hpcstrat._memory.layout import GROUP_ALIGNMENT, Layout, layout_of_sections
from hpcstrat._transports.host import HostCommunicator
from hpcstrat._transports.point_to_point import PointToPoint, pieces
from hpcstrat._transports.verbs import Write

FEW_RANKS = 16
"""Up to this many ranks exchange whole records, with short messages in them: 4 KiB in one call."""


class MpiCommunicator(HostCommunicator):
    """Ranks on several hosts, over mpi4py.

    Only bytes travel, and ranks reduce them themselves, in an order that does not depend on MPI. So
    any dtype can be reduced, even one that MPI lacks, and results are bit-identical on all ranks
    and from run to run.

    Args:
        comm: an MPI communicator that only this object uses.
    """

    LARGEST = (1 << 31) - 1
    """The most bytes of a buffer in one collective call of MPI, which counts with 32 bits."""
    CHECKED_BYTES = 1 << 26
    """Messages at least this large are preceded by a check that every rank could allocate."""

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        super().__init__(comm.rank, comm.size)
        self._comm = comm
        self._messages = PointToPoint(comm)
        self._in_place = MPI.IN_PLACE
        self._and, self._max = MPI.BAND, MPI.MAX
        self.has_many_ranks = comm.size > FEW_RANKS
        # Of many ranks records are gathered only where they differ, without messages in them.
        self._short, nbytes = (-1, WHOLE) if self.has_many_ranks else (PAYLOAD, RECORD)
        self._record: Bytes = np.zeros(nbytes, np.uint8)
        self._records: Bytes = np.empty((comm.size, nbytes), np.uint8)
        self._views = [memoryview(record[:WHOLE]) for record in self._records]
        # The record and its complement: see `_is_everyones`.
        self._both = np.empty((2, WHOLE // 8), np.int64)
        self._common = np.empty_like(self._both)
        # Kept from call to call: the pages of new memory would cost about as much as a copy.
        self._send_buffer: Bytes = np.empty(0, np.uint8)
        self._receive_buffer: Bytes = np.empty(0, np.uint8)

    # ---- records

    @span(WAITING, "the other ranks")
    def exchange_records(self, record: bytes, nbytes: int, write: Write | None) -> list[memoryview]:
        own = np.frombuffer(record, np.uint8)
        if self.has_many_ranks and self._is_everyones(own):
            self._views[self.rank][:] = record
            return [self._views[self.rank]]
        self._record[:WHOLE] = own
        if write is not None and nbytes <= self._short:
            write(self._record[HEADER:])
        # It is also the barrier: no rank has all records before every rank has come.
        self._comm.Allgather(self._record, self._records)
        return self._views

    def _is_everyones(self, record: Bytes) -> bool:
        """Whether all ranks have this record; all find the same. Also a barrier.

        A bit that is set on all ranks, or on none, is the same on all.
        """
        self._both[0] = record.view(np.int64)
        np.invert(self._both[0], out=self._both[1])
        self._comm.Allreduce(self._both, self._common, self._and)
        return self._common.tobytes() == self._both.tobytes()

    # ---- messages

    def collect_messages(self, sizes: Sequence[int], write: Write | None) -> list[Bytes]:
        if max(sizes) <= self._short:
            return [record[HEADER:] for record in self._records]
        self._reserve(sum(sizes))
        layout = layout_of_sections(sizes)
        messages = layout.views(self._receive_buffer)
        if write is not None:
            write(messages[self.rank])
        self._all_gather(messages, layout)
        return messages

    def _reserve(self, nbytes: int) -> None:
        """Makes room for sections of `nbytes` bytes, to send and to receive.

        Collective; all ranks pass the same.
        """
        wanted = nbytes + self.size * GROUP_ALIGNMENT
        if self._send_buffer.size >= wanted:
            return
        problem = ""
        try:
            # Freed before larger ones are allocated.
            self._send_buffer = self._receive_buffer = np.empty(0, np.uint8)
            buffers = np.empty(wanted, np.uint8), np.empty(wanted, np.uint8)
            self._send_buffer, self._receive_buffer = buffers
        except MemoryError as error:
            self._send_buffer = np.empty(0, np.uint8)
            problem = str(error) or repr(error)
        # A rank without the memory would raise while the others wait for it in MPI. For small
        # messages the check would cost more than it is worth.
        if wanted < self.CHECKED_BYTES:
            if problem:
                raise MemoryError(
                    f"no memory for a message between replicas: rank {self.rank}: {problem}"
                )
        elif problems := list_by_rank(enumerate(self._comm.allgather(problem))):
            # On all ranks, which then check again together.
            self._send_buffer = self._receive_buffer = np.empty(0, np.uint8)
            self.calls.note_shared_error()
            raise MemoryError(f"no memory for a message between replicas: {'; '.join(problems)}")

    def _all_gather(self, messages: Sequence[Bytes], layout: Layout) -> None:
        """Fills in every rank's message except this rank's own, which is there already.

        Args:
            messages: of all ranks, in the receive buffer.
            layout: where they are.
        """
        roots = [rank for rank, size in enumerate(layout.sizes) if size]
        if len(roots) > 1 and layout.nbytes <= self.LARGEST:
            places = layout.sizes, layout.starts
            self._comm.Allgatherv(self._in_place, (self._receive_buffer, places))
            return
        # Of one rank's message MPI would otherwise make a ring, one rank after the other.
        for root in roots:
            for piece in pieces(messages[root], self.LARGEST):
                self._comm.Bcast(piece, root=root)

    def exchange_sections(
        self, signature: CallSignature, sizes: Sequence[int], write: Callable[[int, Bytes], None]
    ) -> list[Bytes]:
        """See `HostCommunicator.exchange_sections`. Each rank gets only its own sections."""
        self.exchange(signature)
        try:
            with self.calls.waiting:
                theirs = np.empty(self.size, np.int64)
                self._comm.Alltoall(np.array(sizes, np.int64), theirs)
                # All ranks must make the same calls of MPI.
                most = np.array([max(*sizes, *theirs), sum(sizes), theirs.sum()], np.int64)
                self._comm.Allreduce(self._in_place, most, self._max)
                longest, sent, received = most.tolist()
                self._reserve(max(sent, received))
                return self._all_to_all(sizes, theirs.tolist(), longest, write)
        except BaseException as error:  # such as a signal's: the others may wait for this rank
            self.calls.mark_interrupted(error)
            raise

    def _all_to_all(
        self,
        sizes: Sequence[int],
        their_sizes: Sequence[int],
        longest: int,
        write: Callable[[int, Bytes], None],
    ) -> list[Bytes]:
        """Sends each rank a section; returns the section of each rank for this rank.

        Args:
            sizes: bytes of this rank's section for each rank. There is room for them.
            their_sizes: bytes of each rank's section for this rank.
            longest: bytes of the longest section on any rank.
            write: writes a section, given the rank that it is for, and the memory.
        """
        sent, received = layout_of_sections(sizes), layout_of_sections(their_sizes)
        ours, theirs = sent.views(self._send_buffer), received.views(self._receive_buffer)
        for rank, section in enumerate(ours):
            write(rank, section)
        if self.size * longest <= self._messages.PIECE:
            self._comm.Alltoallv(
                (self._send_buffer, (sent.sizes, sent.starts)),
                (self._receive_buffer, (received.sizes, received.starts)),
            )
        else:
            theirs[self.rank][...] = ours[self.rank]
            self._messages.swap(dict(enumerate(ours)), dict(enumerate(theirs)))
        return theirs
