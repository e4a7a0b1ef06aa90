"""Mirrored variables in host memory, with updates and slots split over the ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import final

import numpy as np

from hpcstrat._calls.records import CallSignature, signature_of
from hpcstrat._communicators.host import HostCommunicator
from hpcstrat._communicators.reduction import reduce_flat
from hpcstrat._core.call_name import call_named, current_call
from hpcstrat._core.types import FIRST_REPLICA, Aggregation, Array, Bytes, ReduceOp
from hpcstrat._memory.allocator import private_memory
from hpcstrat._memory.blocks import Block, Cuts
from hpcstrat._memory.intervals import divide_up
from hpcstrat._memory.layout import Layout, layout_of
from hpcstrat._memory.segment import Segment
from hpcstrat._storage.base import UpdateRule
from hpcstrat._storage.mirrored_host import MirroredHostStorage
from hpcstrat._storage.plan import Plan
from hpcstrat._storage.shards import cuts_of, parts_of, update_rows_in_shards


@final
class ShardedHostStorage(MirroredHostStorage):
    """Each rank reads its own copy, but stores the slots and makes the updates of only a part.

    An update: each rank sends the others the gradients of their parts, sums those of its own part
    in rank order, and updates it; then all ranks get all new values. Variables without slots are
    updated by each rank, like mirrored variables.
    """

    def split(self, variables: Sequence[Block]) -> list[Cuts]:
        """An equal part of all elements per rank."""
        return cuts_of(variables, self._communicator.size)

    def _create_slot(self, variable: Block, value: float, cuts: Cuts | None) -> Block:
        assert cuts is not None
        start, stop = self._own_cuts(cuts)
        communicator, nbytes = self._communicator, variable.array.nbytes
        communicator.require_memory(
            divide_up(nbytes, communicator.size), signature_of(current_call(), "slot", nbytes)
        )
        with self._communicator.raise_together():
            block = private_memory().new_block(
                (stop - start,), variable.array.dtype, self._created + 1
            )
            block.array[...] = value
            # The cuts depend on all variables that get slots together: ranks that differ in these
            # must not continue.
            self._communicator.exchange(
                signature_of(current_call(), "slot", value, variable.identity(), cuts)
            )
        block.cuts = cuts
        self._created += 1
        return block

    def plan(self, variables: Sequence[Block], slots: Sequence[Sequence[Block]]) -> Plan:
        """The plan of updates; variables without slots are updated by every rank."""
        if not any(slots):
            return super().plan(variables, slots)
        return ShardedPlan(self._segment, variables, slots, self._communicator.rank, self._compiles)

    def _update(
        self,
        signature: CallSignature,
        plan: Plan,
        values: Sequence[Array] | None,
        op: Aggregation,
        rule: UpdateRule,
    ) -> None:
        if not isinstance(plan, ShardedPlan):
            super()._update(signature, plan, values, op, rule)
            return
        communicator, own = self._communicator, plan.own
        flat = plan.flat(plan.buffers if values is None else values)  # pyright: ignore[reportArgumentType]

        def write(rank: int, section: Bytes) -> None:
            plan.write_section(rank, section, flat)

        with self._lock:
            if plan.marks.started:
                messages = [self._sums_of_marked(signature, plan)]
            elif op is ReduceOp.SUM:
                layouts = [shard.layout for shard in plan.shards]
                messages = communicator.sum_sections(signature, layouts, plan.layout, write)
            else:
                # Only optimizers' variables have slots, and optimizers use no other `op`.
                assert op is FIRST_REPLICA
                sizes = [shard.layout.nbytes * (communicator.rank == 0) for shard in plan.shards]
                first = write if communicator.rank == 0 else lambda _, __: None
                messages = communicator.exchange_sections(signature, sizes, first)[:1]
            if rule.norms is None:
                own.apply(rule, messages, self._scratch)
            else:
                # The norms are exchanged between two passes over the gradients. Summed first, these
                # outlive the messages.
                own.apply(
                    rule,
                    [self._sum_messages(own.layout, messages)],
                    self._scratch,
                    share=self._share,
                )
            own.forget_messages()  # they end with this call
            sizes = [shard.layout.nbytes for shard in plan.shards]
            new = communicator.gather_sections(
                signature_of(f"{current_call()}: values"), sizes, plan.write_new
            )
            for rank, message in enumerate(new):
                plan.read_new(rank, message)

    def _sum_bytes(self, plan: Plan) -> int:
        return plan.own.layout.nbytes if isinstance(plan, ShardedPlan) else super()._sum_bytes(plan)

    def _exchange_of(
        self, plan: Plan, places: Sequence[int], sums: Array
    ) -> Callable[[HostCommunicator], None] | None:
        if not isinstance(plan, ShardedPlan):
            return super()._exchange_of(plan, places, sums)
        pieces = plan.pieces_of(places)
        layouts = [
            layout_of(
                tuple([(stop - start,) for _, start, stop, _ in of]),
                tuple([plan.blocks[i].array.dtype for i, *_ in of]),
            )
            for of in pieces
        ]
        assert plan.buffers is not None
        flat, own = plan.flat(plan.buffers), self._communicator.rank
        signature = signature_of(f"{current_call()}: sums")

        def write(rank: int, section: Bytes) -> None:
            layouts[rank].write(
                section, [flat[i][start:stop] for i, start, stop, _ in pieces[rank]]
            )

        def exchange(communicator: HostCommunicator) -> None:
            messages = communicator.sum_sections(signature, layouts, plan.layout, write)
            parts = zip(*[layouts[own].views(message) for message in messages], strict=True)
            for (i, start, stop, offset), summands in zip(pieces[own], parts, strict=True):
                dtype = plan.blocks[i].array.dtype
                out = sums[offset : offset + (stop - start) * dtype.itemsize].view(dtype)
                reduce_flat(out, summands, ReduceOp.SUM)

        return exchange if any(layout.nbytes for layout in layouts) else None

    def _sum_messages(self, layout: Layout, messages: Sequence[Bytes]) -> Bytes:
        if self._sum.size < layout.nbytes:
            self._sum = np.empty(layout.nbytes, np.uint8)
        for group in layout.groups:
            reduce_flat(
                group.of(self._sum), [group.of(message) for message in messages], ReduceOp.SUM
            )
        return self._sum

    def _share(self, sums: Array) -> Array:
        """The sums over whole variables: the ranks' sums over their parts, added in rank order."""
        with call_named(f"{current_call()}: norms"):
            return self._communicator.all_reduce([sums], ReduceOp.SUM)[0]

    def _update_rows(
        self, blocks: Sequence[Block], rows: Array, gradient: Array, rule: UpdateRule
    ) -> None:
        if len(blocks) > 1:
            update_rows_in_shards(self._communicator, blocks, rows, gradient, rule)
        else:
            super()._update_rows(blocks, rows, gradient, rule)


