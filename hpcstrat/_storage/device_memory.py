"""Where a rank stores and updates variables when some ranks compute on GPUs: three kinds."""

from __future__ import annotations

import abc
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import final

import numpy as np

from hpcstrat._core import gpu
from hpcstrat._core.span import COMMUNICATION, UPDATE, Details, span
from hpcstrat._core.types import Array, Bytes
from hpcstrat._memory.allocator import ALIGNMENT, SlabAllocator, gpu_memory, host_memory
from hpcstrat._memory.blocks import Block
from hpcstrat._memory.intervals import Interval, Shard
from hpcstrat._storage.device_plan import DevicePlan
from hpcstrat._storage.local import PART, LocalBlocks, fill, flat, host_parts
from hpcstrat._storage.message_order import MessageOrder
from hpcstrat._update.chunks import Chunk, chunks_of
from hpcstrat._update.device_update import DeviceUpdate
from hpcstrat._update.numpy_update import NumpyUpdate, Scratch
from hpcstrat._update.rule import UpdateRule
from hpcstrat._update.update import Update


def _on_stream(name: str) -> Callable[..., Details]:
    return lambda local, *_, **__: Details(name, None, local.stream)


class DeviceMemory(LocalBlocks):
    """A rank's blocks, and its updates of them. Messages are on the rank's device.

    Attributes:
        stream: the strategy's stream; `None` on a CPU.
        memory: what updates change.
        readable: what programs read: the same memory, or copies.
        current: makes a block in which the strategy's stream is current, on a GPU.
        here: returns an array on this rank's device, copied there if it is elsewhere.
    """

    memory: SlabAllocator
    readable: SlabAllocator
    current: Callable[[], contextlib.AbstractContextManager[None]]
    here: Callable[[Array], Array]

    @abc.abstractmethod
    def zeros(self, nbytes: int) -> Array:
        """New memory for messages, on this rank's device."""

    def new_variable(self, initial: Array, number: int) -> Block:
        """A new block with this value."""
        block = self.memory.new_block(initial.shape, initial.dtype, number)
        fill(block.array, initial)
        return block

    def runs_to_read(self, variables: Sequence[Block]) -> list[Chunk]:
        """The runs of the variables, or their copies, that programs read on this rank."""
        read = [block.copy or block for block in variables]
        order = MessageOrder(read, [()] * len(read), ALIGNMENT)
        return chunks_of(self.readable, order.shards, sys.maxsize, ALIGNMENT)

    @abc.abstractmethod
    def new_update(self, shards: Sequence[Shard]) -> Update:
        """The update of these shards."""

    @span(COMMUNICATION, _on_stream("pack"))
    def pack(self, plan: DevicePlan, values: Sequence[Array], is_reduced: bool) -> list[Array]:
        """`DevicePlan.pack` of values on any device."""
        # Buffers are in the message, which would be overwritten where the order is another.
        if plan.buffers is not None:
            values = [
                value.copy() if _may_overlap(value, plan.message) else value for value in values
            ]
        return plan.pack([self.here(value) for value in values], is_reduced)

    @span(UPDATE, _on_stream("update"))
    def run(
        self,
        plan: DevicePlan,
        rule: UpdateRule,
        add_up: Callable[[Array], Array] | None = None,
    ) -> None:
        """Updates this rank's shards by the plan's message; see `Update.run`."""
        plan.update.run(rule, [plan.update_message], add_up=add_up)

    def has(self, array: Array) -> bool:
        """Whether an array is in the memory that this rank reads."""
        return self.readable.has(array)


