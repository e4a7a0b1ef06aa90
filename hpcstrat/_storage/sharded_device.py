"""Mirrored variables on the replicas' devices, with updates and slots split over the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

from hpcstrat._communicators.device import Move, RankSlice
from hpcstrat._core.types import FIRST_REPLICA, Aggregation, Array, ReduceOp
from hpcstrat._memory.allocator import ALIGNMENT, Block, Cuts
from hpcstrat._storage.device import MirroredDeviceStorage
from hpcstrat._storage.plan import (
    DevicePlan,
    MessageOrder,
    cuts_of,
    rank_parts_of,
    update_rows_in_shards,
)
from hpcstrat._update.rule import UpdateRule


@final
class ShardedDeviceStorage(MirroredDeviceStorage):
    """Each rank reads its own copy, but stores the slots and makes the updates of only a part.

    An update: one reduce-scatter of the gradients, one fused kernel, one all-gather of the new
    values. Each element is updated by one rank, so copies stay equal even where some ranks compute
    on CPUs. Variables without slots are updated by each rank, like mirrored variables: their plans
    have no `slices`.
    """

    def split(self, variables: Sequence[Block]) -> list[Cuts]:
        """An equal part of all elements per rank."""
        return cuts_of(variables, self.communicator.size, ALIGNMENT)

    def plan(self, variables: Sequence[Block], slots: Sequence[Sequence[Block]]) -> DevicePlan:
        """The plan of updates; variables without slots are updated by every rank."""
        if not any(slots):
            return super().plan(variables, slots)
        rank = self.communicator.rank
        order = MessageOrder(variables, [()] * len(variables), ALIGNMENT)
        rank_parts = rank_parts_of(order, order.to_message(slots), rank)
        own = rank_parts[rank]
        update = self.local.new_update(own.layout, own.shards)
        return DevicePlan(order, update, self.local.runs_to_read(order), rank_parts, rank)

    def _reduce_message(self, plan: DevicePlan, sources: Sequence[Array], op: Aggregation) -> None:
        if not plan.slices:
            super()._reduce_message(plan, sources, op)
            return
        communicator = self.communicator
        for source, own, slices in zip(sources, plan.own_gradients, plan.slices, strict=True):
            if op is ReduceOp.SUM:
                communicator.reduce_scatter_flat(source, own, slices)
                continue
            # Only optimizers' variables have slots, and optimizers use no other `op`.
            assert op is FIRST_REPLICA
            communicator.broadcast_flat(source, 0)
            for rank, elements, of_own in slices:
                if rank == communicator.rank:
                    own[of_own.slice] = source[elements.slice]

    def _prepare_reductions(self, plan: DevicePlan) -> list[Move]:
        if not plan.slices:
            return super()._prepare_reductions(plan)
        prepare = self.communicator.prepare_reduce_scatter
        sources = zip(plan.gradients, plan.own_gradients, plan.slices, strict=True)
        return [move for each in sources for move in prepare(*each)]

    def _sum_parts(self, plan: DevicePlan, variables: Iterable[int]) -> None:
        if not plan.slices:
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
        flat = sums.reshape(-1)
        self.communicator.all_reduce_flat(flat, flat, ReduceOp.SUM)
        return sums

    def _share(self, plan: DevicePlan) -> None:
        if not plan.slices:  # every rank has computed the new values
            return
        if plan.sharing is None:
            prepare = self.communicator.prepare_all_gather
            pairs = zip(plan.transfers, plan.slices, strict=True)
            plan.sharing = [m for (flat, _), slices in pairs for m in prepare(flat, slices)]
        for _, parts in plan.transfers:
            for value, part in parts:
                part[...] = value
        self.communicator.launch("the new values", plan.sharing)
        for _, parts in plan.transfers:
            for value, part in parts:
                value[...] = part

    def _update_rows(
        self, blocks: Sequence[Block], rows: Array, gradient: Array, rule: UpdateRule
    ) -> None:
        if len(blocks) == 1:
            super()._update_rows(blocks, rows, gradient, rule)
            return
        with self.local.current():
            rows, gradient = self.local.here(rows), self.local.here(gradient)
            update_rows_in_shards(self.communicator, blocks, rows, gradient, rule)
