"""Mirrored variables on the replicas' devices, with updates and slots split over the ranks."""

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
from hpcstrat._storage.device import fill
from hpcstrat._storage.device_plan import DevicePlan
from hpcstrat._storage.marks import MarkedRange
from hpcstrat._storage.mirrored_device import MirroredDeviceStorage
from hpcstrat._storage.plan import Plan
from hpcstrat._storage.shards import cuts_of, parts_of, update_rows_in_shards


@final
class ShardedDeviceStorage(MirroredDeviceStorage):
    """Each rank reads its own copy, but stores the slots and makes the updates of only a part.

    An update: one reduce-scatter of the gradients, one fused kernel, one all-gather of the new
    values. Each element is updated by one rank, so copies stay equal even where some ranks compute
    on CPUs.
    """

    def split(self, variables: Sequence[Block]) -> list[Cuts]:
        """An equal part of all elements per rank."""
        return cuts_of(variables, self._communicator.size, ALIGNMENT)

    def _create_slot(self, variable: Block, value: float, cuts: Cuts | None) -> Block:
        assert cuts is not None
        start, stop = self._own_cuts(cuts)
        communicator = self._communicator
        with communicator.raise_together(), self._current():
            block = self._master.new_block((stop - start,), variable.array.dtype, self._created + 1)
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
            sources = self._pack_and_agree(signature, plan, values, op is not FIRST_REPLICA)
            if plan.marks.started:
                self._sum_rest(plan)
            else:
                self._sum(plan, sources, op)
            self._apply(plan.own, rule)
            for (flat, parts), segments in zip(plan.transfers, plan.segments, strict=True):
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

    def _sum_range(self, plan: DevicePlan, marked: MarkedRange) -> None:
        if not isinstance(plan, ShardedDevicePlan):
            super()._sum_range(plan, marked)
            return
        segments = []
        for rank, start, stop, place in plan.segments[marked.group]:
            first, last = max(start, marked.start), min(stop, marked.stop)
            if first < last:
                segments.append(RankSlice(rank, first, last, place + first - start))
        self._communicator.reduce_scatter_flat(
            plan.gradients[marked.group], plan.own.gradients[marked.group], segments
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
        own: the plan of this rank's part, whose message follows that of the whole.
        segments: for each dtype of the message, the range of elements of each rank.
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
        own_slots = self.to_message_order(slots)
        cuts = [of[0].cuts for of in own_slots if of[0].cuts is not None]
        self.own: DevicePlan = DevicePlan(
            memory, parts_of(self.blocks, cuts, rank), own_slots, None, chunk
        )
        size = len(cuts[0]) - 1
        dtypes = tuple([block.array.dtype for block in self.blocks])
        layouts = [
            layout_of(tuple([(of[peer + 1] - of[peer],) for of in cuts]), dtypes, ALIGNMENT)
            for peer in range(size)
        ]
        self.segments: list[list[RankSlice]] = []
        for index, group in enumerate(self.layout.groups):
            itemsize = group.dtype.itemsize
            segments: list[RankSlice] = []
            for i in group.members:
                first = (self.layout.starts[i] - group.start) // itemsize
                for peer in range(size):
                    start, stop = cuts[i][peer] + first, cuts[i][peer + 1] + first
                    if start == stop:
                        continue
                    there = layouts[peer]
                    place = (there.starts[i] - there.groups[index].start) // itemsize
                    # Neighbours both in the whole and in the part are one segment, with the gap
                    # between them.
                    if (
                        segments
                        and segments[-1].rank == peer
                        and start - segments[-1].start == place - segments[-1].place
                    ):
                        segments[-1] = segments[-1]._replace(stop=stop)
                    else:
                        segments.append(RankSlice(peer, start, stop, place))
            self.segments.append(segments)

    @property
    def nbytes(self) -> int:
        """Bytes of both messages."""
        # With the gap after the last part, which has one too where all parts are equal.
        return self._own_start + _align(self.own.layout.nbytes)

    @property
    def _own_start(self) -> int:
        return _align(self.layout.nbytes)

    def take(self, message: Array) -> None:
        """Makes this the message of both plans."""
        super().take(message)
        self.own.take(message[self._own_start : self.nbytes])

    def forget_message(self) -> None:
        """Drops the message of both plans."""
        super().forget_message()
        self.own.forget_message()


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
