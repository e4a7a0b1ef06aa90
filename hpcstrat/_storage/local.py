"""This rank's access to the blocks of variables, on a host or a GPU. Nothing here is collective."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, final

import numpy as np

from hpcstrat._communicators.base import Write
from hpcstrat._core import gpu
from hpcstrat._core.types import Array, Bytes
from hpcstrat._memory.allocator import (
    ALIGNMENT,
    Block,
    PrivateMemory,
    SlabAllocator,
    gpu_memory,
    host_memory,
)
from hpcstrat._memory.intervals import Interval, Shard, merge
from hpcstrat._memory.segment import Segment
from hpcstrat._process import settings
from hpcstrat._storage.order import MessageOrder
from hpcstrat._update import compiled
from hpcstrat._update.device_update import DeviceUpdate, prepare_on_gpu
from hpcstrat._update.host_update import HostUpdate, Scratch
from hpcstrat._update.rule import UpdateRule
from hpcstrat._update.update import AddUp, Update, runs_in_memory

# A model that fills the memory can still be saved and restored, because at most one part of it is
# in memory twice.
PART = 1 << 22
"""The most bytes of a block that are read or written at once."""

BlockMemory: TypeAlias = PrivateMemory | SlabAllocator | Segment


class LocalBlocks:
    """A rank's blocks, and its updates of them: here in the memory of a host.

    Args:
        rank: this rank.
        memory: returns what updates change, which it makes when it is first called.
        shares_loops: whether all ranks of this host make the same updates at the same time.

    Attributes:
        stream: the strategy's stream; `None` on a CPU.
        xp: the array module of this rank's device.
        current: makes a block in which the strategy's stream is current, on a GPU.
        here: returns an array on this rank's device, copied there if it is elsewhere.
    """

    def __init__(
        self, rank: int, memory: Callable[[], BlockMemory], shares_loops: bool = False
    ) -> None:
        self._rank = rank
        self._shares_loops = shares_loops
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
        """Changes a variable by an array of its shape, and a rule without a kernel."""
        block.checksum = None
        host = new if type(new) is np.ndarray else gpu.to_host(new)  # mostly it is one
        rule.assign(block.array, host)

    def write_part(self, block: Block, start: int, part: Bytes) -> None:
        """Writes host bytes to a block, from its byte `start` on."""
        if part.size:
            self._write_part(block, start, part)

    def _write_part(self, block: Block, start: int, part: Bytes) -> None:
        block.checksum = None
        flat(block.array)[start : start + part.size] = part

    def parts(self, block: Block, start: int = 0, stop: int | None = None) -> Iterator[Bytes]:
        """The bytes of a block, in host memory.

        At most `PART` of them come at once, read-only by convention and valid until the next.
        """
        return host_parts(block.array, start, stop)

    # ---- updates

    def new_update(self, order: MessageOrder, shards: Sequence[Shard]) -> Update:
        """The update of this rank's shards of some variables."""
        is_large = sum(order.layout.sizes) >= compiled.FEWEST
        after = 0 if is_large else compiled.FEWEST_UPDATES
        after = after if self._compiles else math.inf
        return HostUpdate(
            self.memory.part, shards, self._scratch, self._rank, after, self._shares_loops
        )

    def prepare_rows(self, rule: UpdateRule, variable: Block) -> None:
        """Does `Update.prepare` for updates of rows."""
        return

    def zeros(self, nbytes: int) -> Array:
        """New memory for messages, on this rank's device."""
        return self.xp.zeros(nbytes, np.uint8)

    def to_read(self, order: MessageOrder) -> list[list[tuple[Interval, Array]]]:
        """What programs read on this rank of some variables.

        Returns:
            For each dtype, the elements of the message and the same in memory, flat; one pair for
            what is contiguous in both.
        """
        layout, found = order.layout, []
        for group in layout.groups:
            places = [(layout.bytes_of(i), readable_of(order.blocks[i])) for i in group.members]
            of_dtype = [
                (group.within(message), self.readable.part(*memory).view(group.dtype))
                for _, (message, memory) in merge(places, ALIGNMENT)
            ]
            found.append(of_dtype)
        return found


def readable_of(block: Block) -> Interval:
    """The bytes of a block, or of its copy, in the memory that programs read."""
    return (block.copy or block).memory


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

    def new_block(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Block:
        """See `LocalBlocks.new_block`."""
        self._stream.require_eager("a new variable, or an optimizer's first step,")
        return super().new_block(shape, dtype)

    def zeros(self, nbytes: int) -> Array:
        """See `LocalBlocks.zeros`."""
        self._stream.require_eager("memory for a larger message")
        return super().zeros(nbytes)

    def new_update(self, order: MessageOrder, shards: Sequence[Shard]) -> Update:
        """An update of whole runs, each by one kernel."""
        part = self.memory.part
        return DeviceUpdate(lambda alone: runs_in_memory(part, shards, alone, ALIGNMENT), shards)

    def prepare_rows(self, rule: UpdateRule, variable: Block) -> None:
        """See `LocalBlocks.prepare_rows`."""
        if variable.copy is None:  # else they are updated on the host
            with self.current():
                prepare_on_gpu(rule, variable.array.dtype)

    def write(self, block: Block, new: Array, rule: UpdateRule) -> None:
        """See `LocalBlocks.write`."""
        with self.current():
            if self._stream.capture is not None:
                self._stream.capture.keep(block)
            rule.assign(block.array, self.here(new))

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

    parts = LocalBlocks.parts

    def new_update(self, order: MessageOrder, shards: Sequence[Shard]) -> Update:
        """An update on the host, and of the copies."""
        places = [(readable_of(block), block.memory) for block in order.blocks]
        # Variables that lie in a row in both memories are copied by one call.
        copies = [
            (self.readable.part(*copy), self.memory.part(*master))
            for _, (copy, master) in merge(places, ALIGNMENT)
        ]
        return UpdateOfCopies(LocalBlocks.new_update(self, order, shards), copies, self._to_pinned)

    def _to_pinned(self, message: Array) -> Array:
        """Copies a message to host memory that all updates use. Waits for it."""
        if self._pinned.size < message.size:
            self._pinned = gpu.allocate_pinned(message.size)
        message.get(out=self._pinned[: message.size])  # blocks until the copy is complete
        return self._pinned

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
            rule.assign(block.array, gpu.to_host(new))
            fill(block.view, block.array)


@final
class UpdateOfCopies(Update):
    """An update in host memory by a message on a GPU, where programs read copies.

    Args:
        on_host: the update of the master copies.
        copies: the bytes of the copies and of the masters.
        to_host: returns a message in host memory.
    """

    def __init__(
        self,
        on_host: Update,
        copies: Sequence[tuple[Array, Array]],
        to_host: Callable[[Array], Array],
    ) -> None:
        self._on_host = on_host
        self._copies = copies
        self._to_host = to_host

    def forget_messages(self) -> None:
        """See `Update.forget_messages`."""
        self._on_host.forget_messages()

    def run(
        self, rule: UpdateRule, messages: Sequence[Array], *, add_up: AddUp | None = None
    ) -> None:
        """See `Update.run`."""
        self._on_host.run(rule, [*map(self._to_host, messages)], add_up=add_up)
        for copy, master in self._copies:
            fill(copy, master)
