"""The communicator of ranks on several hosts: each host's shared memory first, then MPI."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from hpcstrat._calls.records import CallSignature, signature_of
from hpcstrat._communicators.base import Write
from hpcstrat._communicators.host import SMALL_MESSAGE_BYTES, describe_message
from hpcstrat._communicators.mpi import MpiCommunicator
from hpcstrat._communicators.rail import Rail
from hpcstrat._communicators.reduction import accumulator, reduce_by_hosts, reduce_in_chunks
from hpcstrat._communicators.shared_memory import SharedMemoryCommunicator
from hpcstrat._core.timeline import COMMUNICATION, span
from hpcstrat._core.types import Array, Bytes, ReduceOp
from hpcstrat._memory.intervals import Interval, divide_up
from hpcstrat._memory.layout import Layout, layout_of_sections, sections_in


@final
class Grid:
    """The ranks of several hosts: a column for each host, a row for each local index.

    With 3 hosts of 2 ranks each:

                       host 0    host 1    host 2
        index 0        rank 0    rank 2    rank 4
        index 1        rank 1    rank 3    rank 5

    What a rank and a host send each other goes through one rank of the host, the rank's *server*
    there, so it travels between hosts once. The servers of a rank are its row: those of rank 2 are
    0, 2 and 4. On its own host a rank serves itself.

    In the rows that a host lacks, its ranks serve again, from the first on. With 3 + 1 ranks:

                       host 0    host 1
        index 0        rank 0    rank 3
        index 1        rank 1    (rank 3)
        index 2        rank 2    (rank 3)

    So all ranks are *clients* of rank 3, whose own servers are 0 and 3. Ranks 1 and 2 serve only
    themselves.

    Args:
        host_of: the host of each rank, as a number that differs from those of other hosts.

    Attributes:
        hosts: the ranks of each host; hosts are in the order of their first ranks.
    """

    def __init__(self, host_of: Sequence[int]) -> None:
        members: dict[int, list[int]] = {}
        for rank, host in enumerate(host_of):
            members.setdefault(host, []).append(rank)
        self.hosts: list[list[int]] = [*members.values()]
        self._peers = {rank: ranks for ranks in self.hosts for rank in ranks}

    def peers(self, rank: int) -> list[int]:
        """The ranks of this rank's host, itself included: its column."""
        return self._peers[rank]

    def servers(self, rank: int) -> list[int]:
        """The rank of each host that serves this rank: its row."""
        index = self.peers(rank).index(rank)
        return [host[index % len(host)] for host in self.hosts]

    def clients(self, rank: int) -> list[int]:
        """The ranks that have this rank as a server, in rank order."""
        peers = self.peers(rank)
        index = peers.index(rank)
        return sorted(other for host in self.hosts for other in host[index :: len(peers)])


