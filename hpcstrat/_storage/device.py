"""Common parts of storage on GPUs: one flat message per update, on each rank's own device."""

from __future__ import annotations

import abc
from collections.abc import Collection, Iterable, Sequence

from hpcstrat._calls.records import CallSignature, signature_of
from hpcstrat._communicators.device import DeviceCommunicator
from hpcstrat._core import gpu
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import Aggregation, Array, ReduceOp
from hpcstrat._memory.allocator import ALIGNMENT
from hpcstrat._memory.blocks import Block
from hpcstrat._storage.base import Storage
from hpcstrat._storage.device_memory import DeviceMemory, device_memory
from hpcstrat._storage.device_plan import DevicePlan, MessagePool
from hpcstrat._storage.message_order import MessageOrder
from hpcstrat._storage.plan import Plan


# Packing, NCCL's calls and the kernels of an update are queued on the strategy's stream in this
# order, so kernels that read the message need not wait for it. Work elsewhere must:
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
        return DevicePlan(order, update, self.local.runs_to_read(variables))

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
            self._sum_parts(plan, variables)
        return True

    @abc.abstractmethod
    def _reduce(self, source: Array, out: Array, op: Aggregation) -> None:
        """Reduces a flat array to where updates read it; `FIRST_REPLICA`: `out` is the source."""

    def _sum_parts(self, plan: DevicePlan, variables: Iterable[int]) -> None:
        """Sums the gradients of some variables in the message, where the update reads them."""
        parts = plan.order.parts_of(variables)
        for gradient, of_gradient in zip(plan.gradients, parts, strict=True):
            for part in of_gradient:
                array = gradient[part.slice]
                self._reduce(array, array, ReduceOp.SUM)

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
            self._messages.lend(plan)
            if values is not None:
                sources = self.local.pack(plan, values, is_reduced)
            else:
                sources = plan.gradients
            self.communicator.exchange(signature)
        return sources
