"""Updates by NumPy's operations, chunk by chunk while it is in cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np

from hpcstrat._communicators.reduction import CHUNK, reduce_chunk
from hpcstrat._core.types import Array, ReduceOp
from hpcstrat._memory.intervals import Interval, Shard
from hpcstrat._update.chunks import Chunk, Memory, PerMessage, chunks_within
from hpcstrat._update.rule import Norms, UpdateRule
from hpcstrat._update.update import Backend, InPlace, Update


class ScratchBuffers:
    """Scratch memory, the same for all updates of a storage."""

    def __init__(self) -> None:
        self._pairs: dict[np.dtype[Any], tuple[Array, Array]] = {}

    def of(self, value: Array) -> tuple[Array, Array]:
        """Two arrays like a chunk's: one for the reduced gradient, one for the rule to work in."""
        dtype, n = value.dtype, value.size
        # Allocated once: new arrays for each chunk would not be in cache, and cost page faults.
        if dtype not in self._pairs:
            self._pairs[dtype] = (np.empty(CHUNK, dtype), np.empty(CHUNK, dtype))
        first, second = self._pairs[dtype]
        return first[:n], second[:n]


class BoundChunk(NamedTuple):
    """A chunk with the gradients of one update.

    Attributes:
        value, slots: the elements in storage, as in `Chunk`.
        parts: every replica's gradient.
        gradient: an array of their length and dtype, for the reduced elements.
        work: an array of their length and dtype, for the rule to work in.
    """

    value: Array
    slots: tuple[Array, ...]
    parts: list[Array]
    gradient: Array
    work: Array


@final
class NumpyBackend(Backend):
    """Updates chunks in host memory.

    Args:
        chunks: at most `CHUNK` elements each.
        local: see `Update`.
        rank: which of the messages is this rank's.
        scratch: memory to work in.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        local: Mapping[int, Shard],
        rank: int,
        scratch: ScratchBuffers,
    ) -> None:
        self._chunks = chunks
        self._rank = rank
        self._scratch = scratch
        self._bound = PerMessage(self._bind)
        shards = [chunk.shard for chunk in chunks]
        # By variable, its local chunks, and the elements of its gradient for each.
        self._local = {
            variable: [
                (k, (local & shards[k].message).elements) for k in chunks_within(shards, local)
            ]
            for variable, local in local.items()
        }

    def _bind(self, messages: Sequence[Array]) -> list[BoundChunk]:
        return [
            BoundChunk(
                value,
                slots,
                [message[shard.message.slice].view(shard.dtype) for message in messages],
                *self._scratch.of(value),
            )
            for shard, value, slots in self._chunks
        ]

    def bind(self, messages: Sequence[Array], in_place: Mapping[int, InPlace]) -> list[BoundChunk]:
        """The chunks with these messages; those of recent messages are kept."""
        bound = self._bound.of(messages)
        if in_place:
            bound = list(bound)
            for variable, (_, gradient) in in_place.items():
                for k, elements in self._local[variable]:
                    parts = list(bound[k].parts)
                    parts[self._rank] = gradient[elements.slice]
                    bound[k] = bound[k]._replace(parts=parts)
        return bound

    def apply(
        self, rule: UpdateRule, bound: Sequence[BoundChunk], chunks: Interval, op: ReduceOp
    ) -> None:
        """See `Backend.apply`."""
        for value, slots, parts, gradient, work in bound[chunks.slice]:
            reduce_chunk(gradient, parts, op)
            rule.apply(value, gradient, slots, work)

    def sums(self, norms: Norms, bound: Sequence[BoundChunk], op: ReduceOp) -> Array:
        """See `Backend.sums`."""
        sums = np.empty((len(bound), norms.size))
        for k, (value, slots, parts, gradient, _) in enumerate(bound):
            reduce_chunk(gradient, parts, op)
            sums[k] = norms.sums(value, gradient, slots)
        return sums

    def forget_messages(self) -> None:
        """See `Backend.forget_messages`."""
        self._bound.clear()


def numpy_update(
    memory: Memory, shards: Sequence[Shard], scratch: ScratchBuffers, rank: int = 0
) -> Update:
    """An update in host memory by NumPy; for the arguments see `Update` and `NumpyBackend`."""
    return Update(memory, shards, lambda chunks, local: NumpyBackend(chunks, local, rank, scratch))
