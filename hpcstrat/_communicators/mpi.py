"""The communicators of ranks on any hosts: by MPI alone, or by each host's shared memory first."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import numpy as np

from hpcstrat._communicators.background import WINDOW, Background, PatientComm, wait_patiently
from hpcstrat._communicators.checked_exchange import Write
from hpcstrat._communicators.host import SMALL_MESSAGE_BYTES, HostCommunicator, describe_message
from hpcstrat._communicators.packing import Layout, layout_of
from hpcstrat._communicators.protocol import HEADER, PAYLOAD, RECORD, WHOLE, CallSignature, signature_of
from hpcstrat._communicators.reduction import REDUCTIONS, accumulator, reduce_flat, slice_of
from hpcstrat._communicators.shared_memory import SharedMemoryCommunicator
from hpcstrat._spans import COMMUNICATION, WAITING, Details, span
from hpcstrat._types import Array, Bytes, ReduceOp


class _Sections(NamedTuple):
    """A section for, or of, each rank, all in one buffer, from which MPI sends and to which it receives.

    Attributes:
        memory: the buffer, in bytes.
        sizes: bytes of each rank's section.
        starts: where each begins.
    """

    memory: Bytes
    sizes: Sequence[int]
    starts: Sequence[int]

    def of(self, rank: int) -> Bytes:
        """The section of a rank."""
        return self.memory[self.starts[rank] : self.starts[rank] + self.sizes[rank]]

    def all(self) -> list[Bytes]:
        """Every rank's, in rank order."""
        return [self.of(rank) for rank in range(len(self.sizes))]

    def for_mpi(self) -> tuple[Bytes, tuple[Sequence[int], Sequence[int]]]:
        """The buffer as mpi4py takes it."""
        return self.memory, (self.sizes, self.starts)


