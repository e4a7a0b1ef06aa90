"""Mirrored variables on the replicas' devices whose updates, and slots, are split over the ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import final

from hpcstrat._calls.records import CallSignature, signature_of
from hpcstrat._communicators.device import RankSlice
from hpcstrat._communicators.reduction import CHUNK
from hpcstrat._core.call_name import call_named, current_call
from hpcstrat._core.types import FIRST_REPLICA, Aggregation, Array, ReduceOp
from hpcstrat._memory.allocator import ALIGNMENT, SlabAllocator
from hpcstrat._memory.blocks import Block, Cuts
from hpcstrat._memory.layout import layout_of
from hpcstrat._storage.base import UpdateRule, slot_values
from hpcstrat._storage.device import DevicePlan, fill
from hpcstrat._storage.marks import MarkedRange
from hpcstrat._storage.mirrored_device import MirroredDeviceStorage
from hpcstrat._storage.plan import Plan
from hpcstrat._storage.shards import cuts_of, parts_of, update_rows_in_shards


@final
class ShardedDeviceStorage(MirroredDeviceStorage):
    """Each rank reads a copy of its own; it keeps the slots of a part of all elements, and updates these.

    An update: one reduce-scatter of the gradients, one fused kernel, one all-gather of the new
    values. Each element is
    updated by one rank, so copies stay equal even where some ranks compute on CPUs.
    """

    def split(self, variables: Sequence[Block]) -> list[Cuts]:
        """See `Storage.split`."""
        return cuts_of(variables, self._communicator.size, ALIGNMENT)

    def _create_slot(self, variable: Block, value: float, cuts: Cuts | None) -> Block:
        assert cuts is not None
        start, stop = self._own_cuts(cuts)
        communicator = self._communicator
        with communicator.raise_together(), self._current():
            block = self._master.new_block((stop - start,), variable.array.dtype, self._created + 1)
            fill(block.array, slot_values(block, value))
            communicator.exchange(
                signature_of(current_call(), "slot", value, variable.held(), cuts)
            )
        block.cuts = cuts
        self._created += 1
        return block

    def plan(self, variables: Sequence[Block], slots: Sequence[Sequence[Block]]) -> DevicePlan:
        """See `Storage.plan`."""
        if not any(slots):
            return super().plan(variables, slots)
        chunk = sys.maxsize if self._updates_on_gpu else CHUNK
        return ShardedDevicePlan(self._master, variables, slots, self._communicator.rank, chunk)

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
        communicator = self._communicator
        with self._current():
            sources = self._begin(signature, plan, values, op is not FIRST_REPLICA)
            if plan.marks.begun:
                self._sum_rest(plan)
            else:
                self._sum(plan, sources, op)
            self._apply(plan.own, rule)
            for (flat, parts), segments in zip(plan.moved, plan.segments, strict=True):
                for value, part in parts:
                    part[...] = value
                communicator.all_gather_flat(flat, segments)
                for value, part in parts:
                    value[...] = part

    def _sum(self, plan: ShardedDevicePlan, sources: Sequence[Array], op: Aggregation) -> None:
        communicator = self._communicator
        for source, gradient, part, segments in zip(
            sources, plan.gradients, plan.own.gradients, plan.segments, strict=True
        ):
            if op is not FIRST_REPLICA:
                communicator.reduce_scatter_flat(source, part, segments)
                continue
            communicator.broadcast_flat(gradient, 0)
            for rank, start, stop, place in segments:
                if rank == communicator.rank:
                    part[place : place + stop - start] = gradient[start:stop]

    def _sum_range(self, plan: DevicePlan, one: MarkedRange) -> None:
        if not isinstance(plan, ShardedDevicePlan):
            super()._sum_range(plan, one)
            return
        segments = []
        for rank, start, stop, place in plan.segments[one.group]:
            first, last = max(start, one.start), min(stop, one.stop)
            if first < last:
                segments.append(RankSlice(rank, first, last, place + first - start))
        self._communicator.reduce_scatter_flat(
            plan.gradients[one.group], plan.own.gradients[one.group], segments
        )

    def _share(self, sums: Array) -> Array:
        with call_named(f"{current_call()}: norms"):
            return self._communicator.all_reduce([sums], ReduceOp.SUM)[0]

    def _update_rows(
        self, blocks: Sequence[Block], rows: Array, gradient: Array, rule: UpdateRule
    ) -> None:
        if len(blocks) == 1:
            super()._update_rows(blocks, rows, gradient, rule)
            return
        with self._current():
            update_rows_in_shards(
                self._communicator, blocks, self.on_device(rows), self.on_device(gradient), rule
            )


class ShardedDevicePlan(DevicePlan):
    """The plan of variables whose slots are split over the ranks.

    Attributes:
        own: the plan of this rank's part, whose message lies behind that of the whole.
        segments: of each dtype of the message, whose elements are which.
    """

    def __init__(
        self,
        memory: SlabAllocator,
        variables: Sequence[Block],
        slots: Sequence[Sequence[Block]],
        rank: int,
        chunk: int,
    ) -> None:
        super().__init__(memory, variables, [()] * len(variables), None, sys.maxsize)
        own_slots = self.in_order(slots)
        cuts = [of[0].cuts for of in own_slots if of[0].cuts is not None]
        self.own: DevicePlan = DevicePlan(
            memory, parts_of(self.blocks, cuts, rank), own_slots, None, chunk
        )
        size = len(cuts[0]) - 1
        dtypes = tuple([block.array.dtype for block in self.blocks])
        layouts = [
            layout_of(tuple([(of[one + 1] - of[one],) for of in cuts]), dtypes, ALIGNMENT)
            for one in range(size)
        ]
        self.segments: list[list[RankSlice]] = []
        for index, group in enumerate(self.layout.groups):
            itemsize = group.dtype.itemsize
            found: list[RankSlice] = []
            for i in group.members:
                begin = (self.layout.starts[i] - group.start) // itemsize
                for one in range(size):
                    start, stop = cuts[i][one] + begin, cuts[i][one + 1] + begin
                    if start == stop:
                        continue
                    there = layouts[one]
                    place = (there.starts[i] - there.groups[index].start) // itemsize
                    # What lies in a row both in the whole and in the part is one segment, with the
                    # gap in between.
                    if (
                        found
                        and found[-1].rank == one
                        and start - found[-1].start == place - found[-1].place
                    ):
                        found[-1] = found[-1]._replace(stop=stop)
                    else:
                        found.append(RankSlice(one, start, stop, place))
            self.segments.append(found)

    @property
    def nbytes(self) -> int:
        """Bytes of both messages."""
        # With the gap behind the last part, which equal parts have too.
        return self._own_start + _aligned(self.own.layout.nbytes)

    @property
    def _own_start(self) -> int:
        return _aligned(self.layout.nbytes)

    def take(self, message: Array) -> None:
        """See `DevicePlan.take`."""
        super().take(message)
        self.own.take(message[self._own_start : self.nbytes])

    def let_go(self) -> None:
        """See `DevicePlan.let_go`."""
        super().let_go()
        self.own.let_go()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
