"""The communicator of ranks on one host: records and mailboxes in one shared segment, and a barrier of flags."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from hpcstrat._calls.records import HEADER, PAYLOAD, RECORD, WHOLE, CallSignature
from hpcstrat._communicators.checked_exchange import Write
from hpcstrat._communicators.host import (
    SMALL_MESSAGE_BYTES,
    MemorySharingCommunicator,
    describe_message,
)
from hpcstrat._communicators.reduction import reduce_flat, slice_of
from hpcstrat._core.span import COMMUNICATION, WAITING, span
from hpcstrat._core.types import Bytes, ReduceOp
from hpcstrat._memory.allocator import RangeAllocator
from hpcstrat._memory.layout import Layout
from hpcstrat._memory.segment import check_available, physical_memory, shared_segment
from hpcstrat._watchdog.channels import SLOT

LINE = 64
"""Bytes of a rank's flag: a cache line of its own."""

_SPINS = (
    20  # polls before the core is offered to another rank: more cost more where ranks share cores
)
_YIELDS = 300  # polls before the rank sleeps: then somebody computes, perhaps on this very core
# the same where every rank has a core: about a millisecond, many times what a wake-up costs
_YIELDS_ON_CORES = 1500
_SLEEP = 50e-6  # seconds
_PROGRESS = 64  # polls between two chances for MPI


def barrier(flags: np.ndarray[Any, np.dtype[np.uint8]], comm: Any) -> Callable[[], object]:
    """A function that returns when all ranks of `comm`, an MPI communicator used by nobody else, have called it.

    Args:
        flags: `LINE * comm.size` bytes of zeros, shared by the ranks.
        comm: the ranks.
    """
    # Only here do all processors see the writes of one in the order in which it made them;
    # elsewhere it takes fences, which Python has not.
    if platform.machine() in ("x86_64", "AMD64"):
        return _FlagBarrier(flags, comm)
    return comm.Barrier


