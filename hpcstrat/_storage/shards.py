"""Sharded updates: each rank updates its part of all elements, and has the slots of that part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hpcstrat._communicators.base import Communicator
from hpcstrat._communicators.device import RankSlice
from hpcstrat._core import gpu
from hpcstrat._core.call_name import call_named, current_call
from hpcstrat._core.types import Array, ReduceOp
from hpcstrat._memory.allocator import Block, Cuts
from hpcstrat._memory.intervals import Interval, Shard, runs
from hpcstrat._memory.layout import Layout, layout_of
from hpcstrat._storage.plan import MessageOrder
from hpcstrat._update.rows import row_view, update_rows
from hpcstrat._update.rule import UpdateRule

_UNIT = 256
"""Parts start at multiples of this many elements: on a GPU, at multiples of 256 bytes."""


def cuts_of(variables: Sequence[Block], size: int, alignment: int = 1) -> list[Cuts]:
    """Splits all elements of a dtype into equal parts; the last part takes the remainder.

    Of fewer than `_UNIT` elements per rank, the last rank has all.

    The variables are in order of creation, and each starts at a multiple of `alignment` bytes.
    """
    # All elements are split, not each variable: ranks have equal parts, whatever the variables'
    # sizes, and a part is one range of memory and of a message.
    shapes = tuple([v.array.shape for v in variables])
    dtypes = tuple([v.array.dtype for v in variables])
    layout = layout_of(shapes, dtypes, alignment)
    cuts: list[Cuts] = [()] * len(variables)
    for group in layout.groups:
        part = group.elements // size // _UNIT * _UNIT
        for i in group.members:
            first, stop = group.within(layout.bytes_of(i))
            starts = [min(max(rank * part, first), stop) for rank in range(size)]
            cuts[i] = tuple([start - first for start in (*starts, stop)])
    return cuts


class RankPart(NamedTuple):
    """A rank's shards of all variables, and the message that consists of these.

    Attributes:
        layout: the layout of the message; it has every variable, perhaps without elements.
        shards: the shards in it, and in the memory of the variables and slots.
        in_whole: the same shards in the message of all elements. Their `memory` is their bytes in
            the message of `layout`, so that `runs` merges what is contiguous in both.
    """

    layout: Layout
    shards: list[Shard]
    in_whole: list[Shard]


def rank_parts_of(
    order: MessageOrder, slots: Sequence[Sequence[Block]], rank: int
) -> list[RankPart]:
    """Each rank's part, given this rank's parts of the slots, by variable.

    The order is one without slots: parts of slots have other shapes.
    """
    dtypes = tuple([block.array.dtype for block in order.blocks])
    cuts = [of_variable[0].cuts or () for of_variable in slots]
    rank_parts = []
    for peer in range(len(cuts[0]) - 1):
        elements = [Interval(*of_variable[peer : peer + 2]) for of_variable in cuts]
        layout = layout_of(
            tuple([(part.size,) for part in elements]), dtypes, order.layout.alignment
        )
        shards, in_whole = [], []
        for variable in order.shards:
            i = variable.variable
            shard, place = variable.part(elements[i]), layout.bytes_of(i)
            own = [slot.memory for slot in slots[i]] if peer == rank else []
            shards.append(shard._replace(message=place, memory=(*shard.memory, *own)))
            in_whole.append(shard._replace(memory=(place,)))
        rank_parts.append(RankPart(layout, shards, in_whole))
    return rank_parts


def rank_slices(order: MessageOrder, rank_parts: Sequence[RankPart]) -> list[list[RankSlice]]:
    """For each dtype of the message, which of its elements belong to which rank."""
    slices: list[list[RankSlice]] = [[] for _ in order.layout.groups]
    dtypes = [group.dtype for group in order.layout.groups]
    for rank, part in enumerate(rank_parts):
        for run in runs(part.in_whole, order.layout.alignment):
            k = dtypes.index(run.dtype)
            elements = order.layout.groups[k].within(run.message)
            own = part.layout.groups[k].within(run.memory[0])
            slices[k].append(RankSlice(rank, elements, own))
    return slices


def add_up_norms(communicator: Communicator, sums: Array) -> Array:
    """The sums over whole variables: the ranks' sums over their parts, added in rank order."""
    with call_named(f"{current_call()}: norms"):
        return communicator.all_reduce([sums], ReduceOp.SUM)[0]


def update_rows_in_shards(
    communicator: Communicator,
    blocks: Sequence[Block],
    rows: Array,
    gradient: Array,
    rule: UpdateRule,
) -> None:
    """`update_rows` with split slots: each rank updates its elements and gets all new values.

    Collective.
    """
    variable, *slots = blocks
    cuts = slots[0].cuts
    assert cuts is not None
    xp = gpu.array_module(rows)
    columns = int(np.prod(gradient.shape[1:], dtype=np.int64))
    elements = (rows[:, np.newaxis] * columns + xp.arange(columns)).reshape(-1)
    # Sorted by rank, in the order in which the new values are gathered.
    owners = sum((elements >= cut).astype(np.int64) for cut in cuts[1:-1])
    order = xp.argsort(owners, kind="stable")
    elements, gradient = elements[order], gradient.reshape(-1)[order]
    start, stop = cuts[communicator.rank : communicator.rank + 2]
    own = xp.flatnonzero((elements >= start) & (elements < stop))
    part = variable.array.reshape(-1)[start:stop]
    update_rows([part, *[slot.array for slot in slots]], elements[own] - start, gradient[own], rule)
    with call_named(f"{current_call()}: new rows"):
        (new,) = communicator.all_gather([part[elements[own] - start]], 0)
    row_view(variable.array, 0)[elements] = new
