"""Storage in host memory: a copy of the variables on each replica."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import final

from hpcstrat._calls.records import CallSignature, signature_of
from hpcstrat._communicators.host import HostCommunicator
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import FIRST_REPLICA, Aggregation, Array
from hpcstrat._memory.allocator import Block, private_memory
from hpcstrat._process.heap import keep_freed_memory
from hpcstrat._storage.base import Storage
from hpcstrat._storage.local import LocalBlocks, flat, writer_of
from hpcstrat._storage.order import MessageOrder
from hpcstrat._storage.plan import Buffers, MessagePool, Plan
from hpcstrat._update.host_update import HostUpdate
from hpcstrat._update.rule import UpdateRule


@final
class MirroredHostStorage(Storage):
    """Each rank stores and updates all variables, in its private memory.

    The same steps on the same sums keep the copies equal.

    Args:
        communicator: the ranks.
    """

    communicator: HostCommunicator

    def __init__(self, communicator: HostCommunicator) -> None:
        keep_freed_memory()  # here, where a program begins to make gradients on the host
        local = LocalBlocks(communicator.rank, private_memory, communicator.size > 1)
        super().__init__(communicator, local)
        self._messages = MessagePool(communicator.new_buffer)
        # Several threads may write variables made outside every scope; the scratch memory is
        # shared.
        self._lock = threading.Lock()

    def _create(self, initial: Array) -> Block:
        communicator = self.communicator
        signature = signature_of(current_call(), (initial.dtype, initial.shape, self._number))
        communicator.require_memory(initial.nbytes, signature)
        # A rank without enough memory stops the others before they wait for its part.
        with communicator.raise_together():
            block = self.local.new_variable(initial)
        own = flat(block.array)
        if communicator.rank == 0:
            communicator.exchange(signature, own.size, writer_of(own))
        else:
            own[...] = communicator.exchange(signature)[0][: own.size]
        return block

    def _create_slot(self, variable: Block, value: float) -> Block:
        nbytes = variable.array.nbytes
        self.communicator.require_memory(nbytes, signature_of(current_call(), "slot", nbytes))
        return super()._create_slot(variable, value)

    def plan(self, variables: Sequence[Block], slots: Sequence[Sequence[Block]]) -> Plan:
        """The plan of updates, of which each rank makes all."""
        order = MessageOrder(variables, slots)
        return Plan(order, self.local.new_update(order, order.shards))

    def make_buffers(self, plan: Plan) -> None:
        """Makes buffers in one message, which several replicas copy as a whole to send it."""
        with self.communicator.raise_together():
            nbytes = plan.order.layout.nbytes
            message = self.communicator.new_buffer(nbytes, plan.signature())
            message[...] = 0
            self.communicator.exchange(plan.signature())
        plan.buffers = Buffers(plan.order, [message], message)

    # ---- updates

    def _update(
        self,
        signature: CallSignature,
        plan: Plan,
        values: Sequence[Array] | None,
        op: Aggregation,
        rule: UpdateRule,
    ) -> None:
        communicator = self.communicator
        with self._lock:
            if communicator.size > 1:
                plan.update.run(rule, [self._reduce(signature, plan, values, op)])
                return
            # There is no other rank to exchange with, but the call is counted, and refused where no
            # call is allowed.
            communicator.exchange(signature)
            if values is None:
                plan.update.run(rule, plan.buffers.messages)
            else:
                self._lend(plan, signature)
                assert isinstance(plan.update, HostUpdate)
                in_place = plan.update.in_place(values)  # large gradients are not copied
                plan.write(plan.memory, values, in_place)
                plan.update.run(rule, [plan.memory], in_place=in_place)

    def _lend(self, plan: Plan, signature: CallSignature) -> None:
        if plan.memory is None:
            with self.communicator.raise_together():
                self._messages.lend(plan, signature)

    def _reduce(
        self,
        signature: CallSignature,
        plan: Plan,
        values: Sequence[Array] | None,
        op: Aggregation,
    ) -> Array:
        """The message of the reduced values, on every rank."""
        communicator, layout = self.communicator, plan.order.layout

        def write(message: Array) -> None:
            if values is None:
                message[: layout.nbytes] = plan.buffers.messages[0]
            else:
                plan.write(message, values)

        if op is not FIRST_REPLICA:
            self._lend(plan, signature)
            communicator.reduce_message(signature, layout, write, op, plan.memory)
            return plan.memory
        if communicator.rank == 0:
            return communicator.exchange(signature, layout.nbytes, write)[0]
        return communicator.exchange(signature)[0]  # only the first replica's values count
