"""What an update does to this rank's shards of the variables, once the gradients are there.

It goes through *chunks*: shards with their memory, which fit in cache on a host. A chunk is a range
of elements of one dtype, whichever variables they belong to:

    variables  |       w        |b |         v          |c |d |   u   |
    ranks      |      rank 0     |      rank 1     |      rank 2     |
    chunks     |----|----|----|--|--|----|----|----|--|-----|----|---|

Here each rank has an equal share of all elements, which it cuts into its own chunks: equal work,
although one variable may be larger than all others together. Small variables that follow each
other, such as c and d, are in one chunk: they cost no calls of their own. This is right because
rules are elementwise. Norms of variables need to know where these end: chunks are cut there.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol, TypeAlias, TypeVar

from hpcstrat._communicators.reduction import CHUNK
from hpcstrat._core.types import Array, ReduceOp
from hpcstrat._memory.intervals import Interval, Shard, runs
from hpcstrat._update.rule import UpdateRule

T = TypeVar("T")
InPlace: TypeAlias = Mapping[int, tuple[Interval, Array]]
"""Gradients that this rank reads where they are, by variable: the elements that are therefore not
in its message, and the whole gradient, flat."""
NOTHING_IN_PLACE: InPlace = MappingProxyType({})


class Memory(Protocol):
    """Memory that contains variables."""

    def part(self, start: int, stop: int, /) -> Array:
        """The bytes between two addresses in one block or in contiguous blocks, as a flat array."""
        ...


Chunk: TypeAlias = tuple[Shard, Array, tuple[Array, ...]]
"""Elements that are updated together: which, and where they are in storage: of the variables, and
of each slot."""


def chunks_of(
    memory: Memory, shards: Sequence[Shard], count: int = CHUNK, alignment: int = 1
) -> list[Chunk]:
    """The chunks of some shards. No chunk has elements of a large shard and of another one.

    Args:
        memory: the memory of the shards.
        shards: in the order of the message.
        count: the most elements of a chunk; a shard that has as many is large.
        alignment: see `runs`.
    """
    chunks: list[Chunk] = []
    for run in runs(shards, alignment, count):
        for shard in run.split(count):
            value, *slots = [memory.part(*place).view(shard.dtype) for place in shard.memory]
            chunks.append((shard, value, tuple(slots)))
    return chunks


def keep_per_message(
    kept: dict[tuple[int, int], tuple[Array, T]],
    messages: Sequence[Array],
    make: Callable[[Sequence[Array]], T],
) -> T:
    """What is made once per message. An update's messages are mostly the same few arrays.

    Args:
        kept: what was made before, by message.
        messages: of all ranks; the first one stands for all.
        make: makes it.
    """
    # By id, because arrays have no hash; each message is kept, so that no other gets its id.
    key = id(messages[0]), len(messages)
    if key not in kept:
        if len(kept) == 3:  # `SharedMemoryCommunicator`: two records, a mailbox before it grew
            kept.clear()
        kept[key] = messages[0], make(messages)
    return kept[key][1]


class Update(abc.ABC):
    """The update of this rank's shards of some variables.

    Args:
        chunks: the chunks of the shards.
        shards: for each variable this rank's part, in the order of the message.

    Attributes:
        may_be_in_place: whether `in_place` may find gradients; asked first, as it costs no call.
    """

    def __init__(self, chunks: Sequence[Chunk], shards: Sequence[Shard]) -> None:
        self._chunks = chunks
        self._shards = shards
        self._parts: dict[tuple[int, int], tuple[Array, list[list[Array]]]] = {}
        self.may_be_in_place: bool = False

    def forget_messages(self) -> None:
        """Drops what it keeps for the next update with the same messages, and so the messages."""
        self._parts.clear()

    def in_place(self, gradients: Sequence[Array]) -> InPlace:
        """Those of this rank's gradients that are read in place; here there are none.

        This requires that no other rank needs this rank's gradients of its own shards.
        """
        return NOTHING_IN_PLACE

    @abc.abstractmethod
    def run(
        self,
        rule: UpdateRule,
        messages: Sequence[Array],
        op: ReduceOp = ReduceOp.SUM,
        in_place: InPlace = NOTHING_IN_PLACE,
        add_up: Callable[[Array], Array] | None = None,
    ) -> None:
        """Reduces the messages, and updates the variables and slots.

        Args:
            rule: the update.
            messages: all ranks', or the only one that counts.
            op: how the messages are reduced.
            in_place: gradients of this rank that are not, or not wholly, in its message.
            add_up: adds up an array of float64 over the ranks that have the other shards; `None` if
                this rank has all.
        """

    def _parts_of(self, messages: Sequence[Array]) -> list[list[Array]]:
        """For each chunk its gradient in each message."""
        return [
            [message[shard.message.slice].view(shard.dtype) for message in messages]
            for shard, _, _ in self._chunks
        ]
