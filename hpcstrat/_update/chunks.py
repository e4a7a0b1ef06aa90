"""The chunks of an update: shards of variables with their memory, which fit in cache on a host.

A chunk is a range of elements of one dtype, whichever variables they belong to:

    variables  |       w        |b |         v          |c |d |   u   |
    ranks      |      rank 0     |      rank 1     |      rank 2     |
    chunks     |----|----|----|--|--|----|----|----|--|-----|----|---|

Here each rank has an equal share of all elements, which it cuts into its own chunks: equal work,
although one variable may be larger than all others together. Small variables that follow each
other, such as c and d, are in one chunk: they cost no calls of their own. This is right because
rules are elementwise. Norms need to know where a variable ends: for them, chunks are cut there.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

from hpcstrat._communicators.reduction import CHUNK
from hpcstrat._core.types import Array
from hpcstrat._memory.intervals import Interval, Shard, runs

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

    def within(self, shard: Shard) -> Chunk:
        """The chunk of those of its elements that are in a shard."""
        both = shard.within(self.shard.message)
        first = (both.message.start - self.shard.message.start) // both.dtype.itemsize
        here = Interval(0, both.elements.size).shift(first).slice
        return Chunk(both, self.value[here], tuple([slot[here] for slot in self.slots]))


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
    chunks = []
    for run in runs(shards, alignment, count):
        for shard in run.split(count):
            value, *slots = [memory.part(*place).view(shard.dtype) for place in shard.memory]
            chunks.append(Chunk(shard, value, tuple(slots)))
    return chunks


def cut_at_variables(
    chunks: Sequence[Chunk], shards: Sequence[Shard]
) -> Iterator[tuple[Shard, list[Chunk]]]:
    """Each shard that has elements, and its chunks, cut where other variables end and start."""
    starts = [chunk.shard.message.start for chunk in chunks]
    for shard in shards:
        if shard.elements:
            # Its first chunk may have started before it.
            first = bisect.bisect_right(starts, shard.message.start) - 1
            stop = bisect.bisect_left(starts, shard.message.stop)
            yield shard, [chunk.within(shard) for chunk in chunks[first:stop]]


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
        if len(kept) == 3:  # two records and a mailbox, before it grew
            kept.clear()
        kept[key] = messages[0], make(messages)
    return kept[key][1]
