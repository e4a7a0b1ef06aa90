"""How the elements of an update are split: ranges in memory, and chunks that fit in cache.

A chunk is a range of elements of one dtype, whichever variables they belong to:

    variables  |       w        |b |         v          |c |    u    |
    chunks     |----|----|----|--|----|----|----|--|----|----|----|--|
    ranks      |      rank 0     |      rank 1     |      rank 2     |

Each rank has an equal share of all elements, which it cuts into its own chunks. So ranks have equal
work although one variable may be larger than all others together, and small variables, such as b
and c, cost no calls of their own. This is right because rules are elementwise. Only norms need to
know where a variable ends: a `Cut` is the part of a chunk that belongs to one variable.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from hpcstrat._communicators.reduction import CHUNK, part_of_rank
from hpcstrat._core.types import Array
from hpcstrat._memory.blocks import Block
from hpcstrat._memory.layout import DtypeGroup, Layout


class ElementRange(NamedTuple):
    """A chunk: elements that are updated together.

    Attributes:
        group: the index of their dtype in the message.
        start, stop: the range in that group, in elements.
        value: the variables' elements, in storage.
        slots: the elements of each slot, in storage.
    """

    group: int
    start: int
    stop: int
    value: Array
    slots: tuple[Array, ...]


class UpdateChunk(NamedTuple):
    """A chunk with the messages of one update.

    Attributes:
        value, slots: the elements in storage, as in `ElementRange`.
        parts: the same elements of every message.
        gradient: an array of their length and dtype, for the reduced elements.
        work: an array of their length and dtype, for the rule to work in.
    """

    value: Array
    slots: tuple[Array, ...]
    parts: list[Array]
    gradient: Array
    work: Array

    def cut(self, start: int, stop: int) -> UpdateChunk:
        """Some of its elements."""
        here = slice(start, stop)
        slots = tuple([slot[here] for slot in self.slots])
        parts = [part[here] for part in self.parts]
        return UpdateChunk(self.value[here], slots, parts, self.gradient[here], self.work[here])


class Cut(NamedTuple):
    """The part of a chunk that belongs to one variable.

    Attributes:
        group: the index of its dtype in the message.
        variable: the variable's place in the message.
        chunk: the index of the chunk.
        start, stop: the part, in elements of the chunk.
    """

    group: int
    variable: int
    chunk: int
    start: int
    stop: int


class LocalOnlyRange(NamedTuple):
    """The part of a large variable that this rank updates in whole chunks.

    No other rank reads its gradient there.

    Attributes:
        group: the index of its dtype in the message.
        first: the variable's first element in that group.
        start, stop: the part, in elements of the variable.
        chunks: the indices of its chunks.
    """

    group: int
    first: int
    start: int
    stop: int
    chunks: range


class Memory(Protocol):
    """Memory that contains blocks."""

    def part(self, start: int, stop: int) -> Array:
        """The bytes between two addresses in one block or in contiguous blocks, as a flat array."""
        ...


class ScratchBuffers:
    """Scratch memory, the same for all plans of a storage."""

    def __init__(self) -> None:
        self._pairs: dict[np.dtype[Any], tuple[Array, Array]] = {}

    def of(self, value: Array) -> tuple[Array, Array]:
        """Two arrays like a chunk's: one for the reduced gradient, one for the rule to work in."""
        dtype, n = value.dtype, value.size
        # Allocated once: new arrays for each chunk would not be in cache, and cost page faults.
        if dtype not in self._pairs:
            self._pairs[dtype] = (np.empty(CHUNK, dtype), np.empty(CHUNK, dtype))
        first, second = self._pairs[dtype]
        return first[:n], second[:n]


def is_readable_in_place(value: Array, view: Array) -> bool:
    """Whether elements of `value` can be read in place while variables change.

    A read-only array may be a variable, which other ranks update meanwhile.
    """
    # A strided or cast gradient has to be copied in any case, so it goes through the message.
    return bool(value.flags.c_contiguous and value.flags.writeable and value.dtype == view.dtype)


