"""How one update of several variables walks through storage: merged ranges, in chunks that fit in cache."""

from __future__ import annotations

import bisect
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hpcstrat._calls.records import CallSignature, signature_of
from hpcstrat._communicators.reduction import CHUNK, reduce_chunk, slice_of
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import FIRST_REPLICA, Aggregation, Array, ReduceOp
from hpcstrat._memory.blocks import Block
from hpcstrat._memory.layout import DtypeGroup, Layout, layout_of
from hpcstrat._storage.chunks import (
    Cut,
    ElementRange,
    LocalOnlyRange,
    Memory,
    ScratchBuffers,
    UpdateChunk,
    is_readable_in_place,
    ranges_of,
)
from hpcstrat._storage.marks import Marks
from hpcstrat._update import compiled
from hpcstrat._update.rule import NO_CONSTANTS, Norms, UpdateRule


class Plan:
    """One update of some variables, computed once.

    Variables that were made one after another are one range.

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
        # What a steady step's gradients must be, in the order of the call; see `fits`.
        self._expected = [
            (type(block.view), block.array.shape, block.array.dtype) for block in variables
        ]
        # By number, the order in memory, and not in the order of the call: variables that were made
        # one after another are then one range, and the ranks have the same ranges.
        self._order = sorted(range(len(variables)), key=lambda i: variables[i].number)
        variables, slots = [variables[i] for i in self._order], [slots[i] for i in self._order]
        self.layout: Layout = layout_of(
            tuple([block.array.shape for block in variables]),
            tuple([block.array.dtype for block in variables]),
            alignment,
        )
        self.blocks: list[Block] = variables
        self._must_match = [block.held() for block in variables]
        self.chunks: list[ElementRange] = []
        self.buffers: list[Array] | None = (
            None  # for the variables' gradients, where `Storage.make_buffers` was called
        )
        self.buffer_messages: list[
            Array
        ] = []  # in which the ranks' buffers lie, as far as this rank sees them
        self._buffers_owner: Block | None = None
        self.marks: Marks = Marks()
        self.sums: Block | None = None  # of each rank and variable, where updates take norms
        # By call: `assign` and `assign_add` of a variable, say, share a plan.
        self._signatures: dict[tuple[str, Aggregation], CallSignature] = {}
        self._views: dict[int, tuple[Array, list[Array]]] = {}
        self._pieces: dict[tuple[int, int], tuple[Array, list[UpdateChunk]]] = {}
        for index, group in enumerate(self.layout.groups):
            # A slice of all elements and not of each variable: ranks have equal work, whatever the
            # variables' sizes.
            mine = slice_of(group.elements, rank, size)
            for place, count, starts in ranges_of(
                group, variables, slots, self.layout.starts, alignment
            ):
                for a in range(max(place, mine.start), min(place + count, mine.stop), chunk):
                    b = min(a + chunk, place + count, mine.stop)
                    item = group.dtype.itemsize
                    value, *rest = [
                        memory.part(start + (a - place) * item, start + (b - place) * item).view(
                            group.dtype
                        )
                        for start in starts
                    ]
                    self.chunks.append(ElementRange(index, a, b, value, tuple(rest)))
        self._rank = rank
        self._own = self._own_parts()
        # Compiling takes half a second, which updates of a few numbers never earn back.
        self._is_compiled = compiles and sum(self.layout.sizes) >= compiled.FEWEST
        self._addresses: dict[int, tuple[Array, compiled.Table, Array]] = {}

    def signature(
        self,
        op: Aggregation = FIRST_REPLICA,
        constants: Mapping[str, float] = NO_CONSTANTS,
        in_buffers: bool = False,
    ) -> CallSignature:
        """What the ranks must agree on for an update."""
        call = f"{current_call()} from buffers" if in_buffers else current_call()
        numbers = tuple(constants.values())
        found = self._signatures.get((call, op))
        if found is None or found.numbers != numbers:
            found = signature_of(
                call, *([] if op is FIRST_REPLICA else [op.name]), *self._must_match
            )
            if numbers:
                found = found.with_numbers(numbers, tuple(constants))
            self._signatures[call, op] = found
        return found

    def signature_of_marks(self, places: Sequence[int]) -> CallSignature:
        """What the ranks must agree on to mark these gradients."""
        return signature_of(current_call(), *[self._must_match[place] for place in places])

    def nbytes_of(self, place: int) -> int:
        """Bytes of a gradient, by its place in a message."""
        return self.blocks[place].array.nbytes

    def require_whole(self) -> None:
        """Raises where an update of one of the variables was interrupted.

        Raises:
            RuntimeError: it was.
        """
        for block in self.blocks:
            _ = block.view

    def arranged(self, message: Array) -> list[Array]:
        """The variables' parts of a message, as views, in the order of the call."""
        in_order = dict(zip(self._order, self.layout.views(message), strict=True))
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
        # By identity, which costs nothing: another array, even over the same memory, is copied as
        # any gradient.
        return self.buffers is not None and all(map(operator.is_, values, self.buffers))

    def _own_parts(self) -> dict[int, LocalOnlyRange]:
        """By the place in the call, where there is any such part."""
        found: dict[int, LocalOnlyRange] = {}
        for index, group in enumerate(self.layout.groups):
            for i in group.members:
                begin, size = (
                    (self.layout.starts[i] - group.start) // group.dtype.itemsize,
                    self.layout.sizes[i],
                )
                inside = [
                    k
                    for k, chunk in enumerate(self.chunks)
                    if chunk.group == index and begin <= chunk.start and chunk.stop <= begin + size
                ]
                # A small one is not worth the trouble. Of a large one, this saves a rank the copy
                # of its own share.
                if size >= CHUNK and inside:
                    start, stop = (
                        self.chunks[inside[0]].start - begin,
                        self.chunks[inside[-1]].stop - begin,
                    )
                    found[self._order[i]] = LocalOnlyRange(
                        index, begin, start, stop, range(inside[0], inside[-1] + 1)
                    )
        return found

    def fits(self, gradients: Sequence[Any]) -> bool:
        """Whether these are arrays of the variables' kind, shapes and dtypes, in the order of the call."""
        for gradient, (kind, shape, dtype) in zip(gradients, self._expected, strict=True):
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
        if not self._own:
            self.write(message, values)
            return
        views = self._message_views(message)
        for i, (view, value) in enumerate(zip(views, values, strict=True)):
            own = self._own.get(i)
            if own is not None and is_readable_in_place(value, view):
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
        share: Callable[[Array], Array] | None = None,
    ) -> None:
        """Reduces the messages, and changes this rank's chunks of the variables and slots by the result.

        Args:
            rule: how.
            messages: of all ranks, or the one that counts.
            scratch: to work in.
            op: how the messages are reduced.
            values: this rank's gradients, where `write_for_others` wrote its message.
            share: adds up an array of float64 over the ranks that have the other chunks; `None` if
                this rank has all.
        """
        is_compiled = op is ReduceOp.SUM and self._is_compiled
        # Loops sum what NumPy would, in rank order. Other operations are rare, and of small
        # variables.
        if rule.norms is not None:
            self._apply_with_norms(
                rule, rule.norms, messages, scratch, op, values, share, is_compiled
            )
            return
        if (
            is_compiled
            and (loops := self._loops(lambda dtype: compiled.loop(rule, dtype))) is not None
        ):
            for loop, group in loops:
                if (found := self._table(group, messages, values)) is not None:
                    loop(found[1], len(messages), rule.kernel_constants)
            return
        pieces = self.pieces(messages, scratch)
        if values is not None:
            pieces = self.with_own(pieces, messages, values)
        for value, slots, parts, gradient, work in pieces:
            reduce_chunk(gradient, parts, op)
            rule.apply(value, gradient, slots, work)

    def _apply_with_norms(
        self,
        rule: UpdateRule,
        norms: Norms,
        messages: Sequence[Array],
        scratch: ScratchBuffers,
        op: ReduceOp,
        values: Sequence[Array] | None,
        share: Callable[[Array], Array] | None,
        is_compiled: bool,
    ) -> None:
        """`apply` in two passes: the norms of all variables, then the update of each by its own."""
        sums = np.zeros((len(self.blocks), norms.size))
        first = self._loops(lambda dtype: compiled.norm_loop(norms, dtype)) if is_compiled else None
        second = (
            self._loops(lambda dtype: compiled.loop(rule, dtype)) if first is not None else None
        )
        if first is not None and second is not None:
            tables = [self._table(group, messages, values) for _, group in second]
            for (loop, _), found in zip(first, tables, strict=True):
                if found is not None:
                    np.add.at(sums, found[0], loop(found[1], len(messages), norms.kernel_constants))
            # The norms need all elements of a variable, of which other ranks have the rest, so no
            # chunk can be updated before.
            rules = self._bound(norms, sums, share)
            for (loop, _), found in zip(second, tables, strict=True):
                if found is not None:
                    for variable in np.unique(found[0]):
                        rows = found[1][found[0] == variable]
                        loop(rows, len(messages), rules[variable].kernel_constants)
            return
        pieces = self.pieces(messages, scratch)
        if values is not None:
            pieces = self.with_own(pieces, messages, values)
        cut = [(each.variable, pieces[each.chunk].cut(each.start, each.stop)) for each in self.cuts]
        for variable, (value, slots, parts, gradient, _) in cut:
            reduce_chunk(gradient, parts, op)
            sums[variable] += norms.sums(value, gradient, slots)
        rules = self._bound(norms, sums, share)
        for variable, (
            value,
            slots,
            parts,
            gradient,
            work,
        ) in cut:  # summed again: a copy would cost as much memory
            reduce_chunk(gradient, parts, op)
            rules[variable].apply(value, gradient, slots, work)

    def _bound(
        self, norms: Norms, sums: Array, share: Callable[[Array], Array] | None
    ) -> list[UpdateRule]:
        """The update of each variable, by the sums of squares of this rank's chunks."""
        return [
            norms.bound(found) for found in np.sqrt(sums if share is None else share(sums)).tolist()
        ]

    def _loops(
        self, loop_of: Callable[[np.dtype[Any]], Any]
    ) -> list[tuple[Any, DtypeGroup]] | None:
        """The loop of each dtype; `None` unless all of them have one."""
        # All or none: half an update in C and half in NumPy would need both ways' bookkeeping for a
        # rare case.
        loops = [(loop_of(group.dtype), group) for group in self.layout.groups]
        return loops if all(loop is not None for loop, _ in loops) else None

    @functools.cached_property
    def cuts(self) -> list[Cut]:
        """This rank's chunks, cut where one variable ends and another begins."""
        found: list[Cut] = []
        for index, group in enumerate(self.layout.groups):
            chunks = [(k, chunk) for k, chunk in enumerate(self.chunks) if chunk.group == index]
            starts = [chunk.start for _, chunk in chunks]
            for i in group.members:
                begin = (self.layout.starts[i] - group.start) // group.dtype.itemsize
                end = begin + self.layout.sizes[i]
                first, last = (
                    bisect.bisect_right(starts, begin) - 1,
                    bisect.bisect_left(starts, end),
                )
                for k, chunk in chunks[max(first, 0) : last]:
                    start, stop = max(begin, chunk.start), min(end, chunk.stop)
                    if start < stop:
                        found.append(Cut(index, i, k, start - chunk.start, stop - chunk.start))
        return found

    def _table(
        self, group: DtypeGroup, messages: Sequence[Array], values: Sequence[Array] | None
    ) -> tuple[Array, compiled.Table] | None:
        """This rank's part of a group of the messages, as a compiled loop takes it; `None` where it has none.

        Returns:
            Of each row, the variable's place in the order of a message; and the rows.
        """
        index = self.layout.groups.index(group)
        if index not in self._addresses:
            cuts = [cut for cut in self.cuts if cut.group == index]
            arrays = [(self.chunks[cut.chunk].value, *self.chunks[cut.chunk].slots) for cut in cuts]
            # The addresses of storage never change, so only those of the messages are filled in at
            # each step.
            fixed = compiled.table(
                [
                    [a[cut.start : cut.stop] for a in each]
                    for cut, each in zip(cuts, arrays, strict=True)
                ]
            )
            starts = np.array([self.chunks[cut.chunk].start + cut.start for cut in cuts], np.int64)
            numbers = np.array([(cut.variable, cut.chunk) for cut in cuts], np.int64).reshape(-1, 2)
            self._addresses[index] = numbers, fixed, starts
        numbers, fixed, starts = self._addresses[index]
        if not len(numbers):
            return None
        variables, chunks = numbers.T
        item = group.dtype.itemsize
        begins = np.array([group.of(message).ctypes.data for message in messages], np.int64)
        table = np.concatenate([fixed, begins + item * starts[:, None]], axis=1)
        if values is not None:
            views = self._message_views(messages[self._rank])
            for i, own in self._own.items():
                if own.group == index and is_readable_in_place(values[i], views[i]):
                    rows = (chunks >= own.chunks.start) & (chunks < own.chunks.stop)
                    # This rank's own part of a large gradient was not copied to its message: the
                    # loop reads it where it is.
                    begin = values[i].ctypes.data - item * own.begin
                    table[rows, fixed.shape[1] + self._rank] = begin + item * starts[rows]
        return variables, table

    def with_own(
        self, pieces: list[UpdateChunk], messages: Sequence[Array], values: Sequence[Array]
    ) -> list[UpdateChunk]:
        """The pieces, with this rank's parts taken from its values where `write_for_others` left them out."""
        if not self._own:
            return pieces
        pieces = list(pieces)
        views = self._message_views(messages[self._rank])
        for i, own in self._own.items():
            if is_readable_in_place(values[i], views[i]):
                given = values[i].reshape(-1)
                for k in own.chunks:
                    parts = list(pieces[k].parts)
                    parts[self._rank] = given[
                        self.chunks[k].start - own.begin : self.chunks[k].stop - own.begin
                    ]
                    pieces[k] = pieces[k]._replace(parts=parts)
        return pieces

    def _message_views(self, message: Array) -> list[Array]:
        """The variables' parts of a message, in the order of the call. A mailbox's are kept."""
        kept = self._views.get(id(message))
        if kept is None or kept[0] is not message:
            # An update's message is one of a few arrays that live as long as the communicator:
            # views of them are made once. By id, because arrays have no hash; the array is kept
            # beside it, so the id stays its own.
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
            flat = [[group.of(message) for message in messages] for group in self.layout.groups]
            pieces = [
                UpdateChunk(
                    value, slots, [part[start:stop] for part in flat[group]], *scratch.of(value)
                )
                for group, start, stop, value, slots in self.chunks
            ]
            kept = self._pieces[key] = (messages[0], pieces)
        return kept[1]
