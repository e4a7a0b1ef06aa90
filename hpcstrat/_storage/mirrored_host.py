"""A copy of every variable on each replica, in its private memory.

With one replica it is the only copy.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Sequence

import numpy as np

from hpcstrat._calls.records import CallSignature, signature_of
from hpcstrat._communicators.background import Background
from hpcstrat._communicators.host import HostCommunicator
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import FIRST_REPLICA, Aggregation, Array, ReduceOp
from hpcstrat._memory.allocator import private_memory
from hpcstrat._memory.blocks import Block
from hpcstrat._memory.layout import layout_of
from hpcstrat._storage.host import HostStorage
from hpcstrat._storage.message_order import MessageOrder
from hpcstrat._storage.plan import Plan
from hpcstrat._update.rows import update_rows
from hpcstrat._update.rule import UpdateRule


class MirroredHostStorage(HostStorage):
    """Each rank stores and updates all variables.

    The same steps on the same sums keep the copies equal.
    """

    communicator: HostCommunicator

    def __init__(self, communicator: HostCommunicator) -> None:
        super().__init__(communicator, lambda: private_memory().segment)
        self._sum: Array = np.empty(0, np.uint8)
        # They keep views of the sum. Weak, because the storage outlives variables and their plans.
        self._plans: weakref.WeakSet[Plan] = weakref.WeakSet()
        # Several threads may write variables made outside every scope; the scratch memory is
        # shared.
        self._lock = threading.Lock()
        self._created = 0
        self._background: Background[HostCommunicator] | None = None

    def _create(self, initial: Array) -> Block:
        communicator = self.communicator
        signature = signature_of(current_call(), (initial.dtype, initial.shape, self._number))
        communicator.require_memory(initial.nbytes, signature)
        # A rank without enough memory stops the others before they wait for its part.
        with communicator.raise_together():
            block = private_memory().new_block(initial.shape, initial.dtype, self._created + 1)
            block.array[...] = initial
        flat = block.array.reshape(-1).view(np.uint8)
        if communicator.rank == 0:

            def write(message: Array) -> None:
                message[: flat.size] = flat

            communicator.exchange(signature, flat.size, write)
        else:
            flat[...] = communicator.exchange(signature)[0][: flat.size]
        self._created += 1
        return block

    def plan(self, variables: Sequence[Block], slots: Sequence[Sequence[Block]]) -> Plan:
        """The plan of updates, with all elements on each rank."""
        order = MessageOrder(variables, slots)
        plan = Plan(order, self._new_update(order.layout, order.shards))
        self._plans.add(plan)
        return plan

    def make_buffers(self, plan: Plan) -> None:
        """Makes buffers in one message, which several replicas copy as a whole to send it."""
        with self.communicator.raise_together():
            nbytes = plan.order.layout.nbytes
            message = self.communicator.new_buffer(nbytes, plan.signature())
            message[...] = 0
            self.communicator.exchange(plan.signature())
        plan.give_buffers([message], message)

    def _update(
        self,
        signature: CallSignature,
        plan: Plan,
        values: Sequence[Array] | None,
        op: Aggregation,
        rule: UpdateRule,
    ) -> None:
        communicator, nbytes = self.communicator, plan.order.layout.nbytes
        with self._lock:
            # One buffer for all plans, as large as the largest: updates come one after the other.
            if self._sum.size < nbytes:
                self._sum = communicator.new_buffer(nbytes, signature)
                for other in self._plans:
                    other.forget_messages()
            if communicator.size > 1:
                plan.update.run(rule, [self._reduce(signature, plan, values, op)])
                return
            # There is no other rank to exchange with, but the call is counted, and refused where no
            # call is allowed.
            communicator.exchange(signature)
            if values is None:
                plan.update.run(rule, plan.buffer_messages)
            else:
                in_place = plan.update.in_place(values)  # large gradients are not copied
                plan.order.write(self._sum, values, in_place)
                plan.update.run(rule, [self._sum], in_place=in_place)

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
                message[: layout.nbytes] = plan.buffer_messages[0]
            else:
                plan.order.write(message, values)

        if plan.started:
            return self._sums_of_marked(signature, plan)
        if op is not FIRST_REPLICA:
            communicator.reduce_message(signature, layout, write, op, self._sum)
            return self._sum
        if communicator.rank == 0:
            return communicator.exchange(signature, layout.nbytes, write)[0]
        return communicator.exchange(signature)[0]  # only the first replica's values count

    def _start_sums(self, plan: Plan, variables: Collection[int]) -> bool:
        communicator = self.communicator
        self._background = communicator.background()
        if self._background is None:
            return False
        if plan.sums is None:  # one per plan: other plans may be updated during the sums
            with communicator.raise_together():
                plan.sums = np.empty(self._sum_bytes(plan), np.uint8)
                communicator.exchange(signature_of(f"{current_call()}: memory"))
        if (exchange := self._exchange_of(plan, variables, plan.sums)) is not None:
            self._background.start(exchange)
        return True

    def _sum_bytes(self, plan: Plan) -> int:
        """Bytes of this rank's sums of marked gradients."""
        return plan.order.layout.nbytes

    def _exchange_of(
        self, plan: Plan, variables: Collection[int], sums: Array
    ) -> Callable[[HostCommunicator], None] | None:
        """A function that sums some of the plan's buffers; `None` if they have no elements."""
        whole, signature = plan.order.layout, signature_of(f"{current_call()}: sums")
        sources = plan.order.views_of(variables, plan.buffer_messages[0])
        targets = plan.order.views_of(variables, sums)
        layout = layout_of(
            tuple([view.shape for view in sources]), tuple([view.dtype for view in sources])
        )

        def exchange(communicator: HostCommunicator) -> None:
            is_one = len(targets) == 1  # then it is summed in place
            out = targets[0].view(np.uint8) if is_one else np.empty(layout.nbytes, np.uint8)
            # Summed in the order of the whole message: the same bits, whatever is marked.
            communicator.reduce_message(
                signature,
                layout,
                lambda sent: layout.write(sent, sources),
                ReduceOp.SUM,
                out,
                whole,
            )
            if not is_one:
                for target, source in zip(targets, layout.views(out), strict=True):
                    target[...] = source

        return exchange if layout.nbytes else None

    def _finish_sums(self) -> None:
        if self._background is not None:
            self._background.wait()

    def _sums_of_marked(self, signature: CallSignature, plan: Plan) -> Array:
        """All sums, once the ranks agree on the update: those that have started, and the rest."""
        assert plan.sums is not None
        self.communicator.exchange(signature)
        self._start_sums(plan, plan.not_started())
        self._finish_sums()
        return plan.sums

    def _update_rows(
        self, blocks: Sequence[Block], rows: Array, gradient: Array, rule: UpdateRule
    ) -> None:
        update_rows([block.array for block in blocks], rows, gradient, rule)

    def publish(self, blocks: Sequence[Block]) -> None:
        """Does nothing: every rank wrote to its own copy."""
