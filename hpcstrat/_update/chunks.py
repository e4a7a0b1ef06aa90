"""The chunks of an update: shards of variables that fit in cache, with their memory.

A chunk is a range of elements of one dtype, whichever variables they belong to:

    variables  |       w        |b |         v          |c |    u    |
    chunks     |----|----|----|--|----|----|----|--|----|----|----|--|
    ranks      |      rank 0     |      rank 1     |      rank 2     |

Each rank has an equal share of all elements, which it cuts into its own chunks. So ranks have equal
work although one variable may be larger than all others together, and small variables, such as b
and c, cost no calls of their own. This is right because rules are elementwise. Only norms need to
know where a variable ends: for them, chunks are cut there.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from hpcstrat._communicators.reduction import CHUNK
from hpcstrat._core.types import Array
from hpcstrat._memory.intervals import Interval, Shard

T = TypeVar("T")


class Memory(Protocol):
    """Memory that contains variables."""

    def part(self, start: int, stop: int) -> Array:
        """The bytes between two addresses in one block or in contiguous blocks, as a flat array."""
        ...


class Chunk(NamedTuple):
    """Elements that are updated together.

    Attributes:
        shard: which elements.
        value: the elements of the variables, in storage.
        slots: the elements of each slot, in storage.
    """

    shard: Shard
    value: Array
    slots: tuple[Array, ...]


def chunk_of(memory: Memory, shard: Shard) -> Chunk:
    """A shard with its memory."""
    value, *slots = [memory.part(*place).view(shard.dtype) for place in shard.memory]
    return Chunk(shard, value, tuple(slots))


def cut_at_variables(chunks: Sequence[Shard], shards: Sequence[Shard]) -> list[Shard]:
    """The chunks of these shards, cut where one variable ends and the next starts."""
    starts = [chunk.message.start for chunk in chunks]
    parts = []
    for shard in shards:
        first = bisect.bisect_right(starts, shard.message.start) - 1  # it may have started before
        stop = bisect.bisect_left(starts, shard.message.stop)
        parts += [shard & chunk.message for chunk in chunks[max(first, 0) : stop]]
    return [part for part in parts if part.elements]


def chunks_within(chunks: Sequence[Shard], shard: Shard) -> range:
    """The indices of the chunks, in the order of the message, that are inside of a shard."""
    starts = [chunk.message.start for chunk in chunks]
    stops = [chunk.message.stop for chunk in chunks]
    return range(
        bisect.bisect_left(starts, shard.message.start),
        bisect.bisect_right(stops, shard.message.stop),
    )


def local_shards(chunks: Sequence[Shard], shards: Sequence[Shard]) -> dict[int, Shard]:
    """By variable, the part of its shard that consists of whole chunks, for large shards."""
    local = {}
    for shard in shards:
        # A small gradient costs less to copy than to read in place.
        inside = chunks_within(chunks, shard) if shard.elements.size >= CHUNK else range(0)
        if inside:
            first, last = chunks[inside[0]], chunks[inside[-1]]
            local[shard.variable] = shard & Interval(first.message.start, last.message.stop)
    return local


class PerMessage(Generic[T]):
    """What is made once for each of the few messages that live as long as the communicator.

    Args:
        make: makes it from the messages of all ranks.
    """

    def __init__(self, make: Callable[[Sequence[Array]], T]) -> None:
        self._make = make
        # By id, because arrays have no hash; each message is kept, so that no other gets its id.
        self._kept: dict[tuple[int, int], tuple[Array, T]] = {}

    def of(self, messages: Sequence[Array]) -> T:
        """What belongs to these messages; the first one stands for all."""
        key = id(messages[0]), len(messages)
        kept = self._kept.get(key)
        if kept is None:
            if len(self._kept) == 3:  # two records and a mailbox, before it grew
                self._kept.clear()
            kept = self._kept[key] = (messages[0], self._make(messages))
        return kept[1]

    def clear(self) -> None:
        """Forgets everything, the messages too."""
        self._kept.clear()
