"""Memory of the ranks of a host in which they meet: records, mailboxes, and a barrier."""

from __future__ import annotations

import functools
import mmap
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

import numpy as np

from hpcstrat._agreement.agreement import Write
from hpcstrat._agreement.collective import CallState
from hpcstrat._agreement.records import HEADER, PAYLOAD, RECORD, WHOLE
from hpcstrat._core.ranks_in_words import list_by_rank
from hpcstrat._core.timeline import WAITING, span
from hpcstrat._core.types import Bytes
from hpcstrat._memory.host_limits import check_available
from hpcstrat._memory.intervals import round_up
from hpcstrat._memory.shared_file import share_file
from hpcstrat._transports.barrier import LINE, barrier

# Up to this size mailboxes double, to grow seldom; beyond it they grow as needed, to save memory.
_DOUBLED = 1 << 26


class Reader(Protocol):
    """Keeps arrays over mailboxes for later calls."""

    def forget_messages(self) -> None:
        """Drops them."""


@final
class Mailboxes:
    """Two records, a flag and a mailbox for each rank of a host, in memory that all of them see.

    A rank writes its record, and its message into the record or its mailbox; all meet in a barrier;
    then each reads what the others have written. It may be far ahead of a rank that still reads:

        call      rank 0                               rank 1
        n         writes record 0, and its mailbox     writes record 0, and its mailbox
                  ===================  barrier: all is written  ====================
                  reads, leaves the call               reads ...
        n + 1     writes record 1                      ... still reads record 0, and mailboxes
                  a mailbox: first `sync`              leaves the call
                  ===================  barrier: all have read call n  ===============
        n + 2     writes record 0 again

    So records alternate, and need no barrier of their own: who writes record 0 again has met all
    others after they read it. A mailbox is written again only after a barrier that follows the one
    after which it was read (`_is_read`). One that is too small is replaced by new memory, in a
    call that all ranks make together.

    Args:
        comm: an MPI communicator whose ranks share memory.
        calls: notes that all ranks raise where memory lacks; `None` if other hosts' ranks do not.

    Attributes:
        comm: for memory that the ranks make together.
        rank: this rank among those of the host.
        size: their number.
        messages: the mailboxes.
        readers: whoever keeps mailboxes from call to call: they drop them before these are freed.

    Raises:
        MemoryError: the ranks do not share memory.
    """

    def __init__(self, comm: Any, calls: CallState | None = None) -> None:
        self.comm: Any = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.readers: weakref.WeakSet[Reader] = weakref.WeakSet()
        self._calls = calls
        records_end = 2 * self.size * RECORD
        head = share_file(comm, records_end + self.size * LINE)
        if self.rank == 0:
            head.commit(0, head.array.size)
        # No rank may touch the head before its pages exist. Rank 0 alone makes them: they belong to
        # the file, and so to all ranks.
        comm.Barrier()
        self.messages: list[Bytes] = [head.array[:0]] * self.size
        self._capacity = PAYLOAD
        self._slot = 0
        self._is_read = False  # whether slower ranks may still read mailboxes
        self._sums: list[Bytes] = self.messages  # see `add_up`
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

    def post(self, record: bytes, nbytes: int, write: Write | None) -> list[memoryview]:
        """All ranks' records; writes this rank's, and its message if there is room for it."""
        if self._is_read:
            self.sync()
        self._slot = slot = 1 - self._slot
        records, rank = self._records[slot], self.rank
        records[rank][:] = record
        if write is not None and nbytes <= self._capacity:
            write(self._payloads[slot][rank] if nbytes <= PAYLOAD else self.messages[rank])
        self._barrier()
        return records

    def collect(self, sizes: Sequence[int], write: Write | None) -> list[Bytes]:
        """The messages of these sizes whose records were just posted, valid until the next call.

        Raises:
            MemoryError: there is not enough for mailboxes of the largest; on all ranks.
        """
        largest = max(sizes)
        if largest > self._capacity:
            # All ranks know the sizes from the records, so all make the same room. A message that
            # did not fit is written only now.
            self.reserve(largest)
            if write is not None:
                write(self.messages[self.rank])
            self.sync()
            self._is_read = True
            return self.messages
        payloads = self._payloads[self._slot]
        if largest <= PAYLOAD:
            return payloads
        self._is_read = True
        if min(sizes) > PAYLOAD:
            return self.messages
        return [
            payloads[rank] if size <= PAYLOAD else self.messages[rank]
            for rank, size in enumerate(sizes)
        ]

    def share(self, write: Write) -> list[Bytes]:
        """All ranks' messages, for which all have reserved the mailboxes."""
        if self._is_read:
            self.sync()
        write(self.messages[self.rank])
        self.sync_to_read()
        return self.messages

    def sync(self) -> None:
        """Waits for all ranks. What they wrote to shared memory before can be read afterwards."""
        self._barrier()
        self._is_read = False

    def sync_to_read(self) -> None:
        """Waits for all ranks, which then read each other's mailboxes."""
        self._barrier()
        self._is_read = True

    def reserve(self, nbytes: int) -> None:
        """Makes room for messages of this many bytes. All ranks pass the same number.

        Raises:
            MemoryError: there is not enough; on all ranks.
        """
        if nbytes <= self._capacity:
            return
        capacity = max(nbytes, min(2 * self._capacity, _DOUBLED))
        # Freed before larger ones are made.
        for reader in [*self.readers]:
            reader.forget_messages()
        self.messages, self._capacity = [np.empty(0, np.uint8)] * self.size, PAYLOAD
        self.messages = self.allocate(capacity)
        self._capacity = capacity

    def allocate(self, nbytes: int) -> list[Bytes]:
        """New memory for a message of each rank, filled with zeros, which all can read.

        All ranks pass the same number.

        Raises:
            MemoryError: there is not enough; on all ranks.
        """
        place = round_up(max(nbytes, 1), mmap.PAGESIZE)  # ranks share no pages, nor cache lines
        start = self.rank * place
        try:
            # No rank takes memory before all have found enough for all.
            self._do_together(lambda: check_available(place, self.size))
            shared = share_file(self.comm, place * self.size)
            self._do_together(lambda: shared.commit(start, start + place))
        except MemoryError:
            if self._calls is not None:
                self._calls.note_shared_error()
            raise
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
            raise MemoryError(f"no memory for a message between replicas: {'; '.join(problems)}")

    def add_up(self, own: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, Any]:
        """The arrays of all ranks added up in rank order. All pass the same size.

        The ranks `sync` before they call it again.

        Raises:
            MemoryError: there is not enough; on all ranks.
        """
        if self._sums[0].size < own.nbytes:
            self._sums = self.allocate(own.nbytes)
        rows = [message[: own.nbytes].view(np.float64) for message in self._sums]
        rows[self.rank][:] = own
        self.sync()
        # Not `np.sum`: its order depends on how many rows there are, and hosts may have more ranks
        # than others.
        return functools.reduce(np.add, rows)
