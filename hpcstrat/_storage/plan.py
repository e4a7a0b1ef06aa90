"""One update of several variables, planned once for all steps."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, final

import numpy as np

from hpcstrat._calls.records import CallSignature, signature_of
from hpcstrat._communicators.device import Move, RankSlice
from hpcstrat._communicators.reduction import part_of_rank
from hpcstrat._core import gpu
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import FIRST_REPLICA, Aggregation, Array, Bytes
from hpcstrat._memory.allocator import ALIGNMENT, Block, Cuts
from hpcstrat._memory.intervals import Interval, Shard, round_up, runs
from hpcstrat._memory.layout import Layout, PackKernel, layout_of, layout_of_arrays, packings_of
from hpcstrat._update.rule import NO_CONSTANTS
from hpcstrat._update.update import (
    NOTHING_IN_PLACE,
    Chunk,
    InPlace,
    PerMessage,
    Update,
    keep_per_message,
)

T = TypeVar("T")


class MessageOrder:
    """The variables of an update, in the order of their message, and where they are in it.

    There are three orders:

    - of the call: the caller's variables and gradients, as the caller passes them;
    - of the variables: by creation number, which is equal on all ranks. "Variable i", and "the
      gradients, by variable", always count in this order;
    - of the message's bytes, and so of every list of shards: the same, dtype by dtype.

    In memory they are by address; `intervals.runs` finds where that is the order of the message.

    Args:
        variables: their blocks, in the order of the call.
        slots: for each variable the blocks of its slots, of its shape and dtype.
        alignment: every variable starts at a multiple of this many bytes, in memory and message.

    Attributes:
        blocks: the variables' blocks, by variable.
        layout: where each variable is in the message.
        shards: the whole variables, as they follow each other in the message.
        is_of_call: whether the order of the variables is that of the call.
    """

    def __init__(
        self, variables: Sequence[Block], slots: Sequence[Sequence[Block]], alignment: int = 1
    ) -> None:
        # Variables that were made one after another are mostly contiguous in memory.
        self._order = sorted(range(len(variables)), key=lambda i: variables[i].number)
        self.is_of_call: bool = self._order == [*range(len(variables))]
        self.blocks: list[Block] = self.to_message(variables)
        arrays = [block.array for block in self.blocks]
        self.layout: Layout = layout_of_arrays(arrays, alignment)
        memory = [
            tuple([block.memory for block in (variable, *of_variable)])
            for variable, of_variable in zip(self.blocks, self.to_message(slots), strict=True)
        ]
        self.shards: list[Shard] = [
            Shard(
                i,
                group.dtype,
                Interval(0, self.layout.sizes[i]),
                self.layout.bytes_of(i),
                memory[i],
            )
            for group in self.layout.groups
            for i in group.members
        ]
        self._views: PerMessage[list[Array]] = {}

    def to_message(self, values: Sequence[T]) -> list[T]:
        """What belongs to the variables, by variable, from the order of the call."""
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

    def parts_of(self, variables: Iterable[int]) -> list[list[Interval]]:
        """Where some variables are in each dtype's elements of the message, neighbours merged."""
        wanted = set(variables)
        # Without memory, `runs` merges by the message alone.
        shards = [shard._replace(memory=()) for shard in self.shards if shard.variable in wanted]
        merged = runs(shards, self.layout.alignment)
        return [
            [group.within(run.message) for run in merged if run.dtype == group.dtype]
            for group in self.layout.groups
        ]

    def views_of(self, variables: Iterable[int], message: Array) -> list[Array]:
        """Some variables in a message, as flat views; neighbours are merged."""
        return [
            group.of(message)[part.slice]
            for group, parts in zip(self.layout.groups, self.parts_of(variables), strict=True)
            for part in parts
        ]

    def write(
        self, message: Array, values: Sequence[Array], in_place: InPlace = NOTHING_IN_PLACE
    ) -> None:
        """Copies gradients, or new values, into a message, except for what is read in place."""
        views = keep_per_message(
            self._views, [message], lambda messages: self.layout.views(messages[0])
        )
        for i, (view, value) in enumerate(zip(views, values, strict=True)):
            if i in in_place:
                absent, gradient = in_place[i]
                flat = view.reshape(-1)
                flat[: absent.start] = gradient[: absent.start]
                flat[absent.stop :] = gradient[absent.stop :]
            else:
                view[...] = value

    def forget_messages(self) -> None:
        """Drops the kept views of messages, and with them the messages."""
        self._views.clear()


