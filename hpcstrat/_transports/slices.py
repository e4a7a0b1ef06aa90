"""How the ranks of a host share a reduction: each reduces a slice of the messages."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat._agreement.agreement import Write
from hpcstrat._agreement.records import CallSignature
from hpcstrat._core.types import Array, Bytes, ReduceOp
from hpcstrat._memory.layout import Layout
from hpcstrat._transports.host import HostCommunicator, check_on_host, layout_and_signature_of
from hpcstrat._transports.mailboxes import Mailboxes
from hpcstrat._transports.reduction import part_of_rank, reduce_in_chunks


class SlicingCommunicator(HostCommunicator):
    """Ranks with others on their host.

    A reduction goes down four levels: the verb `all_reduce` checks and names it; `reduce_arrays`
    packs the arrays into a message; of a large message each rank of a host reduces a slice; and
    `reduction.reduce_in_chunks` adds up.

    Attributes:
        mailboxes: the memory that the ranks of this host share.
        hosts: the number of hosts.
        slices: how many ranks of each host, its first, reduce a slice of a message.
        whole_bytes: up to this size every rank reduces the whole message.
    """

    mailboxes: Mailboxes
    hosts: int = 1
    slices: int
    whole_bytes: int = 1 << 15  # cheaper than a second barrier

    @abc.abstractmethod
    def exchange_slices(
        self,
        signature: CallSignature,
        layout: Layout,
        op: ReduceOp,
        write: Write,
        shared: Sequence[Bytes] = (),
    ) -> Sequence[Bytes]:
        """Messages whose reduction has this rank's slice of all ranks' reduced messages.

        The slice is `part_of_rank(..., rank, slices)` of the elements of each dtype, of this rank
        of its host; the rest may be anything. Messages are valid until the next call; a single one
        is this rank's. The ranks of a host `sync` after they have read them. Collective.

        Args:
            signature: what all ranks agree on.
            layout: the layout of the messages; equal on all ranks.
            op: how they are reduced.
            write: writes this rank's message.
            shared: the messages of the ranks of this host, if they are in shared memory already;
                this may overwrite them.
        """

    def sync(self) -> None:
        """Waits for the ranks of this host, and what they wrote to shared memory. Collective."""
        waiting = self.calls.waiting
        waiting.depth += 1
        try:
            self.mailboxes.sync()
        finally:
            waiting.depth -= 1

    def add_up(self, own: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, Any]:
        """The arrays of all ranks of this host added up in rank order, the same on all hosts.

        Collective; the ranks `sync` before they call it again. All pass the same size.
        """
        with self.calls.waiting:
            return self.mailboxes.add_up(own)

    def reduce_arrays(
        self, must_match: tuple[Any, ...], arrays: Sequence[Array], op: ReduceOp
    ) -> list[Array]:
        check_on_host(arrays)
        layout, signature = layout_and_signature_of(must_match, arrays)
        out = np.empty(layout.nbytes, np.uint8)

        def write(message: Bytes) -> None:
            layout.write(message, arrays)

        with self.change():  # what interrupts it leaves other ranks waiting
            if layout.nbytes <= self.whole_bytes:
                messages = self.exchange(signature, layout.nbytes, write)
                for group in layout.groups:
                    reduce_in_chunks(group.of(out), [group.of(message) for message in messages], op)
            elif self.mailboxes.size == 1:  # no other rank reads the message: it becomes the result
                write(out)
                self.exchange_slices(signature, layout, op, write, [out])
            else:
                messages = self.exchange_slices(signature, layout, op, write)
                self._share_slices(messages, layout, op, out)
        return layout.views(out)

    def _share_slices(
        self, messages: Sequence[Bytes], layout: Layout, op: ReduceOp, out: Bytes
    ) -> None:
        """Reduces this rank's slice, and copies the slices of all ranks of this host to `out`."""
        boxes, slices = self.mailboxes, self.slices
        for group in layout.groups if len(messages) > 1 else ():
            mine = part_of_rank(group.elements, boxes.rank, slices).slice
            parts = [group.of(message)[mine] for message in messages]
            reduce_in_chunks(parts[boxes.rank], parts, op)
        with self.calls.waiting:
            boxes.sync_to_read()
        for group in layout.groups:
            result = group.of(out)
            # Each slice is in the mailbox of the rank that reduced it.
            for rank in range(slices):
                theirs = part_of_rank(group.elements, rank, slices).slice
                result[theirs] = group.of(boxes.messages[rank])[theirs]
