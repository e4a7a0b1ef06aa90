"""Storage on GPUs: one flat message per update, on each rank's own device."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import final

import numpy as np

from hpcstrat._calls.records import CallSignature, signature_of
from hpcstrat._communicators.device import DeviceCommunicator
from hpcstrat._core import gpu
from hpcstrat._core.call_name import current_call
from hpcstrat._core.timeline import COMMUNICATION, span
from hpcstrat._core.types import FIRST_REPLICA, Aggregation, Array, ReduceOp
from hpcstrat._memory.allocator import ALIGNMENT, Block, Shares, SlabAllocator
from hpcstrat._storage.base import Storage
from hpcstrat._storage.device_plan import DevicePartsPlan, DevicePlan
from hpcstrat._storage.local import LocalBlocks, OnGpu, OnHostOfGpu
from hpcstrat._storage.order import MessageOrder, rank_parts_of, shares_of
from hpcstrat._storage.plan import Buffers, MessagePool, Plan
from hpcstrat._update.rows import row_view, update_rows
from hpcstrat._update.rule import UpdateRule


# Packing, NCCL's calls and the kernels of an update are queued on the strategy's stream in this
# order, so kernels that read the message need not wait for it, and the host does not wait either:
# the next step's Python code runs while the GPU works. Work elsewhere must wait:
# - marked gradients are summed on the side stream; `_finish_sums` makes the strategy's stream wait
#   for it before the rest is queued;
# - an update in host memory reads the message on the host; `UpdateOfCopies` copies it there, and
#   blocks until the copy is complete.
class DeviceStorage(Storage):
    """Variables of ranks some or all of which compute on GPUs.

    Every rank reads them on its own device.

    Args:
        communicator: the ranks.
        root: the parameter rank, whose initial values count.
        on_host: whether this rank updates variables in host memory though it computes on a GPU.
    """

    communicator: DeviceCommunicator

    def __init__(self, communicator: DeviceCommunicator, root: int, on_host: bool = False) -> None:
        # Ranks on CPUs and on GPUs can be replicas of one strategy, so memory is chosen per rank.
        stream, rank = communicator.stream, communicator.rank
        if stream is None:
            # In slabs, where variables are aligned as they are on the other ranks' GPUs.
            memory = SlabAllocator(lambda nbytes: np.empty(nbytes, np.uint8))
            local = LocalBlocks(rank, lambda: memory)
        else:
            local = OnHostOfGpu(rank, stream) if on_host else OnGpu(rank, stream)
        super().__init__(communicator, local)
        self.stream = stream
        self._root = root
        self._messages = MessagePool(lambda nbytes, _: local.zeros(nbytes))

    def _create(self, initial: Array) -> Block:
        communicator, local = self.communicator, self.local
        with communicator.raise_together(), local.current():
            block = local.new_variable(local.here(initial) if gpu.is_on_gpu(initial) else initial)
            communicator.exchange(
                signature_of(current_call(), (initial.dtype, initial.shape, self._number))
            )
        with local.current():
            # The parameter rank's value replaces the other ranks' values.
            communicator.broadcast_flat((block.copy or block).array.reshape(-1), self._root)
        return block

    def make_buffers(self, plan: Plan) -> None:
        """Gives the plan a message of its own, in which its buffers are."""
        assert isinstance(plan, DevicePlan)
        with self.communicator.raise_together(), self.local.current():
            memory = self.local.zeros(plan.nbytes)
            self.communicator.exchange(plan.signature())
            # After the exchange, when a rank without enough memory would have raised on all ranks.
            plan.take(memory)
        plan.buffers = Buffers(plan.order, [plan.message], plan.message)

    def _check_unchanged(self, blocks: Sequence[Block]) -> None:
        """Compares the ranks' copies with each other, because CuPy cannot forbid writing."""
        with self.local.current():
            copies = [block.view for block in blocks]
            self.communicator.require_equal(copies, ": the copies that the ranks read")

    def _note_change(self, blocks: Sequence[Block]) -> None:
        """Notes nothing: the ranks' copies are compared instead."""

    # ---- updates

    def _update(
        self,
        signature: CallSignature,
        plan: Plan,
        values: Sequence[Array] | None,
        op: Aggregation,
        rule: UpdateRule,
    ) -> None:
        assert isinstance(plan, DevicePlan)
        communicator = self.communicator
        number = communicator.calls.number
        with self.local.current():
            try:
                # Before the ranks agree: a kernel that does not compile must change nothing.
                kind = rule.kernel and (rule.kernel, rule.clip)
                if kind not in plan.prepared and self.updates_here:
                    plan.prepare(rule)
                    plan.prepared.add(kind)
                if plan.memory is None:
                    self._messages.lend(plan, signature)
                if self.stream is not None and self.stream.capture is not None:
                    self.stream.capture.keep(plan, plan.memory)
                sources = plan.gradients
                if values is not None:
                    sources = self._pack(plan, values, op is not FIRST_REPLICA)
                communicator.agree(signature)
            # An error on one rank, such as a lack of memory, is raised on all. As a block of
            # `raise_together`, without its calls.
            except BaseException as error:
                communicator.calls.share_error(error, number)
                raise
            if plan.buffers.started:
                self._finish_sums()
                if rest := plan.buffers.not_started():
                    communicator.launch("the sum of gradients", plan.sums_of(rest))
            elif op is ReduceOp.SUM and sources is plan.gradients and not plan.has_integers:
                communicator.launch("the sum of gradients", plan.all_sums)
            else:
                plan.reduce(sources, op)
            if self.updates_here:
                plan.run(rule)
            if plan.new_values is not None:
                plan.new_values.send(communicator)

    def _update_rows_on_root(
        self, blocks: Sequence[Block], rows: Array, gradient: Array, rule: UpdateRule
    ) -> None:
        """`_update_rows` by the root alone, which sends the new rows to all."""
        variable, arrays = blocks[0], [block.array for block in blocks]
        is_root = self.communicator.rank == self._root
        with self.local.current():
            rows, gradient = self.local.here(rows), self.local.here(gradient)
            if is_root and variable.copy is not None:
                # The master copy is in host memory, and only the new rows travel to the GPU.
                host_rows = gpu.to_host(rows)
                update_rows(arrays, host_rows, gpu.to_host(gradient), rule)
                new = self.local.here(row_view(variable.array, gradient.ndim - 1)[host_rows])
            else:
                if is_root:
                    update_rows(arrays, rows, gradient, rule)
                new = row_view(variable.array, gradient.ndim - 1)[rows]
            self.communicator.broadcast_flat(new.reshape(-1), self._root)
            row_view((variable.copy or variable).array, gradient.ndim - 1)[rows] = new

    @span(COMMUNICATION, "pack")
    def _pack(self, plan: DevicePlan, values: Sequence[Array], is_reduced: bool) -> list[Array]:
        """`DevicePlan.pack` of values on any device."""
        # Buffers are in the message, which would be overwritten where the order is another.
        if plan.buffers.arrays:
            values = [
                value.copy() if _may_overlap(value, plan.message) else value for value in values
            ]
        stream, values = self.stream, list(values)
        for i, value in enumerate(values):
            # Mostly it is here, which is asked without a call.
            if (
                stream is None
                or type(value) is not stream.xp.ndarray
                or value.data.device_id != stream.ordinal
            ):
                values[i] = self.local.here(value)
        return plan.pack(values, is_reduced)

    # ---- sums of marked gradients, while the program computes others

    def _start_sums(self, plan: Plan, variables: Collection[int]) -> bool:
        assert isinstance(plan, DevicePlan)
        communicator = self.communicator
        if not communicator.has_side_stream or (self.stream and self.stream.capture):
            return False
        with self.local.current(), communicator.side_stream(plan.memory):
            communicator.launch("the sum of gradients", plan.sums_of(variables))
        return True

    def _finish_sums(self) -> None:
        self.communicator.join_side_stream()


