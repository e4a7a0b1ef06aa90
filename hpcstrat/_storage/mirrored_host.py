"""Storage in host memory: a copy of the variables on each replica."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from typing import final

import numpy as np

from hpcstrat._calls.records import CallSignature, signature_of
from hpcstrat._communicators.host import HostCommunicator
from hpcstrat._communicators.point_to_point import Background
from hpcstrat._communicators.reduction import reduce_in_chunks
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import FIRST_REPLICA, Aggregation, Array, Bytes, ReduceOp
from hpcstrat._memory.allocator import Block, Shares, private_memory
from hpcstrat._memory.intervals import divide_up
from hpcstrat._memory.layout import layout_of_arrays
from hpcstrat._process.heap import keep_freed_memory
from hpcstrat._storage.base import Storage
from hpcstrat._storage.local import LocalBlocks, flat, writer_of
from hpcstrat._storage.order import (
    MessageOrder,
    RankPart,
    rank_parts_of,
    rank_slices,
    shares_of,
    slices_of,
)
from hpcstrat._storage.plan import Buffers, MessagePool, Plan
from hpcstrat._update.host_update import HostUpdate
from hpcstrat._update.rule import UpdateRule
from hpcstrat._update.update import Run, Update, runs_in_memory


@final
class PartsPlan(Plan):
    """The plan of a rank that updates its part of the variables, on a host.

    Args:
        order, update: see `Plan`.
        rank_parts: each rank's part.
        rank: this rank.
        values: for each rank the runs of its shards of the variables in this rank's memory.

    Attributes:
        own: this rank's part.
        rank_parts, values: as above.
    """

    def __init__(
        self,
        order: MessageOrder,
        update: Update,
        rank_parts: Sequence[RankPart],
        rank: int,
        values: Sequence[Sequence[Run]],
    ) -> None:
        super().__init__(order, update)
        self.rank_parts = rank_parts
        self.own: RankPart = rank_parts[rank]
        self.values = values
        self._rank = rank
        self._slices = rank_slices(order, rank_parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the sums of this rank's part."""
        return self.own.layout.nbytes

    def parts_to_sum(self, variables: Collection[int]) -> tuple[list[list[Array]], list[Array]]:
        """See `Plan.parts_to_sum`; each rank gets the sums of its part."""
        slices = slices_of(self.order, self._slices, variables)
        buffers, sums = self.buffers.messages[0], self.memory
        sources: list[list[Array]] = [[] for _ in self.rank_parts]
        targets: list[Array] = []
        groups = zip(self.order.layout.groups, self.own.layout.groups, slices, strict=True)
        for group, own_group, of_dtype in groups:
            for rank, elements, own in of_dtype:
                sources[rank].append(group.of(buffers)[elements.slice])
                if rank == self._rank:
                    targets.append(own_group.of(sums)[own.slice])
        return sources, targets


