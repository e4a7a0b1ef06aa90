"""Gradients that are complete early in a step: their sums start while the rest is computed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from hpcstrat._core.types import Array
from hpcstrat._memory.intervals import Interval, Shard, runs
from hpcstrat._memory.layout import Layout

FEWEST_BYTES = 1 << 20
"""Summing starts once this many bytes are marked: fewer do not hide the latency of messages."""


@final
class Marks:
    """The gradients of a plan that are complete in this step, by variable.

    Attributes:
        marked: the variables of complete gradients.
        started: the variables of those whose sums have started.
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


def parts_of(layout: Layout, variables: Iterable[int]) -> list[list[Interval]]:
    """Where some arrays of a message are; neighbours are merged.

    Returns:
        For each dtype of the message, intervals of its elements.
    """
    wanted = set(variables)
    parts = []
    for group in layout.groups:
        shards = [
            Shard(i, group.dtype, Interval(0, layout.sizes[i]), layout.bytes_of(i), ())
            for i in group.members
            if i in wanted
        ]
        parts.append([group.within(run.message) for run in runs(shards, layout.alignment)])
    return parts


def views_of(layout: Layout, variables: Iterable[int], message: Array) -> list[Array]:
    """Some arrays of a message, as flat views; neighbours are merged."""
    return [
        group.of(message)[part.slice]
        for group, parts in zip(layout.groups, parts_of(layout, variables), strict=True)
        for part in parts
    ]
