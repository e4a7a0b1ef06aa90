"""Gradients that are complete early in a step: their sums start while the rest is computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, final

import numpy as np

from hpcstrat._core.types import Array, Bytes
from hpcstrat._memory.layout import Layout, layout_of

FEWEST_BYTES = 1 << 20
"""Summing starts once this many bytes are marked: fewer do not hide the latency of messages."""


@final
class Marks:
    """The gradients of a plan that are complete in this step, by their places in the message.

    Attributes:
        marked: the places of complete gradients.
        started: the places of those whose sums have started.
        sums: the storage's memory for these sums, if they are not in the buffers.
    """

    __slots__ = ("marked", "started", "sums")

    def __init__(self) -> None:
        self.marked: set[int] = set()
        self.started: set[int] = set()
        self.sums: Array | None = None

    def clear(self) -> None:
        """Clears the marks, for the next step."""
        self.marked.clear()
        self.started.clear()


class MarkedRange(NamedTuple):
    """Contiguous gradients in a message.

    Attributes:
        group: the index of their dtype in the message.
        start, stop: the range in that group, in elements.
    """

    group: int
    start: int
    stop: int


def ranges_in(layout: Layout, places: Iterable[int]) -> list[MarkedRange]:
    """The ranges of some arrays of a message, without empty arrays; neighbours are merged."""
    wanted = set(places)
    ranges: list[MarkedRange] = []
    for index, group in enumerate(layout.groups):
        continues = False
        for i in group.members:
            if not layout.sizes[i]:
                continue
            start = (layout.starts[i] - group.start) // group.dtype.itemsize
            stop = start + layout.sizes[i]
            if i in wanted:
                ranges.append(MarkedRange(index, ranges.pop().start if continues else start, stop))
            continues = i in wanted
    return ranges


class Bucket:
    """Some arrays of a message as a smaller message.

    Args:
        whole: the layout of the whole message.
        places: the places of the arrays in it.

    Attributes:
        layout: of the smaller message.
    """

    def __init__(self, whole: Layout, places: Iterable[int]) -> None:
        self._whole = whole
        self._ranges = ranges_in(whole, places)
        dtypes = tuple([whole.groups[part.group].dtype for part in self._ranges])
        self.layout: Layout = layout_of(
            tuple([(part.stop - part.start,) for part in self._ranges]), dtypes
        )

    def views(self, message: Array) -> list[Array]:
        """Its parts of the whole message."""
        return [
            self._whole.groups[part.group].of(message)[part.start : part.stop]
            for part in self._ranges
        ]

    def in_place(self, message: Array) -> Bytes | None:
        """The memory of its part of the whole message, if it is one range."""
        return self.views(message)[0].view(np.uint8) if len(self._ranges) == 1 else None


def places_of(buffers: Sequence[Array], every: Sequence[Array]) -> list[int]:
    """The places of some buffers in `every`, in order.

    Raises:
        LookupError: a buffer is not in `every`; its index is the argument.
    """
    places = {id(buffer): place for place, buffer in enumerate(every)}
    chosen: list[int] = []
    for i, buffer in enumerate(buffers):
        if id(buffer) not in places:
            raise LookupError(i)
        chosen.append(places[id(buffer)])
    return sorted(chosen)
