"""How every collective call starts: the ranks exchange records, and agree, or all raise."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from hpcstrat._agreement import mismatch, records
from hpcstrat._agreement.collective import CallState, ErrorBlock
from hpcstrat._agreement.mismatch import RankReport
from hpcstrat._agreement.records import CallSignature, signature_of
from hpcstrat._core.call_name import current_call
from hpcstrat._core.timeline import COMMUNICATION, span
from hpcstrat._core.types import Bytes, ReplicaMismatchError

Write: TypeAlias = Callable[[Bytes], None]
"""Writes this rank's message to the first bytes of the array passed to it."""


class Agreement(abc.ABC):
    """Ranks that make the same calls in one order.

    Every call starts with one record per rank, by which the ranks check that they make the same
    call with the same arguments. If not, all of them raise. `collective.py` says what follows from
    an error of one rank.

    Attributes:
        rank: this process's index in the group.
        size: the number of ranks.
        calls: what this rank has called.
    """

    rank: int
    size: int

    def __init__(self, rank: int, size: int, calls: CallState | None = None) -> None:
        self.rank = rank
        self.size = size
        # A device communicator shares its host communicator's `CallState`: the calls of both are
        # counted, and so compared, in one order.
        self.calls: CallState = CallState(size, self._raise_on_others) if calls is None else calls
        self._no_messages: list[Bytes] = [np.empty(0, np.uint8)] * size

    @abc.abstractmethod
    def exchange_records(self, record: bytes, nbytes: int, write: Write | None) -> list[memoryview]:
        """Exchanges records of `records.pack_record`; returns all ranks' records.

        If all are equal, one of them will do. Writes the message too, if it can travel with them.
        """

    @abc.abstractmethod
    def collect_messages(self, sizes: Sequence[int], write: Write | None) -> list[Bytes]:
        """All ranks' messages of the call just exchanged by records, valid until the next call."""

    # ---- the exchange that starts every call

    @span(COMMUNICATION, lambda _, signature, nbytes=0, *__, **___: (signature.call, nbytes))
    def exchange(
        self, signature: CallSignature, nbytes: int = 0, write: Write | None = None
    ) -> list[Bytes]:
        """Returns every rank's message, once all ranks agree on `signature`.

        Messages may differ in size. The arrays are read-only by convention and valid until the next
        call. Collective.

        Args:
            signature: what must be equal on all ranks.
            nbytes: the size of this rank's message.
            write: writes it.

        Raises:
            ReplicaMismatchError: the ranks call different things.
            Exception: what another rank's `raise_together` block raised.
            RuntimeError: called in a child of the rank.
        """
        # As `calls.count` and `with waiting:`, without their calls: every step comes through here.
        calls = self.calls
        if calls.barred:
            calls.refuse(signature.call)
        if calls.thread != threading.get_ident():
            calls.change_thread(signature.call)
        calls.number += 1
        calls.last_signature = signature
        waiting = calls.waiting
        waiting.depth += 1
        try:
            own = records.pack_record(
                calls.number, calls.escaped_hash, records.OK, signature.digest, nbytes
            )
            posted = self.exchange_records(own, nbytes, write)
            # Whole records first: if even the messages' sizes are equal, no record is unpacked.
            for record in posted:
                if record != own:
                    break
            else:  # the fast path
                if not nbytes:
                    return self._no_messages
                return self.collect_messages([nbytes] * self.size, write)
            # The records differ. They may in the sizes of messages, but not in what comes before.
            if any(record[: records.COMMON] != own[: records.COMMON] for record in posted):
                self._disagree(posted, signature.words(), None)
            return self.collect_messages(self._sizes(posted), write)
        except BaseException as error:
            # A signal's handler may raise while this rank waits. Then the others have made a call
            # that this rank has not made.
            calls.mark_interrupted(error, signature.call)
            raise
        finally:
            waiting.depth -= 1

    def raise_together(self) -> ErrorBlock:
        """A block of local work before a collective: what one rank raises in it, all ranks raise.

        `@collective` makes such a block of a whole call, up to its first exchange.
        """
        return ErrorBlock(self.calls)

    def change(self) -> ErrorBlock:
        """A block that changes what ranks share or keep equal; interrupted, it ends the job."""
        return ErrorBlock(self.calls, is_change=True)

    def leave(self) -> None:
        """Tells the others that this rank leaves the program.

        Unless all leave, the job ends with an error.
        """
        self.calls.count(signature_of("the end of the program"))
        words = records.CallDescription("leaves the program")
        with self.calls.waiting:
            own, posted = self._post(records.LEAVING)
            if any(record != own for record in posted):
                self._disagree(posted, words, None)

    # ---- where ranks disagree

    def _raise_on_others(self, error: Exception) -> None:
        """Makes the other ranks raise what this rank raises already."""
        if self.size == 1:
            self.calls.note_shared_error()
            return
        # The others are in the exchange that this rank does not reach. There they find this record.
        self.calls.number += 1
        try:
            with self.calls.waiting:
                _, posted = self._post(records.FAILED)
                self._disagree(posted, records.CallDescription(current_call()), error)
        except BaseException as interruption:
            self.calls.mark_interrupted(interruption)
            raise

    def _post(self, status: int) -> tuple[bytes, list[memoryview]]:
        """This rank's record, which says that it makes no call; and all ranks' records."""
        calls = self.calls
        own = records.pack_record(calls.number, calls.escaped_hash, status, bytes(16), 0)
        return own, self.exchange_records(own, 0, None)

    def _disagree(
        self, posted: Sequence[memoryview], words: records.CallDescription, error: Exception | None
    ) -> None:
        """All ranks come here together, and all raise, or the job ends.

        The rank that failed itself (`error`) returns, and raises its own exception.
        """
        heads = [records.read_record(record) for record in posted]
        statuses, numbers = [head.status for head in heads], [head.number for head in heads]
        # In these two cases the ranks cannot exchange reports: some are gone, or they are in
        # different calls.
        if records.LEAVING in statuses:
            mismatch.end_after_leaving(self.rank, statuses, words)
        if len({(head.number, head.escaped_hash) for head in heads}) > 1:
            mismatch.end_after_escaped(self.rank, numbers, words, self.calls.last_escaped)
        by_rank = self._exchange_reports(mismatch.report_of(words, error))
        self.calls.note_shared_error()
        # An error of one rank explains the differing signatures, not the other way round. So all
        # raise the error.
        failed = [rank for rank, other in enumerate(by_rank) if other.problem is not None]
        if error is not None:
            return
        if failed:
            mismatch.raise_as(failed[0], by_rank[failed[0]])
        raise ReplicaMismatchError(
            "the ranks must make the same call with arguments that fit, but "
            f"called{mismatch.lines(by_rank)}"
        )

    def _exchange_reports(self, own: RankReport) -> list[RankReport]:
        """`all_gather_obj` without the check that brought us here."""
        nbytes, write = records.pack_object(own)
        self.calls.number += 1
        record = records.pack_record(self.calls.number, 0, records.OK, bytes(16), nbytes)
        posted = self.exchange_records(record, nbytes, write)
        if any(other[: records.COMMON] != record[: records.COMMON] for other in posted):
            numbers = [records.read_record(other).number for other in posted]
            mismatch.end_after_escaped(self.rank, numbers, own.words, self.calls.last_escaped)
        messages = self.collect_messages(self._sizes(posted), write)
        return [records.load_object(message) for message in messages]

    def _sizes(self, posted: Sequence[memoryview]) -> list[int]:
        """The bytes of each rank's message, from what `exchange_records` returned."""
        sizes = records.message_sizes(posted)
        return sizes if len(sizes) == self.size else sizes * self.size
