"""Where the variables of an update are in its message, and which of their elements a rank updates.

Nothing here changes after it was made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from hpcstrat._memory.blocks import Block
from hpcstrat._memory.intervals import ElementRange
from hpcstrat._memory.layout import Layout, layout_of_arrays
from hpcstrat._memory.shards import Shard
from hpcstrat._transports.reduction import part_of_rank

T = TypeVar("T")


class MessageOrder:
    """The variables of an update, in the order of their message, and where they are in it.

    The order is dtype by dtype, and of each dtype by creation number. It is equal on all ranks, and
    "variable i" always counts in it. Only callers have an order of their own, that of the call, in
    which they pass variables and gradients. In memory variables are by address; `shards.merge`
    finds where that is the order of the message.

    Args:
        variables: their blocks, in the order of the call.
        slots: for each variable the blocks of its slots, of its shape and dtype.
        alignment: every variable starts at a multiple of this many bytes, in memory and message.

    Attributes:
        blocks: the variables' blocks.
        layout: where each variable is in the message.
        shards: the whole variables.
        is_of_call: whether the call has this order too.
    """

    def __init__(
        self, variables: Sequence[Block], slots: Sequence[Sequence[Block]], alignment: int = 1
    ) -> None:
        # Variables that were made one after another are mostly contiguous in memory.
        by_number = sorted(range(len(variables)), key=lambda i: variables[i].number)
        dtypes = [*dict.fromkeys(variables[i].array.dtype for i in by_number)]
        self._order = sorted(by_number, key=lambda i: dtypes.index(variables[i].array.dtype))
        self.is_of_call: bool = self._order == [*range(len(variables))]
        self.blocks: list[Block] = self.to_message(variables)
        self.layout: Layout = layout_of_arrays([block.array for block in self.blocks], alignment)
        self.shards: list[Shard] = [
            Shard(
                i,
                block.array.dtype,
                ElementRange(0, self.layout.sizes[i]),
                self.layout.bytes_of(i),
                tuple([of_slot.memory for of_slot in (block, *of_block)]),
            )
            for i, (block, of_block) in enumerate(
                zip(self.blocks, self.to_message(slots), strict=True)
            )
        ]

    def to_message(self, values: Sequence[T]) -> list[T]:
        """What belongs to the variables, in this order, from the order of the call."""
        return [values[i] for i in self._order]

    def to_call(self, values: Sequence[T]) -> list[T]:
        """The inverse of `to_message`."""
        of_call = dict(zip(self._order, values, strict=True))
        return [of_call[i] for i in range(len(of_call))]

    def shards_of_rank(self, rank: int, size: int) -> list[Shard]:
        """The shards of a rank that has an equal share of the elements of each dtype."""
        shares = {}
        for group in self.layout.groups:
            share = part_of_rank(group.elements, rank, size)
            shares[group.dtype] = share.bytes(group.dtype.itemsize).shift(group.start)
        return [shard.within(shares[shard.dtype]) for shard in self.shards]
