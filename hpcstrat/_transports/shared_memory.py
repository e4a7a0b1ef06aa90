"""The communicator of ranks on one host: shared records and mailboxes, and a barrier of flags."""

from __future__ import annotations

import functools
import mmap
import os
import platform
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

import numpy as np

from hpcstrat._agreement.records import HEADER, PAYLOAD, RECORD, WHOLE, CallSignature
from hpcstrat._core.ranks_in_words import list_by_rank
from hpcstrat._core.timeline import COMMUNICATION, WAITING, span
from hpcstrat._core.types import Array, Bytes, ReduceOp
from hpcstrat._memory.host_limits import check_available
from hpcstrat._memory.intervals import round_up
from hpcstrat._memory.layout import Layout
from hpcstrat._memory.shared_file import share_file
from hpcstrat._transports.host import SMALL_MESSAGE_BYTES, HostCommunicator, describe_message
from hpcstrat._transports.reduction import part_of_rank, reduce_in_chunks
from hpcstrat._transports.verbs import Write

LINE = 64
"""Bytes of a rank's flag: a whole cache line."""

# Polls before the core is offered to another rank, if every rank has its own. Where ranks share
# cores it is offered at once, or the rank that is waited for may not run.
_SPINS = 20
# Polls before the rank sleeps: then another rank computes, perhaps on this core.
_YIELDS = 300
# The same if every rank has its own core: about a millisecond, many times the cost of a wake-up.
_YIELDS_ON_CORES = 1500
_SLEEP = 50e-6  # seconds
# With more ranks than this for each core, all their polls and wake-ups take the time that the rank
# needs which has not arrived: then they sleep at once, and longer. 64 ranks on 2 cores then meet
# in about a third of the time.
_CROWD = 4
_SLEEP_IN_CROWD = 200e-6
_PROGRESS = 64  # polls between two chances for MPI


def barrier(flags: np.ndarray[Any, np.dtype[np.uint8]], comm: Any) -> Callable[[], object]:
    """A function that returns when all ranks of `comm` have called it.

    Args:
        flags: `LINE * comm.size` bytes of zeros, shared by the ranks.
        comm: an MPI communicator that only this function uses.
    """
    # Only on these machines do all processors see one's writes in the order in which it made them.
    # Others need fences, which Python does not have.
    if platform.machine() in ("x86_64", "AMD64"):
        return _FlagBarrier(flags, comm)
    return comm.Barrier


