"""Updates on a GPU: one kernel per run of elements, on the current stream."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple, final

import numpy as np

from hpcstrat._core import gpu
from hpcstrat._core.types import Array, ReduceOp
from hpcstrat._memory.allocator import ALIGNMENT
from hpcstrat._memory.intervals import Interval, Shard
from hpcstrat._update.chunks import Chunk, Memory
from hpcstrat._update.rule import Norms, UpdateRule
from hpcstrat._update.update import Backend, InPlace, Update


class DeviceChunk(NamedTuple):
    """A chunk on a GPU with its reduced gradient; all are flat arrays of one length and dtype."""

    value: Array
    gradient: Array
    slots: tuple[Array, ...]


@final
class DeviceBackend(Backend):
    """Updates chunks on a GPU by the only message, which has the reduced gradients."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks
        self.forget_messages()

    def bind(self, messages: Sequence[Array], in_place: Mapping[int, InPlace]) -> list[DeviceChunk]:
        """The chunks with this message."""
        (message,) = messages
        # Views and addresses are made once per message: a steady step only launches.
        if message is not self._message:
            self._message = message
            self._bound = [
                DeviceChunk(value, message[shard.message.slice].view(shard.dtype), slots)
                for shard, value, slots in self._chunks
            ]
        return self._bound

    def apply(
        self, rule: UpdateRule, bound: Sequence[DeviceChunk], chunks: Interval, op: ReduceOp
    ) -> None:
        """Applies the rule; NCCL has reduced the gradients."""
        for value, gradient, slots in bound[chunks.slice]:
            rule.on_gpu(value, gradient, slots)

    def sums(self, norms: Norms, bound: Sequence[DeviceChunk], op: ReduceOp) -> Array:
        """See `Backend.sums`. The host waits once, for the norms of all variables."""
        if not bound:
            return np.empty((0, norms.size))
        # In one array: each copy to the host waits for the stream.
        xp = gpu.array_module(bound[0].value)
        sums = xp.zeros((len(bound), norms.size), np.float64)
        for k, (value, gradient, slots) in enumerate(bound):
            norms.sums_on_gpu(value, gradient, slots, sums[k])
        return gpu.to_host(sums)

    def forget_messages(self) -> None:
        """See `Backend.forget_messages`."""
        self._message: Array = None
        self._bound: list[DeviceChunk] = []


def device_update(memory: Memory, shards: Sequence[Shard]) -> Update:
    """An update on a GPU, of whole runs; for the arguments see `Update`."""
    return Update(memory, shards, lambda chunks, _: DeviceBackend(chunks), sys.maxsize, ALIGNMENT)
