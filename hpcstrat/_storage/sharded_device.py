"""Mirrored variables on the replicas' devices, with updates and slots split over the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

from hpcstrat._calls.records import CallSignature, signature_of
from hpcstrat._communicators.device import RankSlice
from hpcstrat._core.call_name import call_named, current_call
from hpcstrat._core.types import FIRST_REPLICA, Aggregation, Array, ReduceOp
from hpcstrat._memory.allocator import ALIGNMENT
from hpcstrat._memory.blocks import Block, Cuts
from hpcstrat._memory.intervals import Interval, round_up, runs
from hpcstrat._memory.layout import Layout
from hpcstrat._storage.base import slot_values
from hpcstrat._storage.device_plan import DevicePlan
from hpcstrat._storage.local import fill
from hpcstrat._storage.message_order import MessageOrder
from hpcstrat._storage.mirrored_device import MirroredDeviceStorage
from hpcstrat._storage.plan import Plan
from hpcstrat._storage.shards import Section, cuts_of, sections_of, update_rows_in_shards
from hpcstrat._update.chunks import Chunk
from hpcstrat._update.rule import UpdateRule
from hpcstrat._update.update import Update


@final
class ShardedDeviceStorage(MirroredDeviceStorage):
    """Each rank reads its own copy, but stores the slots and makes the updates of only a part.

    An update: one reduce-scatter of the gradients, one fused kernel, one all-gather of the new
    values. Each element is updated by one rank, so copies stay equal even where some ranks compute
    on CPUs.
    """

    def split(self, variables: Sequence[Block]) -> list[Cuts]:
        """An equal part of all elements per rank."""
        return cuts_of(variables, self.communicator.size, ALIGNMENT)

    def _create_slot(self, variable: Block, value: float, cuts: Cuts | None) -> Block:
        assert cuts is not None
        communicator, dtype = self.communicator, variable.array.dtype
        own = Interval(*cuts[communicator.rank : communicator.rank + 2])
        with communicator.raise_together(), self.local.current():
            block = self.local.memory.new_block((own.size,), dtype, self._created + 1)
            fill(block.array, slot_values(block, value))
            communicator.exchange(
                signature_of(current_call(), "slot", value, variable.identity(), cuts)
            )
        block.cuts = cuts
        self._created += 1
        return block

    def plan(self, variables: Sequence[Block], slots: Sequence[Sequence[Block]]) -> DevicePlan:
        """The plan of updates; variables without slots are updated by every rank."""
        if not any(slots):
            return super().plan(variables, slots)
        rank = self.communicator.rank
        order = MessageOrder(variables, [()] * len(variables), ALIGNMENT)
        sections = sections_of(order, order.to_message(slots), rank)
        update = self.local.new_update(sections[rank].shards)
        readable = self.local.runs_to_read(variables)
        return ShardedDevicePlan(order, update, readable, sections, rank)

    def _update(
        self,
        signature: CallSignature,
        plan: Plan,
        values: Sequence[Array] | None,
        op: Aggregation,
        rule: UpdateRule,
    ) -> None:
        if not isinstance(plan, ShardedDevicePlan):
            super()._update(signature, plan, values, op, rule)
            return
        with self.local.current():
            sources = self._pack_and_agree(signature, plan, values, op is not FIRST_REPLICA)
            if plan.started:
                self._finish_sums()
                self._sum_parts(plan, plan.not_started())
            elif op is FIRST_REPLICA:
                self._broadcast(plan)
            else:
                # Only optimizers' variables have slots, and optimizers use no other `op`.
                assert op is ReduceOp.SUM
                for source, own, slices in zip(
                    sources, plan.own_gradients, plan.slices, strict=True
                ):
                    self.communicator.reduce_scatter_flat(source, own, slices)
            self.local.run(plan, rule, self._add_up)
            for (flat, parts), slices in zip(plan.transfers, plan.slices, strict=True):
                for value, part in parts:
                    part[...] = value
                self.communicator.all_gather_flat(flat, slices)
                for value, part in parts:
                    value[...] = part

    def _broadcast(self, plan: ShardedDevicePlan) -> None:
        """Sends the first replica's values to all ranks, which take their own part."""
        communicator = self.communicator
        for gradient, own, slices in zip(
            plan.gradients, plan.own_gradients, plan.slices, strict=True
        ):
            communicator.broadcast_flat(gradient, 0)
            for rank, elements, of_own in slices:
                if rank == communicator.rank:
                    own[of_own.slice] = gradient[elements.slice]

    def _sum_parts(self, plan: DevicePlan, variables: Iterable[int]) -> None:
        if not isinstance(plan, ShardedDevicePlan):
            super()._sum_parts(plan, variables)
            return
        parts = plan.order.parts_of(variables)
        for gradient, own, slices, of_gradient in zip(
            plan.gradients, plan.own_gradients, plan.slices, parts, strict=True
        ):
            for part in of_gradient:
                here = [
                    RankSlice(rank, both, both.shift(of_own.start - elements.start))
                    for rank, elements, of_own in slices
                    if (both := elements & part)
                ]
                self.communicator.reduce_scatter_flat(gradient, own, here)

    def _add_up(self, sums: Array) -> Array:
        """The sums over whole variables, from the sums over this rank's shards."""
        with call_named(f"{current_call()}: norms"):
            return self.communicator.all_reduce([sums], ReduceOp.SUM)[0]

    def _update_rows(
        self, blocks: Sequence[Block], rows: Array, gradient: Array, rule: UpdateRule
    ) -> None:
        if len(blocks) == 1:
            super()._update_rows(blocks, rows, gradient, rule)
            return
        with self.local.current():
            rows, gradient = self.local.here(rows), self.local.here(gradient)
            update_rows_in_shards(self.communicator, blocks, rows, gradient, rule)


