"""How one update of several variables walks through storage: merged ranges, in chunks that fit in cache."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from hpcstrat._communicators.packing import Group, Layout, layout
from hpcstrat._communicators.protocol import CallSignature, signature
from hpcstrat._communicators.reduction import CHUNK, reduce_chunk, slice_of
from hpcstrat._memory.blocks import Block
from hpcstrat._storage import compiled
from hpcstrat._storage.rule import NO_CONSTANTS, UpdateRule
from hpcstrat._types import FIRST_REPLICA, Aggregation, Array, ReduceOp


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


class UpdateChunk(NamedTuple):
    """A chunk as it meets the messages of one update.

    Attributes:
        value, slots: see `Chunk`.
        parts: the same elements of every message.
        gradient: of their length and dtype, to reduce them into.
        work: likewise, for the rule to work in.
    """

    value: Array
    slots: tuple[Array, ...]
    parts: list[Array]
    gradient: Array
    work: Array


class LocalOnlyRange(NamedTuple):
    """The part of one large variable that this rank updates in whole chunks. Nobody else reads its gradient there.

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


class Plan:
    """One update of some variables, computed once. Variables that were made one after another are one range.

    Args:
        memory: where they are.
        variables: their blocks.
        slots: for each variable the blocks of its slots, of its shape and dtype.
        rank, size: this process updates the `rank`-th of `size` slices of all elements.
        chunk: elements that are updated together at most.
        alignment: bytes to whose multiples every variable starts, in memory and in a message.
        compiles: whether `apply` may compile rules, if the variables are large.
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
        compiles: bool = False,
    ) -> None:
        # By number, the order in memory, and not in the order of the call: variables that were made one after another
        # are then one range, and the ranks have the same ranges.
        self._forms = [(type(block.view), block.array.shape, block.array.dtype) for block in variables]
        self._order = sorted(range(len(variables)), key=lambda i: variables[i].number)
        variables, slots = [variables[i] for i in self._order], [slots[i] for i in self._order]
        self.form: Layout = layout(
            tuple([block.array.shape for block in variables]),
            tuple([block.array.dtype for block in variables]),
            alignment,
        )
        self.blocks: list[Block] = variables
        self._facts = [block.held() for block in variables]
        self.chunks: list[Chunk] = []
        self.buffers: list[Array] | None = None  # for the variables' gradients, where `Storage.make_buffers` was called
        self.buffer_messages: list[
            Array
        ] = []  # the messages that the ranks' buffers are parts of, as far as it sees them
        self._buffers_owner: Block | None = None
        self._signatures: dict[tuple[str, Aggregation], CallSignature] = {}
        self._views: dict[int, tuple[Array, list[Array]]] = {}
        self._pieces: dict[tuple[int, int], tuple[Array, list[UpdateChunk]]] = {}
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
        self._rank = rank
        self._own = self._own_parts()
        self._is_compiled = compiles and sum(self.form.sizes) >= compiled.FEWEST
        self._addresses: dict[int, tuple[list[int], compiled.Table, compiled.Table]] = {}

    def signature(
        self, call: str, op: Aggregation = FIRST_REPLICA, constants: Mapping[str, float] = NO_CONSTANTS
    ) -> CallSignature:
        """What the ranks must agree on for an update."""
        numbers = tuple(constants.values())
        found = self._signatures.get((call, op))
        if found is None or found.numbers != numbers:
            found = signature(call, *([] if op is FIRST_REPLICA else [op.name]), *self._facts)
            if numbers:
                found = found.with_numbers(numbers, tuple(constants))
            self._signatures[call, op] = found
        return found

    def require_whole(self) -> None:
        """Raises where an update of one of the variables was broken off.

        Raises:
            RuntimeError: it was.
        """
        for block in self.blocks:
            _ = block.view

    def arranged(self, message: Array) -> list[Array]:
        """The variables' parts of a message, as views, in the order of the call."""
        in_order = dict(zip(self._order, self.form.views(message), strict=True))
        return [in_order[i] for i in range(len(in_order))]

    def give_buffers(self, messages: list[Array], own: Array, owner: Block | None = None) -> None:
        """Makes the parts of a message the buffers, from which gradients need not be copied.

        Args:
            messages: the messages that an update reads: all ranks', or this rank's alone.
            own: this rank's.
            owner: the block that they lie in, whose memory returns when nobody holds it.
        """
        self.buffers = self.arranged(own)
        self.buffer_messages = messages
        self._buffers_owner = owner

    def are_in_buffers(self, values: Sequence[Array]) -> bool:
        """Whether these gradients are the plan's buffers, and so need not be copied."""
        return self.buffers is not None and all(map(operator.is_, values, self.buffers))

    def _own_parts(self) -> dict[int, LocalOnlyRange]:
        """By the place in the call, where there is any such part."""
        found: dict[int, LocalOnlyRange] = {}
        for index, group in enumerate(self.form.groups):
            for i in group.members:
                begin, size = (self.form.starts[i] - group.start) // group.dtype.itemsize, self.form.sizes[i]
                inside = [
                    k
                    for k, chunk in enumerate(self.chunks)
                    if chunk.group == index and begin <= chunk.start and chunk.stop <= begin + size
                ]
                # A small one is not worth the trouble. Of a large one, this saves a rank the copy of its own share.
                if size >= CHUNK and inside:
                    start, stop = self.chunks[inside[0]].start - begin, self.chunks[inside[-1]].stop - begin
                    found[self._order[i]] = LocalOnlyRange(index, begin, start, stop, range(inside[0], inside[-1] + 1))
        return found

    def fits(self, gradients: Sequence[Any]) -> bool:
        """Whether these are arrays of the variables' kind, shapes and dtypes, in the order of the call."""
        for gradient, (kind, shape, dtype) in zip(gradients, self._forms, strict=True):
            # Equal dtypes need not be identical; those that are not take the longer way.
            if type(gradient) is not kind or gradient.shape != shape or gradient.dtype is not dtype:
                return False
        return True

    def in_order(self, values: Sequence[Array]) -> list[Array]:
        """The variables' gradients, or new values, in the order of a message."""
        return [values[i] for i in self._order]

    def write(self, message: Array, values: Sequence[Array]) -> None:
        """Copies the variables' gradients, or new values, into a message."""
        for view, value in zip(self._message_views(message), values, strict=True):
            view[...] = value

    def write_for_others(self, message: Array, values: Sequence[Array]) -> None:
        """`write` without the ranges that `with_own` reads from the values directly."""
        views = self._message_views(message)
        for i, (view, value) in enumerate(zip(views, values, strict=True)):
            own = self._own.get(i)
            if own is not None and _is_readable_in_place(value, view):
                flat, given = view.reshape(-1), value.reshape(-1)
                flat[: own.start] = given[: own.start]
                flat[own.stop :] = given[own.stop :]
            else:
                view[...] = value

    def apply(
        self,
        rule: UpdateRule,
        messages: Sequence[Array],
        scratch: ScratchBuffers,
        op: ReduceOp = ReduceOp.SUM,
        values: Sequence[Array] | None = None,
    ) -> None:
        """Reduces the messages, and changes this rank's chunks of the variables and slots by the result.

        Args:
            rule: how.
            messages: of all ranks, or the one that counts.
            scratch: to work in.
            op: how the messages are reduced.
            values: this rank's gradients, where `write_for_others` wrote its message.
        """
        if op is ReduceOp.SUM and self._is_compiled and rule.kernel is not None:
            loops = [(group, compiled.loop(rule, group.dtype)) for group in self.form.groups]
            if all(loop is not None for _, loop in loops):
                for group, loop in loops:
                    if loop is not None and (table := self._table(group, messages, values)) is not None:
                        loop(table, len(messages), rule.kernel_constants)
                return
        pieces = self.pieces(messages, scratch)
        if values is not None:
            pieces = self.with_own(pieces, messages, values)
        for value, slots, parts, gradient, work in pieces:
            reduce_chunk(gradient, parts, op)
            rule.apply(value, gradient, slots, work)

    def _table(self, group: Group, messages: Sequence[Array], values: Sequence[Array] | None) -> compiled.Table | None:
        """This rank's chunks of a group of the messages, as a compiled loop takes them; `None` where it has none."""
        index = self.form.groups.index(group)
        if index not in self._addresses:
            mine = [k for k, chunk in enumerate(self.chunks) if chunk.group == index]
            fixed = compiled.table([(self.chunks[k].value, *self.chunks[k].slots) for k in mine])
            self._addresses[index] = mine, fixed, np.array([self.chunks[k].start for k in mine], np.int64)
        mine, fixed, starts = self._addresses[index]
        if not mine:
            return None
        item = group.dtype.itemsize
        begins = np.array([group.of(message).ctypes.data for message in messages], np.int64)
        table = np.concatenate([fixed, begins + item * starts[:, None]], axis=1)
        if values is not None:
            views = self._message_views(messages[self._rank])
            for i, own in self._own.items():
                if own.group == index and _is_readable_in_place(values[i], views[i]):
                    rows = slice(own.chunks.start - mine[0], own.chunks.stop - mine[0])
                    begin = values[i].ctypes.data - item * own.begin
                    table[rows, fixed.shape[1] + self._rank] = begin + item * starts[rows]
        return table

    def with_own(
        self, pieces: list[UpdateChunk], messages: Sequence[Array], values: Sequence[Array]
    ) -> list[UpdateChunk]:
        """The pieces, with this rank's parts taken from its values where `write_for_others` left them out."""
        if not self._own:
            return pieces
        pieces = list(pieces)
        views = self._message_views(messages[self._rank])
        for i, own in self._own.items():
            if _is_readable_in_place(values[i], views[i]):
                given = values[i].reshape(-1)
                for k in own.chunks:
                    parts = list(pieces[k].parts)
                    parts[self._rank] = given[self.chunks[k].start - own.begin : self.chunks[k].stop - own.begin]
                    pieces[k] = pieces[k]._replace(parts=parts)
        return pieces

    def _message_views(self, message: Array) -> list[Array]:
        """The variables' parts of a message, in the order of the call. A mailbox's are kept."""
        kept = self._views.get(id(message))
        if kept is None or kept[0] is not message:
            # An update's message is one of a few arrays that live as long as the communicator: views of them are made
            # once. By id, because arrays have no hash; the array is kept beside it, so the id stays its own.
            if len(self._views) == 3:  # two records and a mailbox, before it grew
                self._views.clear()
            kept = self._views[id(message)] = (message, self.arranged(message))
        return kept[1]

    def forget_messages(self) -> None:
        """Lets go of what is kept of messages."""
        self._views.clear()
        self._pieces.clear()

    def pieces(self, messages: Sequence[Array], scratch: ScratchBuffers) -> list[UpdateChunk]:
        """The chunks with these messages. Those of mailboxes are kept."""
        key = (id(messages[0]), len(messages))
        kept = self._pieces.get(key)
        if kept is None or kept[0] is not messages[0]:
            if len(self._pieces) == 3:
                self._pieces.clear()
            flat = [[group.of(message) for message in messages] for group in self.form.groups]
            pieces = [
                UpdateChunk(value, slots, [part[start:stop] for part in flat[group]], *scratch.of(value))
                for group, start, stop, value, slots in self.chunks
            ]
            kept = self._pieces[key] = (messages[0], pieces)
        return kept[1]


class ScratchBuffers:
    """Memory to work in, the same for all plans of a storage."""

    def __init__(self) -> None:
        self._pairs: dict[np.dtype[Any], tuple[Array, Array]] = {}

    def of(self, value: Array) -> tuple[Array, Array]:
        """Two arrays like a chunk's: one for the reduced gradient, one for the rule to work in."""
        dtype, n = value.dtype, value.size
        if dtype not in self._pairs:
            self._pairs[dtype] = (np.empty(CHUNK, dtype), np.empty(CHUNK, dtype))
        first, second = self._pairs[dtype]
        return first[:n], second[:n]


def _is_readable_in_place(value: Array, view: Array) -> bool:
    """Whether elements of `value` can be taken from it while variables change.

    What is read-only may be a variable, which others update meanwhile.
    """
    return bool(value.flags.c_contiguous and value.flags.writeable and value.dtype == view.dtype)


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
