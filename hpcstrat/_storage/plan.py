"""How one update of several variables walks through storage: merged ranges, in chunks that fit in cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hpcstrat._communicators.packing import Layout, layout
from hpcstrat._communicators.records import Signature, signature
from hpcstrat._communicators.reduction import CHUNK, slice_of
from hpcstrat._communicators.segment import Segment
from hpcstrat._storage.memory import Block
from hpcstrat._types import ReduceOp

Array: TypeAlias = "np.ndarray[Any, Any]"
Rule: TypeAlias = Callable[[Array, Array, Sequence[Array], Array], None]
"""`rule(value, gradient, slots, work)` updates `value` and `slots` in place, flat arrays of one length and dtype.

It may overwrite `gradient` and `work`, and must work elementwise, because storage calls it chunk by chunk.
"""


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


class Plan:
    """One update of some variables, computed once. Variables that were made one after another are one range.

    Args:
        segment: where they are.
        variables: their blocks.
        slots: for each variable the blocks of its slots, of its shape and dtype.
        rank, size: this process updates the `rank`-th of `size` slices of all elements.
    """

    def __init__(
        self, segment: Segment, variables: Sequence[Block], slots: Sequence[Sequence[Block]], rank: int, size: int
    ) -> None:
        # By number, which is the order in storage and the same on all ranks, and not in the order of the call.
        self._order = sorted(range(len(variables)), key=lambda i: variables[i].number)
        variables, slots = [variables[i] for i in self._order], [slots[i] for i in self._order]
        self.form: Layout = layout(
            tuple([block.array.shape for block in variables]), tuple([block.array.dtype for block in variables])
        )
        self._facts = [(block.number, block.array.dtype, block.array.shape) for block in variables]
        self.chunks: list[Chunk] = []
        self._signatures: dict[tuple[str, ReduceOp | None], Signature] = {}
        self._views: dict[int, tuple[Array, list[Array]]] = {}
        self._parts: dict[int, tuple[Array, list[list[Array]]]] = {}
        for index, group in enumerate(self.form.groups):
            mine = slice_of(group.elements, rank, size)
            for place, count, starts in _ranges(group.dtype, group.start, variables, slots, self.form.starts):
                for a in range(max(place, mine.start), min(place + count, mine.stop), CHUNK):
                    b = min(a + CHUNK, place + count, mine.stop)
                    item = group.dtype.itemsize
                    value, *rest = [
                        segment.array[start + (a - place) * item : start + (b - place) * item].view(group.dtype)
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

    def write(self, message: Array, values: Sequence[Array]) -> None:
        """Copies the variables' gradients, or new values, into a message. A mailbox's views are kept."""
        kept = self._views.get(id(message))
        if kept is None or kept[0] is not message:
            if len(self._views) == 3:  # two records and a mailbox, before it grew
                self._views.clear()
            in_order = dict(zip(self._order, self.form.views(message), strict=True))
            kept = self._views[id(message)] = (message, [in_order[i] for i in range(len(in_order))])
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
    dtype: np.dtype[Any],
    group_start: int,
    variables: Sequence[Block],
    slots: Sequence[Sequence[Block]],
    starts: list[int],
) -> list[tuple[int, int, list[int]]]:
    """(place in the group, number of elements, first bytes of value and slots) of what lies in a row everywhere."""
    ranges: list[tuple[int, int, list[int]]] = []
    for variable, own, start in zip(variables, slots, starts, strict=True):
        if variable.array.dtype != dtype:
            continue
        place, count = (start - group_start) // dtype.itemsize, variable.array.size
        begins = [variable.start, *(slot.start for slot in own)]
        if ranges and begins == [b + ranges[-1][1] * dtype.itemsize for b in ranges[-1][2]]:
            last = ranges.pop()
            ranges.append((last[0], last[1] + count, last[2]))
        else:
            ranges.append((place, count, begins))
    return ranges
