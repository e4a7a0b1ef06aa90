"""The communicators of ranks on any hosts: by MPI alone, or by each host's shared memory first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import numpy as np

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

    PIECE = (1 << 31) - 1
    """Bytes of a buffer that one MPI call takes at most: MPI counts, and finds sections, with 32 bits."""
    CHECKED_BYTES = 1 << 26
    """Bytes of messages from which on the ranks ask each other whether all have the memory."""

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        super().__init__(comm.rank, comm.size)
        self._comm = comm
        self._in_place = MPI.IN_PLACE
        self._record: Bytes = np.zeros(RECORD, np.uint8)
        self._records: Bytes = np.empty((comm.size, RECORD), np.uint8)
        self._views = [memoryview(record[:WHOLE]) for record in self._records]

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
        messages = self._new_sections(sizes, sum(sizes))
        if write is not None:
            write(messages.of(self.rank))
        self._all_gather(messages)
        return messages.all()

    def _new_sections(self, sizes: Sequence[int], most: int) -> _Sections:
        """Memory for sections of these sizes; `most` bytes, the same on all ranks, are what one of them needs."""
        layout = _layout_of(sizes)
        if most < self.CHECKED_BYTES:
            return _Sections(np.empty(layout.nbytes, np.uint8), sizes, layout.starts)
        memory, problem = np.empty(0, np.uint8), ""
        try:
            memory = np.empty(layout.nbytes, np.uint8)
        except MemoryError as error:
            problem = f"rank {self.rank}: {error}"
        # A rank without the memory would raise while the others wait for it in MPI. For small messages the question
        # would cost more than it is worth.
        if problems := [one for one in self._comm.allgather(problem) if one]:
            self.settle()
            raise MemoryError(f"no memory for a message between replicas: {'; '.join(problems)}")
        return _Sections(memory, sizes, layout.starts)

    def _all_gather(self, sections: _Sections) -> None:
        """Fills in every rank's section but this rank's own, which is there already. The sizes are all ranks'."""
        if sections.memory.size <= self.PIECE:
            self._comm.Allgatherv(self._in_place, sections.for_mpi())
            return
        # Sections beyond 2 GiB, which MPI's numbers cannot tell the places of, go one by one.
        for root, section in enumerate(sections.all()):
            for start in range(0, section.size, self.PIECE):
                self._comm.Bcast(section[start : start + self.PIECE], root=root)

    @span(COMMUNICATION, describe_message)
    def reduce_message(self, signature: CallSignature, layout: Layout, write: Write, op: ReduceOp, out: Bytes) -> None:
        """Small messages every rank reduces itself. Large ones go by slices: each rank reduces one, all gather them."""
        if layout.nbytes <= SMALL_MESSAGE_BYTES:
            self._reduce_by_all(self.exchange(signature, layout.nbytes, write), layout, op, out)
            return
        with self.calls.waiting:
            self._reduce_by_slices(signature, layout, write, op, out)

    def _reduce_by_slices(
        self, signature: CallSignature, layout: Layout, write: Write, op: ReduceOp, out: Bytes
    ) -> None:
        message = np.empty(layout.nbytes, np.uint8)
        write(message)
        # Before messages move: where sizes differ, MPI raises on one rank and gives another a wrong result.
        self.exchange(signature)
        for group in layout.groups:
            values, result = group.of(message), group.of(out)
            slices = [slice_of(group.elements, rank, self.size) for rank in range(self.size)]
            item, own = group.dtype.itemsize, slices[self.rank]
            sizes = [item * (one.stop - one.start) for one in slices]
            starts = [item * one.start for one in slices]
            parts = np.empty((self.size, own.stop - own.start), group.dtype)
            nbytes = sizes[self.rank]
            theirs = _Sections(
                parts.reshape(-1).view(np.uint8), [nbytes] * self.size, [nbytes * rank for rank in range(self.size)]
            )
            self._all_to_all(_Sections(values.view(np.uint8), sizes, starts), theirs, max(sizes))
            reduce_flat(result[own], list(parts), op)
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
                most = int(max(everyones.sum(axis=0).max(), everyones.sum(axis=1).max()))
                theirs = self._new_sections(everyones[:, self.rank].tolist(), most)
                ours = self._new_sections(sizes, most)
                for rank, section in enumerate(ours.all()):
                    write(rank, section)
                self._all_to_all(ours, theirs, int(everyones.max()))
        except BaseException as error:  # a signal's, say: the others may wait for this rank's sections
            self.mark_interrupted(error)
            raise
        return theirs.all()

    def _all_to_all(self, ours: _Sections, theirs: _Sections, longest: int) -> None:
        """Sends each rank its section of `ours`; each one of `theirs` is what that rank sent here.

        `longest` is the size of the longest one of all ranks, so that all make the same MPI calls.
        """
        if self.size * (longest + _ALIGNMENT) <= self.PIECE:
            self._comm.Alltoallv(ours.for_mpi(), theirs.for_mpi())
            return
        # As in `_all_gather`. In each turn every rank sends to one other and receives from one.
        theirs.of(self.rank)[...] = ours.of(self.rank)
        for distance in range(1, self.size):
            to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            sent, received = ours.of(to), theirs.of(source)
            for start in range(0, longest, self.PIECE):
                stop = start + self.PIECE
                self._comm.Sendrecv(sent[start:stop], to, recvbuf=received[start:stop], source=source)