@final
class MirroredHostStorage(Storage):
    """Each rank stores and updates all variables, in its private memory.

    The same steps on the same sums keep the copies equal.

    If slots are split, each rank stores only its part of them, and makes only these updates: it
    sends the other ranks the gradients of their parts, sums those of its own in rank order, and
    updates it; then all ranks get all new values. Variables without slots are updated by each rank.

    Args:
        communicator: the ranks.
        splits: whether slots are split over the ranks.
    """

    communicator: HostCommunicator

    def __init__(self, communicator: HostCommunicator, splits: bool = False) -> None:
        keep_freed_memory()  # here, where a program begins to make gradients on the host
        local = LocalBlocks(communicator.rank, private_memory, communicator.size > 1)
        super().__init__(communicator, local)
        self._splits = splits
        self._messages = MessagePool(communicator.new_buffer)
        # Several threads may write variables made outside every scope; the scratch memory is
        # shared.
        self._lock = threading.Lock()
        self._background: Background[HostCommunicator] | None = None

    def _create(self, initial: Array) -> Block:
        communicator = self.communicator
        signature = signature_of(current_call(), (initial.dtype, initial.shape, self._number))
        communicator.require_memory(initial.nbytes, signature)
        # A rank without enough memory stops the others before they wait for its part.
        with communicator.raise_together():
            block = self.local.new_variable(initial)
        own = flat(block.array)
        if communicator.rank == 0:
            communicator.exchange(signature, own.size, writer_of(own))
        else:
            own[...] = communicator.exchange(signature)[0][: own.size]
        return block

    def _create_slot(self, variable: Block, value: float, shares: Shares | None) -> Block:
        parts = 1 if shares is None else self.communicator.size
        nbytes = divide_up(variable.array.nbytes, parts)
        self.communicator.require_memory(nbytes, signature_of(current_call(), "slot", nbytes))
        return super()._create_slot(variable, value, shares)

    def split(self, variables: Sequence[Block]) -> Sequence[Shares | None]:
        """An equal part of all elements per rank."""
        return (
            shares_of(variables, self.communicator.size)
            if self._splits
            else super().split(variables)
        )

    def plan(self, variables: Sequence[Block], slots: Sequence[Sequence[Block]]) -> Plan:
        """The plan of updates, of which each rank makes all, or its part if slots are split."""
        local, rank = self.local, self.communicator.rank
        if not (self._splits and any(slots)):
            order = MessageOrder(variables, slots)
            return Plan(order, local.new_update(order, order.shards))
        order = MessageOrder(variables, [()] * len(variables))
        rank_parts = rank_parts_of(order, order.to_message(slots), rank)
        update = local.new_update(order, rank_parts[rank].shards)
        # What is contiguous is copied together.
        values = [runs_in_memory(local.memory.part, part.shards) for part in rank_parts]
        return PartsPlan(order, update, rank_parts, rank, values)

    def make_buffers(self, plan: Plan) -> None:
        """Makes buffers in one message, which several replicas copy as a whole to send it."""
        with self.communicator.raise_together():
            nbytes = plan.order.layout.nbytes
            message = self.communicator.new_buffer(nbytes, plan.signature())
            message[...] = 0
            self.communicator.exchange(plan.signature())
        plan.buffers = Buffers(plan.order, [message], message)

    # ---- updates

    def _update(
        self,
        signature: CallSignature,
        plan: Plan,
        values: Sequence[Array] | None,
        op: Aggregation,
        rule: UpdateRule,
    ) -> None:
        communicator = self.communicator
        with self._lock:
            if isinstance(plan, PartsPlan):
                self._update_part(signature, plan, values, op, rule)
                return
            if communicator.size > 1:
                plan.update.run(rule, [self._reduce(signature, plan, values, op)])
                return
            # There is no other rank to exchange with, but the call is counted, and refused where no
            # call is allowed.
            communicator.exchange(signature)
            if values is None:
                plan.update.run(rule, plan.buffers.messages)
            else:
                self._lend(plan, signature)
                assert isinstance(plan.update, HostUpdate)
                in_place = plan.update.in_place(values)  # large gradients are not copied
                plan.write(plan.memory, values, in_place)
                plan.update.run(rule, [plan.memory], in_place=in_place)

    def _lend(self, plan: Plan, signature: CallSignature) -> None:
        if plan.memory is None:
            with self.communicator.raise_together():
                self._messages.lend(plan, signature)

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
                message[: layout.nbytes] = plan.buffers.messages[0]
            else:
                plan.write(message, values)

        if plan.buffers.started:
            return self._sums_of_marked(signature, plan)
        if op is not FIRST_REPLICA:
            self._lend(plan, signature)
            communicator.reduce_message(signature, layout, write, op, plan.memory)
            return plan.memory
        if communicator.rank == 0:
            return communicator.exchange(signature, layout.nbytes, write)[0]
        return communicator.exchange(signature)[0]  # only the first replica's values count

    def _update_part(
        self,
        signature: CallSignature,
        plan: PartsPlan,
        values: Sequence[Array] | None,
        op: Aggregation,
        rule: UpdateRule,
    ) -> None:
        """Updates this rank's part, and gets the other ranks' new values."""
        communicator, rank = self.communicator, self.communicator.rank
        if rule.clip is not None and not self._messages.has_own(plan):
            # Before the exchange, when a rank without enough memory still stops the others.
            with communicator.raise_together():
                plan.take(np.empty(plan.nbytes, np.uint8))
        messages = self._messages_of(signature, plan, values, op)
        if rule.clip is not None:
            # The squares are exchanged before the update reads the gradients again. Summed first,
            # these outlive the messages.
            for group in plan.own.layout.groups:
                reduce_in_chunks(group.of(plan.memory), [*map(group.of, messages)], ReduceOp.SUM)
            messages = [plan.memory]

        def add_up(squares: Array) -> Array:
            return communicator.all_reduce([squares], ReduceOp.SUM)[0]

        def write(message: Bytes) -> None:
            for shard, value, _ in plan.values[rank]:
                message[shard.message.slice].view(shard.dtype)[...] = value

        assert isinstance(plan.update, HostUpdate)
        plan.update.run(rule, messages, add_up=add_up)
        plan.update.forget_messages()  # they end with this call
        new = communicator.gather_sections(
            signature_of(f"{current_call()}: values"),
            [part.layout.nbytes for part in plan.rank_parts],
            write,
        )
        for of_rank, message in enumerate(new):
            if of_rank != rank:
                for shard, value, _ in plan.values[of_rank]:
                    value[...] = message[shard.message.slice].view(shard.dtype)

    def _messages_of(
        self,
        signature: CallSignature,
        plan: PartsPlan,
        values: Sequence[Array] | None,
        op: Aggregation,
    ) -> list[Bytes]:
        """Messages whose sum is the gradients, or new values, of this rank's shards."""
        communicator = self.communicator
        if plan.buffers.started:
            return [self._sums_of_marked(signature, plan)]
        given = plan.order.layout.views(plan.buffers.messages[0]) if values is None else values
        gradients = [array.reshape(-1) for array in given]
        layouts = [part.layout for part in plan.rank_parts]

        def write(rank: int, message: Bytes) -> None:
            for shard in plan.rank_parts[rank].shards if message.size else ():
                if shard.elements:  # most ranks have no part of most variables
                    own = gradients[shard.variable][shard.elements.slice]
                    message[shard.message.slice].view(shard.dtype)[...] = own

        if op is ReduceOp.SUM:
            return communicator.sum_sections(signature, layouts, write)
        # Only optimizers' variables have slots, and optimizers use no other `op`.
        assert op is FIRST_REPLICA
        sizes = [layout.nbytes if communicator.rank == 0 else 0 for layout in layouts]
        return communicator.exchange_sections(signature, sizes, write)[:1]

    # ---- sums of marked gradients, while the program computes others

    def _start_sums(self, plan: Plan, variables: Collection[int]) -> bool:
        communicator = self.communicator
        self._background = communicator.background()
        if self._background is None:
            return False
        if not self._messages.has_own(plan):
            with communicator.raise_together():
                # Not the pool's: other variables are updated during the sums.
                sums = np.empty(plan.nbytes, np.uint8)
                communicator.exchange(signature_of(f"{current_call()}: memory"))
            plan.take(sums)
        sources, targets = plan.parts_to_sum(variables)
        layouts = [*map(layout_of_arrays, sources)]
        signature = signature_of(f"{current_call()}: sums")

        def write(rank: int, message: Bytes) -> None:
            layouts[rank].write(message, sources[rank])

        def sum_for_each(other: HostCommunicator) -> None:
            messages = other.sum_sections(signature, layouts, write)
            parts = [layouts[other.rank].views(message) for message in messages]
            for target, *summands in zip(targets, *parts, strict=True):
                reduce_in_chunks(target, summands, ReduceOp.SUM)

        def sum_for_all(other: HostCommunicator) -> None:
            (layout,) = layouts
            is_one = len(targets) == 1  # then it is summed in place
            out = targets[0].view(np.uint8) if is_one else np.empty(layout.nbytes, np.uint8)
            other.reduce_message(signature, layout, lambda sent: write(0, sent), ReduceOp.SUM, out)
            if not is_one:
                for target, source in zip(targets, layout.views(out), strict=True):
                    target[...] = source

        if any(layout.nbytes for layout in layouts):
            self._background.start(sum_for_each if len(layouts) > 1 else sum_for_all)
        return True

    def _finish_sums(self) -> None:
        if self._background is not None:
            self._background.wait()

    def _sums_of_marked(self, signature: CallSignature, plan: Plan) -> Bytes:
        """All sums, once the ranks agree on the update: those that have started, and the rest."""
        self.communicator.exchange(signature)
        self._start_sums(plan, plan.buffers.not_started())
        self._finish_sums()
        return plan.memory
