"""Intervals of elements and of bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from typing_extensions import Self


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

    def __and__(self, other: Self) -> Self:
        start = max(self.start, other.start)
        return type(self)(start, max(start, min(self.stop, other.stop)))

    def shift(self, by: int) -> Self:
        """The interval `by` integers further."""
        return type(self)(self.start + by, self.stop + by)

    def split(self, size: int) -> Iterator[Self]:
        """The interval in parts of `size` integers; the last may be shorter."""
        for start in range(self.start, self.stop, size):
            yield type(self)(start, min(start + size, self.stop))

    def of_rank(self, rank: int, size: int, unit: int = 1) -> Self:
        """The part of rank `rank` of `size` ranks, in multiples of `unit` integers.

        The parts of all ranks, in rank order, are the interval. They differ by at most one unit,
        and a rank has none if there are fewer units than ranks.
        """
        units = divide_up(self.size, unit)
        start, stop = (
            self.start + min(self.size, unit * (units * n // size)) for n in (rank, rank + 1)
        )
        return type(self)(start, stop)


class ElementRange(Interval):
    """Elements of a flat array."""

    __slots__ = ()

    def bytes(self, itemsize: int) -> ByteRange:
        """Their bytes, if an element has `itemsize` bytes."""
        return ByteRange(self.start * itemsize, self.stop * itemsize)


class ByteRange(Interval):
    """Bytes of a message, of memory or of a file."""

    __slots__ = ()

    def elements(self, itemsize: int) -> ElementRange:
        """The elements of `itemsize` bytes that are in it, all of them whole."""
        return ElementRange(self.start // itemsize, self.stop // itemsize)


def divide_up(count: int, unit: int) -> int:
    """How many units have room for `count`."""
    return -(-count // unit)


def round_up(count: int, unit: int) -> int:
    """The next multiple of `unit`, from `count` on."""
    return divide_up(count, unit) * unit