class ShardedPlan(Plan):
    """The plan of variables whose slots are split over the ranks.

    Attributes:
        shards: for each rank, the plan of its part of the variables; only this rank's has slots.
        own: this rank's.
    """

    def __init__(
        self,
        memory: Segment,
        variables: Sequence[Block],
        slots: Sequence[Sequence[Block]],
        rank: int,
        compiles: bool,
    ) -> None:
        # This plan updates nothing: each range is one chunk.
        super().__init__(memory, variables, [()] * len(variables), chunk=sys.maxsize)
        own_slots = self.to_message_order(slots)
        cuts = [of[0].cuts for of in own_slots]
        self._rank = rank
        self.shards: list[Plan] = []
        for peer in range(len(cuts[0]) - 1):
            parts = parts_of(self.blocks, cuts, peer)
            if peer == rank:
                self.shards.append(Plan(memory, parts, own_slots, compiles=compiles))
            else:
                self.shards.append(Plan(memory, parts, [()] * len(parts), chunk=sys.maxsize))
        self.own: Plan = self.shards[rank]
        # For each rank the gradients it gets: the variable's place in the message, the range of its
        # elements, and their first byte in the rank's section. Most ranks have no part of most
        # variables.
        self._sources = [
            [
                (i, of[peer], of[peer + 1], shard.layout.starts[i])
                for i, of in enumerate(cuts)
                if of[peer] < of[peer + 1]
            ]
            for peer, shard in enumerate(self.shards)
        ]

    def pieces_of(self, places: Sequence[int]) -> list[list[tuple[int, int, int, int]]]:
        """For each rank, its pieces of the gradients at these places.

        A piece is the place in the message, the range of elements, and the range's first byte in
        the rank's section.
        """
        return [[piece for piece in of_rank if piece[0] in places] for of_rank in self._sources]

    def flat(self, values: Sequence[Array]) -> list[Array]:
        """The variables' gradients, in the order of the message, as flat arrays."""
        return [value.reshape(-1) for value in self.to_message_order(values)]

    def write_section(self, rank: int, section: Bytes, flat: Sequence[Array]) -> None:
        """Copies a rank's pieces of the gradients to its section."""
        for i, start, stop, offset in self._sources[rank]:
            dtype = self.blocks[i].array.dtype
            piece = section[offset : offset + (stop - start) * dtype.itemsize].view(dtype)
            piece[...] = flat[i][start:stop]

    def write_new(self, message: Bytes) -> None:
        """Copies this rank's part of the variables to a message."""
        for chunk in self.own.chunks:
            self.own.layout.groups[chunk.group].of(message)[chunk.start : chunk.stop] = chunk.value

    def read_new(self, rank: int, message: Bytes) -> None:
        """Copies another rank's part from its message to the variables."""
        if rank == self._rank:
            return
        shard = self.shards[rank]
        for chunk in shard.chunks:
            chunk.value[...] = shard.layout.groups[chunk.group].of(message)[
                chunk.start : chunk.stop
            ]
