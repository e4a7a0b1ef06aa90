"""Shards: some elements of a variable, wherever they are counted; and runs of several."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcstrat._memory.intervals import ByteRange, ElementRange, round_up


class Shard(NamedTuple):
    """Some elements of a variable, in each of the spaces in which they are counted.

    A run of several variables (see `runs`) is a shard too: of the first variable, whose elements
    are counted on beyond its end.

    Attributes:
        variable: the variable's index; see `MessageOrder`.
        dtype: their dtype.
        elements: the elements of the variable.
        message: their bytes in a message.
        memory: their addresses: of the variable, then of each of its slots; see `slabs`.
    """

    variable: int
    dtype: np.dtype[Any]
    elements: ElementRange
    message: ByteRange
    memory: tuple[ByteRange, ...]

    def part(self, elements: ElementRange) -> Shard:
        """The shard of some of its elements."""
        first = elements.shift(-self.elements.start).bytes(self.dtype.itemsize)
        message, *memory = [first.shift(place.start) for place in (self.message, *self.memory)]
        return Shard(self.variable, self.dtype, elements, message, tuple(memory))

    def within(self, message: ByteRange) -> Shard:
        """The shard of its elements in these bytes of the message."""
        here = (self.message & message).shift(-self.message.start)
        return self.part(here.elements(self.dtype.itemsize).shift(self.elements.start))

    def split(self, count: int) -> Iterator[Shard]:
        """The shard in parts of `count` elements; the last may be shorter."""
        return map(self.part, self.elements.split(count))


def merge(
    places: Iterable[tuple[ByteRange, ...]], alignment: int = 1
) -> list[tuple[int, tuple[ByteRange, ...]]]:
    """Merges places that follow each other in every space in which they are counted.

    Args:
        places: where some bytes are, in each of the spaces, such as message and memory; in the
            order of the first space. Those without bytes are left out.
        alignment: gaps up to the next multiple of this many bytes are merged too: on a GPU, one
            kernel over a gap costs less than two kernels.

    Returns:
        For each merged place the index of its first one, and where it is in each space.
    """
    merged: list[tuple[int, tuple[ByteRange, ...]]] = []
    for i, place in enumerate(places):
        if not place[0]:
            continue
        if merged and all(
            round_up(before.stop, alignment) == after.start
            for before, after in zip(merged[-1][1], place, strict=True)
        ):
            first, start = merged.pop()
            both = [ByteRange(a.start, b.stop) for a, b in zip(start, place, strict=True)]
            merged.append((first, tuple(both)))
        else:
            merged.append((i, place))
    return merged


def runs(shards: Sequence[Shard], alignment: int = 1, alone: int = sys.maxsize) -> list[Shard]:
    """Shards, of which those of one dtype are merged where they follow each other everywhere.

    That is in the message and in memory, in which the slots follow, too: a rule is applied to a
    variable and its slots together.

    Args:
        shards: the shards, in the order of the message. Those without elements are left out.
        alignment: see `merge`.
        alone: a shard with this many elements, or more, is not merged.
    """

    def kind(shard: Shard) -> tuple[np.dtype[Any], int | None]:
        return shard.dtype, shard.variable if shard.elements.size >= alone else None

    found = []
    for (dtype, _), group in itertools.groupby(shards, kind):
        alike = [*group]
        places = [(shard.message, *shard.memory) for shard in alike]
        for i, (message, *memory) in merge(places, alignment):
            count = message.size // dtype.itemsize
            elements = ElementRange(0, count).shift(alike[i].elements.start)
            found.append(Shard(alike[i].variable, dtype, elements, message, tuple(memory)))
    return found