_UNIT = 256
"""Parts start at multiples of this many elements: on a GPU, at multiples of 256 bytes."""


def cuts_of(variables: Sequence[Block], size: int, alignment: int = 1) -> list[Cuts]:
    """Splits all elements of a dtype into equal parts; the last part takes the remainder.

    Of fewer than `_UNIT` elements per rank, the last rank has all.

    The variables are in order of creation, and each starts at a multiple of `alignment` bytes.
    """
    # All elements are split, not each variable: ranks have equal parts, whatever the variables'
    # sizes, and a part is one range of memory and of a message.
    layout = layout_of_arrays([variable.array for variable in variables], alignment)
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


class Plan:
    """The update of some variables by the gradients, or new values, in a message.

    Args:
        order: the variables, and where they are in the message.
        update: what happens to this rank's shards of them.
        rank_parts: each rank's part, where slots are split over the ranks.
        rank: this rank.

    Attributes:
        own: this rank's part, where slots are split.
        values: in mirrored storage on hosts, where slots are split, for each rank its shards of the
            variables in memory.
        taken: the memory of its message, lent by a `MessagePool` or its own; `None` until then, and
            in central storage on a host. In mirrored storage on hosts, the sums are in it.
        buffers: arrays for the variables' gradients, in the order of the call, or `None`.
        buffer_messages: the messages that `give_buffers` got.
        marked: the variables whose gradients, in buffers, are complete in this step.
        started: those whose sums have started.
        sums: on hosts, these sums; else they are in the buffers. Where slots are split, the sums
            before norms too.
        norm_sums: per rank and variable, for updates with norms in central storage on a host.
    """

    def __init__(
        self,
        order: MessageOrder,
        update: Update,
        rank_parts: Sequence[RankPart] = (),
        rank: int = 0,
    ) -> None:
        self.order = order
        self.update = update
        self.rank_parts = rank_parts
        self.own: RankPart | None = rank_parts[rank] if rank_parts else None
        self.values: list[list[Chunk]] = []
        self.taken: Array = None
        self.buffers: list[Array] | None = None
        self.buffer_messages: list[Array] = []
        self._buffers_owner: Block | None = None
        self.marked: set[int] = set()
        self.started: set[int] = set()
        self.sums: Array | None = None
        self.norm_sums: Block | None = None
        # The types, shapes and dtypes of a steady step's gradients, in the order of the call.
        in_call = order.to_call(order.blocks)
        self._expected = [(type(b.view), b.array.shape, b.array.dtype) for b in in_call]
        self._must_match = [block.identity() for block in order.blocks]
        # By call: `assign` and `assign_add` of a variable, for example, share a plan.
        self._signatures: dict[tuple[str, Aggregation], CallSignature] = {}

    def signature(
        self,
        op: Aggregation = FIRST_REPLICA,
        constants: Mapping[str, float] = NO_CONSTANTS,
        in_buffers: bool = False,
    ) -> CallSignature:
        """What the ranks must agree on for an update, or to make buffers."""
        call = f"{current_call()} from buffers" if in_buffers else current_call()
        numbers = tuple(constants.values())
        signature = self._signatures.get((call, op))
        if signature is None or signature.numbers != numbers:
            if signature is None or not numbers:  # else the last one's, with other numbers
                signature = signature_of(
                    call, *([] if op is FIRST_REPLICA else [op.name]), *self._must_match
                )
            if numbers:
                signature = signature.with_numbers(numbers, tuple(constants))
            self._signatures[call, op] = signature
        return signature

    def signature_of_marks(self, variables: Sequence[int]) -> CallSignature:
        """What the ranks must agree on to mark the gradients of these variables."""
        return signature_of(current_call(), *[self._must_match[i] for i in variables])

    def require_whole(self) -> None:
        """Raises if an interrupted update left one of the variables changed in part."""
        for block in self.order.blocks:
            _ = block.view  # raises

    def fits(self, gradients: Sequence[Any]) -> bool:
        """Whether these, in the order of the call, are of the variables' kinds, shapes, dtypes."""
        for gradient, (kind, shape, dtype) in zip(gradients, self._expected, strict=True):
            # Equal dtypes need not be identical; if they are not, the slow path checks them.
            if type(gradient) is not kind or gradient.shape != shape or gradient.dtype is not dtype:
                return False
        return True

    # ---- messages

    @property
    def nbytes(self) -> int:
        """Bytes that `take` or `make_sums` needs."""
        return (self.own or self.order).layout.nbytes

    def take(self, memory: Array) -> None:
        """Takes memory of at least `nbytes` bytes for the message."""
        self.taken = memory

    def forget_message(self) -> None:
        """Drops the message, and what is kept for later updates by messages, and so these."""
        self.taken = None
        self.order.forget_messages()
        self.update.forget_messages()

    # ---- buffers

    def give_buffers(self, messages: list[Array], own: Array, owner: Block | None = None) -> None:
        """Makes the parts of this rank's `own` message the buffers.

        `messages` are those that an update reads: all ranks', or only this rank's. They are in the
        block `owner`, if given, which this plan keeps alive.
        """
        self.buffers = self.order.to_call(self.order.layout.views(own))
        self.buffer_messages = messages
        self._buffers_owner = owner

    def are_in_buffers(self, gradients: Sequence[Array]) -> bool:
        """Whether these, in the order of the call, are the buffers, and so need not be copied."""
        # By identity, which costs nothing: another array, even over the same memory, is copied like
        # any gradient.
        return self.buffers is not None and all(map(operator.is_, gradients, self.buffers))

    def not_started(self) -> set[int]:
        """The variables whose gradients' sums have not started in this step."""
        return {*range(len(self.order.blocks))} - self.started

    def make_sums(self) -> Bytes:
        """Makes `sums`, unless they are there; one per plan: others are updated during the sums."""
        if self.sums is None:
            self.sums = np.empty(self.nbytes, np.uint8)
        return self.sums

    def parts_to_sum(self, variables: Iterable[int]) -> tuple[list[list[Array]], list[Array]]:
        """What is summed for some variables, on hosts, and where the sums are.

        Returns:
            Flat views of the buffers, for each rank that gets sums of its own, or for all ranks
            together; and views of `sums`, for this rank.
        """
        wanted, buffers, sums = set(variables), self.buffer_messages[0], self.make_sums()
        if self.own is None:
            return [self.order.views_of(wanted, buffers)], self.order.views_of(wanted, sums)

        def runs_of(part: RankPart) -> list[Shard]:
            return runs(shard for shard in part.in_whole if shard.variable in wanted)

        sources = [
            [buffers[run.message.slice].view(run.dtype) for run in runs_of(part)]
            for part in self.rank_parts
        ]
        own = [sums[run.memory[0].slice].view(run.dtype) for run in runs_of(self.own)]
        return sources, own


