"""The communicator of ranks on any hosts, through MPI alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcstrat._calls.records import HEADER, PAYLOAD, RECORD, WHOLE, CallSignature
from hpcstrat._communicators.background import WINDOW, Background, SleepingComm, wait_with_sleeps
from hpcstrat._communicators.checked_exchange import Write
from hpcstrat._communicators.host import SMALL_MESSAGE_BYTES, HostCommunicator, describe_message
from hpcstrat._communicators.reduction import part_of_rank, reduce_in_chunks
from hpcstrat._core.span import COMMUNICATION, WAITING, span
from hpcstrat._core.types import Bytes, ReduceOp
from hpcstrat._memory.intervals import Interval
from hpcstrat._memory.layout import GROUP_ALIGNMENT, Layout, Sections, sections_in


class MpiCommunicator(HostCommunicator):
    """Ranks on any hosts, over mpi4py.

    Only bytes travel, and every rank reduces in rank order itself. So any dtype can be reduced,
    even one that MPI lacks, and results are bit-identical on all ranks and from run to run.

    Args:
        comm: an MPI communicator that only this object uses.
    """

    PIECE = 1 << 20
    """Bytes that are sent at once.

    Small messages take one collective call of MPI, larger ones are sent in pieces.

    MPI moves a large message in one direction at a time, over TCP at least, which takes twice as
    long where both sides send. Many small messages at a time keep links busy in both directions.
    """
    LARGEST = (1 << 31) - 1
    """The most bytes of a buffer in one collective call of MPI, which counts with 32 bits."""
    CHECKED_BYTES = 1 << 26
    """Messages at least this large are preceded by a check that every rank could allocate."""

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        super().__init__(comm.rank, comm.size)
        self._comm: Any = comm
        self._in_place = MPI.IN_PLACE
        self._wait_for = MPI.Request.Waitall
        self._record: Bytes = np.zeros(RECORD, np.uint8)
        self._records: Bytes = np.empty((comm.size, RECORD), np.uint8)
        self._views = [memoryview(record[:WHOLE]) for record in self._records]
        # Kept from call to call: the pages of new memory would cost about as much as a copy.
        self._send_buffer: Bytes = np.empty(0, np.uint8)
        self._receive_buffer: Bytes = np.empty(0, np.uint8)
        self._window = self.PIECE
        self._background: Background[HostCommunicator] | None = None
        self._has_asked_for_background = False

    def background(self) -> Background[HostCommunicator] | None:
        """See `HostCommunicator.background`."""
        if self.size > 1 and not self._has_asked_for_background:
            from mpi4py import MPI

            with self.calls.waiting:
                if all(self._comm.allgather(MPI.Query_thread() == MPI.THREAD_MULTIPLE)):
                    self._background = Background(
                        self._duplicate_for_background, self.calls, self.watchdog
                    )
            self._has_asked_for_background = True
        return self._background

    def _duplicate_for_background(self) -> MpiCommunicator:
        duplicate = self._duplicate()
        duplicate._comm = SleepingComm(duplicate._comm)
        duplicate._wait_for = wait_with_sleeps
        duplicate._window = WINDOW
        return duplicate

    def _duplicate(self) -> MpiCommunicator:
        """Another communicator of the same ranks. Collective."""
        return MpiCommunicator(self._comm.Dup())

    @span(WAITING, "the other ranks")
    def exchange_records(self, record: bytes, nbytes: int, write: Write | None) -> list[memoryview]:
        self._record[: len(record)] = np.frombuffer(record, np.uint8)
        if write is not None and nbytes <= PAYLOAD:
            write(self._record[HEADER:])
        # It is also the barrier: no rank has all records before every rank has come.
        self._comm.Allgather(self._record, self._records)
        return self._views

    def collect_messages(self, sizes: Sequence[int], write: Write | None) -> list[Bytes]:
        if max(sizes) <= PAYLOAD:
            return [record[HEADER:] for record in self._records]
        self._reserve(sum(sizes))
        messages = sections_in(self._receive_buffer, sizes)
        if write is not None:
            write(messages.of(self.rank))
        self._all_gather(messages)
        return messages.all()

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
            problem = f"rank {self.rank}: {error}"
        # A rank without the memory would raise while the others wait for it in MPI. For small
        # messages the check would cost more than it is worth.
        if wanted < self.CHECKED_BYTES:
            if problem:
                raise MemoryError(f"no memory for a message between replicas: {problem}")
        elif problems := [text for text in self._comm.allgather(problem) if text]:
            # On all ranks, which then check again together.
            self._send_buffer = self._receive_buffer = np.empty(0, np.uint8)
            self.calls.note_shared_error()
            raise MemoryError(f"no memory for a message between replicas: {'; '.join(problems)}")

    def _all_gather(self, sections: Sections) -> None:
        """Fills in every rank's section except this rank's own, which is there already.

        The sizes are all ranks'.
        """
        if sum(sections.sizes) > self.PIECE and self._sends_to_each(sections.sizes):
            self._swap([sections.of(self.rank)] * self.size, sections.all())
        elif sections.starts[-1] + sections.sizes[-1] <= self.LARGEST:
            self._comm.Allgatherv(self._in_place, sections.for_mpi())
        else:
            for root, section in enumerate(sections.all()):
                for piece in _pieces(section, self.LARGEST):
                    self._comm.Bcast(piece, root=root)

    def _sends_to_each(self, sizes: Sequence[int]) -> bool:
        """Whether each rank sends its section to all others itself.

        Otherwise MPI passes sections on from rank to rank: if one rank has nearly everything, as in
        a broadcast, its link would carry that once for every other rank.
        """
        return self.size * max(sizes) <= 2 * sum(sizes)

    def _all_to_all(
        self,
        ours: Sections,
        theirs: Sections,
        longest: int,
        prepare: Callable[[Interval], None] | None = None,
    ) -> None:
        """Sends each rank its section of `ours`; `theirs` gets what each rank sends to this rank.

        Args:
            ours: a section for each rank.
            theirs: a section from each rank.
            longest: size of the longest section on any rank: all must make the same MPI calls.
            prepare: writes some bytes of every section of `ours`, before it is sent.
        """
        if self.size * longest <= self.PIECE:
            if prepare is not None:
                prepare(Interval(0, longest))
            self._comm.Alltoallv(ours.for_mpi(), theirs.for_mpi())
            return
        own, sent = theirs.of(self.rank), ours.of(self.rank)

        def write(window: Interval) -> None:
            if prepare is not None:
                prepare(window)
            if own.size:
                own[window.slice] = sent[window.slice]

        self._swap(ours.all(), theirs.all(), write)

    def _swap(
        self,
        outgoing: Sequence[Bytes],
        incoming: Sequence[Bytes],
        prepare: Callable[[Interval], None] | None = None,
    ) -> None:
        """Sends each other rank a section, and receives theirs, which are as long as they send.

        In windows: while one is on its way, `prepare` writes the next.
        """
        longest = max([section.size for section in (*outgoing, *incoming)])
        before: list[Any] = []
        for window in Interval(0, longest).split(self._window):
            now: list[Any] = []
            if prepare is not None:
                prepare(window)
            # The next rank first, so that not all ranks send to the same rank.
            for distance in range(1, self.size):
                source = (self.rank - distance) % self.size
                target = (self.rank + distance) % self.size
                now += [
                    self._comm.Irecv(piece, source)
                    for piece in _pieces(incoming[source][window.slice], self.PIECE)
                ]
                now += [
                    self._comm.Isend(piece, target)
                    for piece in _pieces(outgoing[target][window.slice], self.PIECE)
                ]
            self._wait_for(before)  # one of two windows is always on its way
            before = now
        self._wait_for(before)

    @span(COMMUNICATION, describe_message)
    def reduce_message(
        self,
        signature: CallSignature,
        layout: Layout,
        write: Write,
        op: ReduceOp,
        out: Bytes,
        whole: Layout | None = None,
    ) -> None:
        """Every rank reduces small messages itself.

        Of a large message each rank reduces one slice, and all gather the slices.
        """
        if layout.nbytes <= SMALL_MESSAGE_BYTES:
            self._reduce_by_all(self.exchange(signature, layout.nbytes, write), layout, op, out)
            return
        with self.calls.waiting:
            self._reduce_by_slices(signature, layout, write, op, out)

    def _reduce_by_slices(
        self, signature: CallSignature, layout: Layout, write: Write, op: ReduceOp, out: Bytes
    ) -> None:
        # Slices differ by at most 64 elements, of at most 16 bytes.
        self._reserve(layout.nbytes + 1024 * self.size)
        write(self._send_buffer)
        # Before messages move: where sizes differ, MPI raises on one rank, and another rank gets a
        # wrong result.
        self.exchange(signature)
        for group in layout.groups:
            values, result = group.of(self._send_buffer), group.of(out)
            parts = [part_of_rank(group.elements, rank, self.size) for rank in range(self.size)]
            own, item = parts[self.rank].slice, group.dtype.itemsize
            sizes = [item * part.size for part in parts]
            starts = [item * part.start for part in parts]
            theirs = sections_in(self._receive_buffer, [sizes[self.rank]] * self.size)
            self._all_to_all(Sections(values.view(np.uint8), sizes, starts), theirs, max(sizes))
            reduce_in_chunks(result[own], [part.view(group.dtype) for part in theirs.all()], op)
            self._all_gather(Sections(result.view(np.uint8), sizes, starts))

    def exchange_sections(
        self, signature: CallSignature, sizes: Sequence[int], write: Callable[[int, Bytes], None]
    ) -> list[Bytes]:
        """See `HostCommunicator.exchange_sections`. Each rank gets only its own sections."""

        def write_sizes(message: Bytes) -> None:
            message[: 8 * self.size].view(np.int64)[:] = sizes

        messages = self.exchange(signature, 8 * self.size, write_sizes)
        everyones = np.stack([message[: 8 * self.size].view(np.int64) for message in messages])
        try:
            with self.calls.waiting:
                self._reserve(int(max(everyones.sum(axis=0).max(), everyones.sum(axis=1).max())))
                ours = sections_in(self._send_buffer, sizes)
                theirs = sections_in(self._receive_buffer, everyones[:, self.rank].tolist())
                for rank, section in enumerate(ours.all()):
                    write(rank, section)
                self._all_to_all(ours, theirs, int(everyones.max()))
        except BaseException as error:  # such as a signal's: the others may wait for this rank
            self.calls.mark_interrupted(error)
            raise
        return theirs.all()


def _pieces(section: Bytes, size: int) -> list[Bytes]:
    return [section[piece.slice] for piece in Interval(0, section.size).split(size)]
