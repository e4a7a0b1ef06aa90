"""Common parts of storage in host memory: each rank reads and writes blocks in place."""

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
    """Storage whose blocks are in a segment of host memory."""

    def __init__(self, communicator: Communicator) -> None:
        super().__init__(communicator)
        self._compiles = settings.compiles()  # read here, so that making the strategy may raise

    @property
    @abc.abstractmethod
    def _segment(self) -> Segment:
        """The memory with all blocks."""

    def write(self, block: Block, new: Array, rule: UpdateRule) -> None:
        """Changes the variable in place."""
        # The library itself writes: the next check has nothing to compare with.
        block.checksum = None
        rule.apply(block.array, new, (), block.array)

    def parts(self, block: Block, start: int = 0, stop: int | None = None) -> Iterator[Bytes]:
        """The bytes of a block, in place and in parts."""
        return host_parts(block.array, start, stop)

    def _write_part(self, block: Block, start: int, part: Bytes) -> None:
        block.checksum = None
        flat(block.array)[start : start + part.size] = part

    def _check_unchanged(self, blocks: Sequence[Block]) -> None:
        """Compares checksums, because NumPy's `at` writes to read-only arrays, too."""
        with self.communicator.raise_together():
            for block in blocks:
                # Cleared at once, so that a foreign write is reported once and not at every later
                # update.
                seen, block.checksum = block.checksum, None
                if seen not in (None, checksum(block.array)):
                    raise RuntimeError(
                        f"{current_call()}: since the last update something else wrote to the "
                        f"memory of a variable of shape {block.array.shape} and dtype "
                        f"{block.array.dtype.name} (HPCSTRAT_CHECK); pass functions that write in "
                        "place, such as np.add.at, a copy: read_value() instead of value()"
                    )

    def _note_change(self, blocks: Sequence[Block]) -> None:
        """Notes the new checksums."""
        for block in blocks:
            block.checksum = checksum(block.array)

    def has(self, array: Array) -> bool:
        """Whether an array is in this segment."""
        return not gpu.is_on_gpu(array) and np.may_share_memory(array, self._segment.array)
