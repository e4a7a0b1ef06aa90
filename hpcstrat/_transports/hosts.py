"""The communicator of ranks on several hosts: each host's shared memory first, then MPI."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from hpcstrat._agreement.records import CallSignature, signature_of
from hpcstrat._core.timeline import COMMUNICATION, span
from hpcstrat._core.types import Array, Bytes, ReduceOp
from hpcstrat._memory.intervals import divide_up
from hpcstrat._memory.layout import Layout
from hpcstrat._transports.host import (
    SMALL_MESSAGE_BYTES,
    HostCommunicator,
    describe_message,
)
from hpcstrat._transports.mpi import MpiCommunicator
from hpcstrat._transports.rail import Rail
from hpcstrat._transports.reduction import reduce_by_hosts
from hpcstrat._transports.shared_memory import SharedMemoryCommunicator
from hpcstrat._transports.verbs import Write


@final
class HierarchicalCommunicator(MpiCommunicator):
    """Ranks on several hosts, over mpi4py and each host's shared memory.

    A large reduction is split over the ranks of each host: each sums up a slice of what the host's
    ranks have, in shared memory, and then with those that do the same on other hosts, its `Rail`.
    The results are in shared memory again, from which all ranks of the host copy them. So a host
    sends everything once, however many ranks it has, and its ranks share the work, and the links if
    it has several.

    Each host's ranks are summed in rank order, then the hosts, as in `reduce_by_hosts`:
    bit-identical on all ranks and from run to run.

    Args:
        comm: an MPI communicator that only this object uses.
        host_comm: its ranks on this host.

    Attributes:
        host: connects the ranks of this host.
    """

    def __init__(self, comm: Any, host_comm: Any) -> None:
        super().__init__(comm)
        self.host: SharedMemoryCommunicator = SharedMemoryCommunicator(host_comm.Dup())
        # What every host has room for. Not this host's own capacity: it may have grown where
        # another host could not.
        self._reserved_bytes = 0
        # The first rank of its host tells each host from the others.
        leads = np.empty(self.size, np.int64)
        comm.Allgather(np.array([host_comm.bcast(comm.rank)], np.int64), leads)
        members: dict[int, list[int]] = {}
        for rank, lead in enumerate(leads.tolist()):
            members.setdefault(lead, []).append(rank)
        self._hosts = [*members.values()]  # the ranks of each, in the order of their first ranks
        self.hosts, self.slices = len(self._hosts), min(map(len, self._hosts))
        self._small: Bytes = np.empty(SMALL_MESSAGE_BYTES, np.uint8)
        self._rail: Rail | None = None
        if self.host.rank < self.slices:
            ranks = [host[self.host.rank] for host in self._hosts]
            self._rail = Rail(self._messages, ranks, self.rank, self.size)

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

        with self.calls.waiting:
            self._agree_and_reserve(signature, layout.nbytes)
            if self.host.size > 1:
                messages = self.host.exchange(signature, layout.nbytes, write)
                self.host.reduce_slices(messages, layout, self.slices, self._reduce_on_rail(op))
                self.host.copy_slices(messages, layout, self.slices, out)
                return
            write(out)  # no other rank of this host reads the message: it becomes the result
            self.host.reduce_slices([out], layout, 1, self._reduce_on_rail(op))

    def _reduce_on_rail(self, op: ReduceOp) -> Callable[[Array, Sequence[Array]], None]:
        def reduce_slice(result: Array, parts: Sequence[Array]) -> None:
            assert self._rail is not None
            self._rail.all_reduce(result, parts, op)

        return reduce_slice

    def exchange_slices(
        self,
        signature: CallSignature,
        layout: Layout,
        op: ReduceOp,
        write: Write,
        shared: Sequence[Bytes] = (),
    ) -> Sequence[Bytes]:
        """See `HostCommunicator.exchange_slices`: one message, with the reduced slice."""
        if self._is_gathered(layout.nbytes):
            messages = self.exchange(signature, layout.nbytes, write)
            self._reduce_gathered(messages, layout, op, self._small)
            return [self._small]
        with self.calls.waiting:
            self._agree_and_reserve(signature, layout.nbytes)
            messages = shared or self.host.exchange(signature, layout.nbytes, write)
            if shared:
                self.host.sync()  # the others have written theirs
            self.host.reduce_slices(messages, layout, self.slices, self._reduce_on_rail(op))
            return [messages[self.host.rank]]

    def add_up(self, own: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, Any]:
        """See `HostCommunicator.add_up`."""
        with self.calls.waiting:
            return self.host.add_up(own)

    def sync(self) -> None:
        """See `HostCommunicator.sync`."""
        with self.calls.waiting:
            self.host.sync()

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
            self._reserved_bytes = 0
            with self.raise_together():  # a host without the memory stops the others
                self.host.reserve(nbytes)
                if self._rail is not None:
                    self._rail.reserve(divide_up(nbytes, self.slices))
                self.exchange(signature_of(f"{signature.call}: memory"))
            self._reserved_bytes = nbytes

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


def host_of(communicator: HostCommunicator) -> SharedMemoryCommunicator | None:
    """The ranks of this host, which share memory; `None` for a rank without others."""
    if isinstance(communicator, HierarchicalCommunicator):
        return communicator.host
    return communicator if isinstance(communicator, SharedMemoryCommunicator) else None
