"""How one update of several variables walks through storage: merged ranges, in chunks that fit in cache."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from hpcstrat._communicators.base import Array
from hpcstrat._communicators.packing import Group, Layout, layout
from hpcstrat._communicators.records import Signature, signature
from hpcstrat._communicators.reduction import CHUNK, slice_of
from hpcstrat._storage.memory import Block
from hpcstrat._types import ReduceOp


class Chunk(NamedTuple):
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


class Memory(Protocol):
    """Where blocks are."""

    def part(self, start: int, stop: int) -> Array:
        """The bytes between two places of a block or of several in a row, a flat array."""
        ...


class Plan:
    """One update of some variables, computed once. Variables that were made one after another are one range.

    Args:
        memory: where they are.
        variables: their blocks.
        slots: for each variable the blocks of its slots, of its shape and dtype.
        rank, size: this process updates the `rank`-th of `size` slices of all elements.
        chunk: elements that are updated together at most.
        alignment: bytes to whose multiples every variable starts, in memory and in a message.
    """

    def __init__(
        self,
        memory: Memory,
        variables: Sequence[Block],
        slots: Sequence[Sequence[Block]],
        rank: int = 0,
        size: int = 1,
        chunk: int = CHUNK,
        alignment: int = 1,
    ) -> None:
        # By number, which is the order in storage and the same on all ranks, and not in the order of the call.
        self._order = sorted(range(len(variables)), key=lambda i: variables[i].number)
        variables, slots = [variables[i] for i in self._order], [slots[i] for i in self._order]
        self.form: Layout = layout(
            tuple([block.array.shape for block in variables]),
            tuple([block.array.dtype for block in variables]),
            alignment,
        )
        self._facts = [(block.number, block.array.dtype, block.array.shape) for block in variables]
        self.chunks: list[Chunk] = []
        self.buffers: list[Array] | None = None  # for the variables' gradients, where `Storage.make_buffers` was called
        self.buffer_block: Block | None = None  # where these are in shared memory
        self._signatures: dict[tuple[str, ReduceOp | None], Signature] = {}
        self._views: dict[int, tuple[Array, list[Array]]] = {}
        self._parts: dict[int, tuple[Array, list[list[Array]]]] = {}
        for index, group in enumerate(self.form.groups):
            mine = slice_of(group.elements, rank, size)
            for place, count, starts in _ranges(group, variables, slots, self.form.starts, alignment):
                for a in range(max(place, mine.start), min(place + count, mine.stop), chunk):
                    b = min(a + chunk, place + count, mine.stop)
                    item = group.dtype.itemsize
                    value, *rest = [
                        memory.part(start + (a - place) * item, start + (b - place) * item).view(group.dtype)
                        for start in starts
                    ]
                    self.chunks.append(Chunk(index, a, b, value, tuple(rest)))

    def signature(self, call: str, op: ReduceOp | None, numbers: tuple[float, ...]) -> Signature:
        """What the ranks must agree on for an update."""
        found = self._signatures.get((call, op))
        if found is None or found.numbers != numbers:
            name = "ONLY_FIRST_REPLICA" if op is None else op.name
            found = signature(call, name, *self._facts)
            if numbers:
                found = found.with_numbers(numbers)
            self._signatures[call, op] = found
        return found

    def arranged(self, message: Array) -> list[Array]:
        """The variables' parts of a message, as views, in the order of the call."""
        in_order = dict(zip(self._order, self.form.views(message), strict=True))
        return [in_order[i] for i in range(len(in_order))]

    def are_in_buffers(self, values: Sequence[Array]) -> bool:
        """Whether these gradients are the plan's buffers, and so need not be copied."""
        return self.buffers is not None and all(map(operator.is_, values, self.buffers))

    def in_order(self, values: Sequence[Array]) -> list[Array]:
        """The variables' gradients, or new values, in the order of a message."""
        return [values[i] for i in self._order]

    def write(self, message: Array, values: Sequence[Array]) -> None:
        """Copies the variables' gradients, or new values, into a message. A mailbox's views are kept."""
        kept = self._views.get(id(message))
        if kept is None or kept[0] is not message:
            if len(self._views) == 3:  # two records and a mailbox, before it grew
                self._views.clear()
            kept = self._views[id(message)] = (message, self.arranged(message))
        for view, value in zip(kept[1], values, strict=True):
            view[...] = value

    def parts(self, messages: Sequence[Array]) -> list[list[Array]]:
        """For each chunk, its elements in every message."""
        kept = self._parts.get(id(messages[0]))
        if kept is None or kept[0] is not messages[0] or (kept[1] and len(kept[1][0]) != len(messages)):
            if len(self._parts) == 3:
                self._parts.clear()
            flat = [[group.of(message) for message in messages] for group in self.form.groups]
            parts = [[part[chunk.start : chunk.stop] for part in flat[chunk.group]] for chunk in self.chunks]
            kept = self._parts[id(messages[0])] = (messages[0], parts)
        return kept[1]


class Scratch:
    """Memory to work in, the same for all plans of a storage."""

    def __init__(self) -> None:
        self._pairs: dict[np.dtype[Any], tuple[Array, Array]] = {}

    def of(self, chunk: Chunk) -> tuple[Array, Array]:
        """Two arrays of the size of a chunk: one for the reduced gradient, one for the rule to work in."""
        dtype, n = chunk.value.dtype, chunk.value.size
        if dtype not in self._pairs:
            self._pairs[dtype] = (np.empty(CHUNK, dtype), np.empty(CHUNK, dtype))
        first, second = self._pairs[dtype]
        return first[:n], second[:n]


def _ranges(
    group: Group, variables: Sequence[Block], slots: Sequence[Sequence[Block]], starts: Sequence[int], alignment: int
) -> list[tuple[int, int, list[int]]]:
    """(place in the group, number of elements, first bytes of value and slots) of what lies in a row everywhere."""
    ranges: list[tuple[int, int, list[int]]] = []
    item = group.dtype.itemsize
    for i in group.members:
        place, count = (starts[i] - group.start) // item, variables[i].array.size
        begins = [variables[i].start, *(slot.start for slot in slots[i])]
        if ranges:
            before, length, firsts = ranges[-1]
            length = -(-length * item // alignment) * alignment // item  # with what lies between the two
            if begins == [first + length * item for first in firsts]:
                ranges[-1] = (before, length + count, firsts)
                continue
        ranges.append((place, count, begins))
    return ranges
