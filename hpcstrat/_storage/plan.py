"""How one update of several variables walks through storage: in chunks that fit in cache."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hpcstrat._calls.records import CallSignature, signature_of
from hpcstrat._communicators.reduction import CHUNK, reduce_chunk
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
    chunks_of,
    cut_at_variables,
    is_readable_in_place,
    local_ranges_of,
)
from hpcstrat._storage.marks import Marks
from hpcstrat._update import compiled
from hpcstrat._update.rule import NO_CONSTANTS, Norms, UpdateRule


class Plan:
    """One update of some variables, planned once for all steps.

    Variables are counted in three orders:

    - the order of the call: the caller's `variables`, gradients and values, in the caller's order;
    - the order in the message: by creation number, which is equal on all ranks; its bytes are
      grouped by dtype. A "place" is an index in this order, such as in `blocks`, `layout.starts`,
      marks and `Cut.variable`;
    - the order in memory: by address. `ranges_of` finds where it follows that of the message.

    `to_message_order` takes arrays from the order of the call to that of the message;
    `to_call_order` is its inverse, for the views of a message.

    Args:
        memory: the memory that the blocks are in.
        variables: their blocks.
        slots: for each variable the blocks of its slots, of its shape and dtype.
        rank, size: this process updates the `rank`-th of `size` slices of all elements.
        chunk: elements that are updated together at most.
        alignment: every variable starts at a multiple of this many bytes, in memory and message.
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
        # The types, shapes and dtypes of a steady step's gradients, in the order of the call.
        self._expected = [
            (type(block.view), block.array.shape, block.array.dtype) for block in variables
        ]
        # By number: variables that were made one after another are mostly contiguous in memory, and
        # all ranks have the same order, whatever the order of the call.
        self._order = sorted(range(len(variables)), key=lambda i: variables[i].number)
        variables, slots = [variables[i] for i in self._order], [slots[i] for i in self._order]
        self.layout: Layout = layout_of(
            tuple([block.array.shape for block in variables]),
            tuple([block.array.dtype for block in variables]),
            alignment,
        )
        self.blocks: list[Block] = variables
        self._must_match = [block.identity() for block in variables]
        self.chunks: list[ElementRange] = chunks_of(
            memory, self.layout, variables, slots, rank, size, chunk, alignment
        )
        # For the variables' gradients, where `Storage.make_buffers` was called.
        self.buffers: list[Array] | None = None
        # The messages that contain the ranks' buffers, as far as this rank sees them.
        self.buffer_messages: list[Array] = []
        self._buffers_owner: Block | None = None
        self.marks: Marks = Marks()
        self.sums: Block | None = None  # per rank and variable, where updates take norms
        # By call: `assign` and `assign_add` of a variable, for example, share a plan.
        self._signatures: dict[tuple[str, Aggregation], CallSignature] = {}
        self._views: dict[int, tuple[Array, list[Array]]] = {}
        self._pieces: dict[tuple[int, int], tuple[Array, list[UpdateChunk]]] = {}
        self._rank = rank
        # By the variable's index in the order of the call.
        self._own: dict[int, LocalOnlyRange] = {
            self._order[i]: own for i, own in local_ranges_of(self.layout, self.chunks).items()
        }
        # Compiling takes half a second, which small updates never make up for.
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
        signature = self._signatures.get((call, op))
        if signature is None or signature.numbers != numbers:
            signature = signature_of(
                call, *([] if op is FIRST_REPLICA else [op.name]), *self._must_match
            )
            if numbers:
                signature = signature.with_numbers(numbers, tuple(constants))
            self._signatures[call, op] = signature
        return signature

    def signature_of_marks(self, places: Sequence[int]) -> CallSignature:
        """What the ranks must agree on to mark these gradients."""
        return signature_of(current_call(), *[self._must_match[place] for place in places])

    def nbytes_of(self, place: int) -> int:
        """Bytes of the gradient at a place in the message."""
        return self.blocks[place].array.nbytes

    def require_whole(self) -> None:
        """Refuses variables that an interrupted update left changed in part.

        Raises:
            RuntimeError: an update of one of the variables was interrupted.
        """
        for block in self.blocks:
            _ = block.view

    def to_call_order(self, message: Array) -> list[Array]:
        """The variables' views of a message, in the order of the call."""
        views = dict(zip(self._order, self.layout.views(message), strict=True))
        return [views[i] for i in range(len(views))]

    def give_buffers(self, messages: list[Array], own: Array, owner: Block | None = None) -> None:
        """Makes the parts of a message the buffers, from which gradients need not be copied.

        Args:
            messages: the messages that an update reads: all ranks', or only this rank's.
            own: this rank's.
            owner: the block that contains them, which this plan keeps alive.
        """
        self.buffers = self.to_call_order(own)
        self.buffer_messages = messages
        self._buffers_owner = owner

    def are_in_buffers(self, values: Sequence[Array]) -> bool:
        """Whether these gradients are the plan's buffers, and so need not be copied."""
        # By identity, which costs nothing: another array, even over the same memory, is copied like
        # any gradient.
        return self.buffers is not None and all(map(operator.is_, values, self.buffers))

    def fits(self, gradients: Sequence[Any]) -> bool:
        """Whether these, in the order of the call, are of the variables' kinds, shapes, dtypes."""
        for gradient, (kind, shape, dtype) in zip(gradients, self._expected, strict=True):
            # Equal dtypes need not be identical; if they are not, the slow path checks them.
            if type(gradient) is not kind or gradient.shape != shape or gradient.dtype is not dtype:
                return False
        return True

    def to_message_order(self, values: Sequence[Array]) -> list[Array]:
        """Gradients, new values or slots in the order of the message, from that of the call."""
        return [values[i] for i in self._order]

    def write(self, message: Array, values: Sequence[Array]) -> None:
        """Copies the variables' gradients, or new values, into a message."""
        for view, value in zip(self._message_views(message), values, strict=True):
            view[...] = value

    def write_for_others(self, message: Array, values: Sequence[Array]) -> None:
        """Like `write`, but skips the ranges that only this rank reads (see `with_own`)."""
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
        """Reduces the messages and updates this rank's chunks of the variables and slots.

        Args:
            rule: the update.
            messages: all ranks', or the single one that counts.
            scratch: memory to work in.
            op: how the messages are reduced.
            values: this rank's gradients, where `write_for_others` wrote its message.
            share: adds up an array of float64 over the ranks that have the other chunks; `None` if
                this rank has all.
        """
        # Loops sum in rank order, like NumPy. Other operations are rare, on small variables.
        is_compiled = op is ReduceOp.SUM and self._is_compiled
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
                if (table := self._table(group, messages, values)) is not None:
                    loop(table[1], len(messages), rule.kernel_constants)
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
        """`apply` in two passes: the norms of all variables, then the update of each variable."""
        sums = np.zeros((len(self.blocks), norms.size))
        first = self._loops(lambda dtype: compiled.norm_loop(norms, dtype)) if is_compiled else None
        second = (
            self._loops(lambda dtype: compiled.loop(rule, dtype)) if first is not None else None
        )
        if first is not None and second is not None:
            tables = [self._table(group, messages, values) for _, group in second]
            for (loop, _), table in zip(first, tables, strict=True):
                if table is not None:
                    np.add.at(sums, table[0], loop(table[1], len(messages), norms.kernel_constants))
            # A norm needs all elements of a variable, some of them on other ranks, so no chunk can
            # be updated before.
            rules = self._rules_from(norms, sums, share)
            for (loop, _), table in zip(second, tables, strict=True):
                if table is not None:
                    for variable in np.unique(table[0]):
                        rows = table[1][table[0] == variable]
                        loop(rows, len(messages), rules[variable].kernel_constants)
            return
        pieces = self.pieces(messages, scratch)
        if values is not None:
            pieces = self.with_own(pieces, messages, values)
        cut = [(each.variable, pieces[each.chunk].cut(each.start, each.stop)) for each in self.cuts]
        for variable, (value, slots, parts, gradient, _) in cut:
            reduce_chunk(gradient, parts, op)
            sums[variable] += norms.sums(value, gradient, slots)
        rules = self._rules_from(norms, sums, share)
        # Reduced again: a copy of the gradients would cost as much memory.
        for variable, (value, slots, parts, gradient, work) in cut:
            reduce_chunk(gradient, parts, op)
            rules[variable].apply(value, gradient, slots, work)

    def _rules_from(
        self, norms: Norms, sums: Array, share: Callable[[Array], Array] | None
    ) -> list[UpdateRule]:
        """The update of each variable, from the sums of squares of this rank's chunks."""
        roots = np.sqrt(sums if share is None else share(sums)).tolist()
        return [norms.rule_with(of_variable) for of_variable in roots]

    def _loops(
        self, loop_of: Callable[[np.dtype[Any]], Any]
    ) -> list[tuple[Any, DtypeGroup]] | None:
        """The loop of each dtype; `None` unless all of them have one."""
        # All or none: half an update in C and half in NumPy would need the bookkeeping of both, for
        # a rare case.
        loops = [(loop_of(group.dtype), group) for group in self.layout.groups]
        return loops if all(loop is not None for loop, _ in loops) else None

    @functools.cached_property
    def cuts(self) -> list[Cut]:
        """This rank's chunks, cut where one variable ends and the next starts."""
        return cut_at_variables(self.layout, self.chunks)

    def _table(
        self, group: DtypeGroup, messages: Sequence[Array], values: Sequence[Array] | None
    ) -> tuple[Array, compiled.Table] | None:
        """The table for a compiled loop over this rank's part of a group; `None` if it has none.

        Returns:
            The variable's place in the message for each row; and the rows.
        """
        index = self.layout.groups.index(group)
        if index not in self._addresses:
            cuts = [cut for cut in self.cuts if cut.group == index]
            arrays = [(self.chunks[cut.chunk].value, *self.chunks[cut.chunk].slots) for cut in cuts]
            # Addresses in storage never change; a step fills in only those of the messages.
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
        bases = np.array([group.of(message).ctypes.data for message in messages], np.int64)
        table = np.concatenate([fixed, bases + item * starts[:, None]], axis=1)
        if values is not None:
            views = self._message_views(messages[self._rank])
            for i, own in self._own.items():
                if own.group == index and is_readable_in_place(values[i], views[i]):
                    rows = (chunks >= own.chunks.start) & (chunks < own.chunks.stop)
                    # This rank's own part of a large gradient was not copied to its message: the
                    # loop reads it in place.
                    base = values[i].ctypes.data - item * own.first
                    table[rows, fixed.shape[1] + self._rank] = base + item * starts[rows]
        return variables, table

    def with_own(
        self, pieces: list[UpdateChunk], messages: Sequence[Array], values: Sequence[Array]
    ) -> list[UpdateChunk]:
        """The pieces with this rank's values in place of what `write_for_others` left out."""
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
                        self.chunks[k].start - own.first : self.chunks[k].stop - own.first
                    ]
                    pieces[k] = pieces[k]._replace(parts=parts)
        return pieces

    def _message_views(self, message: Array) -> list[Array]:
        """`to_call_order`, with the views of recent messages kept."""
        kept = self._views.get(id(message))
        if kept is None or kept[0] is not message:
            # An update's message is one of a few arrays that live as long as the communicator:
            # views of them are made once. By id, because arrays have no hash; the array is kept
            # with it, so that no other array gets the id.
            if len(self._views) == 3:  # two records and a mailbox, before it grew
                self._views.clear()
            kept = self._views[id(message)] = (message, self.to_call_order(message))
        return kept[1]

    def forget_messages(self) -> None:
        """Drops the kept views of messages, and with them the messages."""
        self._views.clear()
        self._pieces.clear()

    def pieces(self, messages: Sequence[Array], scratch: ScratchBuffers) -> list[UpdateChunk]:
        """The chunks with these messages; those of recent messages are kept."""
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