class _FlagBarrier:
    """Each rank counts its calls in its flag, and waits until the others have counted as many."""

    def __init__(self, flags: np.ndarray[Any, np.dtype[np.uint8]], comm: Any) -> None:
        # A memoryview: its elements are read faster than those of a NumPy array.
        self._flags = memoryview(flags.view(np.int64))  # pyright: ignore[reportArgumentType]
        indices = [rank * LINE // 8 for rank in range(comm.size)]
        # Each flag has its own cache line. On a shared line each write would take the line away
        # from the ranks that poll it.
        self._own = indices.pop(comm.rank)
        self._others = indices
        self._progress = comm.Iprobe
        cores = set().union(*comm.allgather(os.sched_getaffinity(0)))
        self._spins, self._yields, self._sleep = 0, _YIELDS, _SLEEP
        if comm.size <= len(cores):
            self._spins, self._yields = _SPINS, _YIELDS_ON_CORES
        elif comm.size > _CROWD * len(cores):
            self._spins, self._yields, self._sleep = _SPINS, _SPINS, _SLEEP_IN_CROWD
        self.calls = 0

    def __call__(self) -> None:
        # Counts only grow: no flag is ever reset, and a rank may be one call ahead.
        self.calls += 1
        flags, calls = self._flags, self.calls
        flags[self._own] = calls
        for index in self._others:
            if flags[index] < calls:
                self._wait(index)

    def _wait(self, index: int) -> None:
        flags, calls, spins, yields = self._flags, self.calls, self._spins, self._yields
        polls = 0
        while flags[index] < calls:
            polls += 1
            if polls > yields:
                time.sleep(self._sleep)
            elif polls > spins:
                os.sched_yield()
            if polls > yields or polls % _PROGRESS == 0:
                # A message that the other rank waits to send moves only in a call of MPI.
                self._progress()


# Up to this size mailboxes double, to grow seldom; beyond it they grow as needed, to save memory.
_DOUBLED = 1 << 26


class Reader(Protocol):
    """Keeps arrays over mailboxes for later calls."""

    def forget_messages(self) -> None:
        """Drops them."""


@final
class SharedMemoryCommunicator(HostCommunicator):
    """Ranks of one host, whose memory can hold one copy of each variable for all of them.

    They share, for each rank, two records that alternate from call to call, a flag and a mailbox. A
    rank writes its record and its message, all meet in a barrier, and all read. Records alternate
    because a fast rank writes the next record while a slow rank still reads. A mailbox is
    overwritten only after another barrier; a larger one is new memory.

    Attributes:
        comm: the MPI communicator of these ranks, for memory that they make together.
        readers: whoever keeps mailboxes from call to call: they drop them before these are freed.

    Args:
        comm: an MPI communicator whose ranks share memory.

    Raises:
        RuntimeError: they do not.
    """

    def __init__(self, comm: Any) -> None:
        super().__init__(comm.rank, comm.size)
        self.comm: Any = comm
        self.slices = comm.size
        self.readers: weakref.WeakSet[Reader] = weakref.WeakSet()
        records_end = 2 * self.size * RECORD
        try:
            head = share_file(comm, records_end + self.size * LINE)
        except MemoryError as error:
            raise RuntimeError(f"hpcstrat cannot connect the ranks: {error}") from None
        if self.rank == 0:
            head.commit(0, head.array.size)
        # No rank may touch the head before its pages exist. Rank 0 alone makes them: they belong to
        # the file, and so to all ranks.
        comm.Barrier()
        self._mailboxes: list[Bytes] = [head.array[:0]] * self.size
        self._capacity = PAYLOAD
        self._being_read = False  # whether slower ranks may still read mailboxes
        self._squares: list[Bytes] = self._mailboxes  # see `add_up`
        self._barrier = span(WAITING, "the other ranks")(barrier(head.array[records_end:], comm))
        # Slices of a memoryview: a few bytes are assigned and compared faster than in NumPy arrays.
        whole = memoryview(head.array)  # pyright: ignore[reportArgumentType]
        starts = [
            [RECORD * (slot * self.size + rank) for rank in range(self.size)] for slot in (0, 1)
        ]
        self._records = [[whole[start : start + WHOLE] for start in slot] for slot in starts]
        self._payloads = [
            [head.array[start + HEADER : start + RECORD] for start in slot] for slot in starts
        ]
        self._own_records = [slot[self.rank] for slot in self._records]

    def reserve(self, nbytes: int) -> None:
        """Makes room for messages of this many bytes. Collective; all ranks pass the same number.

        Raises:
            MemoryError: there is not enough, on any rank.
        """
        if nbytes > self._capacity:
            self._grow(nbytes)

    def sync(self) -> None:
        """Waits for all ranks. What they wrote to shared memory before can be read afterwards."""
        waiting = self.calls.waiting
        waiting.depth += 1
        try:
            self._barrier()
        finally:
            waiting.depth -= 1
        self._being_read = False

    def exchange_records(self, record: bytes, nbytes: int, write: Write | None) -> list[memoryview]:
        # A slow rank may still copy from this rank's mailbox, which `write` is about to overwrite.
        if self._being_read:
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
            # All ranks know the sizes from the records, so all make the same room. A message that
            # did not fit is written only now.
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
        capacity = max(wanted, min(2 * self._capacity, _DOUBLED))
        # Freed before larger ones are made.
        for reader in [*self.readers]:
            reader.forget_messages()
        self._mailboxes, self._capacity = [np.empty(0, np.uint8)] * self.size, PAYLOAD
        self._mailboxes = self.share_messages(capacity)
        self._capacity = capacity

    def share_messages(self, nbytes: int) -> list[Bytes]:
        """New memory for a message of each rank, filled with zeros, which all can read. Collective.

        All ranks pass the same number.

        Raises:
            MemoryError: there is not enough, on any rank.
        """
        place = round_up(max(nbytes, 1), mmap.PAGESIZE)  # ranks share no pages, nor cache lines
        start = self.rank * place
        # No rank takes memory before all have found enough for all.
        self._do_together(lambda: check_available(place, self.size))
        try:
            shared = share_file(self.comm, place * self.size)
        except MemoryError:
            self.calls.note_shared_error()
            raise
        self._do_together(lambda: shared.commit(start, start + place))
        starts = range(0, place * self.size, place)
        return [shared.array[start : start + nbytes] for start in starts]

    def _do_together(self, step: Callable[[], None]) -> None:
        """Makes all ranks raise together; over MPI, because the mailboxes are not there yet."""
        problem = ""
        try:
            step()
        except MemoryError as error:
            problem = str(error) or repr(error)
        if problems := list_by_rank(enumerate(self.comm.allgather(problem))):
            self.calls.note_shared_error()
            raise MemoryError(f"no memory for a message between replicas: {'; '.join(problems)}")

    def exchange_slices(
        self,
        signature: CallSignature,
        layout: Layout,
        op: ReduceOp,
        write: Write,
        shared: Sequence[Bytes] = (),
    ) -> Sequence[Bytes]:
        """See `HostCommunicator.exchange_slices`: all ranks' messages."""
        if shared:
            self.exchange(signature)
            return shared
        return self.exchange(signature, layout.nbytes, write)

    def add_up(self, own: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, Any]:
        """See `HostCommunicator.add_up`."""
        if self._squares[0].size < own.nbytes:
            self._squares = self.share_messages(own.nbytes)
        rows = [message[: own.nbytes].view(np.float64) for message in self._squares]
        rows[self.rank][:] = own
        self.sync()
        # Not `np.sum`: its order depends on how many rows there are, and hosts may have more ranks
        # than others.
        return functools.reduce(np.add, rows)

    @span(COMMUNICATION, describe_message)
    def reduce_message(
        self, signature: CallSignature, layout: Layout, write: Write, op: ReduceOp, out: Bytes
    ) -> None:
        """Every rank reduces small messages itself, and of large ones its slice."""
        if layout.nbytes <= SMALL_MESSAGE_BYTES:
            messages = self.exchange(signature, layout.nbytes, write)
            for group in layout.groups:
                parts = [group.of(message) for message in messages]
                reduce_in_chunks(group.of(out), parts, op)
            return

        def reduce_slice(result: Array, parts: Sequence[Array]) -> None:
            reduce_in_chunks(result, parts, op)

        messages = self.exchange(signature, layout.nbytes, write)
        self.reduce_slices(messages, layout, self.size, reduce_slice)
        self.copy_slices(messages, layout, self.size, out)

    def reduce_slices(
        self,
        messages: Sequence[Bytes],
        layout: Layout,
        count: int,
        reduce_slice: Callable[[Array, Sequence[Array]], None],
    ) -> None:
        """Reduces this rank's slice of all ranks' messages, in its own message.

        Args:
            messages: all ranks', in shared memory. No rank reads another's slice of its message.
            layout: that of the messages.
            count: how many ranks, the first, have a slice of each group.
            reduce_slice: called with the array for the result, which is this rank's own slice, and
                with all ranks' slices.
        """
        for group in layout.groups if self.rank < count else ():
            if mine := part_of_rank(group.elements, self.rank, count):
                parts = [group.of(message)[mine.slice] for message in messages]
                reduce_slice(parts[self.rank], parts)

    def copy_slices(
        self, messages: Sequence[Bytes], layout: Layout, count: int, out: Bytes
    ) -> None:
        """Copies what `reduce_slices` of all ranks has reduced to `out`. Collective."""
        self.sync()
        for group in layout.groups:
            result = group.of(out)
            # Each slice is in the message of the rank that reduced it.
            for rank in range(count):
                theirs = part_of_rank(group.elements, rank, count).slice
                result[theirs] = group.of(messages[rank])[theirs]
        # A slower rank may still copy from this rank's mailbox; records alternate.
        self._being_read = layout.nbytes > PAYLOAD
