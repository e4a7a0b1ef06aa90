"""Storage on GPUs: one flat message per update, on each rank's own GPU."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from hpcstrat._agreement.records import CallSignature, signature_of
from hpcstrat._core import gpu
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import FIRST_REPLICA, Aggregation, Array, ReduceOp
from hpcstrat._memory.blocks import Block
from hpcstrat._memory.intervals import ByteRange
from hpcstrat._memory.shards import merge
from hpcstrat._memory.slabs import GPU_ALIGNMENT, Slab, Slabs, allocate_on_gpu, part
from hpcstrat._storage.base import Storage
from hpcstrat._storage.gpu_plan import GpuPlan, MessageMemory
from hpcstrat._storage.order import MessageOrder
from hpcstrat._storage.parts import fill
from hpcstrat._storage.plan import Buffers, Plan
from hpcstrat._transports.device import DeviceCommunicator
from hpcstrat._update.device_update import DeviceUpdate, prepare_on_gpu
from hpcstrat._update.formula import Kernel
from hpcstrat._update.rows import update_rows
from hpcstrat._update.rule import UpdateRule
from hpcstrat._update.update import runs_in_memory

_SMALLEST = 1 << 25  # of slabs


# Packing, NCCL's calls and the kernels of an update are queued on the strategy's stream in this
# order, so kernels that read the message need not wait for it, and the host does not wait either:
# the next step's Python code runs while the GPU works.
@final
class GpuStorage(Storage):
    """Each rank reads variables on its own GPU.

    An update: each rank packs its gradients into one flat message; one group of NCCL's calls sums
    them, on all ranks or on the parameter rank; there a kernel updates each run of variables. Where
    only the parameter rank updates, and has the slots, one group of broadcasts follows. All of it
    is queued on the strategy's stream, and the host does not wait. Where every rank updates its
    copy, the same steps on the same sums keep the copies equal.

    Args:
        communicator: the ranks.
        root: the parameter rank; `None` if every rank updates its copy.
    """

    communicator: DeviceCommunicator
    stream: gpu.Stream

    def __init__(self, communicator: DeviceCommunicator, root: int | None = None) -> None:
        super().__init__(communicator, communicator.stream)
        self._root = root
        self.is_central = root is not None
        self.has_all_slots = root is None
        self.writes_here = root in (None, communicator.rank)
        self.copies = communicator.size if root is None else 1
        stream = communicator.stream
        self._variables = Slabs(self._allocate_together, _SMALLEST, alignment=GPU_ALIGNMENT)
        # What other ranks have none of, or elsewhere.
        allocate = functools.partial(allocate_on_gpu, stream)
        self._others = Slabs(allocate, _SMALLEST, alignment=GPU_ALIGNMENT)
        self._messages = MessageMemory(stream)
        self._prepared: set[tuple[Kernel | None, np.dtype[Any]]] = set()  # for updates of rows

    # ---- blocks

    def _create(self, initial: Array, per_replica: bool) -> Block:
        communicator, stream = self.communicator, self.stream
        with stream.current():
            with communicator.raise_together():
                stream.refuse_in_graph("a new variable, or an optimizer's first step,")
                slabs = self._others if per_replica else self._variables
                block = slabs.new_block(initial.shape, initial.dtype)
                fill(block.array, stream.here(initial) if gpu.is_on_gpu(initial) else initial)
                communicator.exchange(signature_of(f"{current_call()}: memory"))
            # The parameter rank's value replaces the other ranks' values.
            communicator.broadcast_flat(block.array.reshape(-1), self._root or 0)
        return block

    def _create_slot(self, variable: Block, value: float) -> Block:
        array, stream = variable.array, self.stream
        with self.communicator.raise_together(), stream.current():
            stream.refuse_in_graph("a new variable, or an optimizer's first step,")
            if self.writes_here:
                block = self._others.new_block(array.shape, array.dtype)
                block.array.fill(np.array(value, array.dtype))
            else:
                # A number, so that all ranks count the same, but no memory: slots are as large as
                # the model.
                empty = stream.xp.zeros(0, np.uint8)
                block = Block(empty, ByteRange(0, 0), None, (0,), array.dtype)
            self.communicator.exchange(signature_of(f"{current_call()}: memory"))
        return block

    def _allocate_together(self, least: int, wanted: int) -> Slab:
        """A slab of the same size on all ranks: variables have the same places. Collective.

        The size is what rank 0 wants: others may not have collected the same garbage.
        """
        wanted = self.communicator.control.broadcast_obj(wanted, 0)
        try:
            return self._allocate_equal(wanted)
        except MemoryError:
            if wanted == least:
                raise
        return self._allocate_equal(least)  # the ranks that had the larger slab have freed it

    def _allocate_equal(self, nbytes: int) -> Slab:
        communicator = self.communicator
        with communicator.raise_together():
            slab = allocate_on_gpu(self.stream, nbytes, nbytes)
            communicator.exchange(signature_of(f"{current_call()}: memory", nbytes))
        return slab

    def publish(self, blocks: Sequence[Block]) -> None:
        """Broadcasts the parameter rank's values."""
        if self._root is not None and blocks:
            self.communicator.exchange(
                signature_of(current_call(), "publish", *[block.identity() for block in blocks])
            )
            with self.stream.current():
                for block in blocks:
                    self.communicator.broadcast_flat(block.array.reshape(-1), self._root)

    def _check_unchanged(self, blocks: Sequence[Block]) -> None:
        """Compares the ranks' copies with each other, because CuPy cannot forbid writing."""
        with self.stream.current():
            copies = [block.view for block in blocks]
            self.communicator.require_equal(copies, ": the copies that the ranks read")

    def _note_change(self, blocks: Sequence[Block]) -> None:
        """Notes nothing: the ranks' copies are compared instead."""

    # ---- plans

    def plan(self, variables: Sequence[Block], slots: Sequence[Sequence[Block]]) -> GpuPlan:
        """The plan of updates, whose message has the same gaps as the memory."""
        order = MessageOrder(
            variables, slots if self.writes_here else [()] * len(variables), GPU_ALIGNMENT
        )
        shards = order.shards
        update = DeviceUpdate(
            lambda alone: runs_in_memory(part, shards, alone, GPU_ALIGNMENT), shards
        )
        return GpuPlan(order, update, self.stream)

    def make_buffers(self, plan: Plan) -> None:
        """Gives the plan a message of its own, in which its buffers are."""
        assert isinstance(plan, GpuPlan)
        with self.communicator.raise_together(), self.stream.current():
            memory = self._messages.allocate(plan.order.layout.nbytes)
            self.communicator.exchange(plan.signature())
        plan.attach(memory)
        self._prepare_calls(plan)
        plan.buffers = Buffers(plan.order, [plan.message], plan.message)

    def _prepare_calls(self, plan: GpuPlan) -> None:
        """Prepares NCCL's calls for the memory that the plan has now."""
        communicator, root = self.communicator, self._root
        if all(group.dtype.kind not in "iub" for group in plan.order.layout.groups):
            # One group of calls for all: a message's latency counts more than its bytes.
            prepare = communicator.prepare_reduce
            plan.sums = [
                move for flat in plan.gradients for move in prepare(flat, ReduceOp.SUM, root)
            ]
        if root is not None and not plan.new_values:
            places = sorted((block.memory,) for block in plan.order.blocks)
            plan.new_values = [
                move
                for _, (run,) in merge(places, GPU_ALIGNMENT)
                for move in communicator.prepare_broadcast(part(*run), root)
            ]

    # ---- updates

    def _update(
        self,
        signature: CallSignature,
        plan: Plan,
        values: Sequence[Array] | None,
        op: Aggregation,
        rule: UpdateRule,
    ) -> None:
        assert isinstance(plan, GpuPlan)
        communicator, stream = self.communicator, self.stream
        with stream.current():
            with communicator.raise_together():
                # Before the ranks agree: a kernel that does not compile must change nothing.
                kind = rule.kernel and (rule.kernel, rule.clip)
                if kind not in plan.prepared and self.writes_here:
                    plan.update.prepare(rule)
                    plan.prepared.add(kind)
                if plan.memory is None:
                    self._messages.lend(plan)
                    self._prepare_calls(plan)
                if values is not None:
                    plan.pack(values)
                communicator.control.exchange(signature)
            self._reduce(plan, op)
            if self.writes_here:
                plan.update.run(rule, [plan.message])
            if plan.new_values:
                communicator.launch("the new values", plan.new_values)

    def _reduce(self, plan: GpuPlan, op: Aggregation) -> None:
        """Reduces the message over the ranks, to where updates read it."""
        communicator, root = self.communicator, self._root
        if op is ReduceOp.SUM and plan.sums:
            communicator.launch("the sum of gradients", plan.sums)
        elif op is not FIRST_REPLICA:
            for flat in plan.gradients:
                communicator.reduce_flat("the sum of gradients", flat, flat, op, root)
        elif root != 0:  # the first replica is rank 0
            communicator.broadcast_flat(plan.message, 0)

    def prepare_rows(self, variables: Sequence[Block], rule: UpdateRule) -> None:
        """See `Storage.prepare_rows`."""
        kernels = {(rule.kernel, variable.array.dtype) for variable in variables}
        with self.stream.current():
            for kernel in kernels - self._prepared if self.writes_here else ():
                prepare_on_gpu(rule, kernel[1])
                self._prepared.add(kernel)

    def _update_rows(
        self, blocks: Sequence[Block], rows: Array, gradient: Array, rule: UpdateRule
    ) -> None:
        """The parameter rank updates all rows, and sends them to the others; or each rank does."""
        array = blocks[0].array
        with self.stream.current():
            rows, gradient = self.stream.here(rows), self.stream.here(gradient)
            if self.writes_here:
                update_rows([block.array for block in blocks], rows, gradient, rule)
            if self._root is not None:
                new = array[rows]
                self.communicator.broadcast_flat(new.reshape(-1), self._root)
                array[rows] = new
