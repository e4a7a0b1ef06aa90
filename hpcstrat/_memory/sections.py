"""Sections of one buffer, one for each rank, as MPI sends and receives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hpcstrat._communicators.packing import Layout, layout_of
from hpcstrat._types import Bytes

ALIGNMENT = 16
"""Bytes to whose multiples sections begin, so that arrays of any dtype lie well in them."""


class Sections(NamedTuple):
    """A section for, or of, each rank, all in one buffer, from which MPI sends and to which it receives.

    Attributes:
        memory: the buffer, in bytes.
        sizes: bytes of each rank's section.
        starts: where each begins.
    """

    memory: Bytes
    sizes: Sequence[int]
    starts: Sequence[int]

    def of(self, rank: int) -> Bytes:
        """The section of a rank."""
        return self.memory[self.starts[rank] : self.starts[rank] + self.sizes[rank]]

    def all(self) -> list[Bytes]:
        """Every rank's, in rank order."""
        return [self.of(rank) for rank in range(len(self.sizes))]

    def for_mpi(self) -> tuple[Bytes, tuple[Sequence[int], Sequence[int]]]:
        """The buffer as mpi4py takes it."""
        return self.memory, (self.sizes, self.starts)


def layout_of_sections(sizes: Sequence[int]) -> Layout:
    """The layout of a message of sections of these sizes, in bytes."""
    return layout_of(tuple([(size,) for size in sizes]), (np.dtype(np.uint8),) * len(sizes), ALIGNMENT)


def sections_in(memory: Bytes, sizes: Sequence[int]) -> Sections:
    """Sections of these sizes, in bytes, in the first bytes of a buffer."""
    return Sections(memory, sizes, layout_of_sections(sizes).starts)
