"""The communicator of ranks on several hosts: each host's shared memory first, then MPI."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from hpcstrat._calls.records import CallSignature, signature_of
from hpcstrat._communicators.checked_exchange import Write
from hpcstrat._communicators.grid import Grid
from hpcstrat._communicators.host import SMALL_MESSAGE_BYTES, describe_message
from hpcstrat._communicators.mpi import MpiCommunicator
from hpcstrat._communicators.reduction import (
    REDUCTIONS,
    accumulator,
    part_of_rank,
    reduce_in_chunks,
)
from hpcstrat._communicators.shared_memory import SharedMemoryCommunicator
from hpcstrat._core.span import COMMUNICATION, Details, span
from hpcstrat._core.types import Array, Bytes, ReduceOp
from hpcstrat._memory.intervals import Interval
from hpcstrat._memory.layout import Layout, Sections, layout_of, layout_of_sections, sections_in


@final
class HierarchicalCommunicator(MpiCommunicator):
    """Ranks on several hosts, over mpi4py and each host's shared memory.

    A large reduction is split over all ranks: each reduces one section of the message. With the 3
    hosts that `Grid` shows, that of rank 2 is summed by its servers 0, 2 and 4: each adds up what
    the ranks of its own host have of it, in shared memory, and sends the sum to rank 2, which adds
    up the three. The result goes back to 0, 2 and 4, into shared memory, from which all ranks of
    their hosts copy it. So a host sends everything once, however many ranks it has, and its ranks
    share the work, and the links if it has several.

    Each host's ranks are summed in rank order, then the hosts in order: bit-identical on all ranks
    and from run to run. 16-bit floats, which are rounded only once, travel between all ranks.

    Args:
        comm: an MPI communicator that only this object uses.
        host_comm: its ranks on this host.
    """

    def __init__(self, comm: Any, host_comm: Any) -> None:
        super().__init__(comm)
        self._host_comm = host_comm
        self._host = SharedMemoryCommunicator(host_comm.Dup())
        # What every host has room for. Not this host's own capacity: it may have grown where
        # another host could not.
        self._reserved_bytes = 0
        # The first rank of its host tells each host from the others.
        grid = Grid(comm.allgather(host_comm.bcast(comm.rank)))
        self._servers = grid.servers(comm.rank)
        self._clients = {peer: grid.clients(peer) for peer in grid.peers(comm.rank)}

    def _sends_to_each(self, sizes: Sequence[int]) -> bool:
        """See `MpiCommunicator._sends_to_each`.

        A host would get everything once for each of its ranks.
        """
        return False

    def _duplicate(self) -> MpiCommunicator:
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
        """Every rank reduces small messages itself.

        Large messages are reduced inside each host, then between hosts, and copied back.
        """
        if not _goes_by_hosts(whole or layout):
            super().reduce_message(signature, layout, write, op, out)
            return
        with self.calls.waiting:
            self._reduce_by_hosts(signature, layout, write, op, out)

    def _reduce_by_hosts(
        self, signature: CallSignature, layout: Layout, write: Write, op: ReduceOp, out: Bytes
    ) -> None:
        def parts_in(message: Bytes, rank: int) -> list[Array]:
            """What this rank reduces: a part of each group."""
            return [
                group.of(message)[part_of_rank(group.elements, rank, self.size).slice]
                for group in layout.groups
            ]

        results = [parts_in(out, rank) for rank in range(self.size)]
        dtypes = tuple([group.dtype for group in layout.groups])
        layouts = [layout_of(tuple([part.shape for part in parts]), dtypes) for parts in results]
        sizes = [section.nbytes for section in layouts]
        is_mean = REDUCTIONS[op].is_mean
        # A mean of the hosts' means would be wrong where hosts run different numbers of ranks.
        partial = ReduceOp.SUM if is_mean else op
        self._agree_and_reserve(signature, max(layout.nbytes, layout_of_sections(sizes).nbytes))
        messages = self._host.exchange(signature, layout.nbytes, write)
        sums = self._sum_by_hosts(layouts, messages, parts_in, partial)

        @np.errstate(all="ignore")  # as in `reduce_in_chunks`
        def write_own(section: Bytes) -> None:
            for group in layouts[self.rank].groups:
                result = group.of(section)
                reduce_in_chunks(result, [group.of(host_sum) for host_sum in sums], partial)
                if is_mean:
                    np.divide(result, self.size, out=result)

        sections = self._gather_by_hosts(signature, sizes, write_own)
        for parts, own, section in zip(results, layouts, sections, strict=True):
            for part, group in zip(parts, own.groups, strict=True):
                part[...] = group.of(section)

    def _agree_and_reserve(self, signature: CallSignature, nbytes: int) -> None:
        """All ranks agree on a call, then make room for `nbytes` bytes of each rank.

        Inside a host no rank would notice that another host makes a different call.
        """
        self.exchange(signature)
        if self._reserved_bytes < nbytes:
            with self.raise_together():  # a host without the memory stops the others
                self._host.reserve(nbytes)
                self.exchange(signature_of(f"{signature.call}: memory"))
            self._reserved_bytes = nbytes

    @span(
        COMMUNICATION,
        lambda _, signature, layouts, *__: Details(
            signature.call, sum(layout.nbytes for layout in layouts)
        ),
    )
    def sum_sections(
        self,
        signature: CallSignature,
        layouts: Sequence[Layout],
        whole: Layout,
        write: Callable[[int, Bytes], None],
    ) -> list[Bytes]:
        """See `HostCommunicator.sum_sections`.

        Inside each host first: one message from each host to each rank.
        """
        if not _goes_by_hosts(whole):  # as in `reduce_message`, for the same order of sums
            return super().sum_sections(signature, layouts, whole, write)
        sent = layout_of_sections([layout.nbytes for layout in layouts])

        def write_all(message: Bytes) -> None:
            for rank, section in enumerate(sent.views(message)):
                write(rank, section)

        def parts_in(message: Bytes, rank: int) -> list[Array]:
            section = message[sent.bytes_of(rank).slice]
            return [group.of(section) for group in layouts[rank].groups]

        with self.calls.waiting:
            self._agree_and_reserve(signature, sent.nbytes)
            messages = self._host.exchange(signature, sent.nbytes, write_all)
            return self._sum_by_hosts(layouts, messages, parts_in, ReduceOp.SUM)

    def _sum_by_hosts(
        self,
        layouts: Sequence[Layout],
        messages: Sequence[Bytes],
        parts_in: Callable[[Bytes, int], list[Array]],
        op: ReduceOp,
    ) -> list[Bytes]:
        """Each host's reduction of this rank's section.

        Args:
            layouts: the layout of each rank's section.
            messages: what each rank of this host has.
            parts_in: returns a rank's section in such a message, group by group.
            op: how the sections are reduced.
        """
        sizes = [layout.nbytes for layout in layouts]
        clients = self._clients[self.rank]
        self._reserve(max(sum(sizes), len(self._servers) * max(sizes)))
        ours = sections_in(self._send_buffer, _only(clients, sizes))
        theirs = sections_in(
            self._receive_buffer, _only(self._servers, [sizes[self.rank]] * self.size)
        )
        parts_for = {rank: [parts_in(message, rank) for message in messages] for rank in clients}

        def reduce_window(window: Interval) -> None:
            for rank, parts in parts_for.items():
                for i, group in enumerate(layouts[rank].groups):
                    here = group.within(window).slice
                    result = group.of(ours.of(rank))[here]
                    reduce_in_chunks(result, [part[i][here] for part in parts], op)

        self._all_to_all(ours, theirs, max(sizes), reduce_window)
        return [theirs.of(rank) for rank in self._servers]

    @span(COMMUNICATION, lambda _, signature, sizes, __: Details(signature.call, sum(sizes)))
    def gather_sections(
        self, signature: CallSignature, sizes: Sequence[int], write: Write
    ) -> list[Bytes]:
        """See `HostCommunicator.gather_sections`.

        One message from each rank to each host, then inside the host.
        """
        if sum(sizes) <= SMALL_MESSAGE_BYTES:
            return super().gather_sections(signature, sizes, write)
        with self.calls.waiting:
            self._agree_and_reserve(signature, layout_of_sections(sizes).nbytes)
            return self._gather_by_hosts(signature, sizes, write)

    def _gather_by_hosts(
        self, signature: CallSignature, sizes: Sequence[int], write: Write
    ) -> list[Bytes]:
        """Every rank's section, on every rank; the host's memory has room for all of them."""
        self._reserve(max(sizes))
        own = self._send_buffer[: sizes[self.rank]]
        write(own)
        # One rank of each host gets the same bytes, so all sections start at 0.
        ours = Sections(own, _only(self._servers, [own.size] * self.size), [0] * self.size)
        incoming = _only(self._clients[self.rank], sizes)

        def receive(message: Bytes) -> None:
            self._all_to_all(ours, sections_in(message, incoming), max(sizes))

        # What other hosts send arrives in this host's shared memory: MPI receives within the host's
        # exchange, which "writes" it. There is room, so `receive` runs once: otherwise the message
        # would be written again.
        messages = self._host.exchange(signature, layout_of_sections(incoming).nbytes, receive)
        # The message of each rank of this host has the sections of its clients.
        by_rank: dict[int, Bytes] = {}
        for clients, message in zip(self._clients.values(), messages, strict=True):
            received = sections_in(message, _only(clients, sizes))
            by_rank |= {rank: received.of(rank) for rank in clients}
        return [by_rank[rank] for rank in range(self.size)]

    def reduce_parts(
        self, must_match: tuple[Any, ...], parts: Sequence[Sequence[Array]], op: ReduceOp
    ) -> list[Array]:
        """Reduces everything and drops the rest: hosts send less than from each rank to each."""
        flat = [np.concatenate([part.reshape(-1) for part in leaf]) for leaf in parts]
        results = []
        for whole, leaf in zip(self.reduce_arrays(must_match, flat, op), parts, strict=True):
            start = sum(part.size for part in leaf[: self.rank])
            own = leaf[self.rank]
            results.append(whole[start : start + own.size].reshape(own.shape).copy())
        return results


def _only(ranks: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """The sizes of these ranks' sections, and 0 for the sections of all others."""
    return [size if rank in ranks else 0 for rank, size in enumerate(sizes)]


def _goes_by_hosts(whole: Layout) -> bool:
    """Whether such a message is reduced inside each host first, a different order of sums."""
    is_short = any(accumulator(group.dtype) != group.dtype for group in whole.groups)
    return whole.nbytes > SMALL_MESSAGE_BYTES and not is_short
