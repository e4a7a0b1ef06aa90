"""What the storages of replicas on GPUs have in common: one flat message an update, on each rank's own device."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hpcstrat import _gpu
from hpcstrat._communicators.base import Array
from hpcstrat._communicators.device import DeviceCommunicator
from hpcstrat._communicators.pack import pack
from hpcstrat._communicators.records import Signature, signature
from hpcstrat._communicators.reduction import CHUNK
from hpcstrat._storage.base import PART, Bytes, Rule, Storage, flat, host_parts
from hpcstrat._storage.memory import Block
from hpcstrat._storage.plan import Plan, Scratch
from hpcstrat._storage.slabs import ALIGNMENT, SlabMemory, gpu_memory, host_memory


class DevicePlan(Plan):
    """A plan with the flat message of its updates, which lies on this rank's device and is kept.

    Args:
        memory: where the variables are that this rank updates.
        variables: their blocks.
        slots: likewise, of their slots.
        copies: where this rank reads them instead; `None` where it reads what it updates.
        chunk: elements that are updated together at most.
    """

    def __init__(
        self,
        memory: SlabMemory,
        variables: Sequence[Block],
        slots: Sequence[Sequence[Block]],
        copies: SlabMemory | None,
        chunk: int,
    ) -> None:
        super().__init__(memory, variables, slots, chunk=chunk, alignment=ALIGNMENT)
        self.message: Array = None
        self.read: Plan = self
        if copies is not None:
            read = [block.copy or block for block in variables]
            self.read = Plan(copies, read, [()] * len(read), chunk=sys.maxsize, alignment=ALIGNMENT)


class DeviceStorage(Storage):
    """Variables of ranks of which some, or all, compute on GPUs. Every rank reads them on its own device.

    Args:
        communicator: the ranks.
        root: the parameter rank, whose initial values count.
        on_host: whether this rank updates variables in host memory though it computes on a GPU.
    """

    def __init__(self, communicator: DeviceCommunicator, root: int, on_host: bool = False) -> None:
        self._communicator = communicator
        self._root = root
        self._is_root = communicator.rank == root
        stream = communicator.stream
        self._read = host_memory(is_pinned=False) if stream is None else gpu_memory(stream)
        self._master = host_memory(is_pinned=True) if on_host else self._read
        self._is_apart = on_host  # what this rank updates is not what it reads
        self._updates_on_gpu = stream is not None and not on_host
        self._scratch = Scratch()
        self._pinned: Array = np.empty(0, np.uint8)
        self._created = 0

    @property
    def communicator(self) -> DeviceCommunicator:
        """See `Storage.communicator`."""
        return self._communicator

    def _current(self) -> contextlib.AbstractContextManager[None]:
        """In this context the stream of the strategy is the current one, on a GPU."""
        stream = self._communicator.stream
        return contextlib.nullcontext() if stream is None else stream.current()

    def on_device(self, array: Array) -> Array:
        """`array` on this rank's device, copied there if it is elsewhere."""
        stream = self._communicator.stream
        return _gpu.to_host(array) if stream is None else stream.xp.asarray(array)

    # ---- variables

    def _create(self, call: str, initial: Array) -> Block:
        communicator = self._communicator
        with communicator.joint(call), self._current():
            block = self._place(initial)
            communicator.exchange(signature(call, initial.dtype, initial.shape))
        self._created += 1
        with self._current():
            communicator.broadcast_flat((block.copy or block).array.reshape(-1), self._root)
        return block

    def _place(self, initial: Array) -> Block:
        """A new block with this value, on this rank."""
        block = self._master.place(initial.shape, initial.dtype, self._created + 1)
        fill(block.array, initial)
        if self._is_apart:
            block.copy = self._read.place(initial.shape, initial.dtype, self._created + 1)
            fill(block.copy.array, initial)
            block.view = block.copy.view
        return block

    def plan(self, variables: Sequence[Block], slots: Sequence[Sequence[Block]]) -> DevicePlan:
        """See `Storage.plan`. A GPU updates a range at once, host memory in chunks that fit in cache."""
        return DevicePlan(
            self._master,
            variables,
            slots,
            self._read if self._is_apart else None,
            sys.maxsize if self._updates_on_gpu else CHUNK,
        )

    def write(self, block: Block, new: Array, rule: Rule) -> None:
        """See `Storage.write`."""
        with self._current():
            if self._is_apart:
                if (stream := self._communicator.stream) is not None:
                    stream.synchronize()  # what was written before may still be on its way to the GPU
                rule.apply(block.array, _gpu.to_host(new), (), block.array)
                fill(block.view, block.array)
            else:
                rule.apply(block.array, self.on_device(new), (), block.array)

    def parts(self, block: Block) -> Iterator[Bytes]:
        """See `Storage.parts`. What is on a GPU comes through pinned memory."""
        if not _gpu.is_on_gpu(block.array):
            yield from host_parts(block.array)
            return
        everything: Array = flat(block.array)
        pinned = _gpu.pinned(min(PART, everything.size))
        for start in range(0, everything.size, PART):
            part = everything[start : start + PART]
            with self._current():
                part.get(out=pinned[: part.size])
            yield pinned[: part.size]

    def write_part(self, block: Block, start: int, part: Bytes) -> None:
        """See `Storage.write_part`."""
        blocks = [block] if block.copy is None else [block, block.copy]
        with self._current():
            if (stream := self._communicator.stream) is not None:
                stream.synchronize()  # what was written before may still be on its way to the GPU
            for one in blocks:
                fill(flat(one.array)[start : start + part.size], part)
            if stream is not None:
                stream.synchronize()  # the caller may change `part`

    def has(self, array: Array) -> bool:
        """See `Storage.has`."""
        return self._read.has(array)

    # ---- updates

    def _check_copies(self, call: str, plan: Plan) -> None:
        """See `Storage._check_copies`. CuPy cannot forbid writing."""
        assert isinstance(plan, DevicePlan)
        with self._current():
            copies = [block.view for block in plan.blocks]
            self._communicator.require_equal(f"{call}: the copies that the ranks read", copies)

    def make_buffers(self, call: str, plan: Plan) -> None:
        """See `Storage.make_buffers`. They are the plan's message, which is written nowhere else."""
        assert isinstance(plan, DevicePlan)
        with self._communicator.joint(call), self._current():
            self._make_message(plan)
            self._communicator.exchange(plan.signature(call, None, ()))
        plan.buffers = plan.arranged(plan.message)

    def _make_message(self, plan: DevicePlan) -> None:
        if plan.message is None:
            stream = self._communicator.stream
            # The padding between variables is updated with them: it holds zeros, which stay finite.
            plan.message = (np if stream is None else stream.xp).zeros(plan.form.nbytes, np.uint8)

    def _begin(self, agreed: Signature, plan: DevicePlan, values: Sequence[Array] | None) -> None:
        """Packs the values, and agrees on the update: what fails here on one rank, all ranks raise."""
        with self._communicator.joint(agreed.call):
            self._pack(plan, values)
            self._communicator.exchange(agreed)

    def _pack(self, plan: DevicePlan, values: Sequence[Array] | None) -> None:
        """Copies the values to the plan's message, cast where they are of another dtype."""
        stream = self._communicator.stream
        self._make_message(plan)
        if values is None:
            return
        if plan.buffers is not None:  # which are the message: those that are passed in another order lie in it
            values = [value.copy() if _lies_in(value, plan.message) else value for value in values]
        if stream is None:
            plan.write(plan.message, values)
            return
        arrays = plan.in_order(values)
        for group in plan.form.groups:
            for i in group.members:
                if arrays[i].dtype != group.dtype or not _gpu.is_on_gpu(arrays[i]):
                    arrays[i] = self.on_device(arrays[i]).astype(group.dtype, copy=False)
            pack(plan.form, group, arrays, plan.message)

    def _apply(self, plan: DevicePlan, rule: Rule) -> None:
        """Updates what this rank holds by the gradients, or new values, in the plan's message."""
        if self._updates_on_gpu:
            flat = [group.of(plan.message) for group in plan.form.groups]
            for chunk in plan.chunks:
                rule.on_gpu(chunk.value, flat[chunk.group][chunk.start : chunk.stop], chunk.slots)
            return
        message = self._host_message(plan)
        for value, slots, (part,), gradient, work in plan.pieces([message], self._scratch):
            gradient[...] = part
            rule.apply(value, gradient, slots, work)

    def _host_message(self, plan: DevicePlan) -> Any:
        if not self._is_apart:
            return plan.message
        if self._pinned.size != plan.form.nbytes:
            self._pinned = _gpu.pinned(plan.form.nbytes)
        plan.message.get(out=self._pinned)  # waits for what the stream does before
        return self._pinned


def _lies_in(array: Array, memory: Array) -> bool:
    """Whether an array may share memory with another one; on a GPU and on the host it does not."""
    return _gpu.is_on_gpu(array) is _gpu.is_on_gpu(memory) and bool(
        _gpu.array_module(array).may_share_memory(array, memory)
    )


def fill(array: Array, value: Array) -> None:
    """Writes `value`, of the same shape and dtype, to an array; each may be on the host or on a GPU."""
    if not _gpu.is_on_gpu(array):
        array[...] = _gpu.to_host(value)
    elif _gpu.is_on_gpu(value):
        array[...] = value
    else:
        array.set(np.ascontiguousarray(value).reshape(array.shape))
