"""Storage on GPUs: one flat message per update, on each rank's own device."""

from __future__ import annotations

import abc
from collections.abc import Collection, Iterable, Sequence

from hpcstrat._calls.records import CallSignature, signature_of
from hpcstrat._communicators.device import DeviceCommunicator, Move
from hpcstrat._core import gpu
from hpcstrat._core.call_name import current_call
from hpcstrat._core.span import COMMUNICATION, span
from hpcstrat._core.types import FIRST_REPLICA, Aggregation, Array, ReduceOp
from hpcstrat._memory.allocator import ALIGNMENT, Block
from hpcstrat._storage.base import Storage
from hpcstrat._storage.local import local_blocks, on_stream
from hpcstrat._storage.plan import DevicePlan, MessageOrder, MessagePool, Plan
from hpcstrat._update.rows import update_rows
from hpcstrat._update.rule import UpdateRule


# Packing, NCCL's calls and the kernels of an update are queued on the strategy's stream in this
# order, so kernels that read the message need not wait for it, and the host does not wait either:
# the next step's Python code runs while the GPU works. Work elsewhere must wait:
# - marked gradients are summed on the side stream; `_finish_sums` makes the strategy's stream wait
#   for it before the rest is queued;
# - an update in host memory reads the message on the host; `OnHostOfGpu.run` copies it there as the
#   last call on the stream, and blocks until the copy is complete.
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
        local = local_blocks(communicator.rank, communicator.stream, on_host)
        super().__init__(communicator, local)
        self.stream = local.stream
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

    def plan(self, variables: Sequence[Block], slots: Sequence[Sequence[Block]]) -> DevicePlan:
        """The plan of updates of whole variables."""
        order = MessageOrder(variables, slots, ALIGNMENT)
        update = self.local.new_update(order.layout, order.shards)
        return DevicePlan(order, update, self.local.runs_to_read(order))

    def make_buffers(self, plan: Plan) -> None:
        """Gives the plan a message that only its buffers write to."""
        assert isinstance(plan, DevicePlan)
        with self.communicator.raise_together(), self.local.current():
            memory = self.local.zeros(plan.nbytes)
            self.communicator.exchange(plan.signature())
            # After the exchange, when a rank without enough memory would have raised on all ranks.
            plan.take(memory)
        plan.give_buffers([plan.message], plan.message)

    def _check_unchanged(self, blocks: Sequence[Block]) -> None:
        """Compares the ranks' copies with each other, because CuPy cannot forbid writing."""
        with self.local.current():
            copies = [block.view for block in blocks]
            self.communicator.require_equal(copies, ": the copies that the ranks read")

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
        calls = self.communicator.calls
        number = calls.number
        with self.local.current():
            try:
                if plan.taken is None:
                    self._messages.lend(plan, signature)
                sources = plan.gradients
                if values is not None:
                    sources = self._pack(plan, values, op is not FIRST_REPLICA)
                self.communicator.agree(signature)
            # An error on one rank, such as a lack of memory, is raised on all. As a block of
            # `raise_together`, without its calls.
            except BaseException as error:
                calls.share_error(error, number)
                raise
            if plan.started:
                self._finish_sums()
                self._sum_parts(plan, plan.not_started())
            elif op is ReduceOp.SUM and sources is plan.gradients:
                if plan.reductions is None:
                    plan.reductions = self._prepare_reductions(plan)
                self.communicator.launch("the sum of gradients", plan.reductions)
            else:
                self._reduce_message(plan, sources, op)
            if self.updates_here:
                add_up = self._add_up if plan.slices else None
                self.local.run(plan, plan.own_message, rule, add_up)
            self._share(plan)

    @span(COMMUNICATION, on_stream("pack"))
    def _pack(self, plan: DevicePlan, values: Sequence[Array], is_reduced: bool) -> list[Array]:
        """`DevicePlan.pack` of values on any device."""
        # Buffers are in the message, which would be overwritten where the order is another.
        if plan.buffers is not None:
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

    def _reduce_message(self, plan: DevicePlan, sources: Sequence[Array], op: Aggregation) -> None:
        """Reduces all values in the message, or given as `DevicePlan.pack` returns them."""
        for source, gradient in zip(sources, plan.gradients, strict=True):
            self._reduce(source, gradient, op)

    @abc.abstractmethod
    def _prepare_reductions(self, plan: DevicePlan) -> list[Move]:
        """The sums of all gradients in the message, for `DeviceCommunicator.launch`."""

    def _sum_parts(self, plan: DevicePlan, variables: Iterable[int]) -> None:
        """Sums the gradients of some variables in the message, where the update reads them."""
        for array in plan.order.views_of(variables, plan.message):
            self._reduce(array, array, ReduceOp.SUM)

    @abc.abstractmethod
    def _reduce(self, source: Array, out: Array, op: Aggregation) -> None:
        """Reduces a flat array to where updates read it; by `FIRST_REPLICA` in place only."""

    def _add_up(self, sums: Array) -> Array:
        """The sums over whole variables, from those over this rank's shards; see `Update.run`."""
        return sums

    def _share(self, plan: DevicePlan) -> None:
        """Sends new values to the ranks that have not computed them."""

    # ---- sums of marked gradients, while the program computes others

    def _start_sums(self, plan: Plan, variables: Collection[int]) -> bool:
        assert isinstance(plan, DevicePlan)
        communicator = self.communicator
        if not communicator.has_side_stream:
            return False
        with self.local.current(), communicator.side_stream(plan.taken):
            self._sum_parts(plan, variables)
        return True

    def _finish_sums(self) -> None:
        self.communicator.join_side_stream()


def _may_overlap(array: Array, memory: Array) -> bool:
    """Whether two arrays may share memory; one on a GPU and one on the host never do."""
    return gpu.is_on_gpu(array) is gpu.is_on_gpu(memory) and bool(
        gpu.array_module(array).may_share_memory(array, memory)
    )


class MirroredDeviceStorage(DeviceStorage):
    """Each rank stores and updates all variables; with one replica there is one copy.

    The same steps on the same sums keep the copies equal.
    """

    def _reduce(self, source: Array, out: Array, op: Aggregation) -> None:
        if op is FIRST_REPLICA:
            self.communicator.broadcast_flat(out, 0)
        else:
            self.communicator.all_reduce_flat(source, out, op)

    def _prepare_reductions(self, plan: DevicePlan) -> list[Move]:
        prepare = self.communicator.prepare_reduce
        return [move for g in plan.gradients for move in prepare(g, ReduceOp.SUM, None)]

    def _update_rows(
        self, blocks: Sequence[Block], rows: Array, gradient: Array, rule: UpdateRule
    ) -> None:
        with self.local.current():
            arrays = [block.array for block in blocks]
            update_rows(arrays, self.local.here(rows), self.local.here(gradient), rule)
