"""The pieces that an update's elements are cut into: ranges in memory, and chunks of them that fit in cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from hpcstrat._communicators.reduction import CHUNK
from hpcstrat._core.types import Array
from hpcstrat._memory.blocks import Block
from hpcstrat._memory.layout import DtypeGroup


class ElementRange(NamedTuple):
    """Some elements that are updated together.

    Attributes:
        group: which dtype of the message.
        start, stop: the elements' place among that dtype's of the message.
        value: the variables' elements, in storage.
        slots: the optimizer's, likewise.
    """

    group: int
    start: int
    stop: int
    value: Array
    slots: tuple[Array, ...]


class UpdateChunk(NamedTuple):
    """A chunk as it meets the messages of one update.

    Attributes:
        value, slots: see `ElementRange`.
        parts: the same elements of every message.
        gradient: of their length and dtype, to reduce them into.
        work: likewise, for the rule to work in.
    """

    value: Array
    slots: tuple[Array, ...]
    parts: list[Array]
    gradient: Array
    work: Array

    def cut(self, start: int, stop: int) -> UpdateChunk:
        """Some of its elements."""
        here = slice(start, stop)
        slots, parts = (
            tuple([slot[here] for slot in self.slots]),
            [part[here] for part in self.parts],
        )
        return UpdateChunk(self.value[here], slots, parts, self.gradient[here], self.work[here])


class Cut(NamedTuple):
    """The part of a chunk that one variable has.

    Attributes:
        group: which dtype of the message.
        variable: its place in the order of a message.
        chunk: the index of the chunk.
        start, stop: the part, in elements of the chunk.
    """

    group: int
    variable: int
    chunk: int
    start: int
    stop: int


class LocalOnlyRange(NamedTuple):
    """The part of one large variable that this rank updates in whole chunks.

    Nobody else reads its gradient there.

    Attributes:
        group: which dtype of the message.
        begin: the variable's first element among its dtype's of the message.
        start, stop: the part, in elements from there.
        chunks: the indices of its chunks.
    """

    group: int
    begin: int
    start: int
    stop: int
    chunks: range


class Memory(Protocol):
    """Where blocks are."""

    def part(self, start: int, stop: int) -> Array:
        """The bytes between two places of a block or of several in a row, a flat array."""
        ...


class ScratchBuffers:
    """Memory to work in, the same for all plans of a storage."""

    def __init__(self) -> None:
        self._pairs: dict[np.dtype[Any], tuple[Array, Array]] = {}

    def of(self, value: Array) -> tuple[Array, Array]:
        """Two arrays like a chunk's: one for the reduced gradient, one for the rule to work in."""
        dtype, n = value.dtype, value.size
        # Allocated once: arrays made anew for each chunk would leave the cache, and cost page
        # faults.
        if dtype not in self._pairs:
            self._pairs[dtype] = (np.empty(CHUNK, dtype), np.empty(CHUNK, dtype))
        first, second = self._pairs[dtype]
        return first[:n], second[:n]


def is_readable_in_place(value: Array, view: Array) -> bool:
    """Whether elements of `value` can be taken from it while variables change.

    What is read-only may be a variable, which others update meanwhile.
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
    """(place in the group, number of elements, first bytes of value and slots) of what lies in a row everywhere."""
    ranges: list[tuple[int, int, list[int]]] = []
    item = group.dtype.itemsize
    for i in group.members:
        place, count = (starts[i] - group.start) // item, variables[i].array.size
        begins = [variables[i].start, *(slot.start for slot in slots[i])]
        if ranges:
            before, length, firsts = ranges[-1]
            # On a GPU variables have gaps between them. They are updated with the rest, since one
            # kernel over a gap costs less than two kernels.
            length = (
                -(-length * item // alignment) * alignment // item
            )  # with what lies between the two
            # One range only if the slots are contiguous as well: the rule is applied to value and
            # slots together.
            if begins == [first + length * item for first in firsts]:
                ranges[-1] = (before, length + count, firsts)
                continue
        ranges.append((place, count, begins))
    return ranges
