"""The communicator of ranks on several hosts: MPI between them, shared memory within each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np

from hpcstrat._agreement.agreement import Write
from hpcstrat._agreement.records import HEADER, PAYLOAD, RECORD, WHOLE, CallSignature, signature_of
from hpcstrat._core.call_name import current_call
from hpcstrat._core.timeline import WAITING, span
from hpcstrat._core.types import Array, Bytes, ReduceOp
from hpcstrat._memory.intervals import ByteRange
from hpcstrat._memory.layout import Layout, layout_of_sections
from hpcstrat._transports.host import check_on_host
from hpcstrat._transports.mailboxes import Mailboxes
from hpcstrat._transports.reduction import REDUCTIONS, accumulator, part_of_rank, reduce_in_chunks
from hpcstrat._transports.slices import SlicingCommunicator

FEW_RANKS = 16
"""Up to this many ranks exchange whole records, with short messages in them: 4 KiB in one call."""
PIECE = 1 << 24
"""Elements of a slice that travel between hosts at once, which limits the memory that they take.

Pieces of 2**15 elements for each host took 0.9 of the time with MPICH, 2 to 4 times as long with
Open MPI.
"""
SMALL_BYTES = 1 << 17
"""So few bytes of all hosts go to each of them as they are, in one call of MPI and not in two."""


@final
class HostsCommunicator(SlicingCommunicator):
    """Ranks on several hosts.

    The ranks of a host reduce a slice each of what they have, in shared memory and in rank order.
    Then those that have the same slice, one of each host, reduce it by MPI's `Alltoall` and
    `Allgather`, and each adds up its share in the order of the hosts. So a host sends everything
    once, however many ranks it has, and its ranks share the work, and the links if it has several.
    MPI moves bytes only: results are bit-identical on all ranks and from run to run, and any dtype
    can be reduced, even one that MPI lacks.

    Args:
        comm: an MPI communicator that only this object uses.
        host_comm: its ranks on this host.
    """

    LARGEST = (1 << 31) - 1
    """The most bytes of a buffer in one call of MPI, which counts with 32 bits."""

    def __init__(self, comm: Any, host_comm: Any) -> None:
        from mpi4py import MPI

        super().__init__(comm.rank, comm.size)
        self._mpi: Any = MPI
        self._comm = comm
        try:
            self.mailboxes = Mailboxes(host_comm.Dup())
        except MemoryError as error:
            raise RuntimeError(f"hpcstrat cannot connect the ranks: {error}") from None
        self.hosts = comm.allreduce(int(host_comm.rank == 0))
        self.slices = comm.allreduce(host_comm.size, MPI.MIN)
        # Those that reduce the same slice, for each slice in the same order of the hosts.
        has_slice = host_comm.rank < self.slices
        self._peers: Any = comm.Split(
            host_comm.rank if has_slice else MPI.UNDEFINED, host_comm.bcast(comm.rank)
        )
        # What every host has room for. Not this host's own capacity: it may have grown where
        # another host could not.
        self._reserved_bytes = 0
        self.has_many_ranks = comm.size > FEW_RANKS
        # Of many ranks records are gathered only where they differ, without messages in them.
        self.whole_bytes, nbytes = (-1, WHOLE) if self.has_many_ranks else (PAYLOAD, RECORD)
        self._record: Bytes = np.zeros(nbytes, np.uint8)
        self._records: Bytes = np.empty((comm.size, nbytes), np.uint8)
        self._views = [memoryview(record[:WHOLE]) for record in self._records]
        # The record and its complement: see `_is_everyones`.
        self._both = np.empty((2, WHOLE // 8), np.int64)
        self._common = np.empty_like(self._both)
        # Kept from call to call: the pages of new memory would cost about as much as a copy.
        self._received: Bytes = np.empty(0, np.uint8)

    # ---- records and messages

    @span(WAITING, "the other ranks")
    def exchange_records(self, record: bytes, nbytes: int, write: Write | None) -> list[memoryview]:
        own = np.frombuffer(record, np.uint8)
        if self.has_many_ranks and self._is_everyones(own):
            self._views[self.rank][:] = record
            return [self._views[self.rank]]
        self._record[:WHOLE] = own
        if write is not None and nbytes <= self.whole_bytes:
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
        self._comm.Allreduce(self._both, self._common, self._mpi.BAND)
        return self._common.tobytes() == self._both.tobytes()

    def collect_messages(self, sizes: Sequence[int], write: Write | None) -> list[Bytes]:
        if max(sizes) <= self.whole_bytes:
            return [record[HEADER:] for record in self._records]
        layout = layout_of_sections(sizes)
        if self._received.size < layout.nbytes:
            self._received = np.empty(0, np.uint8)  # freed before a larger one is allocated
            self._received = np.empty(layout.nbytes, np.uint8)
        messages = layout.views(self._received)
        if write is not None:
            write(messages[self.rank])
        roots = [rank for rank, size in enumerate(sizes) if size]
        if len(roots) > 1 and layout.nbytes <= self.LARGEST:
            places = layout.sizes, layout.starts
            self._comm.Allgatherv(self._mpi.IN_PLACE, (self._received, places))
            return messages
        # Of one rank's message MPI would otherwise make a ring, one rank after the other.
        for root in roots:
            for piece in self._pieces(messages[root]):
                self._comm.Bcast(piece, root)
        return messages

    def _pieces(self, array: Array) -> list[Bytes]:
        """The bytes of an array, as many as MPI can count at once in each piece."""
        whole = array.reshape(-1).view(np.uint8)
        return [whole[piece.slice] for piece in ByteRange(0, whole.size).split(self.LARGEST)]

    # ---- arrays

    def exchange_slices(
        self,
        signature: CallSignature,
        layout: Layout,
        op: ReduceOp,
        write: Write,
        shared: Sequence[Bytes] = (),
    ) -> Sequence[Bytes]:
        """See `SlicingCommunicator.exchange_slices`: one message, with the reduced slice."""
        # Within a host no rank would notice that another host makes a different call.
        self.exchange(signature)
        if self._reserved_bytes < layout.nbytes:
            self._reserved_bytes = 0
            with self.raise_together():  # a host without the memory stops the others
                self.mailboxes.reserve(max(layout.nbytes, PAYLOAD + 1))
                self.exchange(signature_of(f"{signature.call}: memory"))
            self._reserved_bytes = layout.nbytes
        with self.calls.waiting:
            messages = shared or self.mailboxes.share(write)
            host_rank = self.mailboxes.rank
            for group in layout.groups if self._peers else ():
                mine = part_of_rank(group.elements, host_rank, self.slices)
                for piece in mine.split(PIECE):
                    parts = [group.of(message)[piece.slice] for message in messages]
                    self._reduce_slice(parts[host_rank], parts, op)
        return [messages[host_rank]]

    @np.errstate(all="ignore")  # as in `reduce_in_chunks`
    def _reduce_slice(self, result: Array, parts: Sequence[Array], op: ReduceOp) -> None:
        """Reduces a part of a slice over this host's ranks and over the hosts, to `result`.

        `result` is one of `parts`. 16-bit floats travel as `float32`, and are rounded once.
        """
        comm, hosts = self._peers, self.hosts
        wide, is_mean = accumulator(result.dtype), REDUCTIONS[op].is_mean
        # A mean of the hosts' means would be wrong where hosts run different numbers of ranks.
        partial = ReduceOp.SUM if is_mean else op
        sums = result if wide == result.dtype else np.empty(result.size, wide)
        if len(parts) > 1 or sums is not result:
            reduce_in_chunks(sums, parts, partial)
        left = sums
        if hosts * sums.nbytes > SMALL_BYTES:
            share = sums.size // hosts
            shares, left = sums[: share * hosts].reshape(hosts, share), sums[share * hosts :]
            received = np.empty_like(shares)
            comm.Alltoall(_bytes(shares), _bytes(received))
            reduce_in_chunks(shares[comm.rank], [*received], partial)
            comm.Allgather(self._mpi.IN_PLACE, _bytes(shares))
        if left.size:
            received = np.empty((hosts, left.size), wide)
            comm.Allgather(_bytes(left), _bytes(received))
            reduce_in_chunks(left, [*received], partial)
        if is_mean:
            np.divide(sums, self.size, out=sums)
        if sums is not result:
            result[...] = sums

    def send_arrays(
        self,
        must_match: tuple[Any, ...],
        sent: Sequence[tuple[int, Array]],
        expected: Sequence[tuple[int, Array]],
    ) -> list[Array]:
        """Each array goes to its rank alone."""
        check_on_host([array for _, array in (*sent, *expected)])
        with self.change():  # what interrupts it leaves other ranks waiting
            shapes = self.exchange_shapes(signature_of(current_call(), *must_match), sent, expected)
            with self.raise_together():
                outgoing = [(rank, np.ascontiguousarray(array)) for rank, array in sent]
                incoming = [
                    (source, np.empty(shape, like.dtype))
                    for (source, like), shape in zip(expected, shapes, strict=True)
                ]
                self.exchange(signature_of(current_call(), "memory"))
            with self.calls.waiting:
                requests = [
                    start(piece, rank)
                    for start, pairs in ((self._comm.Irecv, incoming), (self._comm.Isend, outgoing))
                    for rank, array in pairs
                    for piece in self._pieces(array)
                ]
                self._mpi.Request.Waitall(requests)
        return [array for _, array in incoming]


def _bytes(array: Array) -> Bytes:
    return array.reshape(-1).view(np.uint8)
