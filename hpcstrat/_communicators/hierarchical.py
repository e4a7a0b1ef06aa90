"""The communicator of ranks on several hosts: each host's shared memory first, then MPI."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from hpcstrat._calls.records import CallSignature, signature_of
from hpcstrat._communicators.checked_exchange import Write
from hpcstrat._communicators.host import SMALL_MESSAGE_BYTES, describe_message
from hpcstrat._communicators.mpi import MpiCommunicator
from hpcstrat._communicators.reduction import REDUCTIONS, accumulator, part_of_rank, reduce_flat
from hpcstrat._communicators.shared_memory import SharedMemoryCommunicator
from hpcstrat._core.span import COMMUNICATION, Details, span
from hpcstrat._core.types import Array, Bytes, ReduceOp
from hpcstrat._memory.intervals import Interval
from hpcstrat._memory.layout import Layout, Sections, layout_of, layout_of_sections, sections_in


# Each rank has one server per host: itself on its own host, elsewhere the rank with the same local
# index (modulo that host's number of ranks). With 3 hosts of 2 ranks each:
#
#                  host 0     host 1     host 2
#    index 0       rank 0     rank 2     rank 4      servers of ranks 0, 2 and 4: [0, 2, 4]
#    index 1       rank 1     rank 3     rank 5      servers of ranks 1, 3 and 5: [1, 3, 5]
#
# So rank 2 serves the ranks 0, 2 and 4, and its peers, the ranks of its host, are 2 and 3. To sum
# the section of rank 0, its servers 0, 2 and 4 each add up what the ranks of their own host have of
# it (2 adds those of 2 and 3), and send the sum to rank 0, which adds up the three sums. The result
# goes back to 0, 2 and 4, in shared memory, where their peers 1, 3 and 5 read it.
@final
class HierarchicalCommunicator(MpiCommunicator):
    """Ranks on several hosts, over mpi4py and each host's shared memory.

    A large reduction is split over all ranks. On each host a rank's section is summed in shared
    memory and sent to that rank; it sums the hosts' sums, and sends the result to one rank of each
    host, from which the others copy it. So a host sends everything once, however many ranks it has,
    and its ranks share the work, and the links if it has several. Each host's ranks are summed in
    rank order, then the hosts in order: bit-identical on all ranks and from run to run. 16-bit
    floats, which are rounded only once, travel between all ranks.

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
        of_rank = comm.allgather(host_comm.bcast(comm.rank))  # the first rank of each rank's host
        hosts = [
            [rank for rank in range(comm.size) if of_rank[rank] == lead]
            for lead in sorted(set(of_rank))
        ]
        own_hosts = [next(host for host in hosts if rank in host) for rank in range(comm.size)]
        # For every rank and host the rank there that sums for it, and through which its section
        # reaches that host: itself, or the rank with the same local index on that host.
        self._servers = [
            [host[own.index(rank) % len(host)] for host in hosts]
            for rank, own in enumerate(own_hosts)
        ]
        self._peers = own_hosts[comm.rank]
        self._served_ranks = {
            peer: [rank for rank in range(comm.size) if peer in self._servers[rank]]
            for peer in self._peers
        }

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
        slices = [_slices_of(layout, rank, self.size) for rank in range(self.size)]
        layouts = [_layout_of_slices(layout, rank, self.size) for rank in range(self.size)]
        is_mean = REDUCTIONS[op].is_mean
        # A mean of the hosts' means would be wrong where hosts run different numbers of ranks.
        partial = ReduceOp.SUM if is_mean else op
        sizes = [part.nbytes for part in layouts]
        self._agree(signature, max(layout.nbytes, layout_of_sections(sizes).nbytes))
        messages = self._host.exchange(signature, layout.nbytes, write)

        def parts_of(rank: int) -> list[list[Array]]:
            groups = zip(layout.groups, slices[rank], strict=True)
            return [[group.of(message)[part] for message in messages] for group, part in groups]

        sums = self._sum_by_hosts(layouts, parts_of, partial)

        def write_own(section: Bytes) -> None:
            for group in layouts[self.rank].groups:
                result = group.of(section)
                reduce_flat(result, [group.of(host_sum) for host_sum in sums], partial)
                if is_mean and self.size > 1:
                    with np.errstate(all="ignore"):
                        np.divide(result, self.size, out=result)

        sections = self._gather_by_hosts(signature, sizes, write_own)
        for rank, section in enumerate(sections):
            for group, part, elements in zip(
                layout.groups, layouts[rank].groups, slices[rank], strict=True
            ):
                group.of(out)[elements] = part.of(section)

    def _agree(self, signature: CallSignature, nbytes: int) -> None:
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

        with self.calls.waiting:
            self._agree(signature, sent.nbytes)
            everyones = [
                sent.views(message)
                for message in self._host.exchange(signature, sent.nbytes, write_all)
            ]

            def parts_of(rank: int) -> list[list[Array]]:
                return [
                    [group.of(sections[rank]) for sections in everyones]
                    for group in layouts[rank].groups
                ]

            return self._sum_by_hosts(layouts, parts_of, ReduceOp.SUM)

    def _sum_by_hosts(
        self, layouts: Sequence[Layout], parts_of: Callable[[int], list[list[Array]]], op: ReduceOp
    ) -> list[Bytes]:
        """Each host's reduction of this rank's section.

        Args:
            layouts: the layout of each rank's section.
            parts_of: returns what the ranks of this host have of a rank's section, group by group.
            op: how they are reduced.
        """
        sizes = [layout.nbytes for layout in layouts]
        senders = self._servers[self.rank]
        self._reserve(max(sum(sizes), len(senders) * max(sizes)))
        ours = sections_in(self._send_buffer, self._of_served(sizes, self.rank))
        theirs = sections_in(
            self._receive_buffer,
            [sizes[self.rank] * (rank in senders) for rank in range(self.size)],
        )
        reductions = [
            (group, group.of(ours.of(rank)), parts)
            for rank in self._served_ranks[self.rank]
            for group, parts in zip(layouts[rank].groups, parts_of(rank), strict=True)
        ]

        def reduce_window(window: Interval) -> None:
            for group, result, parts in reductions:
                here = group.within(window).slice
                reduce_flat(result[here], [part[here] for part in parts], op)

        self._all_to_all(ours, theirs, max(sizes), reduce_window)
        return [theirs.of(rank) for rank in senders]

    def _of_served(self, sizes: Sequence[int], server: int) -> list[int]:
        """The sizes of the sections of ranks that `server` serves; 0 for the others."""
        return [n if server in self._servers[rank] else 0 for rank, n in enumerate(sizes)]

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
            self._agree(signature, layout_of_sections(sizes).nbytes)
            return self._gather_by_hosts(signature, sizes, write)

    def _gather_by_hosts(
        self, signature: CallSignature, sizes: Sequence[int], write: Write
    ) -> list[Bytes]:
        """Every rank's section, on every rank; the host's memory has room for all of them."""
        self._reserve(max(sizes))
        size, senders = sizes[self.rank], self._servers[self.rank]
        own = self._send_buffer[:size]
        write(own)
        # The same bytes to one rank of each host.
        ours = Sections(
            own, [size * (rank in senders) for rank in range(self.size)], [0] * self.size
        )
        served = {peer: self._of_served(sizes, peer) for peer in self._peers}

        def receive(message: Bytes) -> None:
            self._all_to_all(ours, sections_in(message, served[self.rank]), max(sizes))

        # What other hosts send arrives in this host's shared memory. There is room for it, so
        # `receive` runs once: otherwise the message would be written again.
        messages = self._host.exchange(
            signature, layout_of_sections(served[self.rank]).nbytes, receive
        )
        by_rank: dict[int, Bytes] = {}
        for peer, message in zip(self._peers, messages, strict=True):
            sections = sections_in(message, served[peer])
            by_rank |= {rank: sections.of(rank) for rank in self._served_ranks[peer]}
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


def _slices_of(layout: Layout, rank: int, size: int) -> list[slice]:
    """The elements of each group of a message that a rank reduces."""
    return [part_of_rank(group.elements, rank, size).slice for group in layout.groups]


def _layout_of_slices(layout: Layout, rank: int, size: int) -> Layout:
    slices = _slices_of(layout, rank, size)
    return layout_of(
        tuple([(part.stop - part.start,) for part in slices]),
        tuple([group.dtype for group in layout.groups]),
    )


def _goes_by_hosts(whole: Layout) -> bool:
    """Whether such a message is reduced inside each host first, a different order of sums."""
    is_short = any(accumulator(group.dtype) != group.dtype for group in whole.groups)
    return whole.nbytes > SMALL_MESSAGE_BYTES and not is_short
