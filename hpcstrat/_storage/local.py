"""This rank's access to the blocks of variables. Nothing here is collective."""

from __future__ import annotations

import abc
from collections.abc import Iterator

import numpy as np

from hpcstrat._core import gpu
from hpcstrat._core.types import Array, Bytes
from hpcstrat._memory.blocks import Block
from hpcstrat._memory.intervals import Interval
from hpcstrat._update.rule import UpdateRule

# A model that fills the memory can still be saved and restored, because at most one part of it is
# in memory twice.
PART = 1 << 22
"""The most bytes of a block that are read or written at once."""


class LocalBlocks(abc.ABC):
    """Reads and writes this rank's blocks.

    Args:
        rank: this rank, which has its own part of blocks that are split.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank

    @abc.abstractmethod
    def write(self, block: Block, new: Array, rule: UpdateRule) -> None:
        """Changes a variable by `rule`, from an array of its shape; the rule needs no scratch."""

    @abc.abstractmethod
    def parts(self, block: Block, start: int = 0, stop: int | None = None) -> Iterator[Bytes]:
        """The bytes of a block, in host memory, at most `PART` of them at once.

        Each part is read-only by convention and valid until the next.

        Args:
            block: if it is split, a rank has only its part.
            start: the first byte.
            stop: the byte after the last; `None` for all.
        """

    def write_part(self, block: Block, start: int, part: Bytes) -> None:
        """Writes host bytes to a block, from its byte `start` on.

        If the block is split over the ranks, `start` counts from the start of the whole, and only
        this rank's part is written.
        """
        if block.cuts is not None:
            own = Interval(*block.cuts[self._rank : self._rank + 2])
            own = own.scale(block.array.dtype.itemsize)
            here = own & Interval(start, start + part.size)
            part = part[here.shift(-start).slice]
            start = here.start - own.start
        if part.size:
            self._write_part(block, start, part)

    @abc.abstractmethod
    def _write_part(self, block: Block, start: int, part: Bytes) -> None: ...

    @abc.abstractmethod
    def has(self, array: Array) -> bool:
        """Whether a NumPy or CuPy array is in the memory that programs read of variables."""


def flat(array: Array) -> Bytes:
    """The bytes of an array in storage, in place."""
    return array.reshape(-1).view(np.uint8)


def host_parts(array: Array, start: int = 0, stop: int | None = None) -> Iterator[Bytes]:
    """The bytes of an array in host memory, from `start` to `stop`, in parts and without copies."""
    wanted = flat(array)[start:stop]
    for part in Interval(0, wanted.size).split(PART):
        yield wanted[part.slice]


def fill(array: Array, value: Array) -> None:
    """Writes `value`, of the same shape and dtype, to an array; each may be on host or GPU."""
    if not gpu.is_on_gpu(array):
        array[...] = gpu.to_host(value)
    elif gpu.is_on_gpu(value):
        array[...] = value
    else:
        array.set(np.ascontiguousarray(value).reshape(array.shape))