@final
class HierarchicalCommunicator(MpiCommunicator):
    """Ranks on several hosts, over mpi4py and each host's shared memory.

    A large reduction is made by the ranks of each host in shared memory; the hosts' first ranks reduce the results, so
    that each host sends one message instead of one per rank; and the ranks of a host copy its first rank's result. Sums
    are of each host's in rank order, then of the hosts in order: bit-identical on all ranks and from run to run. 16-bit
    floats, which are rounded once only, go between all ranks.

    Args:
        comm: an MPI communicator, used by nobody else.
        host_comm: the ranks of it that are on this host.
    """

    def __init__(self, comm: Any, host_comm: Any) -> None:
        from mpi4py import MPI

        super().__init__(comm)
        self._host = SharedMemoryCommunicator(host_comm.Dup())
        # What every host has room for. Not each host's own capacity: one may have grown where another could not.
        self._reserved_bytes = 0
        leads = comm.Split(0 if host_comm.rank == 0 else MPI.UNDEFINED, key=comm.rank)
        of_rank = comm.allgather(host_comm.bcast(comm.rank))  # the first rank of each rank's host
        hosts = [[rank for rank in range(comm.size) if of_rank[rank] == lead] for lead in sorted(set(of_rank))]
        own_hosts = [next(host for host in hosts if rank in host) for rank in range(comm.size)]
        # Every rank has one of each host that sums for it, and that its section reaches the others by: itself, or the
        # one of its own place there. So all ranks of a host share the work, and its links.
        self._servers = [[host[own.index(rank) % len(host)] for host in hosts] for rank, own in enumerate(own_hosts)]
        self._peers = own_hosts[comm.rank]
        self._between = MpiCommunicator(leads) if host_comm.rank == 0 else None

    @span(COMMUNICATION, describe_message)
    def reduce_message(self, signature: CallSignature, layout: Layout, write: Write, op: ReduceOp, out: Bytes) -> None:
        """Small messages every rank reduces itself. Large ones go inside the host, between hosts, and back."""
        is_short = any(accumulator(group.dtype) != group.dtype for group in layout.groups)
        if layout.nbytes <= SMALL_MESSAGE_BYTES or is_short:
            super().reduce_message(signature, layout, write, op, out)
            return
        with self.calls.waiting:
            self._reduce_by_hosts(signature, layout, write, op, out)

    def _reduce_by_hosts(
        self, signature: CallSignature, layout: Layout, write: Write, op: ReduceOp, out: Bytes
    ) -> None:
        self._agree(signature, layout.nbytes)
        is_mean = REDUCTIONS[op].is_mean
        # A mean of the hosts' means would be wrong where hosts run different numbers of ranks.
        partial = ReduceOp.SUM if is_mean else op
        self._host.reduce_message(signature, layout, write, partial, out)
        if self._between is not None:

            def write_sum(message: Bytes) -> None:
                message[: layout.nbytes] = out

            self._between.reduce_message(signature, layout, write_sum, partial, out)
            self._host.exchange(signature, layout.nbytes, write_sum)
        else:
            out[...] = self._host.exchange(signature)[0][: layout.nbytes]
        if is_mean and self.size > 1:
            with np.errstate(all="ignore"):
                for group in layout.groups:
                    np.divide(group.of(out), self.size, out=group.of(out))

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

    @span(COMMUNICATION, lambda _, signature, __, nbytes, *___: Details(signature.call, nbytes))
    def sum_sections(
        self, signature: CallSignature, layouts: Sequence[Layout], nbytes: int, write: Callable[[int, Bytes], None]
    ) -> list[Bytes]:
        """See `HostCommunicator.sum_sections`. Inside each host first: one message from each host to each rank."""
        is_short = any(accumulator(group.dtype) != group.dtype for group in layouts[0].groups)
        if nbytes <= SMALL_MESSAGE_BYTES or is_short:  # as in `reduce_message`, which adds up in the same order
            return super().sum_sections(signature, layouts, nbytes, write)
        sizes = [layout.nbytes for layout in layouts]
        whole = _layout_of(sizes)

        def write_all(message: Bytes) -> None:
            for rank, section in enumerate(whole.views(message)):
                write(rank, section)

        with self.calls.waiting:
            self._agree(signature, whole.nbytes)
            everyones = [whole.views(message) for message in self._host.exchange(signature, whole.nbytes, write_all)]
            ours = self._new_sections(self._served(sizes), sum(sizes))
            for rank, out in enumerate(ours.all()):
                for group in layouts[rank].groups if out.size else []:
                    reduce_flat(group.of(out), [group.of(sections[rank]) for sections in everyones], ReduceOp.SUM)
            senders = self._servers[self.rank]
            theirs = self._new_sections([sizes[self.rank] * (rank in senders) for rank in range(self.size)], sum(sizes))
            self._all_to_all(ours, theirs, max(sizes))
            return [theirs.of(rank) for rank in senders]

    def _served(self, sizes: Sequence[int]) -> list[int]:
        """The sizes of the sections of those ranks that this one serves; 0 for the others."""
        return [n if self.rank in self._servers[rank] else 0 for rank, n in enumerate(sizes)]

    @span(COMMUNICATION, lambda _, signature, sizes, __: Details(signature.call, sum(sizes)))
    def gather_sections(self, signature: CallSignature, sizes: Sequence[int], write: Write) -> list[Bytes]:
        """See `HostCommunicator.gather_sections`. One message from each rank to each host, and then inside it."""
        if sum(sizes) <= SMALL_MESSAGE_BYTES:
            return super().gather_sections(signature, sizes, write)
        # What each rank of this host brings.
        served = {peer: [rank for rank in range(self.size) if peer in self._servers[rank]] for peer in self._peers}
        brought = {peer: _layout_of([sizes[rank] for rank in ranks]) for peer, ranks in served.items()}
        with self.calls.waiting:
            self._agree(signature, _layout_of(sizes).nbytes)
            size, senders = sizes[self.rank], self._servers[self.rank]
            own = self._new_sections([size], sum(sizes)).memory
            write(own)
            # The same bytes to one rank of each host.
            ours = _Sections(own, [size * (rank in senders) for rank in range(self.size)], [0] * self.size)
            theirs = self._new_sections(self._served(sizes), sum(sizes))
            self._all_to_all(ours, theirs, max(sizes))

            def write_brought(message: Bytes) -> None:
                for section, rank in zip(brought[self.rank].views(message), served[self.rank], strict=True):
                    section[...] = theirs.of(rank)

            messages = self._host.exchange(signature, brought[self.rank].nbytes, write_brought)
        found = {}
        for peer, message in zip(self._peers, messages, strict=True):
            found |= zip(served[peer], brought[peer].views(message), strict=True)
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
