"""What the storages of replicas on GPUs have in common: one flat message an update, on each rank's own device."""

from __future__ import annotations

import abc
import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcstrat._calls.records import CallSignature, signature_of
from hpcstrat._communicators.device import DeviceCommunicator
from hpcstrat._communicators.reduction import CHUNK
from hpcstrat._core import gpu
from hpcstrat._core.call_name import current_call
from hpcstrat._core.span import COMMUNICATION, UPDATE, Details, span
from hpcstrat._core.types import Array, Bytes
from hpcstrat._memory.allocator import ALIGNMENT, SlabAllocator, gpu_memory, host_memory
from hpcstrat._memory.blocks import Block
from hpcstrat._memory.layout import PackKernel
from hpcstrat._storage.base import PART, Storage, UpdateRule, flat, host_parts
from hpcstrat._storage.chunks import ScratchBuffers
from hpcstrat._storage.marks import MarkedRange, ranges_in
from hpcstrat._storage.plan import Plan
from hpcstrat._update.rule import Norms


class Moved(NamedTuple):
    """What one broadcast brings to the ranks: the variables of one dtype.

    Attributes:
        flat: what is sent or received: the variables in place where they are contiguous, else a
            part of the message.
        parts: in the latter case, each range of the variables and its part of `flat`.
    """

    flat: Array
    parts: list[tuple[Array, Array]]


class DevicePlan(Plan):
    """A plan and the flat message of its updates, on this rank's device, with all parts of it that updates use.

    Attributes:
        message: its bytes, of which there may be more than the plan needs.
        gradients: the message by dtype.
        packings: what copies to each of these.
        updates: each range of the variables, the message's part for it, and the range of each slot.
        moved: how new values get to the other ranks.

    Args:
        memory: where the variables are that this rank updates.
        variables: their blocks.
        slots: likewise, of their slots.
        copies: where this rank reads them instead; `None` where it reads what it updates.
        chunk: elements that are updated together at most.
    """

    def __init__(
        self,
        memory: SlabAllocator,
        variables: Sequence[Block],
        slots: Sequence[Sequence[Block]],
        copies: SlabAllocator | None,
        chunk: int,
    ) -> None:
        # The message has the gaps of the memory, so that a range of variables is one range of the
        # message too.
        super().__init__(memory, variables, slots, chunk=chunk, alignment=ALIGNMENT)
        self.message: Array = None
        self.gradients: list[Array] = []
        self.packings: list[PackKernel] = []
        self.updates: list[tuple[Array, Array, tuple[Array, ...]]] = []
        self.moved: list[Moved] = []
        self.read: Plan = self
        if copies is not None:
            read = [block.copy or block for block in variables]
            self.read = Plan(copies, read, [()] * len(read), chunk=sys.maxsize, alignment=ALIGNMENT)

    @property
    def nbytes(self) -> int:
        """Bytes of the message."""
        return self.layout.nbytes

    def take(self, message: Array) -> None:
        """Makes this the message."""
        self.message = message
        self.gradients = [group.of(message) for group in self.layout.groups]
        # Kernels, views and addresses are made once for a message: a steady step only launches.
        if gpu.is_on_gpu(message):
            self.packings = [
                PackKernel(self.layout, group, message) for group in self.layout.groups
            ]
        self.updates = [
            (chunk.value, self.gradients[chunk.group][chunk.start : chunk.stop], chunk.slots)
            for chunk in self.chunks
        ]
        self.moved = []
        for index, part in enumerate(self.gradients):
            chunks = [chunk for chunk in self.read.chunks if chunk.group == index]
            if len(chunks) == 1:
                self.moved.append(Moved(chunks[0].value, []))
            else:
                self.moved.append(
                    Moved(part, [(chunk.value, part[chunk.start : chunk.stop]) for chunk in chunks])
                )

    def let_go(self) -> None:
        """Forgets the message, whose memory else lives as long as the plan."""
        self.message, self.gradients, self.packings, self.updates, self.moved = None, [], [], [], []
        self.forget_messages()


def _on_stream(name: str) -> Callable[..., Details]:
    return lambda storage, *_, **__: Details(name, None, storage.communicator.stream)


