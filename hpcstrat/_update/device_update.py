"""Updates on a GPU: one kernel per run of elements, on the current stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from hpcstrat._core.types import Array, ReduceOp
from hpcstrat._memory.intervals import Shard
from hpcstrat._update.chunks import Chunk
from hpcstrat._update.rule import Norms, UpdateRule
from hpcstrat._update.update import InPlace, Update


@final
class DeviceUpdate(Update):
    """An update on a GPU, by the only message, which has the reduced gradients."""

    def __init__(self, chunks: Sequence[Chunk], shards: Sequence[Shard]) -> None:
        super().__init__(chunks, shards)
        self._message: Array = None
        self._bound: list[tuple[Array, Array, tuple[Array, ...]]] = []

    def _with(self, chunks: Sequence[Chunk], shard: Shard) -> DeviceUpdate:
        return DeviceUpdate(chunks, [shard])

    def apply(
        self, rule: UpdateRule, messages: Sequence[Array], op: ReduceOp, in_place: InPlace
    ) -> None:
        """See `Update.apply`."""
        # Views and addresses are made once per message: a steady step only launches.
        if messages[0] is not self._message:
            self._bind(messages[0])
        for value, gradient, slots in self._bound:
            rule.on_gpu(value, gradient, slots)

    def add_squares(
        self,
        norms: Norms,
        messages: Sequence[Array],
        op: ReduceOp,
        in_place: InPlace,
        out: Array,
    ) -> None:
        """See `Update.add_squares`. A variable is a single chunk, whose sums are written."""
        # Views and addresses are made once per message: a steady step only launches.
        if messages[0] is not self._message:
            self._bind(messages[0])
        for value, gradient, slots in self._bound:
            norms.sums_on_gpu(value, gradient, slots, out)

    def _bind(self, message: Array) -> None:
        """Finds the gradient of each chunk in a message."""
        self._message = message
        self._bound = [
            (value, message[shard.message.slice].view(shard.dtype), slots)
            for shard, value, slots in self._chunks
        ]

    def forget_messages(self) -> None:
        """See `Update.forget_messages`."""
        super().forget_messages()
        self._message, self._bound = None, []
