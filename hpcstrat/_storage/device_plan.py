"""The plan of an update on a rank's device, with the flat message of its gradients."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from hpcstrat._core import gpu
from hpcstrat._core.types import Array
from hpcstrat._memory.allocator import ALIGNMENT, SlabAllocator
from hpcstrat._memory.blocks import Block
from hpcstrat._memory.layout import PackKernel
from hpcstrat._storage.plan import Plan


class Transfer(NamedTuple):
    """The new values of one dtype, as one call sends or receives them.

    Attributes:
        flat: the array that is sent or received: the variables in place where they are contiguous,
            else a part of the message.
        parts: in the latter case, each range of the variables and its part of `flat`.
    """

    flat: Array
    parts: list[tuple[Array, Array]]


class DevicePlan(Plan):
    """A plan with the flat message of its updates on this rank's device, and views of its parts.

    Attributes:
        message: a buffer of bytes, at least as large as the plan needs.
        gradients: the message by dtype.
        packings: the kernels that copy to each of these.
        updates: each range of the variables, the message's part for it, and the range of each slot.
        transfers: how new values reach the other ranks.

    Args:
        memory: the memory with the variables that this rank updates.
        variables: their blocks.
        slots: for each variable the blocks of its slots.
        copies: the memory where this rank reads them instead; `None` if it reads what it updates.
        chunk: elements that are updated together at most.
    """

    def __init__(
        self,
        memory: SlabAllocator,
        variables: Sequence[Block],
        slots: Sequence[Sequence[Block]],
        copies: SlabAllocator | None,
        chunk: int,
    ) -> None:
        # The message has the same gaps as the memory, so that a range of variables is also one
        # range of the message.
        super().__init__(memory, variables, slots, chunk=chunk, alignment=ALIGNMENT)
        self.message: Array = None
        self.gradients: list[Array] = []
        self.packings: list[PackKernel] = []
        self.updates: list[tuple[Array, Array, tuple[Array, ...]]] = []
        self.transfers: list[Transfer] = []
        self.read: Plan = self
        if copies is not None:
            read = [block.copy or block for block in variables]
            self.read = Plan(copies, read, [()] * len(read), chunk=sys.maxsize, alignment=ALIGNMENT)

    @property
    def nbytes(self) -> int:
        """Bytes of the message."""
        return self.layout.nbytes

    def take(self, message: Array) -> None:
        """Makes this the message."""
        self.message = message
        self.gradients = [group.of(message) for group in self.layout.groups]
        # Kernels, views and addresses are made once per message: a steady step only launches.
        if gpu.is_on_gpu(message):
            self.packings = [
                PackKernel(self.layout, group, message) for group in self.layout.groups
            ]
        self.updates = [
            (chunk.value, self.gradients[chunk.group][chunk.start : chunk.stop], chunk.slots)
            for chunk in self.chunks
        ]
        self.transfers = []
        for index, part in enumerate(self.gradients):
            chunks = [chunk for chunk in self.read.chunks if chunk.group == index]
            if len(chunks) == 1:
                self.transfers.append(Transfer(chunks[0].value, []))
            else:
                self.transfers.append(
                    Transfer(
                        part, [(chunk.value, part[chunk.start : chunk.stop]) for chunk in chunks]
                    )
                )

    def forget_message(self) -> None:
        """Drops the message, which would otherwise live as long as the plan."""
        self.message, self.gradients, self.packings, self.updates, self.transfers = (
            None,
            [],
            [],
            [],
            [],
        )
        self.forget_messages()
