"""The one interface between replicas: exchanges that every rank makes together, and all their checking."""

from __future__ import annotations

import abc
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from hpcstrat import _gpu, _settings
from hpcstrat._arrays import as_native
from hpcstrat._communicators import mismatch, protocol, reduction
from hpcstrat._communicators.call_state import CallState
from hpcstrat._communicators.collective import Change, RaiseTogether
from hpcstrat._communicators.mismatch import RankReport
from hpcstrat._communicators.protocol import CallSignature, signature
from hpcstrat._edge import current_call
from hpcstrat._errors import ReplicaMismatchError
from hpcstrat._spans import COMMUNICATION, Details, span
from hpcstrat._types import Array, Bytes, ReduceOp
from hpcstrat._watchdog.watchdog import Watchdog

Write: TypeAlias = Callable[[Bytes], None]
"""Writes this rank's message to the first bytes of the array that it is given."""


def _described(_: Communicator, arrays: Sequence[Array], *__: Any, **___: Any) -> Details:
    return Details(current_call(), sum(array.nbytes for array in arrays))


class Communicator(abc.ABC):
    """Moves arrays and objects between the ranks of a group. Collective: all ranks make every call, in one order.

    Every call begins with one record a rank, by which the ranks agree that it is the same call with the same
    arguments. Where it is not, all of them raise. A transport fills in how records and messages travel.

    Attributes:
        rank: this process's index in the group.
        size: how many ranks there are.
        checks: whether values that count as one are compared; see `require_equal`.
        calls: what this rank has called.
        watchdog: ends the job where ranks wait without end; `None` where there is none.
    """

    rank: int
    size: int

    def __init__(self, rank: int, size: int, calls: CallState | None = None) -> None:
        self.rank = rank
        self.size = size
        self.calls: CallState = CallState() if calls is None else calls
        self.checks: bool = size > 1 and _settings.is_on("HPCSTRAT_CHECK")
        self.watchdog: Watchdog | None = None

    @property
    def number(self) -> int:
        """How many calls were made."""
        return self.calls.number

    # ---- what a transport fills in

    @abc.abstractmethod
    def _post(self, record: bytes, nbytes: int, write: Write | None) -> list[memoryview]:
        """Exchanges records of `protocol.pack_record`; returns all. Writes the message too, if it can go at once."""

    @abc.abstractmethod
    def _messages(self, sizes: Sequence[int], write: Write | None) -> list[Bytes]:
        """All ranks' messages of the call whose records were just exchanged, valid until the next call."""

    @abc.abstractmethod
    def _reduce_arrays(self, must_match: tuple[Any, ...], arrays: Sequence[Array], op: ReduceOp) -> list[Array]:
        """`all_reduce` of checked arrays. On all ranks `must_match`, the shapes and the dtypes are equal."""

    @abc.abstractmethod
    def _gather_arrays(self, must_match: Sequence[Any], arrays: Sequence[Array], axis: int) -> list[Array]:
        """`all_gather` of arrays that are checked, but for their shapes. Equal are `must_match` and the dtypes."""

    # ---- the exchange that every call begins with

    @span(COMMUNICATION, lambda _, agreed, nbytes=0, *__, **___: Details(agreed.call, nbytes))
    def exchange(self, agreed: CallSignature, nbytes: int = 0, write: Write | None = None) -> list[Bytes]:
        """Every rank's message of `nbytes` bytes, which may differ from rank to rank, once all agree on `agreed`.

        The arrays are read-only by convention and valid until the next call. Collective.

        Raises:
            ReplicaMismatchError: the ranks call different things.
            Exception: what another rank's `raise_together` block raised.
            RuntimeError: not all ranks are here, but in the function of an update.
        """
        self._count(agreed)
        waiting = self.calls.waiting
        waiting.depth += 1  # what `with waiting:` does, without its two calls: every step comes through here
        try:
            own = protocol.pack_record(self.calls.number, self.calls.faults, protocol.OK, agreed.digest, nbytes)
            posted = self._post(own, nbytes, write)
            # Whole records first: where even the sizes of the messages are equal, nobody has to unpack any.
            for record in posted:
                if record != own:
                    break
            else:  # the way of nearly all calls
                return self._messages([nbytes] * self.size, write)
            if any(record[: protocol.COMMON] != own[: protocol.COMMON] for record in posted):
                self._disagree(posted, agreed.words(), None)
            return self._messages(protocol.message_sizes(posted), write)
        except BaseException as error:
            self.tear(error, agreed.call)
            raise
        finally:
            waiting.depth -= 1

    def _count(self, agreed: CallSignature) -> None:
        calls = self.calls
        if calls.barred:
            calls.refuse(agreed.call)
        if calls.thread != threading.get_ident():
            calls.change_thread(agreed.call)
        calls.number += 1
        calls.agreed = agreed

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
        """Has the other ranks raise an error of this one too, where they have made no call since call `number`.

        Where they have, they may not come back: then the next call compares whether all ranks had an error.
        """
        calls = self.calls
        if calls.torn is not None:  # the next call ends the job, and nobody is told by this one
            return
        if calls.number != number:  # the ranks have met: who raises now may be alone
            if calls.number != calls.settled:
                calls.note_fault(error)
        elif isinstance(error, Exception):
            self._fail(error)

    def require_equal(self, arrays: Sequence[Array], of: str = "") -> None:
        """With `HPCSTRAT_CHECK=1`, checks that the ranks' arrays are equal where only one rank's is used.

        Collective then; otherwise it does nothing.

        Raises:
            ReplicaMismatchError: they are not.
        """
        if self.checks:
            with self.raise_together():
                seen = [f"{array.dtype.name} {array.shape} of checksum {checksum(array):08x}" for array in arrays]
            self.exchange(signature(f"{current_call()}{of}, HPCSTRAT_CHECK", *seen))

    def work(self) -> None:
        """Tells the watchdog that long work goes on, so that the ranks that wait for it wait on."""
        if self.watchdog is not None:
            self.watchdog.work()

    def change(self) -> Change:
        """A block that changes what all ranks share, or keep alike; one that is broken off is not resumed."""
        return Change(self)

    def tear(self, error: BaseException, call: str = "") -> bool:
        """Notes that an exception broke this call off, unless all ranks raised with it: the next call ends the job.

        One replica alone goes on: nobody else waits for it, or believes that the call was done.

        Returns:
            Whether it did.
        """
        if self.calls.settled == self.calls.number:
            return False
        if self.size > 1:
            self.calls.tear(call or current_call(), error)
        return True

    def settle(self) -> None:
        """Notes that all ranks raise now, after what they agreed on last."""
        self.calls.settled = self.calls.number

    def note_fault(self, error: BaseException) -> None:
        """Notes that an exception, of which the others do not know, leaves `Strategy.run` or a collective call.

        The program may catch it and go on only where every rank raised after the same calls; the next one compares.
        """
        self.calls.note_fault(error)

    def pause(self) -> None:
        """From now on no call may be made, because not all ranks are in this one."""
        self.calls.pause(current_call())

    def resume(self) -> None:
        """Calls may be made again."""
        self.calls.pause(None)

    def leave(self) -> None:
        """Tells the others that this rank leaves the program. If they do not leave too, the job ends, non-zero."""
        self._count(signature("the end of the program"))
        own = protocol.pack_record(self.calls.number, self.calls.faults, protocol.LEAVING, bytes(16), 0)
        with self.calls.waiting:
            posted = self._post(own, 0, None)
            if any(record != own for record in posted):
                self._disagree(posted, protocol.CallDescription("leaves the program"), None)

    # ---- verbs

    def barrier(self) -> None:
        """Waits until every rank has come here. Collective."""
        self.exchange(signature(current_call()))

    @span(COMMUNICATION, _described)
    def all_reduce(self, arrays: Sequence[Array], op: ReduceOp, *must_match: str) -> list[Array]:
        """Reduces arrays, of any shape, layout and reducible dtype, elementwise over all ranks.

        All of them travel together. The results are fresh, C-contiguous, where the arrays are, and bit-identical on
        every rank. `MEAN` of integers over several ranks is `float64`. Collective.

        Args:
            arrays: this rank's.
            op: how they are reduced.
            *must_match: what else must be equal on all ranks.

        Raises:
            TypeError: a dtype that cannot be reduced so.
            ReplicaMismatchError: shapes, dtypes, `op` or `must_match` differ between ranks.
        """
        with self.raise_together():
            for array in arrays:
                reduction.check_reducible(array.dtype, op)
            if reduction.REDUCTIONS[op].is_mean and self.size > 1:
                arrays = [array.astype(np.float64) if array.dtype.kind in "iu" else array for array in arrays]
            return self._reduce_arrays((op.name, *must_match), [as_native(array) for array in arrays], op)

    @span(COMMUNICATION, _described)
    def all_gather(self, arrays: Sequence[Array], axis: int, *must_match: str) -> list[Array]:
        """Concatenates each array over all ranks, in rank order, along `axis`.

        Only the sizes along `axis` may differ. The results are fresh, where the arrays are, and bit-identical on every
        rank. `must_match` is what else must be equal on all ranks. Collective.

        Raises:
            TypeError: an array of Python objects.
            ReplicaMismatchError: an array without that axis, or whose other sizes differ; every rank's shape is named.
        """
        with self.raise_together():
            for array in arrays:
                if array.dtype.hasobject:
                    raise TypeError(
                        f"{current_call()}: an array of dtype {array.dtype} cannot be gathered; pass numbers"
                    )
            arrays = [as_native(array) for array in arrays]
            return self._gather_arrays((f"axis={axis}", *must_match), arrays, axis)

    def all_gather_obj(self, obj: Any, *must_match: str) -> list[Any]:
        """Every rank's object, in rank order; arrays in it are fresh copies. Collective.

        Args:
            obj: this rank's.
            *must_match: what must be equal on all ranks.

        Raises:
            TypeError: `obj` cannot be pickled.
        """
        with self.raise_together():
            message = _message(obj)
            messages = self.exchange(signature(current_call(), *must_match), message.nbytes, message.write)
            return [protocol.load_object(one) for one in messages]

    def broadcast_obj(self, obj: Any, root: int = 0) -> Any:
        """The object of rank `root`; what the others pass is ignored. Collective.

        Raises:
            TypeError: the object cannot be pickled.
        """
        with self.raise_together():
            message = _message(obj if self.rank == root else None)
            agreed = signature(current_call(), f"root={root}")
            return protocol.load_object(self.exchange(agreed, message.nbytes, message.write)[root])

    # ---- where ranks disagree

    def _fail(self, error: Exception) -> None:
        """Makes the other ranks raise what this rank raises already."""
        if self.size == 1:
            self.settle()
            return
        # The others are in the exchange that this rank does not reach: they find this record there instead of its own.
        self.calls.number += 1
        own = protocol.pack_record(self.calls.number, self.calls.faults, protocol.FAILED, bytes(16), 0)
        try:
            with self.calls.waiting:
                self._disagree(self._post(own, 0, None), protocol.CallDescription(current_call()), error)
        except BaseException as interruption:
            self.calls.tear(current_call(), interruption)
            raise

    def _disagree(self, posted: Sequence[memoryview], words: protocol.CallDescription, error: Exception | None) -> None:
        """All ranks come here together, and all raise, or the job ends.

        A rank that failed itself (`error`) returns, and raises its own exception.
        """
        states = [protocol.read_record(record) for record in posted]
        if any(status == protocol.LEAVING for _, _, status, _ in states):
            mismatch.end_after_leaving(self.rank, [status for _, _, status, _ in states], words)
        if any(state[:2] != states[0][:2] for state in states):
            mismatch.end_after_fault(self.rank, [number for number, *_ in states], words, self.calls.fault)
        everyones = self._tell(mismatch.report_of(words, error))
        self.settle()
        failed = [rank for rank, other in enumerate(everyones) if other.problem is not None]
        if error is not None:
            return
        if failed:
            mismatch.raise_as(failed[0], everyones[failed[0]])
        raise ReplicaMismatchError(
            f"the ranks must make the same call with arguments that fit, but called{mismatch.lines(everyones)}"
        )

    def _tell(self, own: RankReport) -> list[RankReport]:
        """`all_gather_obj` without the check that brought us here."""
        message = protocol.ObjectMessage(own)
        self.calls.number += 1
        record = protocol.pack_record(self.calls.number, 0, protocol.OK, bytes(16), message.nbytes)
        posted = self._post(record, message.nbytes, message.write)
        if any(other[: protocol.COMMON] != record[: protocol.COMMON] for other in posted):
            numbers = [protocol.read_record(other)[0] for other in posted]
            mismatch.end_after_fault(self.rank, numbers, own.words, self.calls.fault)
        return [protocol.load_object(m) for m in self._messages(protocol.message_sizes(posted), message.write)]


