"""Mirrored variables in host memory, with updates and slots split over the ranks."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Sequence
from typing import final

from hpcstrat._calls.records import CallSignature, signature_of
from hpcstrat._communicators.reduction import reduce_in_chunks
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import FIRST_REPLICA, Aggregation, Array, Bytes, ReduceOp
from hpcstrat._memory.allocator import Block, Cuts
from hpcstrat._memory.intervals import runs
from hpcstrat._storage.host import MirroredHostStorage
from hpcstrat._storage.plan import (
    MessageOrder,
    Plan,
    RankPart,
    add_up_norms,
    cuts_of,
    rank_parts_of,
    update_rows_in_shards,
)
from hpcstrat._update.rule import UpdateRule
from hpcstrat._update.update import Chunk, Update, chunks_of


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

    def plan(self, variables: Sequence[Block], slots: Sequence[Sequence[Block]]) -> Plan:
        """The plan of updates; variables without slots are updated by every rank."""
        if not any(slots):
            return super().plan(variables, slots)
        rank, memory = self.communicator.rank, self.local.memory
        order = MessageOrder(variables, [()] * len(variables))
        rank_parts = rank_parts_of(order, order.to_message(slots), rank)
        own = rank_parts[rank]
        update = self.local.new_update(own.layout, own.shards)
        # What is contiguous is copied together.
        values = [chunks_of(memory, part.shards, sys.maxsize) for part in rank_parts]
        return ShardedHostPlan(order, update, rank_parts, values, rank)

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
            if rule.norms is not None:
                # The norms are exchanged between two passes over the gradients. Summed first, these
                # outlive the messages.
                messages = [plan.sum(messages)]
            add_up = functools.partial(add_up_norms, communicator)
            plan.update.run(rule, messages, add_up=add_up)
            plan.update.forget_messages()  # they end with this call
            new = communicator.gather_sections(
                signature_of(f"{current_call()}: values"),
                [part.layout.nbytes for part in plan.rank_parts],
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
        given = plan.order.layout.views(plan.buffer_messages[0]) if values is None else values
        flat = [array.reshape(-1) for array in given]
        layouts = [part.layout for part in plan.rank_parts]

        def write(rank: int, message: Bytes) -> None:
            for shard in plan.sources[rank]:
                gradient = flat[shard.variable][shard.elements.slice]
                message[shard.message.slice].view(shard.dtype)[...] = gradient

        if op is ReduceOp.SUM:
            return communicator.sum_sections(signature, layouts, write)
        # Only optimizers' variables have slots, and optimizers use no other `op`.
        assert op is FIRST_REPLICA
        if communicator.rank == 0:
            sizes = [layout.nbytes for layout in layouts]
            return communicator.exchange_sections(signature, sizes, write)[:1]
        nothing = [0] * communicator.size
        return communicator.exchange_sections(signature, nothing, lambda _, __: None)[:1]

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
        update: of this rank's part.
        rank_parts: each rank's.
        values: for each rank, its shards of the variables in memory.
        rank: this rank.

    Attributes:
        sources: for each rank, the shards of gradients that it gets: those with elements, since
            most ranks have no part of most variables.
    """

    def __init__(
        self,
        order: MessageOrder,
        update: Update,
        rank_parts: list[RankPart],
        values: list[list[Chunk]],
        rank: int,
    ) -> None:
        super().__init__(order, update)
        self.rank_parts = rank_parts
        self.sources = [[shard for shard in of.shards if shard.elements] for of in rank_parts]
        self._values = values
        self._rank = rank

    @property
    def nbytes(self) -> int:
        """Bytes of the sums of this rank's gradients."""
        return self.rank_parts[self._rank].layout.nbytes

    def parts_to_sum(self, variables: Iterable[int]) -> tuple[list[list[Array]], list[Array]]:
        """See `Plan.parts_to_sum`. Here each rank gets the sums of its shards."""
        wanted, buffers, sums = set(variables), self.buffer_messages[0], self.make_sums()
        by_rank = [
            runs(shard for shard in part.in_whole if shard.variable in wanted)
            for part in self.rank_parts
        ]
        sources = [[buffers[run.message.slice].view(run.dtype) for run in of] for of in by_rank]
        own = [sums[run.memory[0].slice].view(run.dtype) for run in by_rank[self._rank]]
        return sources, own

    def sum(self, messages: Sequence[Bytes]) -> Bytes:
        """The sum of the messages with this rank's gradients, valid until the next."""
        sums = self.make_sums()
        for group in self.rank_parts[self._rank].layout.groups:
            reduce_in_chunks(
                group.of(sums), [group.of(message) for message in messages], ReduceOp.SUM
            )
        return sums

    def write_new(self, rank: int, message: Bytes) -> None:
        """Copies a rank's shards of the variables to its message."""
        for shard, value, _ in self._values[rank]:
            message[shard.message.slice].view(shard.dtype)[...] = value

    def read_new(self, rank: int, message: Bytes) -> None:
        """Copies a rank's shards from its message to the variables."""
        for shard, value, _ in self._values[rank]:
            value[...] = message[shard.message.slice].view(shard.dtype)