class DeviceStorage(Storage):
    """Variables of ranks of which some, or all, compute on GPUs.

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
        # Ranks on CPUs and on GPUs can be replicas of one strategy, so each has memory of its own
        # kind.
        self._read = host_memory(is_pinned=False) if stream is None else gpu_memory(stream)
        self._master = host_memory(is_pinned=True) if on_host else self._read
        self._is_apart = on_host  # what this rank updates is not what it reads
        self._updates_on_gpu = stream is not None and not on_host
        self._scratch = ScratchBuffers()
        self._message: Array = (
            None  # of all plans but those with buffers: one update comes after the other
        )
        # Weak, because plans live as long as their variables, and the storage lives longer.
        self._takers: weakref.WeakSet[DevicePlan] = weakref.WeakSet()  # that hold it
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
        # Only now, when all ranks have made it: the numbers of blocks must stay equal on all ranks.
        self._created += 1
        with self._current():
            # The parameter rank's value replaces what the other ranks passed.
            communicator.broadcast_flat((block.copy or block).array.reshape(-1), self._root)
        return block

    def _new_block(self, initial: Array) -> Block:
        """A new block with this value, on this rank."""
        block = self._master.new_block(initial.shape, initial.dtype, self._created + 1)
        fill(block.array, initial)
        if self._is_apart:
            block.copy = self._read.new_block(initial.shape, initial.dtype, self._created + 1)
            fill(block.copy.array, initial)
            # Programs on this rank compute with the copy, and never see the master.
            block.view = block.copy.view
        return block

    def plan(self, variables: Sequence[Block], slots: Sequence[Sequence[Block]]) -> DevicePlan:
        """See `Storage.plan`.

        A GPU updates a range at once, host memory in chunks that fit in cache.
        """
        return DevicePlan(
            self._master,
            variables,
            slots,
            self._read if self._is_apart else None,
            sys.maxsize if self._updates_on_gpu else CHUNK,
        )

    def write(self, block: Block, new: Array, rule: UpdateRule) -> None:
        """See `Storage.write`."""
        with self._current():
            if self._is_apart:
                if (stream := self._communicator.stream) is not None:
                    # what was written before may still be on its way to the GPU
                    stream.synchronize()
                rule.apply(block.array, gpu.to_host(new), (), block.array)
                fill(block.view, block.array)
            else:
                rule.apply(block.array, self.on_device(new), (), block.array)

    def parts(self, block: Block, start: int = 0, stop: int | None = None) -> Iterator[Bytes]:
        """See `Storage.parts`. What is on a GPU comes through pinned memory."""
        if not gpu.is_on_gpu(block.array):
            yield from host_parts(block.array, start, stop)
            return
        wanted: Array = flat(block.array)[start:stop]
        pinned = gpu.pinned(min(PART, wanted.size))
        for begin in range(0, wanted.size, PART):
            part = wanted[begin : begin + PART]
            with self._current():
                # Into pinned memory: from the GPU a copy to ordinary memory goes through a small
                # staging buffer of the driver.
                part.get(out=pinned[: part.size])
            yield pinned[: part.size]

    def _write_part(self, block: Block, start: int, part: Bytes) -> None:
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

    def _check_unchanged(self, blocks: Sequence[Block]) -> None:
        """See `Storage._check_unchanged`. CuPy cannot forbid writing."""
        with self._current():
            copies = [block.view for block in blocks]
            self._communicator.require_equal(copies, ": the copies that the ranks read")

    def _note_change(self, blocks: Sequence[Block]) -> None:
        """See `Storage._note_change`. The ranks' copies are compared with each other."""

    def make_buffers(self, plan: Plan) -> None:
        """See `Storage.make_buffers`.

        They are a message of the plan's own, which is written nowhere else.
        """
        assert isinstance(plan, DevicePlan)
        with self._communicator.raise_together(), self._current():
            message = self._zeros(plan.nbytes)
            self._communicator.exchange(plan.signature())
            # After the exchange, because a rank that had no memory has raised on all of them by
            # then.
            plan.take(message)
        plan.give_buffers([message], message)

    def _begin_sums(self, plan: Plan, places: Sequence[int]) -> bool:
        assert isinstance(plan, DevicePlan)
        communicator = self._communicator
        if not communicator.has_second_lane:
            return False
        with self._current(), communicator.beside(plan.message):
            for one in ranges_in(plan.layout, places):
                self._sum_range(plan, one)
        return True

    @abc.abstractmethod
    def _sum_range(self, plan: DevicePlan, one: MarkedRange) -> None:
        """Sums some gradients over the replicas, in place, where the update takes them from."""

    def _sum_rest(self, plan: DevicePlan) -> None:
        """Sums what was not marked, once the rest is there."""
        self._finish_sums()
        for one in ranges_in(
            plan.layout,
            [place for place in range(len(plan.blocks)) if place not in plan.marks.begun],
        ):
            self._sum_range(plan, one)

    def _finish_sums(self) -> None:
        self._communicator.join()

    def _zeros(self, nbytes: int) -> Array:
        stream = self._communicator.stream
        return (np if stream is None else stream.xp).zeros(nbytes, np.uint8)

    def _require_message(self, plan: DevicePlan) -> None:
        if plan.buffers is not None:
            return
        if self._message is None or self._message.size < plan.nbytes:
            # Plans hold views of the message, and so its memory: they let go of it before a larger
            # one is allocated, or the GPU would need room for both.
            for other in self._takers:  # which may never be used again
                other.let_go()
            self._takers.clear()
            self._message = None  # so that its memory can be used for the larger one
            self._message = self._zeros(plan.nbytes)
        if plan.message is not self._message:
            plan.take(self._message)
            self._takers.add(plan)

    def _begin(
        self,
        signature: CallSignature,
        plan: DevicePlan,
        values: Sequence[Array] | None,
        is_reduced: bool,
    ) -> list[Array]:
        """Brings the values together, and agrees on the update: what fails here on one rank, all ranks raise.

        Returns:
            For each dtype where this rank's numbers are, one behind the other: a part of the
            message or, where they are reduced, what was passed.
        """
        with self._communicator.raise_together():
            sources = self._packed(plan, values, is_reduced)
            self._communicator.exchange(signature)
        return sources

    @span(COMMUNICATION, _on_stream("pack"))
    def _packed(
        self, plan: DevicePlan, values: Sequence[Array] | None, is_reduced: bool
    ) -> list[Array]:
        stream = self._communicator.stream
        self._require_message(plan)
        if values is None:
            return plan.gradients
        if (
            plan.buffers is not None
        ):  # which are the message: those that are passed in another order lie in it
            values = [value.copy() if _lies_in(value, plan.message) else value for value in values]
        if stream is None:
            plan.write(plan.message, values)
            return plan.gradients
        arrays = [stream.here(array) for array in plan.in_order(values)]
        sources = list(plan.gradients)
        for index, group in enumerate(plan.layout.groups):
            for i in group.members:
                # The packing kernel copies words, and converts nothing.
                if arrays[i].dtype != group.dtype:
                    arrays[i] = arrays[i].astype(group.dtype)
            first = arrays[group.members[0]]
            # A single gradient is its own message: NCCL reads it where it is, and the copy is
            # saved.
            if is_reduced and len(group.members) == 1 and first.flags.c_contiguous:
                sources[index] = first
            else:
                plan.packings[index](arrays)
        return sources

    @span(UPDATE, _on_stream("update"))
    def _apply(self, plan: DevicePlan, rule: UpdateRule) -> None:
        """Updates what this rank holds by the gradients, or new values, in the plan's message."""
        if not self._updates_on_gpu:
            plan.apply(rule, [self._host_message(plan)], self._scratch, share=self._share)
        elif rule.norms is not None:
            self._apply_with_norms(plan, rule.norms)
        else:
            for value, gradient, slots in plan.updates:
                rule.on_gpu(value, gradient, slots)

    def _apply_with_norms(self, plan: DevicePlan, norms: Norms) -> None:
        """The host waits once, for the norms of all variables: what is computed of them it passes to kernels."""
        variables = []
        for cut in plan.cuts:  # each all that is here of a variable: a GPU's plan has no chunks
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
        found = np.sqrt(self._share(gpu.to_host(sums))).tolist()
        for variable, value, gradient, slots in variables:
            norms.bound(found[variable]).on_gpu(value, gradient, slots)

    def _share(self, sums: Array) -> Array:
        """The sums over all of each variable, of those over this rank's part."""
        return sums

    def _host_message(self, plan: DevicePlan) -> Any:
        if not self._is_apart:
            return plan.message
        nbytes = plan.layout.nbytes
        if self._pinned.size < nbytes:
            self._pinned = gpu.pinned(nbytes)
        plan.message[:nbytes].get(
            out=self._pinned[:nbytes]
        )  # waits for what the stream does before
        return self._pinned


def _lies_in(array: Array, memory: Array) -> bool:
    """Whether an array may share memory with another one; on a GPU and on the host it does not."""
    return gpu.is_on_gpu(array) is gpu.is_on_gpu(memory) and bool(
        gpu.array_module(array).may_share_memory(array, memory)
    )


def fill(array: Array, value: Array) -> None:
    """Writes `value`, of the same shape and dtype, to an array; each may be on the host or on a GPU."""
    if not gpu.is_on_gpu(array):
        array[...] = gpu.to_host(value)
    elif gpu.is_on_gpu(value):
        array[...] = value
    else:
        array.set(np.ascontiguousarray(value).reshape(array.shape))
