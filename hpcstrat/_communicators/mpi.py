"""The communicators of ranks on any hosts: by MPI alone, or by each host's shared memory first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from hpcstrat._communicators.checked_exchange import Write
from hpcstrat._communicators.host import SMALL_MESSAGE_BYTES, HostCommunicator, describe_message
from hpcstrat._communicators.packing import Layout, layout_of
from hpcstrat._communicators.protocol import HEADER, PAYLOAD, RECORD, WHOLE, CallSignature, signature_of
from hpcstrat._communicators.reduction import REDUCTIONS, accumulator, reduce_flat, slice_of
from hpcstrat._communicators.shared_memory import SharedMemoryCommunicator
from hpcstrat._spans import COMMUNICATION, WAITING, Details, span
from hpcstrat._types import Array, Bytes, ReduceOp


class MpiCommunicator(HostCommunicator):
    """Ranks anywhere, over mpi4py.

    Only bytes travel, and every rank reduces in rank order itself. So any dtype can be reduced, whatever MPI knows
    of it, and results are bit-identical on all ranks and from run to run.

    Args:
        comm: an MPI communicator, used by nobody else.
    """

    PIECE = (1 << 31) - 1
    """Bytes that one MPI call moves at most, over all ranks: MPI counts with 32 bits."""
    CHECKED_BYTES = 1 << 26
    """Bytes of messages from which on the ranks ask each other whether all have the memory."""

    def __init__(self, comm: Any) -> None:
        super().__init__(comm.rank, comm.size)
        self._comm = comm
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
        messages = self._empty(sizes, sum(sizes))
        if write is not None:
            write(messages[self.rank])
        self._all_gather(messages)
        return messages

    def _empty(self, sizes: Sequence[int], most: int) -> list[Bytes]:
        """Memory for messages of these sizes; `most` bytes, the same on all ranks, are what one of them needs."""
        if most < self.CHECKED_BYTES:
            return [np.empty(size, np.uint8) for size in sizes]
        messages, problem = [], ""
        try:
            messages = [np.empty(size, np.uint8) for size in sizes]
        except MemoryError as error:
            problem = f"rank {self.rank}: {error}"
        # A rank without the memory would raise while the others wait for it in MPI. For small messages the question
        # would cost more than it is worth.
        if problems := [one for one in self._comm.allgather(problem) if one]:
            self.settle()
            raise MemoryError(f"no memory for a message between replicas: {'; '.join(problems)}")
        return messages

    def _all_gather(self, parts: Sequence[Bytes]) -> None:
        """Fills in every rank's part but this rank's own, which is there already."""
        step = self.PIECE // self.size
        if sum(part.size for part in parts) <= step:  # small: one call
            whole = np.empty(sum(part.size for part in parts), np.uint8)
            counts = [part.size for part in parts]
            self._comm.Allgatherv(parts[self.rank], [whole, counts])
            for part, start in zip(parts, np.cumsum([0, *counts[:-1]]), strict=True):
                part[...] = whole[start : start + part.size]
            return
        # Large ones go straight to where they belong: one call for all would need a second copy of everything.
        for root, part in enumerate(parts):
            for start in range(0, part.size, self.PIECE):
                self._comm.Bcast(part[start : start + self.PIECE], root=root)

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
            parts = np.empty((self.size, slices[self.rank].stop - slices[self.rank].start), group.dtype)
            ours = [values[one].view(np.uint8) for one in slices]
            self._all_to_all(ours, list(parts.view(np.uint8)), max(part.size for part in ours))
            reduce_flat(result[slices[self.rank]], list(parts), op)
            self._all_gather([result[one].view(np.uint8) for one in slices])

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
                theirs = self._empty(everyones[:, self.rank].tolist(), most)
                ours = self._empty(sizes, most)
                for rank, section in enumerate(ours):
                    write(rank, section)
                self._all_to_all(ours, theirs, int(everyones.max()))
        except BaseException as error:  # a signal's, say: the others may wait for this rank's sections
            self.mark_interrupted(error)
            raise
        return theirs

    def _all_to_all(self, ours: Sequence[Bytes], theirs: Sequence[Bytes], longest: int) -> None:
        """Sends `ours[r]` to each rank r; `theirs[r]` is what rank r sent here.

        `longest` is the size of the longest one of all ranks, so that all make the same number of MPI calls.
        """
        step = max(1, self.PIECE // self.size)
        for start in range(0, longest, step):
            sent = [part[start : start + step] for part in ours]
            received = [part[start : start + step] for part in theirs]
            counts = [part.size for part in received]
            flat = np.empty(sum(counts), np.uint8)
            self._comm.Alltoallv([np.concatenate(sent), [part.size for part in sent]], [flat, counts])
            for part, end in zip(received, np.cumsum(counts), strict=True):
                part[...] = flat[end - part.size : end]


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
        # Every rank has one of each host that sums for it, and that its section reaches the others by: itself, or one
        # in turn. So all ranks of a host share the work, and its links.
        self._servers = [
            [rank if rank in host else host[rank % len(host)] for host in hosts] for rank in range(comm.size)
        ]
        self._peers = next(host for host in hosts if comm.rank in host)
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
        whole = _sections_of(sizes)

        def write_all(message: Bytes) -> None:
            for rank, section in enumerate(whole.views(message)):
                write(rank, section)

        with self.calls.waiting:
            self._agree(signature, whole.nbytes)
            everyones = [whole.views(message) for message in self._host.exchange(signature, whole.nbytes, write_all)]
            ours = self._empty(
                [n if self.rank in self._servers[rank] else 0 for rank, n in enumerate(sizes)], sum(sizes)
            )
            for rank, out in enumerate(ours):
                for group in layouts[rank].groups if out.size else []:
                    reduce_flat(group.of(out), [group.of(sections[rank]) for sections in everyones], ReduceOp.SUM)
            senders = self._servers[self.rank]
            theirs = self._empty([sizes[self.rank] * (rank in senders) for rank in range(self.size)], sum(sizes))
            self._all_to_all(ours, theirs, max(sizes))
            return [theirs[rank] for rank in senders]

    @span(COMMUNICATION, lambda _, signature, sizes, __: Details(signature.call, sum(sizes)))
    def gather_sections(self, signature: CallSignature, sizes: Sequence[int], write: Write) -> list[Bytes]:
        """See `HostCommunicator.gather_sections`. One message from each rank to each host, and then inside it."""
        if sum(sizes) <= SMALL_MESSAGE_BYTES:
            return super().gather_sections(signature, sizes, write)
        # What each rank of this host brings.
        served = {peer: [rank for rank in range(self.size) if peer in self._servers[rank]] for peer in self._peers}
        brought = {peer: _sections_of([sizes[rank] for rank in ranks]) for peer, ranks in served.items()}
        with self.calls.waiting:
            self._agree(signature, _sections_of(sizes).nbytes)
            own = self._empty([sizes[self.rank]], sum(sizes))[0]
            write(own)
            ours = [own if rank in self._servers[self.rank] else own[:0] for rank in range(self.size)]
            theirs = self._empty(
                [n if self.rank in self._servers[rank] else 0 for rank, n in enumerate(sizes)], sum(sizes)
            )
            self._all_to_all(ours, theirs, max(sizes))

            def write_brought(message: Bytes) -> None:
                for section, rank in zip(brought[self.rank].views(message), served[self.rank], strict=True):
                    section[...] = theirs[rank]

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


def _sections_of(sizes: Sequence[int]) -> Layout:
    """The layout of a message of sections of these sizes, in bytes."""
    return layout_of(tuple([(size,) for size in sizes]), (np.dtype(np.uint8),) * len(sizes), 16)
