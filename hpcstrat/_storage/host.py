"""What storages in host memory have in common: each rank reads and writes a block in place."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence

import numpy as np

from hpcstrat._communicators.base import Communicator
from hpcstrat._communicators.checked_exchange import checksum
from hpcstrat._core import gpu
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import Array, Bytes
from hpcstrat._memory.blocks import Block
from hpcstrat._memory.segment import Segment
from hpcstrat._process import settings
from hpcstrat._storage.base import Storage, UpdateRule, flat, host_parts


class HostStorage(Storage):
    """Storage whose blocks lie in a segment of host memory."""

    def __init__(self, communicator: Communicator) -> None:
        super().__init__(communicator)
        self._compiles = settings.compiles()  # here, where an error is one of making the strategy

    @property
    @abc.abstractmethod
    def _segment(self) -> Segment:
        """The memory that all blocks lie in."""

    def write(self, block: Block, new: Array, rule: UpdateRule) -> None:
        """See `Storage.write`."""
        # Written by the library itself: the next check has nothing to compare with.
        block.checksum = None
        rule.apply(block.array, new, (), block.array)

    def parts(self, block: Block, start: int = 0, stop: int | None = None) -> Iterator[Bytes]:
        """See `Storage.parts`."""
        return host_parts(block.array, start, stop)

    def _write_part(self, block: Block, start: int, part: Bytes) -> None:
        block.checksum = None
        flat(block.array)[start : start + part.size] = part

    def _check_unchanged(self, blocks: Sequence[Block]) -> None:
        """See `Storage._check_unchanged`. NumPy's `at` writes to read-only arrays, too."""
        with self.communicator.raise_together():
            for block in blocks:
                # Forgotten at once, so that one foreign write is reported once and not at every
                # later update.
                seen, block.checksum = block.checksum, None
                if seen not in (None, checksum(block.array)):
                    raise RuntimeError(
                        f"{current_call()}: since the last update something else wrote to the "
                        f"memory of a variable of shape {block.array.shape} and dtype "
                        f"{block.array.dtype.name} (HPCSTRAT_CHECK); pass functions that write in "
                        "place, such as np.add.at, a copy: read_value() instead of value()"
                    )

    def _note_change(self, blocks: Sequence[Block]) -> None:
        """See `Storage._note_change`."""
        for block in blocks:
            block.checksum = checksum(block.array)

    def has(self, array: Array) -> bool:
        """See `Storage.has`."""
        return not gpu.is_on_gpu(array) and np.may_share_memory(array, self._segment.array)