@final
class HierarchicalCommunicator(MpiCommunicator):
    """Ranks on several hosts, over mpi4py and each host's shared memory.

    A large reduction is split over the ranks of each host: each sums up a slice of what the host's
    ranks have, in shared memory, and then with those that do the same on other hosts, its `Rail`.
    The results are in shared memory again, from which all ranks of the host copy them. So a host
    sends everything once, however many ranks it has, and its ranks share the work, and the links if
    it has several. Where one rank gets all sums of a part, as with split slots, the `Grid` says
    who sends them.

    Each host's ranks are summed in rank order, then the hosts, as in `reduce_by_hosts`:
    bit-identical on all ranks and from run to run.

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
        leads = np.empty(self.size, np.int64)
        comm.Allgather(np.array([host_comm.bcast(comm.rank)], np.int64), leads)
        grid = Grid(leads.tolist())
        self._hosts = grid.hosts
        self._servers = grid.servers(self.rank)
        self._clients = {peer: grid.clients(peer) for peer in grid.peers(self.rank)}
        self._rails = min(map(len, self._hosts))
        self._rail: Rail | None = None
        if self._host.rank < self._rails:
            ranks = [host[self._host.rank] for host in self._hosts]
            self._rail = Rail(self._messages, ranks, self.rank, self.size)

    def _duplicate(self) -> MpiCommunicator:
        return HierarchicalCommunicator(self._comm.Dup(), self._host_comm)

    def _is_gathered(self, nbytes: int) -> bool:
        """Whether messages of this size go to every rank as they are, which then reduces them."""
        return not self.has_many_ranks and nbytes <= SMALL_MESSAGE_BYTES

    @span(COMMUNICATION, describe_message)
    def reduce_message(
        self, signature: CallSignature, layout: Layout, write: Write, op: ReduceOp, out: Bytes
    ) -> None:
        """See `HostCommunicator.reduce_message`."""
        if self._is_gathered(layout.nbytes):
            messages = self.exchange(signature, layout.nbytes, write)
            self._reduce_gathered(messages, layout, op, out)
            return

        def reduce_slice(result: Array, parts: Sequence[Array]) -> None:
            assert self._rail is not None
            self._rail.all_reduce(result, parts, op)

        with self.calls.waiting:
            self._agree_and_reserve(signature, layout.nbytes)
            if self._host.size > 1:
                self._host.reduce_slices(signature, layout, write, out, self._rails, reduce_slice)
                return
            write(out)  # no other rank of this host reads the message: it becomes the result
            for group in layout.groups:
                reduce_slice(group.of(out), [group.of(out)])

    def _reduce_gathered(
        self, messages: Sequence[Bytes], layout: Layout, op: ReduceOp, out: Bytes
    ) -> None:
        """Reduces every rank's message to `out`, which may be one of them."""
        for group in layout.groups:
            hosts = [[group.of(messages[rank]) for rank in host] for host in self._hosts]
            reduce_by_hosts(group.of(out), hosts, op, self.size)

    def _agree_and_reserve(self, signature: CallSignature, nbytes: int) -> None:
        """All ranks agree on a call, then make room for `nbytes` bytes of each rank.

        Inside a host no rank would notice that another host makes a different call.
        """
        self.exchange(signature)
        if self._reserved_bytes < nbytes:
            with self.raise_together():  # a host without the memory stops the others
                self._host.reserve(nbytes)
                if self._rail is not None:
                    self._rail.reserve(divide_up(nbytes, self._rails))
                self.exchange(signature_of(f"{signature.call}: memory"))
            self._reserved_bytes = nbytes

    @span(
        COMMUNICATION,
        lambda _, signature, layouts, *__: (signature.call, sum(one.nbytes for one in layouts)),
    )
    def sum_sections(
        self,
        signature: CallSignature,
        layouts: Sequence[Layout],
        write: Callable[[int, Bytes], None],
    ) -> list[Bytes]:
        """See `HostCommunicator.sum_sections`.

        Inside each host first: one message from each host to each rank. Except for 16-bit floats,
        which are rounded only once, and so travel between all ranks.
        """
        own = layouts[self.rank]
        sizes = [layout.nbytes for layout in layouts]
        is_short = any(
            accumulator(group.dtype) != group.dtype for layout in layouts for group in layout.groups
        )
        with self.calls.waiting:
            if is_short or self._is_gathered(sum(sizes)):
                self.exchange(signature)
                self._reserve(max(sum(sizes), self.size * own.nbytes))
                messages = self._all_to_all(sizes, [own.nbytes] * self.size, max(sizes), write)
                self._reduce_gathered(messages, own, ReduceOp.SUM, messages[self.rank])
                return [messages[self.rank]]
            messages = self._sum_in_hosts(signature, layouts, write)
            # Up to three are added up in this order anyway, while they are used.
            if len(messages) > 3:
                for group in own.groups:
                    parts = [[group.of(message)] for message in messages]
                    reduce_by_hosts(parts[0][0], parts, ReduceOp.SUM, self.size)
                messages = messages[:1]
            return messages

    def _sum_in_hosts(
        self,
        signature: CallSignature,
        layouts: Sequence[Layout],
        write: Callable[[int, Bytes], None],
    ) -> list[Bytes]:
        """Each host's sums of this rank's section, in the order of the hosts."""
        sizes = [layout.nbytes for layout in layouts]
        sent = layout_of_sections(sizes)

        def write_all(message: Bytes) -> None:
            for rank, section in enumerate(sent.views(message)):
                write(rank, section)

        self._agree_and_reserve(signature, sent.nbytes)
        messages = self._host.exchange(signature, sent.nbytes, write_all)
        clients = self._clients[self.rank]
        self._reserve(max(sum(sizes), len(self._servers) * max(sizes)))
        received = sections_in(self._receive_buffer, [sizes[self.rank]] * len(self._servers))
        incoming = dict(zip(self._servers, received, strict=True))
        sums = sections_in(self._send_buffer, [sizes[rank] for rank in clients])
        outgoing = dict(zip(clients, sums, strict=True)) | {self.rank: incoming[self.rank]}
        parts_for = {
            rank: [message[sent.bytes_of(rank).slice] for message in messages] for rank in clients
        }

        def add_up(window: Interval) -> None:
            for rank, parts in parts_for.items():
                for group in layouts[rank].groups:
                    here = group.within(window).slice
                    reduce_in_chunks(
                        group.of(outgoing[rank])[here],
                        [group.of(part)[here] for part in parts],
                        ReduceOp.SUM,
                    )

        self._messages.swap(outgoing, incoming, add_up)
        return received

    @span(COMMUNICATION, lambda _, signature, sizes, __: (signature.call, sum(sizes)))
    def gather_sections(
        self, signature: CallSignature, sizes: Sequence[int], write: Write
    ) -> list[Bytes]:
        """See `HostCommunicator.gather_sections`.

        One message from each rank to each host, then inside the host.
        """
        if self._is_gathered(sum(sizes)):
            return super().gather_sections(signature, sizes, write)
        with self.calls.waiting:
            self._agree_and_reserve(signature, layout_of_sections(sizes).nbytes)

            def sections_of(peer: int, message: Bytes) -> dict[int, Bytes]:
                """What a rank of this host receives for all of them: its clients' sections."""
                clients = self._clients[peer]
                sections = sections_in(message, [sizes[rank] for rank in clients])
                return dict(zip(clients, sections, strict=True))

            def receive(message: Bytes) -> None:
                incoming = sections_of(self.rank, message)
                write(incoming[self.rank])
                outgoing = dict.fromkeys(self._servers, incoming[self.rank])
                self._messages.swap(outgoing, incoming)

            # What other hosts send arrives in this host's shared memory: MPI receives within the
            # host's exchange, which "writes" it. There is room, so `receive` runs once: otherwise
            # the message would be written again.
            incoming = [sizes[rank] for rank in self._clients[self.rank]]
            nbytes = layout_of_sections(incoming).nbytes
            messages = self._host.exchange(signature, nbytes, receive)
        by_rank: dict[int, Bytes] = {}
        for peer, message in zip(self._clients, messages, strict=True):
            by_rank |= sections_of(peer, message)
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

    def _all_gather(self, messages: Sequence[Bytes], layout: Layout) -> None:
        """Each rank sends its large section to all others itself, if no host has a second rank.

        Otherwise a host would get everything once for each of its ranks. MPI passes sections on
        from rank to rank: if one rank has nearly everything, its link would carry that once for
        every other rank.
        """
        total = sum(layout.sizes)
        is_even = self.size * max(layout.sizes) <= 2 * total
        if len(self._hosts) == self.size and is_even and total > self._messages.PIECE:
            own, incoming = messages[self.rank], dict(enumerate(messages))
            self._messages.swap(dict.fromkeys(incoming, own), incoming)
        else:
            super()._all_gather(messages, layout)