def _may_overlap(array: Array, memory: Array) -> bool:
    """Whether two arrays may share memory; one on a GPU and one on the host never do."""
    return gpu.is_on_gpu(array) is gpu.is_on_gpu(memory) and bool(
        gpu.array_module(array).may_share_memory(array, memory)
    )


@final
class MirroredDeviceStorage(DeviceStorage):
    """Each rank stores and updates all variables; with one replica there is one copy.

    The same steps on the same sums keep the copies equal.

    If slots are split, each rank stores only its part of them, and makes only these updates: per
    dtype one reduce-scatter of the gradients and one all-gather of the new values, and between
    these one fused kernel per run of variables. Variables without slots are updated by each rank
    or, if some ranks compute on CPUs, by the root alone: what one rank updates has the same bits in
    all copies.

    Args:
        communicator: the ranks.
        root: the rank whose initial values count.
        splits: whether slots are split over the ranks.
        rounds_alike: see `make_replica_storage`.
    """

    def __init__(
        self,
        communicator: DeviceCommunicator,
        root: int,
        splits: bool = False,
        rounds_alike: bool = True,
    ) -> None:
        super().__init__(communicator, root)
        self._splits = splits
        self._rounds_alike = rounds_alike

    def split(self, variables: Sequence[Block]) -> Sequence[Shares | None]:
        """An equal part of all elements per rank."""
        if not self._splits:
            return super().split(variables)
        return shares_of(variables, self.communicator.size, ALIGNMENT)

    def plan(self, variables: Sequence[Block], slots: Sequence[Sequence[Block]]) -> DevicePlan:
        """The plan of updates, of which each rank makes all, or its part if slots are split."""
        communicator, local = self.communicator, self.local
        if not (self._splits and any(slots)):
            order = MessageOrder(variables, slots, ALIGNMENT)
            root = None if self._rounds_alike else self._root
            own = order.shards if root in (None, communicator.rank) else []
            update = local.new_update(order, own)
            return DevicePlan(order, update, communicator, root, local.to_read(order))
        order = MessageOrder(variables, [()] * len(variables), ALIGNMENT)
        rank_parts = rank_parts_of(order, order.to_message(slots), communicator.rank)
        update = local.new_update(order, rank_parts[communicator.rank].shards)
        return DevicePartsPlan(order, update, communicator, rank_parts, local.to_read(order))

    def _update_rows(
        self, blocks: Sequence[Block], rows: Array, gradient: Array, rule: UpdateRule
    ) -> None:
        if self._rounds_alike or blocks[-1].shares is not None:
            super()._update_rows(blocks, rows, gradient, rule)
        else:
            self._update_rows_on_root(blocks, rows, gradient, rule)