class ShardedDevicePlan(DevicePlan):
    """The plan of variables whose slots are split over the ranks.

    Args:
        order: see `DevicePlan`.
        update: of this rank's section.
        readable: see `DevicePlan`.
        sections: each rank's.
        rank: this rank.

    Attributes:
        own_gradients: this rank's section by dtype. It follows the message of the whole.
        slices: for each dtype of the message, the elements of each rank.
    """

    def __init__(
        self,
        order: MessageOrder,
        update: Update,
        readable: Sequence[Chunk],
        sections: Sequence[Section],
        rank: int,
    ) -> None:
        super().__init__(order, update, readable)
        self.own_gradients: list[Array] = []
        self._own: Layout = sections[rank].layout
        self.slices = rank_slices(order, sections)

    @property
    def nbytes(self) -> int:
        """Bytes of both messages."""
        # With the gap after this rank's last element: if parts are equal, a reduce-scatter writes a
        # whole part, also for a rank whose last variable ends before.
        return self._own_start + round_up(self._own.nbytes, ALIGNMENT)

    @property
    def _own_start(self) -> int:
        return round_up(self.order.layout.nbytes, ALIGNMENT)

    def take(self, memory: Array) -> None:
        """Makes both messages."""
        super().take(memory)
        self.update_message = memory[self._own_start : self.nbytes]
        self.own_gradients = [group.of(self.update_message) for group in self._own.groups]

    def forget_message(self) -> None:
        """Drops both messages."""
        super().forget_message()
        self.own_gradients = []


def rank_slices(order: MessageOrder, sections: Sequence[Section]) -> list[list[RankSlice]]:
    """For each dtype of the message, which of its elements belong to which rank."""
    slices: list[list[RankSlice]] = [[] for _ in order.layout.groups]
    for rank, section in enumerate(sections):
        # In the section instead of in memory, merged with the gaps between variables.
        shards = [
            whole.part(own.elements)._replace(memory=(own.message,))
            for whole, own in zip(order.shards, section.shards, strict=True)
        ]
        for run in runs(shards, order.layout.alignment):
            index = [group.dtype for group in order.layout.groups].index(run.dtype)
            whole, own = order.layout.groups[index], section.layout.groups[index]
            elements, of_own = whole.within(run.message), own.within(run.memory[0])
            slices[index].append(RankSlice(rank, elements, of_own))
    return slices
