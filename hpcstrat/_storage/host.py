"""Storage in host memory: one copy that all ranks share, or a copy on each replica."""

from __future__ import annotations

import functools
import itertools
import math
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from typing import final

import numpy as np

from hpcstrat._calls.records import CallSignature, signature_of
from hpcstrat._communicators.host import HostCommunicator
from hpcstrat._communicators.point_to_point import Background
from hpcstrat._communicators.reduction import reduce_in_chunks
from hpcstrat._communicators.shared_memory import LINE, SharedMemoryCommunicator
from hpcstrat._core.call_name import call_named, current_call
from hpcstrat._core.types import FIRST_REPLICA, Aggregation, Array, Bytes, ReduceOp
from hpcstrat._memory.allocator import Block, Shares, block_of, private_memory, size_of
from hpcstrat._memory.intervals import Interval, divide_up
from hpcstrat._memory.layout import layout_of_arrays
from hpcstrat._process.settings import keep_freed_memory
from hpcstrat._storage.base import Storage
from hpcstrat._storage.local import LocalBlocks, flat, writer_of
from hpcstrat._storage.order import MessageOrder, rank_parts_of, shares_of
from hpcstrat._storage.plan import MessagePool, PartsPlan, Plan
from hpcstrat._update.rows import update_rows
from hpcstrat._update.rule import UpdateRule
from hpcstrat._update.update import NOTHING_IN_PLACE, runs_in_memory