def ranges_of(
    group: DtypeGroup,
    variables: Sequence[Block],
    slots: Sequence[Sequence[Block]],
    starts: Sequence[int],
    alignment: int,
) -> list[tuple[int, int, list[int]]]:
    """The ranges of a group that are contiguous in memory, in the variables and in every slot.

    Returns:
        For each range its first element in the group, its number of elements, and the first bytes
        of the value and of each slot.
    """
    ranges: list[tuple[int, int, list[int]]] = []
    item = group.dtype.itemsize
    for i in group.members:
        place, count = (starts[i] - group.start) // item, variables[i].array.size
        addresses = [variables[i].start, *(slot.start for slot in slots[i])]
        if ranges:
            before, length, firsts = ranges[-1]
            # On a GPU there are gaps between variables. They are updated with the rest, since one
            # kernel over a gap costs less than two kernels.
            length = -(-length * item // alignment) * alignment // item
            # One range only if the slots are contiguous as well: the rule is applied to value and
            # slots together.
            if addresses == [first + length * item for first in firsts]:
                ranges[-1] = (before, length + count, firsts)
                continue
        ranges.append((place, count, addresses))
    return ranges


def chunks_of(
    memory: Memory,
    layout: Layout,
    variables: Sequence[Block],
    slots: Sequence[Sequence[Block]],
    rank: int,
    size: int,
    chunk: int,
    alignment: int,
) -> list[ElementRange]:
    """A rank's chunks, each of at most `chunk` elements; for the arguments see `Plan`."""
    chunks: list[ElementRange] = []
    for index, group in enumerate(layout.groups):
        mine = part_of_rank(group.elements, rank, size)
        item = group.dtype.itemsize
        for place, count, addresses in ranges_of(group, variables, slots, layout.starts, alignment):
            for a in range(max(place, mine.start), min(place + count, mine.stop), chunk):
                b = min(a + chunk, place + count, mine.stop)
                value, *rest = [
                    memory.part(first + (a - place) * item, first + (b - place) * item).view(
                        group.dtype
                    )
                    for first in addresses
                ]
                chunks.append(ElementRange(index, a, b, value, tuple(rest)))
    return chunks


def local_ranges_of(layout: Layout, chunks: Sequence[ElementRange]) -> dict[int, LocalOnlyRange]:
    """The ranges that only this rank reads, by the variables' places in the message."""
    ranges: dict[int, LocalOnlyRange] = {}
    for index, group in enumerate(layout.groups):
        for i in group.members:
            first, size = (layout.starts[i] - group.start) // group.dtype.itemsize, layout.sizes[i]
            inside = [
                k
                for k, chunk in enumerate(chunks)
                if chunk.group == index and first <= chunk.start and chunk.stop <= first + size
            ]
            # Only large variables are worth it: a rank need not copy its own share of the gradient.
            if size >= CHUNK and inside:
                start, stop = chunks[inside[0]].start - first, chunks[inside[-1]].stop - first
                ranges[i] = LocalOnlyRange(
                    index, first, start, stop, range(inside[0], inside[-1] + 1)
                )
    return ranges


def cut_at_variables(layout: Layout, chunks: Sequence[ElementRange]) -> list[Cut]:
    """The chunks, cut where one variable ends and the next starts."""
    cuts: list[Cut] = []
    for index, group in enumerate(layout.groups):
        of_group = [(k, chunk) for k, chunk in enumerate(chunks) if chunk.group == index]
        starts = [chunk.start for _, chunk in of_group]
        for i in group.members:
            first = (layout.starts[i] - group.start) // group.dtype.itemsize
            end = first + layout.sizes[i]
            low, high = bisect.bisect_right(starts, first) - 1, bisect.bisect_left(starts, end)
            for k, chunk in of_group[max(low, 0) : high]:
                start, stop = max(first, chunk.start), min(end, chunk.stop)
                if start < stop:
                    cuts.append(Cut(index, i, k, start - chunk.start, stop - chunk.start))
    return cuts
