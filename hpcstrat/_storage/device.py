"""Common parts of storage on GPUs: one flat message per update, on each rank's own device."""

from __future__ import annotations

import abc
import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hpcstrat._calls.records import CallSignature, signature_of
from hpcstrat._communicators.device import DeviceCommunicator
from hpcstrat._communicators.reduction import CHUNK
from hpcstrat._core import gpu
from hpcstrat._core.call_name import current_call
from hpcstrat._core.span import COMMUNICATION, UPDATE, Details, span
from hpcstrat._core.types import Array, Bytes
from hpcstrat._memory.allocator import gpu_memory, host_memory
from hpcstrat._memory.blocks import Block
from hpcstrat._storage.base import PART, Storage, UpdateRule, flat, host_parts
from hpcstrat._storage.chunks import ScratchBuffers
from hpcstrat._storage.device_plan import DevicePlan
from hpcstrat._storage.marks import MarkedRange, ranges_in
from hpcstrat._storage.plan import Plan
from hpcstrat._update.rule import Norms


def _on_stream(name: str) -> Callable[..., Details]:
    return lambda storage, *_, **__: Details(name, None, storage.communicator.stream)


class DeviceStorage(Storage):
    """Variables of ranks some or all of which compute on GPUs.

    Every rank reads them on its own device.

    Args:
        communicator: the ranks.
        root: the parameter rank, whose initial values count.
        on_host: whether this rank updates variables in host memory though it computes on a GPU.
    """

    def __init__(self, communicator: DeviceCommunicator, root: int, on_host: bool = False) -> None:
        super().__init__(communicator)
        self._communicator = communicator
        self._root = root
        self._is_root = communicator.rank == root
        stream = communicator.stream
        # Ranks on CPUs and on GPUs can be replicas of one strategy, so memory is chosen per rank.
        self._read = host_memory(is_pinned=False) if stream is None else gpu_memory(stream)
        self._master = host_memory(is_pinned=True) if on_host else self._read
        self._reads_copies = on_host  # this rank reads copies of the variables that it updates
        self._updates_on_gpu = stream is not None and not on_host
        self._scratch = ScratchBuffers()
        # Shared by all plans without buffers: updates come one after the other.
        self._message: Array = None
        # The plans that hold it. Weak, because the storage outlives variables and their plans.
        self._message_plans: weakref.WeakSet[DevicePlan] = weakref.WeakSet()
        self._pinned: Array = np.empty(0, np.uint8)
        self._created = 0

    @property
    def communicator(self) -> DeviceCommunicator:
        """The ranks that share the variables."""
        return self._communicator

    def _current(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the strategy's stream is the current stream, on a GPU."""
        stream = self._communicator.stream
        return contextlib.nullcontext() if stream is None else stream.current()

    def on_device(self, array: Array) -> Array:
        """`array` on this rank's device, copied there if it is elsewhere."""
        stream = self._communicator.stream
        return gpu.to_host(array) if stream is None else stream.here(array)

    # ---- variables

    def _create(self, initial: Array) -> Block:
        communicator = self._communicator
        with communicator.raise_together(), self._current():
            initial = self.on_device(initial) if gpu.is_on_gpu(initial) else initial
            block = self._new_block(initial)
            communicator.exchange(
                signature_of(current_call(), (initial.dtype, initial.shape, self._number))
            )
        # Counted after all ranks have made it: the numbers of blocks must stay equal on all ranks.
        self._created += 1
        with self._current():
            # The parameter rank's value replaces the other ranks' values.
            communicator.broadcast_flat((block.copy or block).array.reshape(-1), self._root)
        return block

    def _new_block(self, initial: Array) -> Block:
        """A new block with this value, on this rank."""
        block = self._master.new_block(initial.shape, initial.dtype, self._created + 1)
        fill(block.array, initial)
        if self._reads_copies:
            block.copy = self._read.new_block(initial.shape, initial.dtype, self._created + 1)
            fill(block.copy.array, initial)
            # Programs on this rank compute with the copy, never with the master.
            block.view = block.copy.view
        return block

    def plan(self, variables: Sequence[Block], slots: Sequence[Sequence[Block]]) -> DevicePlan:
        """The plan of updates: whole ranges on a GPU, chunks that fit in cache in host memory."""
        return DevicePlan(
            self._master,
            variables,
            slots,
            self._read if self._reads_copies else None,
            sys.maxsize if self._updates_on_gpu else CHUNK,
        )

    def write(self, block: Block, new: Array, rule: UpdateRule) -> None:
        """Changes the variable, and its copy, on this rank's device."""
        with self._current():
            if self._reads_copies:
                if (stream := self._communicator.stream) is not None:
                    # An earlier write may still be on its way to the GPU.
                    stream.synchronize()
                rule.apply(block.array, gpu.to_host(new), (), block.array)
                fill(block.view, block.array)
            else:
                rule.apply(block.array, self.on_device(new), (), block.array)

    def parts(self, block: Block, start: int = 0, stop: int | None = None) -> Iterator[Bytes]:
        """The bytes of a block, from a GPU through pinned memory."""
        if not gpu.is_on_gpu(block.array):
            yield from host_parts(block.array, start, stop)
            return
        wanted: Array = flat(block.array)[start:stop]
        pinned = gpu.allocate_pinned(min(PART, wanted.size))
        for first in range(0, wanted.size, PART):
            part = wanted[first : first + PART]
            with self._current():
                # Into pinned memory: a copy from the GPU to ordinary memory goes through a small
                # staging buffer of the driver.
                part.get(out=pinned[: part.size])
            yield pinned[: part.size]

    def _write_part(self, block: Block, start: int, part: Bytes) -> None:
        blocks = [block] if block.copy is None else [block, block.copy]
        with self._current():
            if (stream := self._communicator.stream) is not None:
                stream.synchronize()  # an earlier write may still be on its way to the GPU
            for target in blocks:
                fill(flat(target.array)[start : start + part.size], part)
            if stream is not None:
                stream.synchronize()  # the caller may change `part`

    def has(self, array: Array) -> bool:
        """Whether an array is in the memory that this rank reads."""
        return self._read.has(array)

    # ---- updates

    def _check_unchanged(self, blocks: Sequence[Block]) -> None:
        """Compares the ranks' copies with each other, because CuPy cannot forbid writing."""
        with self._current():
            copies = [block.view for block in blocks]
            self._communicator.require_equal(copies, ": the copies that the ranks read")

    def _note_change(self, blocks: Sequence[Block]) -> None:
        """Does nothing: `_check_unchanged` needs no notes."""

    def make_buffers(self, plan: Plan) -> None:
        """Gives the plan a message that only its buffers write to."""
        assert isinstance(plan, DevicePlan)
        with self._communicator.raise_together(), self._current():
            message = self._zeros(plan.nbytes)
            self._communicator.exchange(plan.signature())
            # After the exchange, when a rank without enough memory would have raised on all ranks.
            plan.take(message)
        plan.give_buffers([message], message)

    def _start_sums(self, plan: Plan, places: Sequence[int]) -> bool:
        assert isinstance(plan, DevicePlan)
        communicator = self._communicator
        if not communicator.has_side_stream:
            return False
        with self._current(), communicator.side_stream(plan.message):
            for marked in ranges_in(plan.layout, places):
                self._sum_range(plan, marked)
        return True

    @abc.abstractmethod
    def _sum_range(self, plan: DevicePlan, marked: MarkedRange) -> None:
        """Sums some gradients over the replicas, in place, where the update reads them."""

    def _sum_rest(self, plan: DevicePlan) -> None:
        """Waits for the sums of marked gradients, and sums the others."""
        self._finish_sums()
        rest = [place for place in range(len(plan.blocks)) if place not in plan.marks.started]
        for unmarked in ranges_in(plan.layout, rest):
            self._sum_range(plan, unmarked)

    def _finish_sums(self) -> None:
        self._communicator.join_side_stream()

    def _zeros(self, nbytes: int) -> Array:
        stream = self._communicator.stream
        return (np if stream is None else stream.xp).zeros(nbytes, np.uint8)

    def _require_message(self, plan: DevicePlan) -> None:
        if plan.buffers is not None:
            return
        if self._message is None or self._message.size < plan.nbytes:
            # Plans hold views of the message, and so its memory. They drop it before a larger
            # message is allocated, or the GPU would need room for both.
            for other in self._message_plans:
                other.forget_message()
            self._message_plans.clear()
            self._message = None  # freed first
            self._message = self._zeros(plan.nbytes)
        if plan.message is not self._message:
            plan.take(self._message)
            self._message_plans.add(plan)

    def _pack_and_agree(
        self,
        signature: CallSignature,
        plan: DevicePlan,
        values: Sequence[Array] | None,
        is_reduced: bool,
    ) -> list[Array]:
        """Packs the values and agrees on the update; an error on one rank is raised on all.

        Returns:
            For each dtype the flat array with this rank's values: a part of the message or, where
            they are reduced, the array that was passed.
        """
        with self._communicator.raise_together():
            sources = self._pack(plan, values, is_reduced)
            self._communicator.exchange(signature)
        return sources

    @span(COMMUNICATION, _on_stream("pack"))
    def _pack(
        self, plan: DevicePlan, values: Sequence[Array] | None, is_reduced: bool
    ) -> list[Array]:
        stream = self._communicator.stream
        self._require_message(plan)
        if values is None:
            return plan.gradients
        # Buffers are in the message, which would be overwritten where the order is another.
        if plan.buffers is not None:
            values = [
                value.copy() if _may_overlap(value, plan.message) else value for value in values
            ]
        if stream is None:
            plan.write(plan.message, values)
            return plan.gradients
        arrays = [stream.here(array) for array in plan.to_message_order(values)]
        sources = list(plan.gradients)
        for index, group in enumerate(plan.layout.groups):
            for i in group.members:
                # The packing kernel copies words, and converts nothing.
                if arrays[i].dtype != group.dtype:
                    arrays[i] = arrays[i].astype(group.dtype)
            first = arrays[group.members[0]]
            # A single gradient is its own message: NCCL reads it in place, which saves the copy.
            if is_reduced and len(group.members) == 1 and first.flags.c_contiguous:
                sources[index] = first
            else:
                plan.packings[index](arrays)
        return sources

    # Packing, NCCL's calls and the kernels of an update are queued on the strategy's stream in this
    # order, so kernels that read the message need not wait for it. Work elsewhere must:
    # - marked gradients are summed on the side stream; `_sum_rest` makes the strategy's stream wait
    #   for it before the rest is queued;
    # - an update in host memory reads the message on the host; `_host_message` copies it there as
    #   the last call on the stream, and blocks until the copy is complete.
    @span(UPDATE, _on_stream("update"))
    def _apply(self, plan: DevicePlan, rule: UpdateRule) -> None:
        """Updates this rank's variables by the gradients, or new values, in the plan's message."""
        if not self._updates_on_gpu:
            plan.apply(rule, [self._host_message(plan)], self._scratch, share=self._share)
        elif rule.norms is not None:
            self._apply_with_norms(plan, rule.norms)
        else:
            for value, gradient, slots in plan.updates:
                rule.on_gpu(value, gradient, slots)

    def _apply_with_norms(self, plan: DevicePlan, norms: Norms) -> None:
        """Updates with norms; the host waits once, for the norms of all variables."""
        variables = []
        # A cut is all that this rank has of a variable: on a GPU, chunks are whole ranges.
        for cut in plan.cuts:
            value, gradient, slots = plan.updates[cut.chunk]
            here = slice(cut.start, cut.stop)
            variables.append(
                (cut.variable, value[here], gradient[here], [slot[here] for slot in slots])
            )
        # All norms in one array: each copy to the host waits for the stream.
        sums = (
            self._zeros(8 * len(plan.blocks) * norms.size).view(np.float64).reshape(-1, norms.size)
        )
        for variable, value, gradient, slots in variables:
            norms.sums_on_gpu(value, gradient, slots, sums[variable])
        roots = np.sqrt(self._share(gpu.to_host(sums))).tolist()
        for variable, value, gradient, slots in variables:
            norms.rule_with(roots[variable]).on_gpu(value, gradient, slots)

    def _share(self, sums: Array) -> Array:
        """The sums over whole variables, from the sums over this rank's parts."""
        return sums

    def _host_message(self, plan: DevicePlan) -> Any:
        if not self._reads_copies:
            return plan.message
        nbytes = plan.layout.nbytes
        if self._pinned.size < nbytes:
            self._pinned = gpu.allocate_pinned(nbytes)
        plan.message[:nbytes].get(out=self._pinned[:nbytes])  # blocks until the copy is complete
        return self._pinned


def _may_overlap(array: Array, memory: Array) -> bool:
    """Whether two arrays may share memory; one on a GPU and one on the host never do."""
    return gpu.is_on_gpu(array) is gpu.is_on_gpu(memory) and bool(
        gpu.array_module(array).may_share_memory(array, memory)
    )


def fill(array: Array, value: Array) -> None:
    """Writes `value`, of the same shape and dtype, to an array; each may be on host or GPU."""
    if not gpu.is_on_gpu(array):
        array[...] = gpu.to_host(value)
    elif gpu.is_on_gpu(value):
        array[...] = value
    else:
        array.set(np.ascontiguousarray(value).reshape(array.shape))