@final
class CentralDeviceStorage(DeviceStorage):
    """Only the parameter rank updates variables and has their slots; every rank reads a copy.

    An update: each rank packs its gradients into one flat message; one reduction per dtype to the
    parameter rank; one fused kernel per run of variables there; one group of broadcasts of the new
    values. All of it is queued on the strategy's stream, and the host does not wait, unless the
    master copy is in host memory.
    """

    is_central = True
    has_all_blocks = False

    def __init__(self, communicator: DeviceCommunicator, root: int, on_host: bool = False) -> None:
        super().__init__(communicator, root, on_host)
        self.updates_here = communicator.rank == root

    def plan(self, variables: Sequence[Block], slots: Sequence[Sequence[Block]]) -> DevicePlan:
        """The plan of updates, with slots on the parameter rank only."""
        local, own = self.local, slots if self.updates_here else [()] * len(variables)
        order = MessageOrder(variables, own, ALIGNMENT)
        update = local.new_update(order, order.shards)
        return DevicePlan(order, update, self.communicator, self._root, local.to_read(order))

    _update_rows = DeviceStorage._update_rows_on_root

    def publish(self, blocks: Sequence[Block]) -> None:
        """Broadcasts the parameter rank's values."""
        if blocks:
            self.communicator.exchange(
                signature_of(current_call(), "publish", *[block.identity() for block in blocks])
            )
            with self.local.current():
                for block in blocks:
                    self.communicator.broadcast_flat(
                        (block.copy or block).array.reshape(-1), self._root
                    )
