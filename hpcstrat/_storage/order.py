"""Where the variables of an update are in its message, and which of their elements each rank has.

    message            |       w       | b |      v      |    of one dtype; then the next
    parts of ranks     |     rank 0      |    rank 1     |    if slots are split
    message of rank 0  |       w       |b|
    message of rank 1                    |b|      v      |

Nothing here changes after it was made.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import NamedTuple, TypeVar

from hpcstrat._communicators.device import RankSlice
from hpcstrat._communicators.reduction import part_of_rank
from hpcstrat._core.types import Array
from hpcstrat._memory.allocator import Block, Shares
from hpcstrat._memory.intervals import Interval, Shard, merge
from hpcstrat._memory.layout import Layout, layout_of, layout_of_arrays

T = TypeVar("T")


class MessageOrder:
    """The variables of an update, in the order of their message, and where they are in it.

    The order is dtype by dtype, and of each dtype by creation number. It is equal on all ranks, and
    "variable i" always counts in it. Only callers have an order of their own, that of the call, in
    which they pass variables and gradients. In memory variables are by address; `intervals.merge`
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
                Interval(0, self.layout.sizes[i]),
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
            shares[group.dtype] = share.scale(group.dtype.itemsize).shift(group.start)
        return [shard.within(shares[shard.dtype]) for shard in self.shards]

    def parts_of(self, variables: Collection[int]) -> list[list[Interval]]:
        """Where some variables are in each dtype's elements of the message, neighbours merged."""
        layout = self.layout
        return [
            [
                group.within(part)
                for _, (part,) in merge(
                    [(layout.bytes_of(i),) for i in group.members if i in variables],
                    layout.alignment,
                )
            ]
            for group in layout.groups
        ]

    def views_of(self, variables: Collection[int], message: Array) -> list[Array]:
        """Some variables in a message, as flat views; neighbours are merged."""
        return [
            group.of(message)[part.slice]
            for group, parts in zip(self.layout.groups, self.parts_of(variables), strict=True)
            for part in parts
        ]


_UNIT = 256
"""Parts start at multiples of this many elements, and so, whatever the dtype, of 256 bytes."""


def shares_of(variables: Sequence[Block], size: int, alignment: int = 1) -> list[Shares]:
    """Splits all elements of a dtype into equal parts; the last part takes the remainder.

    Of fewer than `_UNIT` elements per rank, the last rank has all.

    The variables are in order of creation, and each starts at a multiple of `alignment` bytes.
    """
    # All elements are split, not each variable: ranks have equal parts, whatever the variables'
    # sizes, and a part is one range of memory and of a message.
    layout = layout_of_arrays([variable.array for variable in variables], alignment)
    shares: list[Shares] = [()] * len(variables)
    for group in layout.groups:
        part = group.elements // size // _UNIT * _UNIT
        for i in group.members:
            first, stop = group.within(layout.bytes_of(i))
            ends = [min(max(rank * part, first), stop) - first for rank in range(size)]
            pairs = itertools.pairwise([*ends, stop - first])
            shares[i] = tuple(itertools.starmap(Interval, pairs))
    return shares


class RankPart(NamedTuple):
    """A rank's shards of all variables, and the message that consists of these.

    Attributes:
        layout: of its message, which has every variable, perhaps without elements.
        shards: by variable, in this message and in the memory of the variables and slots.
    """

    layout: Layout
    shards: list[Shard]


def rank_parts_of(
    order: MessageOrder, slots: Sequence[Sequence[Block]], rank: int
) -> list[RankPart]:
    """Each rank's part, given this rank's parts of the slots, by variable.

    The order is one without slots: parts of slots have other shapes.
    """
    dtypes = tuple([block.array.dtype for block in order.blocks])
    rank_parts = []
    for peer, elements in enumerate(zip(*[of[0].shares or () for of in slots], strict=True)):
        sizes = tuple([(part.size,) for part in elements])
        layout = layout_of(sizes, dtypes, order.layout.alignment)
        shards = []
        for i, variable in enumerate(order.shards):
            own = [slot.memory for slot in slots[i]] if peer == rank else []
            shard = variable.part(elements[i])
            shards.append(shard._replace(message=layout.bytes_of(i), memory=(*shard.memory, *own)))
        rank_parts.append(RankPart(layout, shards))
    return rank_parts


def rank_slices(order: MessageOrder, rank_parts: Sequence[RankPart]) -> list[list[RankSlice]]:
    """For each dtype of the message of all elements, which of these are in which rank's message."""
    slices = []
    for k, group in enumerate(order.layout.groups):
        of_dtype = []
        for rank, part in enumerate(rank_parts):
            # What is contiguous in both messages is merged.
            places = [
                (order.shards[i].part(part.shards[i].elements).message, part.shards[i].message)
                for i in group.members
            ]
            for _, (elements, own) in merge(places, order.layout.alignment):
                own_group = part.layout.groups[k]
                of_dtype.append(RankSlice(rank, group.within(elements), own_group.within(own)))
        slices.append(of_dtype)
    return slices


def slices_of(
    order: MessageOrder, slices: Sequence[Sequence[RankSlice]], variables: Collection[int]
) -> list[list[RankSlice]]:
    """Those of the `rank_slices`, or of their elements, that belong to some variables."""
    return [
        [
            RankSlice(rank, both, both.shift(own.start - elements.start))
            for rank, elements, own in of_dtype
            for part in parts
            if (both := elements & part)
        ]
        for of_dtype, parts in zip(slices, order.parts_of(variables), strict=True)
    ]
