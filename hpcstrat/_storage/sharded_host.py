"""Mirrored variables in host memory, with updates and slots split over the ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from typing import final

import numpy as np

from hpcstrat._calls.records import CallSignature, signature_of
from hpcstrat._communicators.host import HostCommunicator
from hpcstrat._communicators.reduction import reduce_flat
from hpcstrat._core.call_name import call_named, current_call
from hpcstrat._core.types import FIRST_REPLICA, Aggregation, Array, Bytes, ReduceOp
from hpcstrat._memory.allocator import private_memory
from hpcstrat._memory.blocks import Block, Cuts
from hpcstrat._memory.intervals import Interval, divide_up
from hpcstrat._memory.layout import Layout, layout_of
from hpcstrat._storage.message_order import MessageOrder
from hpcstrat._storage.mirrored_host import MirroredHostStorage
from hpcstrat._storage.plan import Plan
from hpcstrat._storage.shards import Section, cuts_of, sections_of, update_rows_in_shards
from hpcstrat._update.chunks import Memory, chunks_of
from hpcstrat._update.rule import UpdateRule
from hpcstrat._update.update import Update


@final
class ShardedHostStorage(MirroredHostStorage):
    """Each rank reads its own copy, but stores the slots and makes the updates of only a part.

    An update: each rank sends the others the gradients of their parts, sums those of its own part
    in rank order, and updates it; then all ranks get all new values. Variables without slots are
    updated by each rank, like mirrored variables.
    """

    def split(self, variables: Sequence[Block]) -> list[Cuts]:
        """An equal part of all elements per rank."""
        return cuts_of(variables, self.communicator.size)

    def _create_slot(self, variable: Block, value: float, cuts: Cuts | None) -> Block:
        assert cuts is not None
        communicator, nbytes = self.communicator, variable.array.nbytes
        own = Interval(*cuts[communicator.rank : communicator.rank + 2])
        communicator.require_memory(
            divide_up(nbytes, communicator.size), signature_of(current_call(), "slot", nbytes)
        )
        with communicator.raise_together():
            dtype = variable.array.dtype
            block = private_memory().new_block((own.size,), dtype, self._created + 1)
            block.array[...] = value
            # The cuts depend on all variables that get slots together: ranks that differ in these
            # must not continue.
            communicator.exchange(
                signature_of(current_call(), "slot", value, variable.identity(), cuts)
            )
        block.cuts = cuts
        self._created += 1
        return block

    def plan(self, variables: Sequence[Block], slots: Sequence[Sequence[Block]]) -> Plan:
        """The plan of updates; variables without slots are updated by every rank."""
        if not any(slots):
            return super().plan(variables, slots)
        order = MessageOrder(variables, [()] * len(variables))
        sections = sections_of(order, order.to_message(slots), self.communicator.rank)
        own = sections[self.communicator.rank]
        update = self._new_update(own.layout, own.shards)
        return ShardedHostPlan(order, update, self._segment(), sections)

    def _update(
        self,
        signature: CallSignature,
        plan: Plan,
        values: Sequence[Array] | None,
        op: Aggregation,
        rule: UpdateRule,
    ) -> None:
        if not isinstance(plan, ShardedHostPlan):
            super()._update(signature, plan, values, op, rule)
            return
        communicator = self.communicator
        with self._lock:
            messages = self._messages_of(signature, plan, values, op)
            if rule.norms is None:
                plan.update.run(rule, messages)
            else:
                # The norms are exchanged between two passes over the gradients. Summed first, these
                # outlive the messages.
                layout = plan.sections[communicator.rank].layout
                total = self._sum_messages(layout, messages)
                plan.update.run(rule, [total], add_up=self._add_up)
            plan.update.forget_messages()  # they end with this call
            sizes = [section.layout.nbytes for section in plan.sections]
            new = communicator.gather_sections(
                signature_of(f"{current_call()}: values"),
                sizes,
                lambda message: plan.write_new(communicator.rank, message),
            )
            for rank, message in enumerate(new):
                if rank != communicator.rank:
                    plan.read_new(rank, message)

    def _messages_of(
        self,
        signature: CallSignature,
        plan: ShardedHostPlan,
        values: Sequence[Array] | None,
        op: Aggregation,
    ) -> list[Bytes]:
        """Messages whose sum is the gradients, or new values, of this rank's shards."""
        communicator = self.communicator
        if plan.started:
            return [self._sums_of_marked(signature, plan)]
        given = plan.in_buffers() if values is None else values
        flat = [array.reshape(-1) for array in given]
        layouts = [section.layout for section in plan.sections]

        def write(rank: int, message: Bytes) -> None:
            for shard in plan.sources[rank]:
                gradient = flat[shard.variable][shard.elements.slice]
                message[shard.message.slice].view(shard.dtype)[...] = gradient

        if op is ReduceOp.SUM:
            return communicator.sum_sections(signature, layouts, plan.order.layout, write)
        # Only optimizers' variables have slots, and optimizers use no other `op`.
        assert op is FIRST_REPLICA
        if communicator.rank == 0:
            sizes = [layout.nbytes for layout in layouts]
            return communicator.exchange_sections(signature, sizes, write)[:1]
        nothing = [0] * communicator.size
        return communicator.exchange_sections(signature, nothing, lambda _, __: None)[:1]

    def _sum_bytes(self, plan: Plan) -> int:
        if not isinstance(plan, ShardedHostPlan):
            return super()._sum_bytes(plan)
        return plan.sections[self.communicator.rank].layout.nbytes

    def _exchange_of(
        self, plan: Plan, variables: Collection[int], sums: Array
    ) -> Callable[[HostCommunicator], None] | None:
        if not isinstance(plan, ShardedHostPlan):
            return super()._exchange_of(plan, variables, sums)
        wanted, rank = set(variables), self.communicator.rank
        chosen = [[shard for shard in of if shard.variable in wanted] for of in plan.sources]
        layouts = [
            layout_of(
                tuple([(shard.elements.size,) for shard in of]),
                tuple([shard.dtype for shard in of]),
            )
            for of in chosen
        ]
        flat = [array.reshape(-1) for array in plan.in_buffers()]
        totals = [sums[shard.message.slice].view(shard.dtype) for shard in chosen[rank]]
        signature = signature_of(f"{current_call()}: sums")

        def write(peer: int, message: Bytes) -> None:
            gradients = [flat[shard.variable][shard.elements.slice] for shard in chosen[peer]]
            layouts[peer].write(message, gradients)

        def exchange(communicator: HostCommunicator) -> None:
            messages = communicator.sum_sections(signature, layouts, plan.order.layout, write)
            parts = zip(*[layouts[rank].views(message) for message in messages], strict=True)
            for total, summands in zip(totals, parts, strict=True):
                reduce_flat(total, summands, ReduceOp.SUM)

        return exchange if any(layout.nbytes for layout in layouts) else None

    def _sum_messages(self, layout: Layout, messages: Sequence[Bytes]) -> Bytes:
        if self._sum.size < layout.nbytes:
            self._sum = np.empty(layout.nbytes, np.uint8)
        for group in layout.groups:
            reduce_flat(
                group.of(self._sum), [group.of(message) for message in messages], ReduceOp.SUM
            )
        return self._sum

    def _add_up(self, sums: Array) -> Array:
        """The sums over whole variables: the ranks' sums over their parts, added in rank order."""
        with call_named(f"{current_call()}: norms"):
            return self.communicator.all_reduce([sums], ReduceOp.SUM)[0]

    def _update_rows(
        self, blocks: Sequence[Block], rows: Array, gradient: Array, rule: UpdateRule
    ) -> None:
        if len(blocks) > 1:
            update_rows_in_shards(self.communicator, blocks, rows, gradient, rule)
        else:
            super()._update_rows(blocks, rows, gradient, rule)