class MpiCommunicator(HostCommunicator):
    """Ranks anywhere, over mpi4py.

    Only bytes travel, and every rank reduces in rank order itself. So any dtype can be reduced, whatever MPI knows
    of it, and results are bit-identical on all ranks and from run to run.

    Args:
        comm: an MPI communicator, used by nobody else.
    """

    PIECE = 1 << 20
    """Bytes that are sent at once. Small messages go by one collective call of MPI, larger ones by pieces.

    MPI moves a large message in one direction at a time, over TCP at least, which takes twice as long where both sides
    send. Many small ones at a time keep links busy in both.
    """
    LARGEST = (1 << 31) - 1
    """Bytes of a buffer that one collective call of MPI takes at most: MPI counts with 32 bits."""
    CHECKED_BYTES = 1 << 26
    """Bytes of messages from which on the ranks ask each other whether all have the memory."""

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        super().__init__(comm.rank, comm.size)
        self._comm: Any = comm
        self._in_place = MPI.IN_PLACE
        self._wait_for = MPI.Request.Waitall
        self._record: Bytes = np.zeros(RECORD, np.uint8)
        self._records: Bytes = np.empty((comm.size, RECORD), np.uint8)
        self._views = [memoryview(record[:WHOLE]) for record in self._records]
        # Kept from call to call: the pages of fresh memory would cost about as much as a copy.
        self._send_buffer: Bytes = np.empty(0, np.uint8)
        self._receive_buffer: Bytes = np.empty(0, np.uint8)
        self._window = sys.maxsize
        self._background: Background[HostCommunicator] | None = None
        self._has_asked_for_background = False

    def background(self) -> Background[HostCommunicator] | None:
        """See `HostCommunicator.background`."""
        if self.size > 1 and not self._has_asked_for_background:
            from mpi4py import MPI

            with self.calls.waiting:
                if all(self._comm.allgather(MPI.Query_thread() == MPI.THREAD_MULTIPLE)):
                    self._background = Background(self._patient_second, self.calls, self.watchdog)
            self._has_asked_for_background = True
        return self._background

    def _patient_second(self) -> MpiCommunicator:
        second = self._second()
        second._comm, second._wait_for, second._window = PatientComm(second._comm), wait_patiently, WINDOW
        return second

    def _second(self) -> MpiCommunicator:
        """Another one of the same ranks. Collective."""
        return MpiCommunicator(self._comm.Dup())

    @span(WAITING, "the other ranks")
    def exchange_records(self, record: bytes, nbytes: int, write: Write | None) -> list[memoryview]:
        self._record[: len(record)] = np.frombuffer(record, np.uint8)
        if write is not None and nbytes <= PAYLOAD:
            write(self._record[HEADER:])
        # It is the barrier too: nobody has all records before every rank has come.
        self._comm.Allgather(self._record, self._records)
        return self._views

    def collect_messages(self, sizes: Sequence[int], write: Write | None) -> list[Bytes]:
        if max(sizes) <= PAYLOAD:
            return [record[HEADER:] for record in self._records]
        self._reserve(sum(sizes))
        messages = _sections_in(self._receive_buffer, sizes)
        if write is not None:
            write(messages.of(self.rank))
        self._all_gather(messages)
        return messages.all()

    def _reserve(self, nbytes: int) -> None:
        """Makes room for sections of `nbytes` bytes, to send and to receive. Collective; all ranks pass the same."""
        wanted = nbytes + self.size * _ALIGNMENT
        if self._send_buffer.size >= wanted:
            return
        problem = ""
        try:
            # Given back before larger ones are asked for.
            self._send_buffer = self._receive_buffer = np.empty(0, np.uint8)
            self._send_buffer, self._receive_buffer = np.empty(wanted, np.uint8), np.empty(wanted, np.uint8)
        except MemoryError as error:
            self._send_buffer = np.empty(0, np.uint8)
            problem = f"rank {self.rank}: {error}"
        # A rank without the memory would raise while the others wait for it in MPI. For small messages the question
        # would cost more than it is worth.
        if wanted < self.CHECKED_BYTES:
            if problem:
                raise MemoryError(f"no memory for a message between replicas: {problem}")
        elif problems := [one for one in self._comm.allgather(problem) if one]:
            self._send_buffer = self._receive_buffer = np.empty(0, np.uint8)  # on all ranks, which ask again together
            self.settle()
            raise MemoryError(f"no memory for a message between replicas: {'; '.join(problems)}")

    def _all_gather(self, sections: _Sections) -> None:
        """Fills in every rank's section but this rank's own, which is there already. The sizes are all ranks'."""
        if sum(sections.sizes) > self.PIECE and self._sends_to_each(sections.sizes):
            self._swap([sections.of(self.rank)] * self.size, sections.all())
        elif sections.starts[-1] + sections.sizes[-1] <= self.LARGEST:
            self._comm.Allgatherv(self._in_place, sections.for_mpi())
        else:
            for root, section in enumerate(sections.all()):
                for start in range(0, section.size, self.LARGEST):
                    self._comm.Bcast(section[start : start + self.LARGEST], root=root)

    def _sends_to_each(self, sizes: Sequence[int]) -> bool:
        """Whether each rank sends its section to all others itself. Else MPI passes them on from rank to rank.

        Where one rank has nearly everything, as in a broadcast, its link would carry that once for every other rank.
        """
        return self.size * max(sizes) <= 2 * sum(sizes)

    def _all_to_all(self, ours: _Sections, theirs: _Sections, longest: int) -> None:
        """Sends each rank its section of `ours`; each one of `theirs` is what that rank sent here.

        `longest` is the size of the longest one of all ranks, so that all make the same MPI calls.
        """
        if self.size * longest <= self.PIECE:
            self._comm.Alltoallv(ours.for_mpi(), theirs.for_mpi())
        else:
            own = theirs.of(self.rank)
            if own.size:
                own[...] = ours.of(self.rank)
            self._swap(ours.all(), theirs.all())

    def _swap(self, outgoing: Sequence[Bytes], incoming: Sequence[Bytes]) -> None:
        """Sends each rank but this one a section, while theirs come. What comes from a rank is as long as it sends."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        longest = max([max(outgoing[rank].size, incoming[rank].size) for rank in others], default=0)
        before: list[Any] = []
        for start in range(0, longest, self._window):
            now: list[Any] = []
            here = slice(start, start + self._window)
            # The next rank first, so that not all ranks send to the same one.
            for distance in range(1, self.size):
                source, target = (self.rank - distance) % self.size, (self.rank + distance) % self.size
                now += [self._comm.Irecv(piece, source) for piece in self._pieces(incoming[source][here])]
                now += [self._comm.Isend(piece, target) for piece in self._pieces(outgoing[target][here])]
            self._wait_for(before)  # of two windows one is always on its way
            before = now
        self._wait_for(before)

    def _pieces(self, section: Bytes) -> list[Bytes]:
        return [section[start : start + self.PIECE] for start in range(0, section.size, self.PIECE)]

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
        """Small messages every rank reduces itself. Large ones go by slices: each rank reduces one, all gather them."""
        if layout.nbytes <= SMALL_MESSAGE_BYTES:
            self._reduce_by_all(self.exchange(signature, layout.nbytes, write), layout, op, out)
            return
        with self.calls.waiting:
            self._reduce_by_slices(signature, layout, write, op, out)

    def _reduce_by_slices(
        self, signature: CallSignature, layout: Layout, write: Write, op: ReduceOp, out: Bytes
    ) -> None:
        self._reserve(layout.nbytes + 1024 * self.size)  # slices are equal but for 64 elements, of 16 bytes at most
        write(self._send_buffer)
        # Before messages move: where sizes differ, MPI raises on one rank and gives another a wrong result.
        self.exchange(signature)
        for group in layout.groups:
            values, result = group.of(self._send_buffer), group.of(out)
            slices = [slice_of(group.elements, rank, self.size) for rank in range(self.size)]
            own, item = slices[self.rank], group.dtype.itemsize
            sizes = [item * (one.stop - one.start) for one in slices]
            starts = [item * one.start for one in slices]
            theirs = _sections_in(self._receive_buffer, [sizes[self.rank]] * self.size)
            self._all_to_all(_Sections(values.view(np.uint8), sizes, starts), theirs, max(sizes))
            reduce_flat(result[own], [part.view(group.dtype) for part in theirs.all()], op)
            self._all_gather(_Sections(result.view(np.uint8), sizes, starts))

    def exchange_sections(
        self, signature: CallSignature, sizes: Sequence[int], write: Callable[[int, Bytes], None]
    ) -> list[Bytes]:
        """See `HostCommunicator.exchange_sections`. Nobody gets what is for others."""

        def write_sizes(message: Bytes) -> None:
            message[: 8 * self.size].view(np.int64)[:] = sizes

        messages = self.exchange(signature, 8 * self.size, write_sizes)
        everyones = np.stack([message[: 8 * self.size].view(np.int64) for message in messages])
        try:
            with self.calls.waiting:
                self._reserve(int(max(everyones.sum(axis=0).max(), everyones.sum(axis=1).max())))
                ours = _sections_in(self._send_buffer, sizes)
                theirs = _sections_in(self._receive_buffer, everyones[:, self.rank].tolist())
                for rank, section in enumerate(ours.all()):
                    write(rank, section)
                self._all_to_all(ours, theirs, int(everyones.max()))
        except BaseException as error:  # a signal's, say: the others may wait for this rank's sections
            self.mark_interrupted(error)
            raise
        return theirs.all()


@final
class HierarchicalCommunicator(MpiCommunicator):
    """Ranks on several hosts, over mpi4py and each host's shared memory.

    A large reduction is split over all ranks. The ranks of each host add up each rank's section in shared memory, and
    send it to that rank; it adds up the hosts' sums, and sends the result to one rank of each host, from which the
    others copy it. So a host sends everything once, however many ranks it has, and all of them share the work, and the
    links where a host has several. Sums are of each host's in rank order, then of the hosts in order: bit-identical on
    all ranks and from run to run. 16-bit floats, which are rounded once only, go between all ranks.

    Args:
        comm: an MPI communicator, used by nobody else.
        host_comm: the ranks of it that are on this host.
    """

    def __init__(self, comm: Any, host_comm: Any) -> None:
        super().__init__(comm)
        self._host_comm = host_comm
        self._host = SharedMemoryCommunicator(host_comm.Dup())
        # What every host has room for. Not each host's own capacity: one may have grown where another could not.
        self._reserved_bytes = 0
        of_rank = comm.allgather(host_comm.bcast(comm.rank))  # the first rank of each rank's host
        hosts = [[rank for rank in range(comm.size) if of_rank[rank] == lead] for lead in sorted(set(of_rank))]
        own_hosts = [next(host for host in hosts if rank in host) for rank in range(comm.size)]
        # Every rank has one of each host that sums for it, and that its section reaches the others by: itself, or the
        # one of its own place there.
        self._servers = [[host[own.index(rank) % len(host)] for host in hosts] for rank, own in enumerate(own_hosts)]
        self._peers = own_hosts[comm.rank]
        self._served_ranks = {
            peer: [rank for rank in range(comm.size) if peer in self._servers[rank]] for peer in self._peers
        }

    def _sends_to_each(self, sizes: Sequence[int]) -> bool:
        """See `MpiCommunicator._sends_to_each`. A host would get everything once for each of its ranks."""
        return False

    def _second(self) -> MpiCommunicator:
        return HierarchicalCommunicator(self._comm.Dup(), self._host_comm)

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
        """Small messages every rank reduces itself. Large ones go inside the host, between hosts, and back."""
        if not _goes_by_hosts(whole or layout):
            super().reduce_message(signature, layout, write, op, out)
            return
        with self.calls.waiting:
            self._reduce_by_hosts(signature, layout, write, op, out)

    def _reduce_by_hosts(
        self, signature: CallSignature, layout: Layout, write: Write, op: ReduceOp, out: Bytes
    ) -> None:
        slices = [_slices_of(layout, rank, self.size) for rank in range(self.size)]
        layouts = [_layout_of_slices(layout, rank, self.size) for rank in range(self.size)]
        is_mean = REDUCTIONS[op].is_mean
        # A mean of the hosts' means would be wrong where hosts run different numbers of ranks.
        partial = ReduceOp.SUM if is_mean else op
        self._agree(signature, layout.nbytes)
        messages = self._host.exchange(signature, layout.nbytes, write)

        def parts_of(rank: int) -> list[list[Array]]:
            groups = zip(layout.groups, slices[rank], strict=True)
            return [[group.of(message)[one] for message in messages] for group, one in groups]

        sums = self._sum_by_hosts(layouts, parts_of, partial)

        def write_own(section: Bytes) -> None:
            for group in layouts[self.rank].groups:
                result = group.of(section)
                reduce_flat(result, [group.of(one) for one in sums], partial)
                if is_mean and self.size > 1:
                    with np.errstate(all="ignore"):
                        np.divide(result, self.size, out=result)

        found = self._gather_by_hosts(signature, [one.nbytes for one in layouts], write_own)
        for rank, section in enumerate(found):
            for group, part, one in zip(layout.groups, layouts[rank].groups, slices[rank], strict=True):
                group.of(out)[one] = part.of(section)

    def _agree(self, signature: CallSignature, nbytes: int) -> None:
        """All ranks agree first: inside a host nobody would notice that another host makes a different call.

        Then there is room for `nbytes` bytes of each rank.
        """
        self.exchange(signature)
        if self._reserved_bytes < nbytes:
            with self.raise_together():  # a host without the memory stops the others
                self._host.reserve(nbytes)
                self.exchange(signature_of(f"{signature.call}: memory"))
            self._reserved_bytes = nbytes

    @span(COMMUNICATION, lambda _, signature, layouts, *__: Details(signature.call, sum(one.nbytes for one in layouts)))
    def sum_sections(
        self, signature: CallSignature, layouts: Sequence[Layout], whole: Layout, write: Callable[[int, Bytes], None]
    ) -> list[Bytes]:
        """See `HostCommunicator.sum_sections`. Inside each host first: one message from each host to each rank."""
        if not _goes_by_hosts(whole):  # as in `reduce_message`, which adds up in the same order
            return super().sum_sections(signature, layouts, whole, write)
        sent = _layout_of([layout.nbytes for layout in layouts])

        def write_all(message: Bytes) -> None:
            for rank, section in enumerate(sent.views(message)):
                write(rank, section)

        with self.calls.waiting:
            self._agree(signature, sent.nbytes)
            everyones = [sent.views(message) for message in self._host.exchange(signature, sent.nbytes, write_all)]

            def parts_of(rank: int) -> list[list[Array]]:
                return [[group.of(sections[rank]) for sections in everyones] for group in layouts[rank].groups]

            return self._sum_by_hosts(layouts, parts_of, ReduceOp.SUM)

    def _sum_by_hosts(
        self, layouts: Sequence[Layout], parts_of: Callable[[int], list[list[Array]]], op: ReduceOp
    ) -> list[Bytes]:
        """Each host's reduction of this rank's section.

        Args:
            layouts: of each rank's section.
            parts_of: for a rank, group by group, the elements of its section that the ranks of this host have.
            op: how they are reduced.
        """
        sizes = [layout.nbytes for layout in layouts]
        senders = self._servers[self.rank]
        self._reserve(max(sum(sizes), len(senders) * max(sizes)))
        ours = _sections_in(self._send_buffer, self._of_served(sizes))
        for rank in self._served_ranks[self.rank]:
            for group, parts in zip(layouts[rank].groups, parts_of(rank), strict=True):
                reduce_flat(group.of(ours.of(rank)), parts, op)
        theirs = _sections_in(self._receive_buffer, [sizes[self.rank] * (rank in senders) for rank in range(self.size)])
        self._all_to_all(ours, theirs, max(sizes))
        return [theirs.of(rank) for rank in senders]

    def _of_served(self, sizes: Sequence[int]) -> list[int]:
        """The sizes of the sections of those ranks that this one serves; 0 for the others."""
        return [n if self.rank in self._servers[rank] else 0 for rank, n in enumerate(sizes)]

    @span(COMMUNICATION, lambda _, signature, sizes, __: Details(signature.call, sum(sizes)))
    def gather_sections(self, signature: CallSignature, sizes: Sequence[int], write: Write) -> list[Bytes]:
        """See `HostCommunicator.gather_sections`. One message from each rank to each host, and then inside it."""
        if sum(sizes) <= SMALL_MESSAGE_BYTES:
            return super().gather_sections(signature, sizes, write)
        with self.calls.waiting:
            self._agree(signature, _layout_of(sizes).nbytes)
            return self._gather_by_hosts(signature, sizes, write)

    def _gather_by_hosts(self, signature: CallSignature, sizes: Sequence[int], write: Write) -> list[Bytes]:
        """Every rank's section, on every rank; there is room for all of them in the host's memory."""
        self._reserve(sum(sizes))
        size, senders = sizes[self.rank], self._servers[self.rank]
        own = self._send_buffer[:size]
        write(own)
        # The same bytes to one rank of each host.
        ours = _Sections(own, [size * (rank in senders) for rank in range(self.size)], [0] * self.size)
        theirs = _sections_in(self._receive_buffer, self._of_served(sizes))
        self._all_to_all(ours, theirs, max(sizes))
        # What each rank of this host has got.
        brought = {peer: _layout_of([sizes[rank] for rank in ranks]) for peer, ranks in self._served_ranks.items()}

        def write_brought(message: Bytes) -> None:
            for section, rank in zip(brought[self.rank].views(message), self._served_ranks[self.rank], strict=True):
                section[...] = theirs.of(rank)

        messages = self._host.exchange(signature, brought[self.rank].nbytes, write_brought)
        found: dict[int, Bytes] = {}
        for peer, message in zip(self._peers, messages, strict=True):
            found |= zip(self._served_ranks[peer], brought[peer].views(message), strict=True)
        return [found[rank] for rank in range(self.size)]

    def reduce_parts(self, must_match: tuple[Any, ...], parts: Sequence[Sequence[Array]], op: ReduceOp) -> list[Array]:
        """All of it is reduced, and the rest dropped: between hosts that sends less than each rank's parts to each."""
        flat = [np.concatenate([part.reshape(-1) for part in leaf]) for leaf in parts]
        results = []
        for whole, leaf in zip(self.reduce_arrays(must_match, flat, op), parts, strict=True):
            start = sum(part.size for part in leaf[: self.rank])
            own = leaf[self.rank]
            results.append(whole[start : start + own.size].reshape(own.shape).copy())
        return results