@final
class CentralHostStorage(Storage):
    """One copy for all ranks of a host.

    All ranks allocate by the same rule from the same reports, so they need not tell each other
    where a block is. A block's memory is reused once all ranks have reported that its variable is
    dead: garbage collection comes at different moments on different ranks.

    An update is cooperative: each rank leaves its gradients in its mailbox; after a barrier each
    rank reduces and updates its slice of the elements, chunk by chunk while they are in cache;
    after another barrier all read the new values. A rank that an exception stops in between does
    not reach the second barrier, so that no rank reads variables that are changed in part.
    """

    communicator: SharedMemoryCommunicator

    def __init__(self, communicator: SharedMemoryCommunicator) -> None:
        keep_freed_memory()  # here, where a program begins to make gradients on the host
        super().__init__(communicator, LocalBlocks(communicator.rank, lambda: communicator.segment))
        self._dead: deque[int] = deque()  # numbers of blocks, not yet reported
        self._reports: Counter[int] = Counter()  # number of a block -> ranks that reported it
        self._places: dict[int, tuple[int, int]] = {}
        self._norm_sums: Block | None = None  # of all ranks, for updates with norms

    def _create(self, initial: Array) -> Block:
        communicator = self.communicator
        dead = [self._dead.popleft() for _ in range(len(self._dead))]
        shape, dtype = initial.shape, initial.dtype
        try:
            reports = communicator.all_gather_obj(dead, (dtype, shape, self._number))
        except Exception:
            # No rank has received the report: it is sent again with the next variable.
            self._dead.extendleft(dead)
            raise
        # Every rank counts the same reports in the same call, so all free the same ranges at the
        # same time.
        self._note_dead([number for of_rank in reports for number in of_rank])
        nbytes = size_of(shape, dtype)
        # All ranks allocate the same, so all of them raise here or none. `raise_together` records
        # that nothing was interrupted.
        with communicator.raise_together():
            start = communicator.heap.allocate(nbytes, dtype.itemsize)
        try:
            with communicator.raise_together():
                if communicator.rank == 0:  # pages belong to the file, and so to all ranks
                    communicator.segment.commit(start, start + nbytes)
                part = communicator.segment.part(start, start + nbytes)
                block = block_of(part, start, shape, dtype)
                if communicator.rank == 0:
                    block.array[...] = initial
            # No rank may read before rank 0 has written the value, or continue without the memory.
            communicator.exchange(signature_of(f"{current_call()}: memory"))
        except Exception:
            communicator.heap.free(start, nbytes)
            raise
        number = self._created + 1
        self._places[number] = (start, nbytes)
        weakref.finalize(block, self._dead.append, number).atexit = False
        return block

    def _create_slot(self, variable: Block, value: float, shares: Shares | None) -> Block:
        # As a view of one element: a slot is as large as its variable, and must not cost twice
        # that.
        array = variable.array
        return self._create(np.broadcast_to(array.dtype.type(value), array.shape))

    def _note_dead(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._reports[number] += 1
            # A rank that has not reported may still read the variable.
            if self._reports[number] == self.communicator.size:
                del self._reports[number]
                free = self.communicator.heap.free(*self._places.pop(number))
                if self.communicator.rank == 0:
                    self.communicator.segment.release(*free)

    def plan(self, variables: Sequence[Block], slots: Sequence[Sequence[Block]]) -> Plan:
        """The plan of updates, with this rank's slice of the elements."""
        communicator, order = self.communicator, MessageOrder(variables, slots)
        own = order.shards_of_rank(communicator.rank, communicator.size)
        return Plan(order, self.local.new_update(order, own, communicator.rank))

    def make_buffers(self, plan: Plan) -> None:
        """Makes buffers in the shared segment, one message per rank."""
        # In elements of a cache line, where the memory then starts too: the messages share no
        # lines, since the ranks write them at the same time.
        lines = divide_up(plan.order.layout.nbytes, LINE)
        dtype = np.dtype((np.void, LINE))
        block = self.create(np.zeros((self.communicator.size, lines), dtype))
        messages = list(block.array.view(np.uint8))
        plan.give_buffers(messages, messages[self.communicator.rank], block)

    def _update(
        self,
        signature: CallSignature,
        plan: Plan,
        values: Sequence[Array] | None,
        op: Aggregation,
        rule: UpdateRule,
    ) -> None:
        communicator = self.communicator
        add_up = None if rule.norms is None else self._prepare_sums(plan, rule.norms.most)
        in_place = NOTHING_IN_PLACE
        if values is None:
            communicator.exchange(signature)
            messages = plan.buffer_messages
        elif op is FIRST_REPLICA and communicator.rank != 0:
            messages = communicator.exchange(signature)
        else:
            if op is not FIRST_REPLICA and plan.update.may_be_in_place:
                # No other rank needs this rank's part of a large gradient.
                in_place = plan.update.in_place(values)
            write = functools.partial(plan.write, values=values, in_place=in_place)
            messages = communicator.exchange(signature, plan.order.layout.nbytes, write)
        if op is FIRST_REPLICA:
            plan.update.run(rule, messages[:1], add_up=add_up)
        else:
            plan.update.run(rule, messages, op, in_place, add_up)
        # Until all have written, a read could see both new and old elements.
        communicator.sync()

    def _prepare_sums(self, plan: Plan, count: int) -> Callable[[Array], Array]:
        """A function that adds up the ranks' sums, in rank order: the same bits on every rank."""
        communicator = self.communicator
        # Twice, used by turns: a rank may be in the next pass while another still adds up.
        shape = (2, communicator.size, len(plan.order.blocks), count)
        size = math.prod(shape)
        if self._norm_sums is None or self._norm_sums.array.size < size:
            with call_named(f"{current_call()}: norms"):
                self._norm_sums = self.create(np.zeros(size))
        turns = itertools.cycle(self._norm_sums.array[:size].reshape(shape))

        def add_up(own: Array) -> Array:
            sums: Array = next(turns)
            sums[communicator.rank] = own
            communicator.sync()
            return sums.sum(axis=0)

        return add_up

    def _update_rows(
        self, blocks: Sequence[Block], rows: Array, gradient: Array, rule: UpdateRule
    ) -> None:
        """Each rank updates its share of the rows."""
        communicator = self.communicator
        # Rows are all different, so ranks that update different rows never touch the same memory.
        share = Interval(0, len(rows)).of_rank(communicator.rank, communicator.size).slice
        update_rows([block.array for block in blocks], rows[share], gradient[share], rule)
        communicator.sync()


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
        super().__init__(communicator, LocalBlocks(communicator.rank, private_memory))
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
        plan.give_buffers([message], message)

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
            if plan.memory is None:
                self._messages.lend(plan, signature)
            if communicator.size > 1:
                plan.update.run(rule, [self._reduce(signature, plan, values, op)])
                return
            # There is no other rank to exchange with, but the call is counted, and refused where no
            # call is allowed.
            communicator.exchange(signature)
            if values is None:
                plan.update.run(rule, plan.buffer_messages)
            else:
                in_place = plan.update.in_place(values)  # large gradients are not copied
                plan.write(plan.memory, values, in_place)
                plan.update.run(rule, [plan.memory], in_place=in_place)

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
                message[: layout.nbytes] = plan.buffer_messages[0]
            else:
                plan.write(message, values)

        if plan.started:
            return self._sums_of_marked(signature, plan)
        if op is not FIRST_REPLICA:
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
        messages = self._messages_of(signature, plan, values, op)
        if rule.norms is not None:
            # The norms are exchanged between two passes over the gradients. Summed first, these
            # outlive the messages.
            if not self._messages.has_own(plan):
                plan.take(np.empty(plan.nbytes, np.uint8))
            for group in plan.own.layout.groups:
                reduce_in_chunks(group.of(plan.memory), [*map(group.of, messages)], ReduceOp.SUM)
            messages = [plan.memory]

        def add_up(sums: Array) -> Array:
            with call_named(f"{current_call()}: norms"):
                return communicator.all_reduce([sums], ReduceOp.SUM)[0]

        def write(message: Bytes) -> None:
            for shard, value, _ in plan.values[rank]:
                message[shard.message.slice].view(shard.dtype)[...] = value

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
        if plan.started:
            return [self._sums_of_marked(signature, plan)]
        given = plan.order.layout.views(plan.buffer_messages[0]) if values is None else values
        flat = [array.reshape(-1) for array in given]
        layouts = [part.layout for part in plan.rank_parts]

        def write(rank: int, message: Bytes) -> None:
            for shard in plan.rank_parts[rank].shards if message.size else ():
                if shard.elements:  # most ranks have no part of most variables
                    gradient = flat[shard.variable][shard.elements.slice]
                    message[shard.message.slice].view(shard.dtype)[...] = gradient

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
        self._start_sums(plan, plan.not_started())
        self._finish_sums()
        return plan.memory