@final
class OnHost(DeviceMemory):
    """The memory of a rank that computes on the CPU."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.memory = self.readable = host_memory(is_pinned=False)
        self.current = contextlib.nullcontext
        self.here = gpu.to_host
        self.stream = None
        self._scratch: Scratch = {}

    def zeros(self, nbytes: int) -> Array:
        """See `DeviceMemory.zeros`."""
        return np.zeros(nbytes, np.uint8)

    def new_update(self, shards: Sequence[Shard]) -> Update:
        """An update in chunks that fit in cache. Compiled loops were never measured here."""
        return NumpyUpdate(chunks_of(self.memory, shards), shards, self._scratch)

    def write(self, block: Block, new: Array, rule: UpdateRule) -> None:
        """See `LocalBlocks.write`."""
        rule.apply(block.array, gpu.to_host(new), (), block.array)

    def parts(self, block: Block, start: int = 0, stop: int | None = None) -> Iterator[Bytes]:
        """See `LocalBlocks.parts`."""
        return host_parts(block.array, start, stop)

    def _write_part(self, block: Block, start: int, part: Bytes) -> None:
        flat(block.array)[start : start + part.size] = part


class OnGpu(DeviceMemory):
    """The memory of a rank that computes on a GPU, and stores and updates variables there."""

    def __init__(self, rank: int, stream: gpu.Stream) -> None:
        super().__init__(rank)
        self.memory = self.readable = gpu_memory(stream)
        self.current = stream.current
        self.here = stream.here
        self.stream = stream

    def zeros(self, nbytes: int) -> Array:
        """See `DeviceMemory.zeros`."""
        return self.stream.xp.zeros(nbytes, np.uint8)

    def new_update(self, shards: Sequence[Shard]) -> Update:
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
            self.stream.synchronize()  # an earlier write may still be on its way to the GPU
            for target in (block, block.copy):
                if target is not None:  # only `OnHostOfGpu` has copies
                    fill(flat(target.array)[start : start + part.size], part)
            self.stream.synchronize()  # the caller may change `part`


@final
class OnHostOfGpu(OnGpu):
    """The memory of a rank that computes on a GPU, and stores and updates variables on its host.

    The GPU has copies, which programs read.
    """

    def __init__(self, rank: int, stream: gpu.Stream) -> None:
        super().__init__(rank, stream)
        self.memory = host_memory(is_pinned=True)
        self._scratch: Scratch = {}
        self._pinned: Array = np.empty(0, np.uint8)

    def new_variable(self, initial: Array, number: int) -> Block:
        """A new block with this value, and its copy."""
        block = super().new_variable(initial, number)
        block.copy = self.readable.new_block(initial.shape, initial.dtype, number)
        fill(block.copy.array, initial)
        # Programs on this rank compute with the copy, never with the master.
        block.view = block.copy.view
        return block

    def new_update(self, shards: Sequence[Shard]) -> Update:
        """An update in chunks that fit in cache."""
        return NumpyUpdate(chunks_of(self.memory, shards), shards, self._scratch)

    @span(UPDATE, _on_stream("update"))
    def run(
        self,
        plan: DevicePlan,
        rule: UpdateRule,
        add_up: Callable[[Array], Array] | None = None,
    ) -> None:
        """Updates the variables on the host, then their copies. Waits for the message."""
        message = plan.update_message
        if self._pinned.size < message.size:
            self._pinned = gpu.allocate_pinned(message.size)
        message.get(out=self._pinned[: message.size])  # blocks until the copy is complete
        plan.update.run(rule, [self._pinned], add_up=add_up)
        for block in plan.order.blocks:
            fill(block.view, block.array)

    def write(self, block: Block, new: Array, rule: UpdateRule) -> None:
        """Changes the variable, and its copy."""
        with self.current():
            self.stream.synchronize()  # an earlier write may still be on its way to the GPU
            rule.apply(block.array, gpu.to_host(new), (), block.array)
            fill(block.view, block.array)

    def parts(self, block: Block, start: int = 0, stop: int | None = None) -> Iterator[Bytes]:
        """See `LocalBlocks.parts`."""
        return host_parts(block.array, start, stop)


def _may_overlap(array: Array, memory: Array) -> bool:
    """Whether two arrays may share memory; one on a GPU and one on the host never do."""
    return gpu.is_on_gpu(array) is gpu.is_on_gpu(memory) and bool(
        gpu.array_module(array).may_share_memory(array, memory)
    )


def device_memory(rank: int, stream: gpu.Stream | None, on_host: bool) -> DeviceMemory:
    """The memory of a rank.

    Args:
        rank: the rank.
        stream: its stream; `None` if it computes on the CPU.
        on_host: whether it stores and updates variables in host memory, also if it has a stream.
    """
    if stream is None:
        return OnHost(rank)
    return OnHostOfGpu(rank, stream) if on_host else OnGpu(rank, stream)
