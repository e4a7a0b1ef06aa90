"""Intervals of elements or bytes, and shards: a part of a variable, wherever it is counted."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np


class Interval(NamedTuple):
    """The integers from `start` up to, and without, `stop`. It is true if there are any."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many integers it has."""
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        """These elements of an array: `array[interval.slice]`."""
        return slice(self.start, self.stop)

    def __bool__(self) -> bool:
        return self.start < self.stop

    def __and__(self, other: Interval) -> Interval:
        start = max(self.start, other.start)
        return Interval(start, max(start, min(self.stop, other.stop)))

    def shift(self, by: int) -> Interval:
        """The interval `by` integers further."""
        return Interval(self.start + by, self.stop + by)

    def scale(self, factor: int) -> Interval:
        """The bytes of these elements, if an element has `factor` bytes."""
        return Interval(self.start * factor, self.stop * factor)

    def split(self, size: int) -> Iterator[Interval]:
        """The interval in parts of `size` integers; the last may be shorter."""
        for start in range(self.start, self.stop, size):
            yield Interval(start, min(start + size, self.stop))

    def of_rank(self, rank: int, size: int, unit: int = 1) -> Interval:
        """The part of rank `rank` of `size` ranks, in multiples of `unit` integers.

        The parts of all ranks, in rank order, are the interval. They differ by at most one unit,
        and a rank has none if there are fewer units than ranks.
        """
        units = divide_up(self.size, unit)
        start, stop = (
            self.start + min(self.size, unit * (units * n // size)) for n in (rank, rank + 1)
        )
        return Interval(start, stop)


class Shard(NamedTuple):
    """Some elements of a variable, in each of the spaces in which they are counted.

    A run of several variables (see `runs`) is a shard too: of the first variable, whose elements
    are counted on beyond its end.

    Attributes:
        variable: the variable's index; see `MessageOrder`.
        dtype: their dtype.
        elements: the elements of the variable.
        message: their bytes in a message.
        memory: their bytes in memory: of the variable, then of each of its slots.
    """

    variable: int
    dtype: np.dtype[Any]
    elements: Interval
    message: Interval
    memory: tuple[Interval, ...]

    def part(self, elements: Interval) -> Shard:
        """The shard of some of its elements."""
        first = elements.shift(-self.elements.start).scale(self.dtype.itemsize)
        message, *memory = [first.shift(place.start) for place in (self.message, *self.memory)]
        return Shard(self.variable, self.dtype, elements, message, tuple(memory))

    def within(self, message: Interval) -> Shard:
        """The shard of its elements in these bytes of the message."""
        start, stop = (self.message & message).shift(-self.message.start)
        elements = Interval(start // self.dtype.itemsize, stop // self.dtype.itemsize)
        return self.part(elements.shift(self.elements.start))

    def split(self, count: int) -> Iterator[Shard]:
        """The shard in parts of `count` elements; the last may be shorter."""
        return map(self.part, self.elements.split(count))


def merge(
    places: Iterable[tuple[Interval, ...]], alignment: int = 1
) -> list[tuple[int, tuple[Interval, ...]]]:
    """Merges places that follow each other in every space in which they are counted.

    Args:
        places: where some bytes are, in each of the spaces, such as message and memory; in the
            order of the first space. Those without bytes are left out.
        alignment: gaps up to the next multiple of this many bytes are merged too: on a GPU, one
            kernel over a gap costs less than two kernels.

    Returns:
        For each merged place the index of its first one, and where it is in each space.
    """
    merged: list[tuple[int, tuple[Interval, ...]]] = []
    for i, place in enumerate(places):
        if not place[0]:
            continue
        if merged and all(
            round_up(before.stop, alignment) == after.start
            for before, after in zip(merged[-1][1], place, strict=True)
        ):
            first, start = merged.pop()
            both = [Interval(a.start, b.stop) for a, b in zip(start, place, strict=True)]
            merged.append((first, tuple(both)))
        else:
            merged.append((i, place))
    return merged


def runs(shards: Iterable[Shard], alignment: int = 1, alone: int = sys.maxsize) -> list[Shard]:
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
            elements = Interval(0, count).shift(alike[i].elements.start)
            found.append(Shard(alike[i].variable, dtype, elements, message, tuple(memory)))
    return found


def divide_up(count: int, unit: int) -> int:
    """How many units have room for `count`."""
    return -(-count // unit)


def round_up(count: int, unit: int) -> int:
    """The next multiple of `unit`, from `count` on."""
    return divide_up(count, unit) * unit
