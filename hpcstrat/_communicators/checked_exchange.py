"""The exchange that every collective call begins with: one record per rank, compared, and then messages."""

from __future__ import annotations

import abc
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from hpcstrat._calls import mismatch, records
from hpcstrat._calls.collective import Change, RaiseTogether
from hpcstrat._calls.mismatch import RankReport
from hpcstrat._calls.records import CallSignature, signature_of
from hpcstrat._calls.state import CallState
from hpcstrat._core import gpu
from hpcstrat._core.call_name import current_call
from hpcstrat._core.span import COMMUNICATION, Details, span
from hpcstrat._core.types import Array, Bytes, ReplicaMismatchError
from hpcstrat._process import settings
from hpcstrat._watchdog.watchdog import Watchdog

Write: TypeAlias = Callable[[Bytes], None]
"""Writes this rank's message to the first bytes of the array that it is given."""


class CheckedExchange(abc.ABC):
    """Exchanges messages between the ranks of a group.

    Collective: all ranks make every call, in one order.

    Every call begins with one record per rank, by which the ranks agree that it is the same call
    with the same arguments. If it is not, all of them raise. A transport fills in how records and
    messages travel.

    Attributes:
        rank: this process's index in the group.
        size: how many ranks there are.
        checks: whether values that count as one are compared; see `require_equal`.
        calls: what this rank has called.
        watchdog: ends the job where ranks wait forever; `None` where there is none.
    """

    rank: int
    size: int

    def __init__(self, rank: int, size: int, calls: CallState | None = None) -> None:
        self.rank = rank
        self.size = size
        # A device communicator shares its host communicator's: calls of both are counted, and so
        # compared, in one order.
        self.calls: CallState = CallState() if calls is None else calls
        self.checks: bool = size > 1 and settings.is_on("HPCSTRAT_CHECK")
        self.watchdog: Watchdog | None = None

    @property
    def number(self) -> int:
        """How many calls were made."""
        return self.calls.number

    # ---- what a transport fills in. It checks nothing; a device communicator calls it of its host
    # communicator

    @abc.abstractmethod
    def exchange_records(self, record: bytes, nbytes: int, write: Write | None) -> list[memoryview]:
        """Exchanges records of `protocol.pack_record`; returns all.

        Writes the message too, if it can go at once.
        """

    @abc.abstractmethod
    def collect_messages(self, sizes: Sequence[int], write: Write | None) -> list[Bytes]:
        """All ranks' messages of the call whose records were just exchanged, valid until the next call."""

    # ---- the exchange that every call begins with

    @span(COMMUNICATION, lambda _, signature, nbytes=0, *__, **___: Details(signature.call, nbytes))
    def exchange(
        self, signature: CallSignature, nbytes: int = 0, write: Write | None = None
    ) -> list[Bytes]:
        """Every rank's message of `nbytes` bytes, which may differ from rank to rank, once all agree on `signature`.

        The arrays are read-only by convention and valid until the next call. Collective.

        Raises:
            ReplicaMismatchError: the ranks call different things.
            Exception: what another rank's `raise_together` block raised.
            RuntimeError: called in the function of an update, which not all ranks run.
        """
        self._count(signature)
        waiting = self.calls.waiting
        waiting.depth += (
            1  # what `with waiting:` does, without its two calls: every step comes through here
        )
        try:
            own = records.pack_record(
                self.calls.number, self.calls.faults, records.OK, signature.digest, nbytes
            )
            posted = self.exchange_records(own, nbytes, write)
            # Whole records first: where even the sizes of the messages are equal, nobody has to
            # unpack any.
            for record in posted:
                if record != own:
                    break
            else:  # the way of nearly all calls
                return self.collect_messages([nbytes] * self.size, write)
            # The records differ somewhere. In the sizes of messages they may, in what comes before
            # these they must not.
            if any(record[: records.COMMON] != own[: records.COMMON] for record in posted):
                self._disagree(posted, signature.words(), None)
            return self.collect_messages(records.message_sizes(posted), write)
        except BaseException as error:
            # A signal's handler may raise while this rank waits: the others have then made a call
            # that this rank has not.
            self.mark_interrupted(error, signature.call)
            raise
        finally:
            waiting.depth -= 1

    def _count(self, signature: CallSignature) -> None:
        calls = self.calls
        if calls.barred:
            calls.refuse(signature.call)
        if calls.thread != threading.get_ident():
            # All ranks must make calls in one order, which two threads of a rank cannot promise.
            calls.change_thread(signature.call)
        calls.number += 1
        calls.last_signature = signature

    def count_storage(self) -> int:
        """The number of a new storage of these ranks: all make theirs in one order."""
        self.calls.storages += 1
        return self.calls.storages

    def require_open(self, call: str = "") -> None:
        """Refuses a method of the library that need not communicate where no call may be made.

        Raises:
            RuntimeError: in a child of the rank, or the function of an update.
        """
        if self.calls.barred:
            self.calls.refuse(call or current_call())

    def raise_together(self) -> RaiseTogether:
        """A block of fallible local work before a collective: what it raises on one rank, all ranks raise.

        `@collective` is such a block around the whole of a call, up to its first exchange.
        """
        return RaiseTogether(self)

    def share_error(self, error: BaseException, number: int) -> None:
        """Makes the other ranks raise this rank's error too, if no call was made since call `number`.

        If one was, the others may be elsewhere: then the next call checks that all ranks had an
        error.
        """
        calls = self.calls
        if (
            calls.interruption is not None
        ):  # the next call ends the job, and nobody is told by this one
            return
        if calls.number != number:  # the ranks have met: who raises now may be alone
            # Unless all ranks raised here together: then there is nothing to compare.
            if calls.number != calls.settled:
                calls.note_fault(error)
        elif isinstance(error, Exception):
            # An exit or an interrupt is no error to share: left uncaught, it ends the job by
            # itself.
            self._fail(error)

    def require_equal(self, arrays: Sequence[Array], of: str = "") -> None:
        """With `HPCSTRAT_CHECK=1`, checks that the ranks' arrays are equal where only one rank's is used.

        Collective then; otherwise it does nothing.

        Raises:
            ReplicaMismatchError: they are not.
        """
        if self.checks:
            with self.raise_together():
                seen = [
                    f"{array.dtype.name} {array.shape} of checksum {checksum(array):08x}"
                    for array in arrays
                ]
            self.exchange(signature_of(f"{current_call()}{of}, HPCSTRAT_CHECK", *seen))

    def work(self) -> None:
        """Tells the watchdog that long work makes progress, so that waiting for it does not count as a stall."""
        if self.watchdog is not None:
            self.watchdog.work()

    def change(self) -> Change:
        """A block that changes what all ranks share, or keep alike; an interrupted one cannot be resumed."""
        return Change(self)

    def mark_interrupted(self, error: BaseException, call: str = "") -> bool:
        """Notes that an exception interrupted this call, unless all ranks raised it: the next call ends the job.

        A single replica may go on: nobody waits for it, or believes that the call was done.

        Returns:
            Whether the call counts as interrupted.
        """
        # All ranks raised this one together, before anything changed.
        if self.calls.settled == self.calls.number:
            return False
        if self.size > 1:
            self.calls.mark_interrupted(call or current_call(), error)
        return True

    def settle(self) -> None:
        """Notes that all ranks raise together now, after the last call."""
        self.calls.settled = self.calls.number

    def note_fault(self, error: BaseException) -> None:
        """Notes that an exception, of which the others do not know, leaves `Strategy.run` or a collective call.

        The program may catch it and go on only where every rank raised after the same calls; the
        next one compares.
        """
        self.calls.note_fault(error)

    def pause(self) -> None:
        """From now on no call may be made, because not all ranks are in this one."""
        self.calls.pause(current_call())

    def resume(self) -> None:
        """Calls may be made again."""
        self.calls.pause(None)

    def leave(self) -> None:
        """Tells the others that this rank leaves the program.

        Unless all leave, the job ends with an error.
        """
        self._count(signature_of("the end of the program"))
        own = records.pack_record(
            self.calls.number, self.calls.faults, records.LEAVING, bytes(16), 0
        )
        with self.calls.waiting:
            posted = self.exchange_records(own, 0, None)
            if any(record != own for record in posted):
                self._disagree(posted, records.CallDescription("leaves the program"), None)

    # ---- where ranks disagree

    def _fail(self, error: Exception) -> None:
        """Makes the other ranks raise what this rank raises already."""
        if self.size == 1:
            self.settle()
            return
        # The others are in the exchange that this rank does not reach: they find this record there
        # instead of its own.
        self.calls.number += 1
        own = records.pack_record(
            self.calls.number, self.calls.faults, records.FAILED, bytes(16), 0
        )
        try:
            with self.calls.waiting:
                self._disagree(
                    self.exchange_records(own, 0, None),
                    records.CallDescription(current_call()),
                    error,
                )
        except BaseException as interruption:
            self.calls.mark_interrupted(current_call(), interruption)
            raise

    def _disagree(
        self, posted: Sequence[memoryview], words: records.CallDescription, error: Exception | None
    ) -> None:
        """All ranks come here together, and all raise, or the job ends.

        A rank that failed itself (`error`) returns, and raises its own exception.
        """
        states = [records.read_record(record) for record in posted]
        # In these two cases the ranks cannot exchange reports: some are gone, or are in different
        # calls.
        if any(status == records.LEAVING for _, _, status, _ in states):
            mismatch.end_after_leaving(self.rank, [status for _, _, status, _ in states], words)
        if any(state[:2] != states[0][:2] for state in states):
            mismatch.end_after_fault(
                self.rank, [number for number, *_ in states], words, self.calls.fault
            )
        by_rank = self._exchange_reports(mismatch.report_of(words, error))
        self.settle()
        # An error of one rank explains the differing signatures, and not the other way round, so it
        # is what all raise.
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
        message = records.ObjectMessage(own)
        self.calls.number += 1
        record = records.pack_record(self.calls.number, 0, records.OK, bytes(16), message.nbytes)
        posted = self.exchange_records(record, message.nbytes, message.write)
        if any(other[: records.COMMON] != record[: records.COMMON] for other in posted):
            numbers = [records.read_record(other)[0] for other in posted]
            mismatch.end_after_fault(self.rank, numbers, own.words, self.calls.fault)
        return [
            records.load_object(m)
            for m in self.collect_messages(records.message_sizes(posted), message.write)
        ]


def checksum(array: Array) -> int:
    """A checksum of an array's bytes, wherever it is."""
    return zlib.crc32(np.ascontiguousarray(gpu.to_host(array)).reshape(-1).view(np.uint8).data)
