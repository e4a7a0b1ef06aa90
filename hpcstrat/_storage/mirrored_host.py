"""A copy of every variable on each replica, in its private memory.

With one replica it is the only copy.
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
    """Each rank stores and updates all variables.

    The same steps on the same sums keep the copies equal.
    """

    def __init__(self, communicator: HostCommunicator) -> None:
        super().__init__(communicator)
        self._communicator = communicator
        self._sum: Array = np.empty(0, np.uint8)
        self._scratch = ScratchBuffers()
        # Several threads may write variables made outside every scope; the scratch memory is
        # shared.
        self._lock = threading.Lock()
        self._created = 0
        self._background: Background[HostCommunicator] | None = None

    @property
    def communicator(self) -> HostCommunicator:
        """The ranks that share the variables."""
        return self._communicator

    @property
    def _segment(self) -> Segment:
        return private_memory().segment

    def _create(self, initial: Array) -> Block:
        communicator = self._communicator
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
        return Plan(private_memory().segment, variables, slots, compiles=self._compiles)

    def make_buffers(self, plan: Plan) -> None:
        """Makes buffers in one message, which several replicas copy as a whole to send it."""
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
            # There is no other rank to exchange with, but the call is counted, and refused where no
            # call is allowed.
            if communicator.size == 1:
                communicator.exchange(signature)
                if values is None:
                    plan.apply(rule, plan.buffer_messages, self._scratch)
                else:
                    plan.write_for_others(self._sum, values)  # large gradients are not copied
                    plan.apply(rule, [self._sum], self._scratch, values=values)
                return
            if plan.marks.started:
                reduced = self._sums_of_marked(signature, plan)
            elif op is not FIRST_REPLICA:
                reduced = self._sum
                communicator.reduce_message(signature, plan.layout, write, op, reduced)
            elif communicator.rank == 0:
                # The first replica's values; the others have nothing to send.
                reduced = communicator.exchange(signature, plan.layout.nbytes, write)[0]
            else:
                reduced = communicator.exchange(signature)[0]
            plan.apply(rule, [reduced], self._scratch)

    def _start_sums(self, plan: Plan, places: Sequence[int]) -> bool:
        communicator, marks = self._communicator, plan.marks
        self._background = communicator.background()
        if self._background is None:
            return False
        if marks.sums is None:  # one per plan: other plans may be updated during the sums
            with communicator.raise_together():
                marks.sums = np.empty(self._sum_bytes(plan), np.uint8)
                communicator.exchange(signature_of(f"{current_call()}: memory"))
        if (exchange := self._exchange_of(plan, places, marks.sums)) is not None:
            self._background.start(exchange)
        return True

    def _sum_bytes(self, plan: Plan) -> int:
        """Bytes of this rank's sums of marked gradients."""
        return plan.layout.nbytes

    def _exchange_of(
        self, plan: Plan, places: Sequence[int], sums: Array
    ) -> Callable[[HostCommunicator], None] | None:
        """A function that sums some of the plan's buffers; `None` if they have no elements."""
        bucket, message = Bucket(plan.layout, places), plan.buffer_messages[0]
        layout, signature = bucket.layout, signature_of(f"{current_call()}: sums")

        def exchange(communicator: HostCommunicator) -> None:
            views, into = bucket.views(message), bucket.in_place(sums)
            out = np.empty(layout.nbytes, np.uint8) if into is None else into
            # Summed in the order of the whole message: the same bits, whatever is marked.
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
        """All sums, once the ranks agree on the update: those that have started, and the rest."""
        assert plan.marks.sums is not None
        self._communicator.exchange(signature)
        rest = [place for place in range(len(plan.blocks)) if place not in plan.marks.started]
        self._start_sums(plan, rest)
        self._finish_sums()
        return plan.marks.sums

    def _update_rows(
        self, blocks: Sequence[Block], rows: Array, gradient: Array, rule: UpdateRule
    ) -> None:
        update_rows(blocks, rows, gradient, rule)

    def publish(self, blocks: Sequence[Block]) -> None:
        """Does nothing: every rank wrote to its own copy."""
