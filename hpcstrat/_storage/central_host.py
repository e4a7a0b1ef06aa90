"""Central storage in the memory of a host: one copy, in the shared segment, which every rank reads in place."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import final

import numpy as np

from hpcstrat._calls.records import CallSignature, signature_of
from hpcstrat._communicators.host import MemorySharingCommunicator
from hpcstrat._communicators.shared_memory import LINE
from hpcstrat._core.call_name import call_named, current_call
from hpcstrat._core.types import FIRST_REPLICA, Aggregation, Array
from hpcstrat._memory.blocks import Block, block_of, size_of
from hpcstrat._memory.segment import Segment
from hpcstrat._storage.base import UpdateRule
from hpcstrat._storage.chunks import ScratchBuffers
from hpcstrat._storage.host import HostStorage
from hpcstrat._storage.plan import Plan
from hpcstrat._update.rows import update_rows


@final
class CentralHostStorage(HostStorage):
    """One copy for all ranks of a host.

    All ranks allocate by the same rule from the same reports, so they need not tell each other
    where a block is. A block's memory is used again once all of them have said that its variable is
    dead: garbage collection comes at different moments on different ranks.

    An update is cooperative: each rank leaves its gradients in its mailbox; after a barrier each
    reduces and updates
    its slice of the elements, chunk by chunk while they are in cache; after another all read the
    new values. A rank that an exception stops in between does not come to that one, so that nobody
    reads what is changed in part.
    """

    def __init__(self, communicator: MemorySharingCommunicator) -> None:
        super().__init__(communicator)
        self._communicator = communicator
        self._scratch = ScratchBuffers()
        self._created = 0
        self._dead: deque[int] = deque()  # numbers of blocks, not yet told
        self._reports: dict[int, int] = {}  # number of a block -> ranks that told
        self._places: dict[int, tuple[int, int]] = {}

    @property
    def communicator(self) -> MemorySharingCommunicator:
        """See `Storage.communicator`."""
        return self._communicator

    @property
    def _segment(self) -> Segment:
        return self._communicator.segment

    def _create(self, initial: Array) -> Block:
        communicator = self._communicator
        told = np.array([self._dead.popleft() for _ in range(len(self._dead))], np.int64)
        shape, dtype = initial.shape, initial.dtype

        def tell(message: Array) -> None:
            message[:8].view(np.int64)[0] = told.size
            message[8 : 8 + told.nbytes].view(np.int64)[...] = told

        try:
            messages = communicator.exchange(
                signature_of(current_call(), (dtype, shape, self._number)), 8 + told.nbytes, tell
            )
        except Exception:
            # Nobody has heard of them. They are reported again with the next variable.
            self._dead.extendleft(told.tolist())
            raise
        # Every rank counts the same reports in the same call, so all free the same ranges at the
        # same time.
        for message in messages:
            count = int(message[:8].view(np.int64)[0])
            self._note_dead(message[8 : 8 + 8 * count].view(np.int64).tolist())
        nbytes = size_of(shape, dtype)
        # All ranks allocate alike, so all raise here or none. The block makes that known: nothing
        # was interrupted.
        with communicator.raise_together():
            start = communicator.heap.allocate(nbytes, dtype.itemsize)
        try:
            with communicator.raise_together():
                if communicator.rank == 0:  # pages are the file's, and so all ranks'
                    communicator.segment.commit(start, start + nbytes)
                block = block_of(communicator.segment, start, shape, dtype, self._created + 1)
                if communicator.rank == 0:
                    block.array[...] = initial
            # No rank may read before rank 0 has written the value, nor go on where the memory could
            # not be had.
            communicator.exchange(signature_of(f"{current_call()}: memory"))
        except Exception:
            communicator.heap.free(start, nbytes)
            raise
        self._created += 1
        self._places[self._created] = (start, nbytes)
        weakref.finalize(block, self._dead.append, self._created).atexit = False
        return block

    def _note_dead(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._reports[number] = self._reports.get(number, 0) + 1
            # A rank that has not reported may still read the variable.
            if self._reports[number] == self._communicator.size:
                del self._reports[number]
                free = self._communicator.heap.free(*self._places.pop(number))
                if self._communicator.rank == 0:
                    self._communicator.segment.release(*free)

    def plan(self, variables: Sequence[Block], slots: Sequence[Sequence[Block]]) -> Plan:
        """See `Storage.plan`. Each rank's has its slice of the elements."""
        communicator = self._communicator
        return Plan(
            communicator.segment,
            variables,
            slots,
            communicator.rank,
            communicator.size,
            compiles=self._compiles,
        )

    def make_buffers(self, plan: Plan) -> None:
        """See `Storage.make_buffers`. They lie in the shared segment, one message for each rank."""
        # Each rank's message has cache lines of its own, since the ranks write them at the same
        # time.
        nbytes = -(-plan.layout.nbytes // LINE) * LINE
        block = self.create(np.zeros((self._communicator.size, nbytes), np.uint8))
        plan.give_buffers(list(block.array), block.array[self._communicator.rank], block)

    def _update(
        self,
        signature: CallSignature,
        plan: Plan,
        values: Sequence[Array] | None,
        op: Aggregation,
        rule: UpdateRule,
    ) -> None:
        communicator = self._communicator
        share = None if rule.norms is None else self._share(plan, rule.norms.size)
        if values is None:
            communicator.exchange(signature)
            messages = plan.buffer_messages
        elif op is FIRST_REPLICA and communicator.rank != 0:
            messages = communicator.exchange(signature)
        else:
            # Where values are summed, this rank reads its own part of a large gradient in place:
            # nobody else needs it.
            write = plan.write if op is FIRST_REPLICA else plan.write_for_others
            messages = communicator.exchange(
                signature, plan.layout.nbytes, lambda message: write(message, values)
            )
        if op is FIRST_REPLICA:
            plan.apply(rule, messages[:1], self._scratch, share=share)
        else:
            plan.apply(rule, messages, self._scratch, op, values, share)
        # Until all have written, a read could see new numbers beside old ones.
        communicator.sync()

    def _share(self, plan: Plan, count: int) -> Callable[[Array], Array]:
        """What adds up the ranks' sums over their parts of the variables, in rank order and so alike on all of them."""
        communicator = self._communicator
        shape = (communicator.size, len(plan.blocks), count)
        if (
            plan.sums is None or plan.sums.array.shape != shape
        ):  # an option may choose a formula of other norms
            with call_named(f"{current_call()}: norms"):
                plan.sums = self.create(np.zeros(shape))
        sums: Array = plan.sums.array

        def share(own: Array) -> Array:
            sums[communicator.rank] = own
            communicator.sync()
            return sums.sum(axis=0)

        return share

    def _update_rows(
        self, blocks: Sequence[Block], rows: Array, gradient: Array, rule: UpdateRule
    ) -> None:
        """Each rank updates its share of the rows."""
        communicator = self._communicator
        # Rows are all different, so ranks that update different rows never touch the same memory.
        share = slice(
            *(
                len(rows) * rank // communicator.size
                for rank in (communicator.rank, communicator.rank + 1)
            )
        )
        update_rows(blocks, rows[share], gradient[share], rule)
        communicator.sync()

    def publish(self, blocks: Sequence[Block]) -> None:
        """See `Storage.publish`. All ranks read what was written."""
        for block in blocks:
            block.checksum = None


@functools.cache
def central_host_storage(communicator: MemorySharingCommunicator) -> CentralHostStorage:
    """The storage in this communicator's segment, the same for every strategy."""
    return CentralHostStorage(communicator)
