"""Updates by NumPy's operations, chunk by chunk while it is in cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from hpcstrat._communicators.reduction import CHUNK, reduce_chunk
from hpcstrat._core.types import Array, ReduceOp
from hpcstrat._memory.intervals import Shard
from hpcstrat._update.chunks import Chunk, keep_per_message
from hpcstrat._update.rule import Norms, UpdateRule
from hpcstrat._update.update import NOTHING_IN_PLACE, InPlace, Update

Scratch: TypeAlias = "dict[np.dtype[Any], tuple[Array, Array]]"
"""Memory to work in, the same for all updates of a storage."""
BoundChunk: TypeAlias = tuple[Array, tuple[Array, ...], list[Array], Array, Array]
"""A chunk with one update's gradients: its value and slots, the gradient in each message, and two
arrays like it from the scratch memory: for the reduced gradient, and for the rule to work in."""


class NumpyUpdate(Update):
    """An update in host memory.

    Args:
        chunks: of at most `CHUNK` elements; see `chunks_of`.
        shards: see `Update`.
        scratch: memory to work in.
        rank: which of the messages is this rank's.
    """

    def __init__(
        self, chunks: Sequence[Chunk], shards: Sequence[Shard], scratch: Scratch, rank: int = 0
    ) -> None:
        super().__init__(chunks, shards)
        self._scratch = scratch
        self._rank = rank
        # These have chunks of their own. A small gradient costs less to copy than to read in place.
        self._large = [shard for shard in shards if shard.elements.size >= CHUNK]
        self._bound: dict[tuple[int, int], tuple[Array, list[BoundChunk]]] = {}

    def _with(self, chunks: Sequence[Chunk], shard: Shard) -> NumpyUpdate:
        return type(self)(chunks, [shard], self._scratch, self._rank)

    def in_place(self, gradients: Sequence[Array]) -> InPlace:
        """Large gradients that are as the messages would have them."""
        if not self._large:
            return NOTHING_IN_PLACE
        in_place = {}
        for shard in self._large:
            gradient = gradients[shard.variable]
            # A strided or cast gradient has to be copied in any case, so it goes through the
            # message. A read-only array may be a variable, which other ranks update meanwhile.
            flags = gradient.flags
            if flags.c_contiguous and flags.writeable and gradient.dtype == shard.dtype:
                in_place[shard.variable] = shard.elements, gradient.reshape(-1)
        return in_place

    def apply(
        self, rule: UpdateRule, messages: Sequence[Array], op: ReduceOp, in_place: InPlace
    ) -> None:
        """See `Update.apply`."""
        for value, slots, parts, gradient, work in self._bind(messages, in_place):
            reduce_chunk(gradient, parts, op)
            rule.apply(value, gradient, slots, work)

    def add_squares(
        self,
        norms: Norms,
        messages: Sequence[Array],
        op: ReduceOp,
        in_place: InPlace,
        out: Array,
    ) -> None:
        """See `Update.add_squares`."""
        for value, slots, parts, gradient, _ in self._bind(messages, in_place):
            reduce_chunk(gradient, parts, op)
            out += norms.sums(value, gradient, slots)

    def _bind(self, messages: Sequence[Array], in_place: InPlace) -> list[BoundChunk]:
        """The chunks with these messages; those of recent messages are kept."""
        bound = keep_per_message(self._bound, messages, self._bind_to_messages)
        if not in_place:
            return bound
        bound = list(bound)
        for k, (shard, *_) in enumerate(self._chunks):
            if shard.variable in in_place:
                _, own = in_place[shard.variable]
                value, slots, parts, gradient, work = bound[k]
                parts = list(parts)
                parts[self._rank] = own[shard.elements.slice]
                bound[k] = value, slots, parts, gradient, work
        return bound

    def _bind_to_messages(self, messages: Sequence[Array]) -> list[BoundChunk]:
        return [
            (
                value,
                slots,
                [message[shard.message.slice].view(shard.dtype) for message in messages],
                *_scratch_like(value, self._scratch),
            )
            for shard, value, slots in self._chunks
        ]

    def forget_messages(self) -> None:
        """See `Update.forget_messages`."""
        super().forget_messages()
        self._bound.clear()


def _scratch_like(value: Array, scratch: Scratch) -> tuple[Array, Array]:
    """Two arrays like this one."""
    # Allocated once: new arrays for each chunk would not be in cache, and cost page faults.
    if value.dtype not in scratch:
        scratch[value.dtype] = (np.empty(CHUNK, value.dtype), np.empty(CHUNK, value.dtype))
    first, second = scratch[value.dtype]
    return first[: value.size], second[: value.size]
