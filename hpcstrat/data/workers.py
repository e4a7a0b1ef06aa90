"""Which replicas a pipeline feeds, where each host has one of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Workers:
    """The workers, hosts, and their replicas.

    Attributes:
        of: for each rank the index of its worker.
        rank: this rank.
    """

    of: tuple[int, ...]
    rank: int

    @property
    def count(self) -> int:
        """How many workers there are."""
        return max(self.of) + 1

    @property
    def index(self) -> int:
        """This rank's worker."""
        return self.of[self.rank]

    def grouped(self, values: Sequence[_Value]) -> list[list[_Value]]:
        """Values of all ranks, worker by worker."""
        groups: list[list[_Value]] = [[] for _ in range(self.count)]
        for worker, value in zip(self.of, values, strict=True):
            groups[worker].append(value)
        return groups

    @property
    def peers(self) -> list[int]:
        """The ranks of this rank's worker, in order."""
        return [rank for rank, worker in enumerate(self.of) if worker == self.index]
