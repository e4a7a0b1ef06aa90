"""Gradients that are complete before the rest of a step's: their sums begin while the rest is computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, final

import numpy as np

from hpcstrat._core.types import Array, Bytes
from hpcstrat._memory.layout import Layout, layout_of

FEWEST_BYTES = 1 << 20
"""Bytes of marked gradients from which on their sum begins: it takes messages, whose latency few bytes do not hide."""


@final
class Marks:
    """Which of a plan's gradients lie in its buffers, complete, in this step; by their places in a message.

    Attributes:
        marked: the places.
        begun: those whose sums are under way, or done.
        sums: where these sums go, if not to the buffers; as the storage makes it.
    """

    __slots__ = ("begun", "marked", "sums")

    def __init__(self) -> None:
        self.marked: set[int] = set()
        self.begun: set[int] = set()
        self.sums: Array | None = None

    def clear(self) -> None:
        """Begins a new step."""
        self.marked.clear()
        self.begun.clear()


class MarkedRange(NamedTuple):
    """Gradients that lie in a row.

    Attributes:
        group: their dtype's index in the message.
        start, stop: their elements in the group.
    """

    group: int
    start: int
    stop: int


def ranges_in(layout: Layout, places: Iterable[int]) -> list[MarkedRange]:
    """The ranges of a message that some of its arrays make, with the gaps between neighbours; without empty ones."""
    wanted = set(places)
    found: list[MarkedRange] = []
    for index, group in enumerate(layout.groups):
        continues = False
        for i in group.members:
            if not layout.sizes[i]:
                continue
            start = (layout.starts[i] - group.start) // group.dtype.itemsize
            stop = start + layout.sizes[i]
            if i in wanted:
                found.append(MarkedRange(index, found.pop().start if continues else start, stop))
            continues = i in wanted
    return found


class Bucket:
    """Some arrays of a message as a message of their own.

    Args:
        whole: the layout of the whole message.
        places: of the arrays in it.

    Attributes:
        layout: of their own message.
    """

    def __init__(self, whole: Layout, places: Iterable[int]) -> None:
        self._whole = whole
        self._ranges = ranges_in(whole, places)
        dtypes = tuple([whole.groups[one.group].dtype for one in self._ranges])
        self.layout: Layout = layout_of(
            tuple([(one.stop - one.start,) for one in self._ranges]), dtypes
        )

    def views(self, message: Array) -> list[Array]:
        """Its parts of the whole message."""
        return [
            self._whole.groups[one.group].of(message)[one.start : one.stop] for one in self._ranges
        ]

    def in_place(self, message: Array) -> Bytes | None:
        """The memory of its part of the whole message, if it is one range."""
        return self.views(message)[0].view(np.uint8) if len(self._ranges) == 1 else None


def places_of(buffers: Sequence[Array], every: Sequence[Array]) -> list[int]:
    """The places of some buffers among `every` one, in order.

    Raises:
        LookupError: one is not among them; its index is the argument.
    """
    places = {id(buffer): place for place, buffer in enumerate(every)}
    found: list[int] = []
    for i, buffer in enumerate(buffers):
        if id(buffer) not in places:
            raise LookupError(i)
        found.append(places[id(buffer)])
    return sorted(found)
