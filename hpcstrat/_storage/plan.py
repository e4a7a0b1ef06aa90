"""One update of several variables, planned once for all steps."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, final

import numpy as np

from hpcstrat._calls.records import CallSignature, signature_of
from hpcstrat._communicators.reduction import part_of_rank
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import FIRST_REPLICA, Aggregation, Array, Bytes
from hpcstrat._memory.allocator import Block
from hpcstrat._memory.intervals import Interval, Shard, runs
from hpcstrat._memory.layout import Layout, layout_of
from hpcstrat._update.rule import NO_CONSTANTS
from hpcstrat._update.update import NOTHING_IN_PLACE, InPlace, Update, keep_per_message

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
        self.layout: Layout = layout_of(
            tuple([block.array.shape for block in self.blocks]),
            tuple([block.array.dtype for block in self.blocks]),
            alignment,
        )
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
        self._views: dict[tuple[int, int], tuple[Array, list[Array]]] = {}

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


class Plan:
    """The update of some variables by the gradients, or new values, in a message.

    Args:
        order: the variables, and where they are in the message.
        update: what happens to this rank's shards of them.

    Attributes:
        taken: the memory of its message, lent by a `MessagePool` or its own; `None` until then,
            and in central storage on a host. There, several hosts' messages are sums in it.
        buffers: arrays for the variables' gradients, in the order of the call, or `None`.
        buffer_messages: the messages that `give_buffers` got.
        marked: the variables whose gradients, in buffers, are complete in this step.
        started: those whose sums have started.
        sums: on hosts, these sums; else they are in the buffers. Sharded storage also sums here
            before norms.
        norm_sums: per rank and variable, for updates with norms in central storage on a host.
    """

    def __init__(self, order: MessageOrder, update: Update) -> None:
        self.order = order
        self.update = update
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
        return self.order.layout.nbytes

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
            Flat views of the buffers, for each rank that gets sums of its own, here for all ranks
            together; and views of `sums`, for this rank.
        """
        variables, sums = list(variables), self.make_sums()
        sources = self.order.views_of(variables, self.buffer_messages[0])
        return [sources], self.order.views_of(variables, sums)


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
