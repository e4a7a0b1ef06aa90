"""This rank's access to the blocks of variables, on a host or a GPU. Nothing here is collective."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, final

import numpy as np

from hpcstrat._communicators.base import Write
from hpcstrat._core import gpu
from hpcstrat._core.call_name import UPDATE, Details, span
from hpcstrat._core.types import Array, Bytes
from hpcstrat._memory.allocator import (
    ALIGNMENT,
    Block,
    PrivateMemory,
    SlabAllocator,
    gpu_memory,
    host_memory,
)
from hpcstrat._memory.intervals import Interval, Shard, runs
from hpcstrat._memory.layout import Layout
from hpcstrat._memory.segment import Segment
from hpcstrat._process import settings
from hpcstrat._storage.device_plan import DevicePlan
from hpcstrat._storage.order import MessageOrder
from hpcstrat._storage.plan import Plan
from hpcstrat._update import compiled
from hpcstrat._update.device_update import DeviceUpdate
from hpcstrat._update.host_update import HostUpdate, Scratch
from hpcstrat._update.rule import UpdateRule
from hpcstrat._update.update import Run, Update, runs_in_memory

# A model that fills the memory can still be saved and restored, because at most one part of it is
# in memory twice.
PART = 1 << 22
"""The most bytes of a block that are read or written at once."""

BlockMemory: TypeAlias = PrivateMemory | SlabAllocator | Segment


def on_stream(name: str) -> Callable[..., Details]:
    """The span of a method of an object that has a `stream`."""
    return lambda owner, *_, **__: Details(name, None, owner.stream)


class LocalBlocks:
    """A rank's blocks, and its updates of them: here in the memory of a host.

    Args:
        rank: this rank, which has its own part of blocks that are split.
        memory: returns what updates change; called when it is first needed.

    Attributes:
        stream: the strategy's stream; `None` on a CPU.
        xp: the array module of this rank's device.
        current: makes a block in which the strategy's stream is current, on a GPU.
        here: returns an array on this rank's device, copied there if it is elsewhere.
    """

    def __init__(self, rank: int, memory: Callable[[], BlockMemory]) -> None:
        self._rank = rank
        self._memory = memory
        self._compiles = settings.is_on("HPCSTRAT_COMPILE")  # here: it may raise
        self._scratch: Scratch = {}
        self.stream: gpu.Stream | None = None
        self.xp: Any = np
        self.current: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self.here: Callable[[Array], Array] = gpu.to_host

    @property
    def memory(self) -> BlockMemory:
        """What updates change."""
        return self._memory()

    @property
    def readable(self) -> BlockMemory:
        """What programs read: the same memory, or copies."""
        return self._memory()

    def has(self, array: Array) -> bool:
        """Whether a NumPy or CuPy array is in the memory that programs read of variables."""
        return self.readable.has(array)

    # ---- blocks

    def new_block(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Block:
        """A new block of this rank's own."""
        memory = self.memory
        assert not isinstance(memory, Segment)  # which several ranks share
        return memory.new_block(shape, dtype)

    def new_variable(self, initial: Array) -> Block:
        """A new block with this value."""
        block = self.new_block(initial.shape, initial.dtype)
        fill(block.array, initial)
        return block

    # The library itself writes: the next check of checksums has nothing to compare with.
    def write(self, block: Block, new: Array, rule: UpdateRule) -> None:
        """Changes a variable by `rule`, from an array of its shape; the rule needs no scratch."""
        block.checksum = None
        host = new if type(new) is np.ndarray else gpu.to_host(new)  # mostly it is one
        rule.apply(block.array, host, (), block.array)

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

    def _write_part(self, block: Block, start: int, part: Bytes) -> None:
        block.checksum = None
        flat(block.array)[start : start + part.size] = part

    def parts(self, block: Block, start: int = 0, stop: int | None = None) -> Iterator[Bytes]:
        """The bytes of a block, or of its part if it is split, in host memory.

        At most `PART` of them come at once, read-only by convention and valid until the next.
        """
        return host_parts(block.array, start, stop)

    # ---- updates

    def new_update(self, layout: Layout, shards: Sequence[Shard], rank: int = 0) -> Update:
        """The update of some shards by messages of this layout.

        Of several messages, this rank's is the one at index `rank`.
        """
        is_large = sum(layout.sizes) >= compiled.FEWEST
        after = 0 if is_large else compiled.FEWEST_UPDATES
        after = after if self._compiles else math.inf
        return HostUpdate(self.memory.part, shards, self._scratch, rank, after)

    def zeros(self, nbytes: int) -> Array:
        """New memory for messages, on this rank's device."""
        return self.xp.zeros(nbytes, np.uint8)

    def runs_to_read(self, order: MessageOrder) -> list[Run]:
        """The runs of variables, or of their copies, that programs read on this rank."""
        blocks = [block.copy or block for block in order.blocks]
        shards = [of._replace(memory=(blocks[of.variable].memory,)) for of in order.shards]
        return runs_in_memory(self.readable.part, shards, alignment=ALIGNMENT)

    @span(UPDATE, on_stream("update"))
    def run(
        self,
        plan: Plan,
        message: Array,
        rule: UpdateRule,
        add_up: Callable[[Array], Array] | None = None,
    ) -> None:
        """Updates this rank's shards by a message on its device; see `Update.run`."""
        plan.update.run(rule, [message], add_up=add_up)


def flat(array: Array) -> Bytes:
    """The bytes of an array in storage, in place."""
    return array.reshape(-1).view(np.uint8)


def host_parts(array: Array, start: int = 0, stop: int | None = None) -> Iterator[Bytes]:
    """The bytes of an array in host memory, in parts and without copies."""
    wanted = flat(array)[start:stop]
    for part in Interval(0, wanted.size).split(PART):
        yield wanted[part.slice]


def writer_of(part: Bytes) -> Write:
    """Writes these bytes as a rank's message."""

    def write(message: Bytes) -> None:
        message[: part.size] = part

    return write


def fill(array: Array, value: Array) -> None:
    """Writes `value`, of the same dtype, to an array; each may be on host or GPU."""
    if not gpu.is_on_gpu(array):
        array[...] = gpu.to_host(value)
    elif gpu.is_on_gpu(value):
        array[...] = value
    else:
        array.set(np.ascontiguousarray(value).reshape(array.shape))


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
        return DeviceUpdate(runs_in_memory(self.memory.part, shards, alignment=ALIGNMENT), shards)

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

    def runs_to_read(self, order: MessageOrder) -> list[Run]:
        """The runs of copies that are runs of the master copy too; that instead of slots."""
        shards = []
        for shard in order.shards:
            block = order.blocks[shard.variable]
            assert block.copy is not None
            shards.append(shard._replace(memory=(block.copy.memory, block.memory)))
        found: list[Run] = []
        for run in runs(shards, ALIGNMENT):
            copy, master = run.memory
            value = self.readable.part(*copy).view(run.dtype)
            found.append(Run(run, value, (self.memory.part(*master).view(run.dtype),)))
        return found

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
