"""Storage on GPUs: one flat message per update, on each rank's own device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from hpcstrat._calls.records import CallSignature, signature_of
from hpcstrat._communicators.device import DeviceCommunicator
from hpcstrat._core import gpu
from hpcstrat._core.call_name import current_call
from hpcstrat._core.timeline import COMMUNICATION, span
from hpcstrat._core.types import FIRST_REPLICA, Aggregation, Array, ReduceOp
from hpcstrat._memory.allocator import ALIGNMENT, Block
from hpcstrat._storage.base import Storage
from hpcstrat._storage.device_plan import DevicePlan
from hpcstrat._storage.local import OnGpu, OnHostOfGpu
from hpcstrat._storage.order import MessageOrder
from hpcstrat._storage.plan import Buffers, MessagePool, Plan
from hpcstrat._update.rows import row_view, update_rows
from hpcstrat._update.rule import UpdateRule


# Packing, NCCL's calls and the kernels of an update are queued on the strategy's stream in this
# order, so kernels that read the message need not wait for it, and the host does not wait either:
# the next step's Python code runs while the GPU works. Only an update in host memory must wait: it
# reads the message on the host, to which `UpdateOfCopies` copies it, and blocks until the copy is
# complete.
class DeviceStorage(Storage):
    """Variables of ranks that compute on GPUs.

    Every rank reads them on its own device.

    Args:
        communicator: the ranks.
        root: the parameter rank, whose initial values count.
        on_host: whether this rank updates variables in host memory though it computes on a GPU.
    """

    communicator: DeviceCommunicator

    def __init__(self, communicator: DeviceCommunicator, root: int, on_host: bool = False) -> None:
        stream, rank = communicator.stream, communicator.rank
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
                if self.stream.capture is not None:
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
            if op is ReduceOp.SUM and sources is plan.gradients and not plan.has_integers:
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
            if type(value) is not stream.xp.ndarray or value.data.device_id != stream.ordinal:
                values[i] = self.local.here(value)
        return plan.pack(values, is_reduced)


def _may_overlap(array: Array, memory: Array) -> bool:
    """Whether two arrays may share memory; one on a GPU and one on the host never do."""
    return gpu.is_on_gpu(array) is gpu.is_on_gpu(memory) and bool(
        gpu.array_module(array).may_share_memory(array, memory)
    )


@final
class MirroredDeviceStorage(DeviceStorage):
    """Each rank stores and updates all variables; with one replica there is one copy.

    The same steps on the same sums keep the copies equal.

    Args:
        communicator: the ranks.
        root: the rank whose initial values count.
    """

    def plan(self, variables: Sequence[Block], slots: Sequence[Sequence[Block]]) -> DevicePlan:
        """The plan of updates, of which each rank makes all."""
        order = MessageOrder(variables, slots, ALIGNMENT)
        return DevicePlan(order, self.local.new_update(order, order.shards), self.communicator)


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