_ALIGNMENT = 16
"""Bytes to whose multiples sections begin, so that arrays of any dtype lie well in them."""


def _layout_of(sizes: Sequence[int]) -> Layout:
    """The layout of a message of sections of these sizes, in bytes."""
    return layout_of(tuple([(size,) for size in sizes]), (np.dtype(np.uint8),) * len(sizes), _ALIGNMENT)


def _sections_in(memory: Bytes, sizes: Sequence[int]) -> _Sections:
    return _Sections(memory, sizes, _layout_of(sizes).starts)


def _slices_of(layout: Layout, rank: int, size: int) -> list[slice]:
    """Of each group of a message, the elements that a rank reduces."""
    return [slice_of(group.elements, rank, size) for group in layout.groups]


def _layout_of_slices(layout: Layout, rank: int, size: int) -> Layout:
    slices = _slices_of(layout, rank, size)
    return layout_of(
        tuple([(one.stop - one.start,) for one in slices]), tuple([group.dtype for group in layout.groups])
    )


def _goes_by_hosts(whole: Layout) -> bool:
    """Whether such a message is reduced inside each host first, which is another order of sums."""
    is_short = any(accumulator(group.dtype) != group.dtype for group in whole.groups)
    return whole.nbytes > SMALL_MESSAGE_BYTES and not is_short
