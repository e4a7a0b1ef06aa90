"""What storages in host memory have in common: each rank reads and writes a block in place."""

from __future__ import annotations

import abc
from collections.abc import Iterator

import numpy as np

from hpcstrat import _gpu
from hpcstrat._communicators.segment import Segment
from hpcstrat._storage.base import Array, Bytes, Rule, Storage, flat, host_parts
from hpcstrat._storage.memory import Block


class SegmentStorage(Storage):
    """Storage whose blocks lie in a segment of host memory."""

    @property
    @abc.abstractmethod
    def _segment(self) -> Segment:
        """The memory that all blocks lie in."""

    def write(self, block: Block, new: Array, rule: Rule) -> None:
        """See `Storage.write`."""
        rule.apply(block.array, new, (), block.array)

    def parts(self, block: Block) -> Iterator[Bytes]:
        """See `Storage.parts`."""
        return host_parts(block.array)

    def write_part(self, block: Block, start: int, part: Bytes) -> None:
        """See `Storage.write_part`."""
        flat(block.array)[start : start + part.size] = part

    def has(self, array: Array) -> bool:
        """See `Storage.has`."""
        return not _gpu.is_on_gpu(array) and np.may_share_memory(array, self._segment.array)
