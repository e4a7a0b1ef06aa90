"""A copy of every variable on each replica, in memory of its own.

With one replica: the only copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from hpcstrat._calls.records import CallSignature, signature_of
from hpcstrat._communicators.background import Background
from hpcstrat._communicators.host import HostCommunicator
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import FIRST_REPLICA, Aggregation, Array, ReduceOp
from hpcstrat._memory.allocator import private_memory
from hpcstrat._memory.blocks import Block
from hpcstrat._memory.segment import Segment
from hpcstrat._storage.base import UpdateRule
from hpcstrat._storage.chunks import ScratchBuffers
from hpcstrat._storage.host import HostStorage
from hpcstrat._storage.marks import Bucket
from hpcstrat._storage.plan import Plan
from hpcstrat._update.rows import update_rows


class MirroredHostStorage(HostStorage):
    """Each rank keeps, and updates, all numbers itself.

    The same steps on the same sums keep the copies equal.
    """

    def __init__(self, communicator: HostCommunicator) -> None:
        super().__init__(communicator)
        self._communicator = communicator
        self._sum: Array = np.empty(0, np.uint8)
        self._scratch = ScratchBuffers()
        # Several threads may write variables made outside of every scope; what they work in is
        # shared.
        self._lock = threading.Lock()
        self._created = 0
        self._background: Background[HostCommunicator] | None = None

    @property
    def communicator(self) -> HostCommunicator:
        """See `Storage.communicator`."""
        return self._communicator

    @property
    def _segment(self) -> Segment:
        return private_memory().segment

    def _create(self, initial: Array) -> Block:
        communicator = self._communicator
        signature = signature_of(current_call(), (initial.dtype, initial.shape, self._number))
        communicator.require_memory(initial.nbytes, signature)
        # A rank without the memory stops the others before they wait for its part.
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
        """See `Storage.plan`. Each rank's has all elements."""
        return Plan(private_memory().segment, variables, slots, compiles=self._compiles)

    def make_buffers(self, plan: Plan) -> None:
        """See `Storage.make_buffers`.

        With several replicas they are copied into a message after all, but at once.
        """
        with self._communicator.raise_together():
            message = self._communicator.new_buffer(plan.layout.nbytes, plan.signature())
            message[...] = 0
            self._communicator.exchange(plan.signature())
        plan.give_buffers([message], message)

    def _update(
        self,
        signature: CallSignature,
        plan: Plan,
        values: Sequence[Array] | None,
        op: Aggregation,
        rule: UpdateRule,
    ) -> None:
        communicator = self._communicator

        def write(message: Array) -> None:
            if values is None:
                message[: plan.layout.nbytes] = plan.buffer_messages[0]
            else:
                plan.write(message, values)

        with self._lock:
            # One buffer for all plans, as large as the largest: updates come one after the other.
            if self._sum.size < plan.layout.nbytes:
                self._sum = communicator.new_buffer(plan.layout.nbytes, signature)
            # There is nobody to exchange with; the call is still counted, and refused where none
            # may be made.
            if communicator.size == 1:
                communicator.exchange(signature)
                if values is None:
                    plan.apply(rule, plan.buffer_messages, self._scratch)
                else:
                    plan.write_for_others(self._sum, values)  # large gradients stay where they are
                    plan.apply(rule, [self._sum], self._scratch, values=values)
                return
            if plan.marks.begun:
                reduced = self._sums_of_marked(signature, plan)
            elif op is not FIRST_REPLICA:
                reduced = self._sum
                communicator.reduce_message(signature, plan.layout, write, op, reduced)
            elif communicator.rank == 0:
                # The first replica's values, as they are: the others have nothing to send.
                reduced = communicator.exchange(signature, plan.layout.nbytes, write)[0]
            else:
                reduced = communicator.exchange(signature)[0]
            plan.apply(rule, [reduced], self._scratch)

    def _begin_sums(self, plan: Plan, places: Sequence[int]) -> bool:
        communicator, marks = self._communicator, plan.marks
        self._background = communicator.background()
        if self._background is None:
            return False
        if marks.sums is None:  # the plan's own: others are updated while they come together
            with communicator.raise_together():
                marks.sums = np.empty(self._sum_bytes(plan), np.uint8)
                communicator.exchange(signature_of(f"{current_call()}: memory"))
        if (exchange := self._exchange_of(plan, places, marks.sums)) is not None:
            self._background.begin(exchange)
        return True

    def _sum_bytes(self, plan: Plan) -> int:
        """Bytes of this rank's sums of marked gradients."""
        return plan.layout.nbytes

    def _exchange_of(
        self, plan: Plan, places: Sequence[int], sums: Array
    ) -> Callable[[HostCommunicator], None] | None:
        """What sums some of the plan's buffers over the replicas; `None` where they have no elements."""
        bucket, message = Bucket(plan.layout, places), plan.buffer_messages[0]
        layout, signature = bucket.layout, signature_of(f"{current_call()}: sums")

        def exchange(communicator: HostCommunicator) -> None:
            views, into = bucket.views(message), bucket.in_place(sums)
            out = np.empty(layout.nbytes, np.uint8) if into is None else into
            # In the order of the whole: the same bits, whatever is marked.
            communicator.reduce_message(
                signature,
                layout,
                lambda sent: layout.write(sent, views),
                ReduceOp.SUM,
                out,
                plan.layout,
            )
            if into is None:
                for target, source in zip(bucket.views(sums), layout.views(out), strict=True):
                    target[...] = source

        return exchange if layout.nbytes else None

    def _finish_sums(self) -> None:
        if self._background is not None:
            self._background.wait()

    def _sums_of_marked(self, signature: CallSignature, plan: Plan) -> Array:
        """All sums, once the ranks agree on the update: those that have begun, and the rest."""
        assert plan.marks.sums is not None
        self._communicator.exchange(signature)
        self._begin_sums(
            plan, [place for place in range(len(plan.blocks)) if place not in plan.marks.begun]
        )
        self._finish_sums()
        return plan.marks.sums

    def _update_rows(
        self, blocks: Sequence[Block], rows: Array, gradient: Array, rule: UpdateRule
    ) -> None:
        update_rows(blocks, rows, gradient, rule)

    def publish(self, blocks: Sequence[Block]) -> None:
        """See `Storage.publish`. Every rank wrote to its own."""
