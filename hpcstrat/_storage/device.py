"""Common parts of storage on GPUs: one flat message per update, on each rank's own device."""

from __future__ import annotations

import abc
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

from hpcstrat._calls.records import CallSignature, signature_of
from hpcstrat._communicators.device import DeviceCommunicator
from hpcstrat._core import gpu
from hpcstrat._core.call_name import current_call
from hpcstrat._core.span import COMMUNICATION, UPDATE, Details, span
from hpcstrat._core.types import Aggregation, Array, ReduceOp
from hpcstrat._memory.allocator import ALIGNMENT
from hpcstrat._memory.blocks import Block
from hpcstrat._memory.intervals import Interval
from hpcstrat._storage.base import Storage
from hpcstrat._storage.device_memory import DeviceMemory, device_memory
from hpcstrat._storage.device_plan import DevicePlan, MessagePool
from hpcstrat._storage.message_order import MessageOrder
from hpcstrat._storage.plan import Plan
from hpcstrat._update.chunks import Chunk, chunks_of
from hpcstrat._update.rule import UpdateRule


def _on_stream(name: str) -> Callable[..., Details]:
    return lambda storage, *_, **__: Details(name, None, storage.communicator.stream)


# Packing, NCCL's calls and the kernels of an update are queued on the strategy's stream in this
# order, so kernels that read the message need not wait for it. Work elsewhere must:
# - marked gradients are summed on the side stream; `_sum_rest` makes the strategy's stream wait for
#   it before the rest is queued;
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
    local: DeviceMemory

    def __init__(self, communicator: DeviceCommunicator, root: int, on_host: bool = False) -> None:
        # Ranks on CPUs and on GPUs can be replicas of one strategy, so memory is chosen per rank.
        local = device_memory(communicator.rank, communicator.stream, on_host)
        super().__init__(communicator, local)
        self._root = root
        self._is_root = communicator.rank == root
        self._created = 0
        self._messages = MessagePool(local.zeros)

    def _create(self, initial: Array) -> Block:
        communicator, local = self.communicator, self.local
        with communicator.raise_together(), local.current():
            initial = local.here(initial) if gpu.is_on_gpu(initial) else initial
            block = local.new_variable(initial, self._created + 1)
            communicator.exchange(
                signature_of(current_call(), (initial.dtype, initial.shape, self._number))
            )
        # Counted after all ranks have made it: the numbers of blocks must stay equal on all ranks.
        self._created += 1
        with local.current():
            # The parameter rank's value replaces the other ranks' values.
            communicator.broadcast_flat((block.copy or block).array.reshape(-1), self._root)
        return block

    def plan(self, variables: Sequence[Block], slots: Sequence[Sequence[Block]]) -> DevicePlan:
        """The plan of updates of whole variables."""
        order = MessageOrder(variables, slots, ALIGNMENT)
        update = self.local.new_update(order.shards)
        return DevicePlan(order, update, self._readable(variables))

    def _readable(self, variables: Sequence[Block]) -> list[Chunk]:
        """The runs of the variables that this rank reads."""
        read = [block.copy or block for block in variables]
        order = MessageOrder(read, [()] * len(read), ALIGNMENT)
        return chunks_of(self.local.readable, order.shards, sys.maxsize, ALIGNMENT)

    def _check_unchanged(self, blocks: Sequence[Block]) -> None:
        """Compares the ranks' copies with each other, because CuPy cannot forbid writing."""
        with self.local.current():
            copies = [block.view for block in blocks]
            self.communicator.require_equal(copies, ": the copies that the ranks read")

    def make_buffers(self, plan: Plan) -> None:
        """Gives the plan a message that only its buffers write to."""
        assert isinstance(plan, DevicePlan)
        with self.communicator.raise_together(), self.local.current():
            memory = self.local.zeros(plan.nbytes)
            self.communicator.exchange(plan.signature())
            # After the exchange, when a rank without enough memory would have raised on all ranks.
            plan.take(memory)
        plan.give_buffers([plan.message], plan.message)

    def _start_sums(self, plan: Plan, variables: Collection[int]) -> bool:
        assert isinstance(plan, DevicePlan)
        communicator = self.communicator
        if not communicator.has_side_stream:
            return False
        with self.local.current(), communicator.side_stream(plan.taken):
            self._sum_parts(plan, plan.order.parts_of(variables))
        return True

    @abc.abstractmethod
    def _reduce(self, source: Array, out: Array, op: Aggregation) -> None:
        """Reduces a flat array to where updates read it; `FIRST_REPLICA`: `out` is the source."""

    def _sum_parts(self, plan: DevicePlan, parts: Sequence[Sequence[Interval]]) -> None:
        """Sums parts of the message over the replicas, in place, where the update reads them.

        Args:
            plan: the plan.
            parts: for each dtype, intervals of its elements.
        """
        for gradient, of_gradient in zip(plan.gradients, parts, strict=True):
            for part in of_gradient:
                array = gradient[part.slice]
                self._reduce(array, array, ReduceOp.SUM)

    def _sum_rest(self, plan: DevicePlan) -> None:
        """Waits for the sums of marked gradients, and sums the others."""
        self._finish_sums()
        self._sum_parts(plan, plan.order.parts_of(plan.not_started()))

    def _finish_sums(self) -> None:
        self.communicator.join_side_stream()

    def _pack_and_agree(
        self,
        signature: CallSignature,
        plan: DevicePlan,
        values: Sequence[Array] | None,
        is_reduced: bool,
    ) -> list[Array]:
        """Packs the values and agrees on the update; an error on one rank is raised on all.

        Returns:
            See `DevicePlan.pack`.
        """
        with self.communicator.raise_together():
            sources = self._pack(plan, values, is_reduced)
            self.communicator.exchange(signature)
        return sources

    @span(COMMUNICATION, _on_stream("pack"))
    def _pack(
        self, plan: DevicePlan, values: Sequence[Array] | None, is_reduced: bool
    ) -> list[Array]:
        self._messages.lend(plan)
        if values is None:
            return plan.gradients
        # Buffers are in the message, which would be overwritten where the order is another.
        if plan.buffers is not None:
            values = [
                value.copy() if _may_overlap(value, plan.message) else value for value in values
            ]
        return plan.pack([self.local.here(value) for value in values], is_reduced)

    @span(UPDATE, _on_stream("update"))
    def _apply(
        self,
        plan: DevicePlan,
        rule: UpdateRule,
        add_up: Callable[[Array], Array] | None = None,
    ) -> None:
        """Updates this rank's shards by the plan's message; see `Update.run`."""
        self.local.run(plan, rule, add_up)


def _may_overlap(array: Array, memory: Any) -> bool:
    """Whether two arrays may share memory; one on a GPU and one on the host never do."""
    return gpu.is_on_gpu(array) is gpu.is_on_gpu(memory) and bool(
        gpu.array_module(array).may_share_memory(array, memory)
    )
