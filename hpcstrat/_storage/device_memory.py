"""Where a rank stores and updates variables if it computes on a GPU: there, or on its host."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import final

import numpy as np

from hpcstrat._core import gpu
from hpcstrat._core.span import UPDATE, span
from hpcstrat._core.types import Array, Bytes
from hpcstrat._memory.allocator import ALIGNMENT, Block, SlabAllocator, gpu_memory, host_memory
from hpcstrat._memory.intervals import Interval, Shard, runs
from hpcstrat._memory.layout import Layout
from hpcstrat._storage.device_plan import DevicePlan
from hpcstrat._storage.local import PART, LocalBlocks, fill, flat, on_stream
from hpcstrat._storage.plan import MessageOrder, Plan
from hpcstrat._update.device_update import DeviceUpdate
from hpcstrat._update.rule import UpdateRule
from hpcstrat._update.update import Chunk, Update, chunks_of


class OnGpu(LocalBlocks):
    """A rank's blocks on its GPU.

    Args:
        rank: this rank.
        stream: its stream.
        memory: what updates change, if it is not the GPU's memory.
    """

    def __init__(self, rank: int, stream: gpu.Stream, memory: SlabAllocator | None = None) -> None:
        self._on_gpu = gpu_memory(stream)
        updated = self._on_gpu if memory is None else memory
        super().__init__(rank, lambda: updated)
        self.stream = self._stream = stream
        self.xp = stream.xp
        self.current = stream.current
        self.here = stream.here

    @property
    def readable(self) -> SlabAllocator:
        """What programs read."""
        return self._on_gpu

    def new_update(self, layout: Layout, shards: Sequence[Shard], rank: int = 0) -> Update:
        """An update of whole runs, each by one kernel."""
        return DeviceUpdate(chunks_of(self.memory, shards, sys.maxsize, ALIGNMENT), shards)

    def write(self, block: Block, new: Array, rule: UpdateRule) -> None:
        """See `LocalBlocks.write`."""
        with self.current():
            rule.apply(block.array, self.here(new), (), block.array)

    def parts(self, block: Block, start: int = 0, stop: int | None = None) -> Iterator[Bytes]:
        """The bytes of a block, through pinned memory."""
        wanted: Array = flat(block.array)[start:stop]
        # From a GPU to ordinary memory, a copy goes through a small staging buffer of the driver.
        pinned = gpu.allocate_pinned(min(PART, wanted.size))
        for here in Interval(0, wanted.size).split(PART):
            with self.current():
                wanted[here.slice].get(out=pinned[: here.size])
            yield pinned[: here.size]

    def _write_part(self, block: Block, start: int, part: Bytes) -> None:
        with self.current():
            self._stream.synchronize()  # an earlier write may still be on its way to the GPU
            for target in (block, block.copy):
                if target is not None:  # only `OnHostOfGpu` has copies
                    fill(flat(target.array)[start : start + part.size], part)
            self._stream.synchronize()  # the caller may change `part`


@final
class OnHostOfGpu(OnGpu):
    """A rank's blocks on the host of its GPU, and copies on the GPU, which programs read."""

    def __init__(self, rank: int, stream: gpu.Stream) -> None:
        super().__init__(rank, stream, host_memory())
        self._pinned: Array = np.empty(0, np.uint8)

    new_update = LocalBlocks.new_update
    parts = LocalBlocks.parts

    def new_variable(self, initial: Array) -> Block:
        """A new block with this value, and its copy."""
        block = super().new_variable(initial)
        block.copy = self._on_gpu.new_block(initial.shape, initial.dtype)
        fill(block.copy.array, initial)
        # Programs on this rank compute with the copy, never with the master.
        block.view = block.copy.view
        return block

    def write(self, block: Block, new: Array, rule: UpdateRule) -> None:
        """Changes the variable, and its copy."""
        with self.current():
            self._stream.synchronize()  # an earlier write may still be on its way to the GPU
            rule.apply(block.array, gpu.to_host(new), (), block.array)
            fill(block.view, block.array)

    def runs_to_read(self, order: MessageOrder) -> list[Chunk]:
        """The runs of copies that are runs of the master copy too; that instead of slots."""
        shards = []
        for shard in order.shards:
            block = order.blocks[shard.variable]
            assert block.copy is not None
            shards.append(shard._replace(memory=(block.copy.memory, block.memory)))
        chunks: list[Chunk] = []
        for run in runs(shards, ALIGNMENT):
            copy, master = run.memory
            value = self.readable.part(*copy).view(run.dtype)
            chunks.append((run, value, (self.memory.part(*master).view(run.dtype),)))
        return chunks

    @span(UPDATE, on_stream("update"))
    def run(
        self,
        plan: Plan,
        message: Array,
        rule: UpdateRule,
        add_up: Callable[[Array], Array] | None = None,
    ) -> None:
        """Updates the variables on the host, then their copies. Waits for the message."""
        if self._pinned.size < message.size:
            self._pinned = gpu.allocate_pinned(message.size)
        message.get(out=self._pinned[: message.size])  # blocks until the copy is complete
        plan.update.run(rule, [self._pinned], add_up=add_up)
        assert isinstance(plan, DevicePlan)
        # Variables that lie in a row are copied by one call.
        for _, copy, (master,) in plan.readable:
            fill(copy, master)


def local_blocks(rank: int, stream: gpu.Stream | None, on_host: bool) -> LocalBlocks:
    """The blocks of a rank of which others, or this one, compute on GPUs.

    Args:
        rank: the rank.
        stream: its stream; `None` if it computes on the CPU.
        on_host: whether it stores and updates variables in host memory, also if it has a stream.
    """
    if stream is None:
        # In slabs, where variables are aligned as they are on the other ranks' GPUs.
        memory = SlabAllocator(lambda nbytes: np.empty(nbytes, np.uint8))
        return LocalBlocks(rank, lambda: memory)
    return OnHostOfGpu(rank, stream) if on_host else OnGpu(rank, stream)
