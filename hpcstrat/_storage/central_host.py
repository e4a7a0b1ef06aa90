"""Storage in host memory that all ranks share: one copy of the variables."""

from __future__ import annotations

import functools
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from hpcstrat._calls.records import CallSignature, signature_of
from hpcstrat._communicators.shared_memory import LINE, SharedMemoryCommunicator
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import FIRST_REPLICA, Aggregation, Array
from hpcstrat._memory.allocator import Block, block_of, size_of
from hpcstrat._memory.intervals import Interval, divide_up, round_up
from hpcstrat._process.heap import keep_freed_memory
from hpcstrat._storage.base import Storage
from hpcstrat._storage.local import LocalBlocks
from hpcstrat._storage.order import MessageOrder
from hpcstrat._storage.plan import Buffers, Plan
from hpcstrat._update.host_update import HostUpdate
from hpcstrat._update.rows import update_rows
from hpcstrat._update.rule import UpdateRule
from hpcstrat._update.update import NOTHING_IN_PLACE


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
    is_central = True

    def __init__(self, communicator: SharedMemoryCommunicator) -> None:
        keep_freed_memory()  # here, where a program begins to make gradients on the host
        local = LocalBlocks(communicator.rank, lambda: communicator.segment, communicator.size > 1)
        super().__init__(communicator, local)
        self._dead: deque[int] = deque()  # numbers of blocks, not yet reported
        self._reports: Counter[int] = Counter()  # number of a block -> ranks that reported it
        self._places: dict[int, tuple[int, int]] = {}

    def _create(self, initial: Array, *facts: Any) -> Block:
        """A new block; the ranks must agree on its shape, its dtype and these facts."""
        communicator = self.communicator
        dead = [self._dead.popleft() for _ in range(len(self._dead))]
        shape, dtype = initial.shape, initial.dtype
        try:
            reports = communicator.all_gather_obj(dead, (dtype, shape, self._number), *facts)
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
            self._free(start, nbytes)
            raise
        number = self._created + 1
        self._places[number] = (start, nbytes)
        weakref.finalize(block, self._dead.append, number).atexit = False
        return block

    def _create_slot(self, variable: Block, value: float) -> Block:
        # As a view of one element: a slot is as large as its variable, and must not cost twice
        # that.
        array = variable.array
        initial = np.broadcast_to(array.dtype.type(value), array.shape)
        return self._create(initial, f"initial value={value}", variable.identity())

    def _note_dead(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._reports[number] += 1
            # A rank that has not reported may still read the variable.
            if self._reports[number] == self.communicator.size:
                del self._reports[number]
                self._free(*self._places.pop(number))

    def _free(self, start: int, nbytes: int) -> None:
        free = self.communicator.heap.free(start, nbytes)
        if self.communicator.rank == 0:
            self.communicator.segment.release(*free)

    def plan(self, variables: Sequence[Block], slots: Sequence[Sequence[Block]]) -> Plan:
        """The plan of updates, with this rank's slice of the elements."""
        communicator, order = self.communicator, MessageOrder(variables, slots)
        own = order.shards_of_rank(communicator.rank, communicator.size)
        return Plan(order, self.local.new_update(order, own))

    def make_buffers(self, plan: Plan) -> None:
        """Makes buffers in the shared segment, one message per rank."""
        # In elements of a cache line, where the memory then starts too: the messages share no
        # lines, since the ranks write them at the same time.
        lines = divide_up(plan.order.layout.nbytes, LINE)
        dtype = np.dtype((np.void, LINE))
        block = self.create(np.zeros((self.communicator.size, lines), dtype))
        messages = list(block.array.view(np.uint8))
        plan.buffers = Buffers(plan.order, messages, messages[self.communicator.rank], block)

    def _update(
        self,
        signature: CallSignature,
        plan: Plan,
        values: Sequence[Array] | None,
        op: Aggregation,
        rule: UpdateRule,
    ) -> None:
        communicator, update = self.communicator, plan.update
        assert isinstance(update, HostUpdate)
        in_place, write = NOTHING_IN_PLACE, None
        nbytes = 0 if values is None else plan.order.layout.nbytes
        if values is not None and (op is not FIRST_REPLICA or communicator.rank == 0):
            if op is not FIRST_REPLICA and update.may_be_in_place:
                # No other rank needs this rank's part of a large gradient.
                in_place = update.in_place(values)
            write = functools.partial(plan.write, values=values, in_place=in_place)
        add_up = None
        if rule.clip is None:
            sent = communicator.exchange(signature, nbytes if write else 0, write)
        else:
            # After its gradients a message has room for the squares of this rank's part of each.
            room = Interval(0, 8 * len(plan.order.blocks)).shift(round_up(nbytes, 8))
            sent = communicator.exchange(signature, room.stop, write or (lambda _: None))
            add_up = functools.partial(self._add_up, sent, room.start)
        messages = plan.buffers.messages if values is None else sent
        if op is FIRST_REPLICA:
            update.run(rule, messages[:1], add_up=add_up)
        else:
            update.run(rule, messages, op, in_place, add_up=add_up)
        # Until all have written, a read could see both new and old elements.
        communicator.sync()

    def _add_up(self, messages: Sequence[Array], start: int, own: Array) -> Array:
        """Adds up the ranks' arrays, in rank order, by way of their messages."""
        place = slice(start, start + own.nbytes)
        rows = [message[place].view(np.float64) for message in messages]
        rows[self.communicator.rank][:] = own
        self.communicator.sync()
        return np.sum(rows, axis=0)

    def _update_rows(
        self, blocks: Sequence[Block], rows: Array, gradient: Array, rule: UpdateRule
    ) -> None:
        """Each rank updates its share of the rows."""
        communicator = self.communicator
        # Rows are all different, so ranks that update different rows never touch the same memory.
        share = Interval(0, len(rows)).of_rank(communicator.rank, communicator.size).slice
        update_rows([block.array for block in blocks], rows[share], gradient[share], rule)
        communicator.sync()