def check_gatherable(shapes: Sequence[tuple[int, ...]], axis: int) -> None:
    """Checks that arrays of these shapes, one a rank, can be concatenated along `axis`.

    Raises:
        ReplicaMismatchError: they cannot.
    """
    listed = ", ".join(f"{shape} on rank {rank}" for rank, shape in enumerate(shapes))
    if any(not -len(shape) <= axis < len(shape) for shape in shapes):
        raise ReplicaMismatchError(
            f"{current_call()}: axis {axis} does not exist in every array: the shapes are {listed}; pass an axis that "
            "all have"
        )
    along = axis % len(shapes[0])
    if len({(len(shape), *shape[:along], *shape[along + 1 :]) for shape in shapes}) > 1:
        raise ReplicaMismatchError(
            f"{current_call()}: shapes may differ along axis {axis} only, but are {listed}; pad the other dimensions"
        )


def _message(obj: Any) -> protocol.ObjectMessage:
    try:
        return protocol.ObjectMessage(obj)
    except Exception as error:
        raise TypeError(
            f"{current_call()}: {obj!r} cannot travel between ranks: {error}; pass what can be pickled"
        ) from error


def checksum(array: Array) -> int:
    """A checksum of an array's bytes, wherever it is."""
    return zlib.crc32(np.ascontiguousarray(_gpu.to_host(array)).reshape(-1).view(np.uint8).data)