PIECE = 1 << 24
"""Bytes of new values that one call sends. Ranks need not agree on where a run of variables in
memory ends: only pieces in which one does are copied to the message."""


@final
class DevicePlan(Plan):
    """A plan with the flat message of its updates on this rank's device, and views of its parts.

    If slots are split over the ranks, a second message follows it: this rank's part.

    Args:
        order: see `Plan`. Its message has the same gaps as the memory, so that a run of variables
            is also a run of the message.
        update, rank_parts, rank: see `Plan`.
        readable: the runs of the variables that this rank reads.

    Attributes:
        readable: as above.
        message: the message of the gradients, in the memory that the plan has taken.
        gradients: the message by dtype.
        own_message: the message by which this rank updates its shards: the same, or its part.
        own_gradients: that message by dtype.
        slices: for each dtype of the message, the elements of each rank; empty if none is split.
        has_integers: whether some of the variables are integers: NCCL casts these to sum them.
        reductions: the sums of all gradients, prepared by the storage in the first step.
        sharing: the calls that send new values, likewise.
        copies: what is copied between the variables and the message before and after these calls.
    """

    def __init__(
        self,
        order: MessageOrder,
        update: Update,
        readable: Sequence[Chunk],
        rank_parts: Sequence[RankPart] = (),
        rank: int = 0,
    ) -> None:
        super().__init__(order, update, rank_parts, rank)
        self.readable = readable
        self.slices: list[list[RankSlice]] = rank_slices(order, rank_parts) if rank_parts else []
        self.has_integers: bool = any(group.dtype.kind in "iu" for group in order.layout.groups)
        self._packings: list[PackKernel] = []  # on a GPU
        self._drop()

    def _drop(self) -> None:
        self.message: Array = None
        self.own_message: Array = None
        self.gradients: list[Array] = []
        self.own_gradients: list[Array] = []
        self.reductions: list[Move] | None = None
        self.sharing: list[Move] | None = None
        self.copies: list[tuple[Array, Array]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of both messages."""
        whole = self.order.layout.nbytes
        if self.own is None:
            return whole
        # With the gap after this rank's last element: if parts are equal, a reduce-scatter writes a
        # whole part, also for a rank whose last variable ends before.
        return round_up(whole, ALIGNMENT) + round_up(self.own.layout.nbytes, ALIGNMENT)

    def take(self, memory: Array) -> None:
        """Makes both messages and their views, in some bytes on this rank's device."""
        self._drop()
        super().take(memory)
        layout = self.order.layout
        self.message = self.own_message = memory[: layout.nbytes]
        self.gradients = self.own_gradients = [group.of(self.message) for group in layout.groups]
        if self.own is not None:
            self.own_message = memory[round_up(layout.nbytes, ALIGNMENT) : self.nbytes]
            self.own_gradients = [group.of(self.own_message) for group in self.own.layout.groups]
        # Kernels, views and addresses are made once: a steady step only launches.
        if not self._packings and gpu.is_on_gpu(memory):
            self._packings = packings_of(layout)

    def transfers(self) -> list[tuple[Array, list[tuple[Array, Array]]]]:
        """How new values reach other ranks: for each call the flat array that it sends or receives.

        That is the variables in place where they are contiguous, else a part of the message; then
        with each run of the variables and its part of the array. The pieces are the same on all
        ranks or, where slots are split, there is one per dtype.
        """
        transfers = []
        for group, whole in zip(self.order.layout.groups, self.gradients, strict=True):
            readable = [
                (value, group.within(shard.message))
                for shard, value, _ in self.readable
                if shard.dtype == group.dtype
            ]
            everything = Interval(0, group.elements)
            # Slices of the ranks are of all elements.
            pieces = [everything] if self.slices else everything.split(PIECE // whole.itemsize)
            for piece in pieces:
                parts = [
                    (value[both.shift(-elements.start).slice], whole[both.slice])
                    for value, elements in readable
                    if (both := elements & piece)
                ]
                is_in_place = len(parts) == 1 and parts[0][0].size == piece.size
                transfer = (parts[0][0], []) if is_in_place else (whole[piece.slice], parts)
                transfers.append(transfer)
        return transfers

    def forget_message(self) -> None:
        """See `Plan.forget_message`."""
        super().forget_message()
        self._drop()

    def pack(self, values: Sequence[Array], is_reduced: bool) -> list[Array]:
        """Copies values on this rank's device to the message.

        Returns:
            For each dtype the flat array with the values: a part of the message or, if they are
            reduced over the ranks before they are used, perhaps the array that was passed. If all
            are in the message, it is the list `gradients` itself: then prepared reductions fit.
        """
        if not self._packings:
            self.order.write(self.message, values)
            return self.gradients
        arrays, sources = list(values), self.gradients
        for index, group in enumerate(self.order.layout.groups):
            for i in group.members:
                # The packing kernel copies words, and converts nothing.
                if arrays[i].dtype != group.dtype:
                    arrays[i] = arrays[i].astype(group.dtype)
            first = arrays[group.members[0]]
            # A single gradient is its own message: NCCL reads it in place, which saves the copy.
            if is_reduced and len(group.members) == 1 and first.flags.c_contiguous:
                sources = [*sources[:index], first.reshape(-1), *sources[index + 1 :]]
            else:
                self._packings[index](arrays, self.message)
        return sources


@final
class MessagePool:
    """Lends its memory to all plans without a message of their own: updates follow one another.

    Args:
        allocate: makes memory of some bytes, in a call of this signature.
    """

    def __init__(self, allocate: Callable[[int, CallSignature], Array]) -> None:
        self._allocate = allocate
        self._memory: Array = None
        # The plans that have it. Weak, because the pool outlives variables and their plans.
        self._plans: weakref.WeakSet[Plan] = weakref.WeakSet()

    def lend(self, plan: Plan, signature: CallSignature) -> None:
        """Makes a plan take the memory."""
        if self._memory is None or self._memory.size < plan.nbytes:
            # Plans hold views of the memory. They drop it before more is allocated, or there would
            # have to be room for both.
            for other in self._plans:
                if other.taken is self._memory:  # others have got buffers since
                    other.forget_message()
            self._plans.clear()
            self._memory = None
            self._memory = self._allocate(plan.nbytes, signature)
        plan.take(self._memory)
        self._plans.add(plan)
