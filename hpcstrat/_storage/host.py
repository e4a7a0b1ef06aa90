"""Common parts of storage in host memory: each rank reads and writes blocks in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import final

import numpy as np

from hpcstrat._communicators.checked_exchange import checksum
from hpcstrat._communicators.host import HostCommunicator
from hpcstrat._core import gpu
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import Array, Bytes
from hpcstrat._memory.blocks import Block
from hpcstrat._memory.intervals import Shard
from hpcstrat._memory.layout import Layout
from hpcstrat._memory.segment import Segment
from hpcstrat._process import settings
from hpcstrat._storage.base import Storage
from hpcstrat._storage.local import LocalBlocks, flat, host_parts
from hpcstrat._update import compiled
from hpcstrat._update.chunks import chunks_of
from hpcstrat._update.compiled_update import CompiledUpdate
from hpcstrat._update.numpy_update import NumpyUpdate, Scratch
from hpcstrat._update.rule import UpdateRule
from hpcstrat._update.update import Update


@final
class SegmentBlocks(LocalBlocks):
    """Blocks in a segment of host memory.

    Args:
        rank: see `LocalBlocks`.
        segment: returns the memory with all blocks, which is reserved when it is first used.
    """

    def __init__(self, rank: int, segment: Callable[[], Segment]) -> None:
        super().__init__(rank)
        self._segment = segment

    # The library itself writes: the next check of checksums has nothing to compare with.
    def write(self, block: Block, new: Array, rule: UpdateRule) -> None:
        """Changes the variable in place."""
        block.checksum = None
        rule.apply(block.array, new, (), block.array)

    def _write_part(self, block: Block, start: int, part: Bytes) -> None:
        block.checksum = None
        flat(block.array)[start : start + part.size] = part

    def parts(self, block: Block, start: int = 0, stop: int | None = None) -> Iterator[Bytes]:
        """The bytes of a block, in place and in parts."""
        return host_parts(block.array, start, stop)

    def has(self, array: Array) -> bool:
        """Whether an array is in this segment."""
        return not gpu.is_on_gpu(array) and np.may_share_memory(array, self._segment().array)


class HostStorage(Storage):
    """Storage whose blocks are in a segment of host memory.

    Args:
        communicator: the ranks.
        segment: see `SegmentBlocks`.
    """

    def __init__(self, communicator: HostCommunicator, segment: Callable[[], Segment]) -> None:
        super().__init__(communicator, SegmentBlocks(communicator.rank, segment))
        self._compiles = settings.compiles()  # read here, so that making the strategy may raise
        self._segment = segment
        self._scratch: Scratch = {}

    def _new_update(self, layout: Layout, shards: Sequence[Shard], rank: int = 0) -> Update:
        """The update of shards of the variables in a message.

        Args:
            layout: of the message.
            shards: see `Update`.
            rank: which of the messages of an update is this rank's.
        """
        # Compiling takes half a second, which small updates never make up for.
        is_compiled = self._compiles and sum(layout.sizes) >= compiled.FEWEST
        kind = CompiledUpdate if is_compiled else NumpyUpdate
        return kind(chunks_of(self._segment(), shards), shards, self._scratch, rank)

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