class _FlagBarrier:
    """Each rank counts its calls in its flag and waits until the others have counted as far."""

    def __init__(self, flags: np.ndarray[Any, np.dtype[np.uint8]], comm: Any) -> None:
        # A memoryview, whose single elements are read faster than those of a NumPy array.
        self._flags = memoryview(flags.view(np.int64))  # pyright: ignore[reportArgumentType]
        indices = [rank * LINE // 8 for rank in range(comm.size)]
        # A flag has a cache line to itself. On a shared line each write would take the line away
        # from the ranks that poll it.
        self._own = indices.pop(comm.rank)
        self._others = indices
        self._progress = comm.Iprobe
        cores = set().union(*comm.allgather(os.sched_getaffinity(0)))
        self._yields = _YIELDS_ON_CORES if len(cores) >= comm.size else _YIELDS
        self.calls = 0

    def __call__(self) -> None:
        # Counts only grow. So no flag is ever reset, and a rank that is one call ahead does no
        # harm.
        self.calls += 1
        flags, calls = self._flags, self.calls
        flags[self._own] = calls
        for index in self._others:
            if flags[index] < calls:
                self._wait(index)

    def _wait(self, index: int) -> None:
        flags, calls, yields = self._flags, self.calls, self._yields
        polls = 0
        while flags[index] < calls:
            polls += 1
            if polls > yields:
                time.sleep(_SLEEP)
            elif polls > _SPINS:
                os.sched_yield()
            if polls > yields or polls % _PROGRESS == 0:
                # a message that the other rank waits to get rid of moves only in a call of MPI
                self._progress()


_LARGEST = 1 << 45  # an address space has 47 bits
_DOUBLED = (
    1 << 26
)  # bytes up to which mailboxes double, so that they seldom grow; beyond, memory counts for more


@final
class SharedMemoryCommunicator(MemorySharingCommunicator):
    """Ranks of one host.

    The segment holds, for each rank, two records that alternate from call to call, a flag and a
    mailbox, and behind them the storage of variables. A rank writes its record and its message, all
    meet in a barrier, and everyone reads. Records alternate because a fast rank writes the next one
    while a slow one still reads. A mailbox is written again only after another barrier.

    Attributes:
        status_slots: one per rank, for the watchdog.

    Args:
        comm: an MPI communicator whose ranks share memory.
    """

    def __init__(self, comm: Any) -> None:
        super().__init__(comm.rank, comm.size)
        self._comm = comm
        records_end = 2 * self.size * RECORD
        slots_start = -(-(records_end + self.size * LINE) // 4096) * 4096
        head = -(-(slots_start + self.size * SLOT) // 4096) * 4096
        # Addresses, not memory: a mailbox can grow to all that the host has without moving; memory
        # comes as it grows.
        wanted = min(physical_memory(), (_LARGEST - head) // (self.size + 1))
        self.segment = shared_segment(comm, head + wanted * (self.size + 1))
        reserve = (self.segment.size - head) // (self.size + 1) // 4096 * 4096
        self.heap = RangeAllocator(head + reserve * self.size, self.segment.size, self.segment.hint)
        self._reserve = reserve
        self._mailbox_starts = [head + reserve * rank for rank in range(self.size)]
        self._mailboxes: list[Bytes] = [self.segment.array[:0]] * self.size
        self._capacity = PAYLOAD
        self._being_read = False  # mailboxes, by ranks that may be slower than this one
        if self.rank == 0:
            self.segment.commit(0, head)
        # Nobody may touch the head before its pages exist. Rank 0 alone makes them: they are the
        # file's, and so all ranks'.
        comm.Barrier()
        flags = self.segment.array[records_end : records_end + self.size * LINE]
        self._barrier = span(WAITING, "the other ranks")(barrier(flags, comm))
        self.status_slots: Bytes = self.segment.array[
            slots_start : slots_start + self.size * SLOT
        ].reshape(self.size, SLOT)
        # Slices of a memoryview: for a few bytes they are assigned and compared faster than NumPy's
        # arrays.
        whole = memoryview(self.segment.array)  # pyright: ignore[reportArgumentType]
        starts = [
            [RECORD * (slot * self.size + rank) for rank in range(self.size)] for slot in (0, 1)
        ]
        self._records = [[whole[start : start + WHOLE] for start in slot] for slot in starts]
        self._payloads = [
            [self.segment.array[start + HEADER : start + RECORD] for start in slot]
            for slot in starts
        ]
        self._own_records = [slot[self.rank] for slot in self._records]

    def reserve(self, nbytes: int) -> None:
        """Makes room for messages of this many bytes. Collective; all ranks pass the same number.

        Raises:
            MemoryError: there is none, on any rank.
        """
        if nbytes > self._capacity:
            self._grow(nbytes)

    def sync(self) -> None:
        """See `MemorySharingCommunicator.sync`."""
        waiting = self.calls.waiting
        waiting.depth += 1
        try:
            self._barrier()
        finally:
            waiting.depth -= 1
        self._being_read = False

    def exchange_records(self, record: bytes, nbytes: int, write: Write | None) -> list[memoryview]:
        if (
            self._being_read
        ):  # a slow rank may still copy from this mailbox, which `write` is about to overwrite
            self.sync()
        slot = self.calls.number & 1
        self._own_records[slot][:] = record
        if write is not None and nbytes <= self._capacity:
            write(
                self._payloads[slot][self.rank] if nbytes <= PAYLOAD else self._mailboxes[self.rank]
            )
        self._barrier()
        return self._records[slot]

    def collect_messages(self, sizes: Sequence[int], write: Write | None) -> list[Bytes]:
        largest = max(sizes)
        if largest > self._capacity:
            # All ranks know the sizes from the records, so all grow alike; a message that did not
            # fit is written only now.
            self._grow(largest)
            if write is not None:
                write(self._mailboxes[self.rank])
            self.sync()
            self._being_read = True
            return self._mailboxes
        payloads = self._payloads[self.calls.number & 1]
        if largest <= PAYLOAD:
            return payloads
        self._being_read = True
        if min(sizes) > PAYLOAD:
            return self._mailboxes
        return [
            payloads[rank] if size <= PAYLOAD else self._mailboxes[rank]
            for rank, size in enumerate(sizes)
        ]

    def _grow(self, wanted: int) -> None:
        """Gives every mailbox room for `wanted` bytes.

        All ranks have seen the same sizes and come here together.
        """
        capacity = min(max(wanted, min(2 * self._capacity, _DOUBLED)), self._reserve)
        there = self._mailboxes[self.rank].size

        def check() -> None:
            if wanted > capacity:
                raise MemoryError(
                    f"{wanted:,} bytes are wanted and {self._reserve:,} are reserved; pass smaller "
                    f"arrays{self.segment.hint}"
                )
            check_available(capacity - there, self.size)

        def commit() -> None:
            start = self._mailbox_starts[self.rank]
            self.segment.commit(start + there, start + capacity)

        # No rank takes memory before all have found enough for all.
        self._together(check)
        self._together(commit)
        self._capacity = capacity
        self._mailboxes = [
            self.segment.array[start : start + capacity] for start in self._mailbox_starts
        ]

    def _together(self, step: Callable[[], None]) -> None:
        """Over MPI: an exchange would need the very mailboxes that are missing."""
        problem = ""
        try:
            step()
        except MemoryError as error:
            problem = f"rank {self.rank}: {error}"
        if problems := [one for one in self._comm.allgather(problem) if one]:
            self.settle()
            raise MemoryError(f"no memory for a message between replicas: {'; '.join(problems)}")

    @span(COMMUNICATION, describe_message)
    def reduce_message(
        self,
        signature: CallSignature,
        layout: Layout,
        write: Write,
        op: ReduceOp,
        out: Bytes,
        whole: Layout | None = None,
    ) -> None:
        """Small messages every rank reduces itself.

        Of large ones each reduces its slice, in its own mailbox.
        """
        messages = self.exchange(signature, layout.nbytes, write)
        if layout.nbytes <= SMALL_MESSAGE_BYTES:
            self._reduce_by_all(messages, layout, op, out)
            return
        for group in layout.groups:
            mine = slice_of(group.elements, self.rank, self.size)
            parts = [group.of(message)[mine] for message in messages]
            # The result overwrites this rank's slice of its own mailbox, which nobody else reads
            # before all have met.
            reduce_flat(parts[self.rank], parts, op)
        self.sync()
        for group in layout.groups:
            result = group.of(out)
            for rank, message in enumerate(messages):
                theirs = slice_of(group.elements, rank, self.size)
                # Each slice is in the mailbox of the rank that reduced it.
                result[theirs] = group.of(message)[theirs]
        self._being_read = True  # a slower rank may still copy from this rank's mailbox
