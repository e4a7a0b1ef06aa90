"""The order of variables in the message of an update, and where they are in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from hpcstrat._communicators.reduction import part_of_rank
from hpcstrat._core.types import Array
from hpcstrat._memory.blocks import Block
from hpcstrat._memory.intervals import Interval, Shard, runs
from hpcstrat._memory.layout import Layout, layout_of
from hpcstrat._update.chunks import keep_per_message
from hpcstrat._update.update import NOTHING_IN_PLACE, InPlace

T = TypeVar("T")


class MessageOrder:
    """The variables of an update, in the order of their message.

    There are three orders:

    - of the call: the caller's variables and gradients, as the caller passes them;
    - of the message: by creation number, which is equal on all ranks. "Variable i", and "the
      gradients, by variable", always count in this order. The bytes are grouped by dtype;
    - of memory: by address. `intervals.runs` finds where it is that of the message.

    Args:
        variables: their blocks, in the order of the call.
        slots: for each variable the blocks of its slots, of its shape and dtype.
        alignment: every variable starts at a multiple of this many bytes, in memory and message.

    Attributes:
        blocks: the variables' blocks.
        layout: where each variable is in the message.
        shards: the whole variables, as they follow each other in the message.
    """

    def __init__(
        self, variables: Sequence[Block], slots: Sequence[Sequence[Block]], alignment: int = 1
    ) -> None:
        # Variables that were made one after another are mostly contiguous in memory.
        self._order = sorted(range(len(variables)), key=lambda i: variables[i].number)
        self.blocks: list[Block] = self.to_message(variables)
        self.layout: Layout = layout_of(
            tuple([block.array.shape for block in self.blocks]),
            tuple([block.array.dtype for block in self.blocks]),
            alignment,
        )
        of_variables = list(zip(self.blocks, self.to_message(slots), strict=True))
        self.shards: list[Shard] = [
            Shard(
                i,
                group.dtype,
                Interval(0, self.layout.sizes[i]),
                self.layout.bytes_of(i),
                tuple([block.memory for block in (of_variables[i][0], *of_variables[i][1])]),
            )
            for group in self.layout.groups
            for i in group.members
        ]
        self._views: dict[tuple[int, int], tuple[Array, list[Array]]] = {}

    def to_message(self, values: Sequence[T]) -> list[T]:
        """What belongs to the variables, in the order of the message, from that of the call."""
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
        """Where some variables are in the message; neighbours are merged.

        Returns:
            For each dtype of the message, intervals of its elements.
        """
        wanted = set(variables)
        parts: list[list[Interval]] = [[] for _ in self.layout.groups]
        # Neighbours in the message alone.
        shards = [shard._replace(memory=()) for shard in self.shards if shard.variable in wanted]
        for run in runs(shards, self.layout.alignment):
            (index,) = [i for i, of in enumerate(self.layout.groups) if of.dtype == run.dtype]
            parts[index].append(self.layout.groups[index].within(run.message))
        return parts

    def views_of(self, variables: Iterable[int], message: Array) -> list[Array]:
        """Some variables in a message, as flat views; neighbours are merged."""
        return [
            group.of(message)[part.slice]
            for group, parts in zip(self.layout.groups, self.parts_of(variables), strict=True)
            for part in parts
        ]

    def write(
        self,
        message: Array,
        values: Sequence[Array],
        in_place: InPlace = NOTHING_IN_PLACE,
    ) -> None:
        """Copies gradients, or new values, into a message, except for what is read in place."""
        views = keep_per_message(self._views, [message], self._views_of)
        for i, (view, value) in enumerate(zip(views, values, strict=True)):
            if i in in_place:
                absent, gradient = in_place[i]
                flat = view.reshape(-1)
                flat[: absent.start] = gradient[: absent.start]
                flat[absent.stop :] = gradient[absent.stop :]
            else:
                view[...] = value

    def _views_of(self, messages: Sequence[Array]) -> list[Array]:
        return self.layout.views(messages[0])

    def forget_messages(self) -> None:
        """Drops the kept views of messages, and with them the messages."""
        self._views.clear()