class ShardedHostPlan(Plan):
    """The plan of variables whose slots are split over the ranks.

    Args:
        order: see `Plan`.
        update: of this rank's section.
        memory: the memory of the variables.
        sections: see the attribute.

    Attributes:
        sections: each rank's.
        sources: for each rank, the shards of gradients that it gets: those with elements, since
            most ranks have no part of most variables.
    """

    def __init__(
        self,
        order: MessageOrder,
        update: Update,
        memory: Memory,
        sections: list[Section],
    ) -> None:
        super().__init__(order, update)
        self.sections = sections
        self.sources = [[shard for shard in of.shards if shard.elements] for of in sections]
        # What is contiguous is copied together.
        self._values = [chunks_of(memory, section.shards, sys.maxsize) for section in sections]

    def in_buffers(self) -> list[Array]:
        """The gradients in the buffers, in the order of the message."""
        return self.order.layout.views(self.buffer_messages[0])

    def write_new(self, rank: int, message: Bytes) -> None:
        """Copies a rank's shards of the variables to its message."""
        for shard, value, _ in self._values[rank]:
            message[shard.message.slice].view(shard.dtype)[...] = value

    def read_new(self, rank: int, message: Bytes) -> None:
        """Copies a rank's shards from its message to the variables."""
        for shard, value, _ in self._values[rank]:
            value[...] = message[shard.message.slice].view(shard.dtype)
