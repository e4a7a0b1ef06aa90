"""The interface between replicas: what communicators do with arrays and objects."""

from __future__ import annotations

import abc
import hashlib
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hpcstrat._agreement import mismatch, records
from hpcstrat._agreement.collective import CallState, ErrorBlock
from hpcstrat._agreement.mismatch import RankReport
from hpcstrat._agreement.records import CallSignature, signature_of
from hpcstrat._core.arrays import as_native, checksum
from hpcstrat._core.call_name import current_call
from hpcstrat._core.ranks_in_words import join_by_rank
from hpcstrat._core.timeline import COMMUNICATION, span
from hpcstrat._core.types import Array, Bytes, ReduceOp, ReplicaMismatchError
from hpcstrat._process import settings
from hpcstrat._transports import reduction
from hpcstrat._watchdog.watchdog import Watchdog

Write: TypeAlias = Callable[[Bytes], None]
"""Writes this rank's message to the first bytes of the array passed to it."""


class Outgoing(NamedTuple):
    """Arrays, of any shapes, that this rank sends to others: at most one to each rank.

    Attributes:
        dtype: the dtype of all arrays, sent and received.
        to: the array for each rank that gets one.
        sources: the ranks that send such an array to this rank.
        is_on_gpu: whether the arrays, sent and received, are on the GPU.
    """

    dtype: np.dtype[Any]
    to: Mapping[int, Array]
    sources: Sequence[int]
    is_on_gpu: bool


def _describe(_: Communicator, arrays: Sequence[Array], *__: Any, **___: Any) -> tuple[str, int]:
    return current_call(), sum(array.nbytes for array in arrays)


class Communicator(abc.ABC):
    """Moves arrays and objects between the ranks of a group.

    Collective: all ranks make every call, in one order.

    Every call starts with one record per rank, by which the ranks check that they make the same
    call with the same arguments. If not, all of them raise. A transport implements how records,
    messages and arrays travel.

    Attributes:
        rank: this process's index in the group.
        size: the number of ranks.
        checks: whether values that must be equal are compared; see `require_equal`.
        calls: what this rank has called.
        watchdog: ends the job if ranks wait forever; `None` if there is none.
        has_many_ranks: whether to gather something from every rank, on every rank, costs much.
    """

    rank: int
    size: int
    has_many_ranks: bool = False

    def __init__(self, rank: int, size: int, calls: CallState | None = None) -> None:
        self.rank = rank
        self.size = size
        # A device communicator shares its host communicator's `CallState`: the calls of both are
        # counted, and so compared, in one order.
        self.calls: CallState = CallState(size, self._raise_on_others) if calls is None else calls
        self.checks: bool = size > 1 and settings.is_on("HPCSTRAT_CHECK")
        self.watchdog: Watchdog | None = None
        self._no_messages: list[Bytes] = [np.empty(0, np.uint8)] * size

    # ---- what a transport implements, without checks of its own

    @abc.abstractmethod
    def exchange_records(self, record: bytes, nbytes: int, write: Write | None) -> list[memoryview]:
        """Exchanges records of `records.pack_record`; returns all ranks' records.

        If all are equal, one of them will do. Writes the message too, if it can travel with them.
        """

    @abc.abstractmethod
    def collect_messages(self, sizes: Sequence[int], write: Write | None) -> list[Bytes]:
        """All ranks' messages of the call just exchanged by records, valid until the next call."""

    @abc.abstractmethod
    def reduce_arrays(
        self, must_match: tuple[Any, ...], arrays: Sequence[Array], op: ReduceOp
    ) -> list[Array]:
        """`all_reduce` of checked arrays.

        On all ranks `must_match`, the shapes and the dtypes are equal.
        """

    @abc.abstractmethod
    def gather_arrays(
        self, must_match: Sequence[Any], arrays: Sequence[Array], axis: int
    ) -> list[Array]:
        """`all_gather` of arrays that are checked, except for their shapes.

        On all ranks `must_match` and the dtypes are equal.
        """

    @abc.abstractmethod
    def broadcast_arrays(
        self, must_match: tuple[Any, ...], arrays: Sequence[Array], root: int
    ) -> list[Array]:
        """`broadcast` of checked arrays.

        On all ranks `must_match`, the shapes and the dtypes are equal.
        """

    @abc.abstractmethod
    def reduce_parts(
        self, must_match: tuple[Any, ...], parts: Sequence[Sequence[Array]], op: ReduceOp
    ) -> list[Array]:
        """`reduce_scatter` of checked arrays, each in one part per rank.

        On all ranks `must_match`, the shapes and the dtypes are equal.
        """

    @abc.abstractmethod
    def exchange_parts(
        self, must_match: tuple[Any, ...], outgoing: Sequence[Outgoing]
    ) -> list[dict[int, Array]]:
        """`all_to_all` of checked arrays."""

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
            RuntimeError: called in the function of an update, which not all ranks run.
        """
        # As `_count` and `with waiting:`, without their calls: every step comes through here.
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

    def _count(self, signature: CallSignature) -> None:
        calls = self.calls
        if calls.barred:
            calls.refuse(signature.call)
        if calls.thread != threading.get_ident():
            # All ranks must make calls in one order, which two threads of a rank cannot guarantee.
            calls.change_thread(signature.call)
        calls.number += 1
        calls.last_signature = signature

    def raise_together(self) -> ErrorBlock:
        """A block of local work before a collective: what one rank raises in it, all ranks raise.

        `@collective` makes such a block of a whole call, up to its first exchange.
        """
        return ErrorBlock(self.calls, self.calls.share_error)

    def require_equal(self, arrays: Sequence[Array], of: str = "") -> None:
        """With `HPCSTRAT_CHECK=1`, checks that arrays of which one rank's is used are equal.

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
        """Tells the watchdog that long work makes progress: waiting for it is not a stall."""
        if self.watchdog is not None:
            self.watchdog.work()

    def change(self) -> ErrorBlock:
        """A block that changes what ranks share or keep equal; interrupted, it ends the job."""
        return ErrorBlock(self.calls, self.calls.share_or_interrupt)

    def leave(self) -> None:
        """Tells the others that this rank leaves the program.

        Unless all leave, the job ends with an error.
        """
        self._count(signature_of("the end of the program"))
        own = records.pack_record(
            self.calls.number, self.calls.escaped_hash, records.LEAVING, bytes(16), 0
        )
        with self.calls.waiting:
            posted = self.exchange_records(own, 0, None)
            if any(record != own for record in posted):
                self._disagree(posted, records.CallDescription("leaves the program"), None)

    # ---- where ranks disagree

    def _raise_on_others(self, error: Exception) -> None:
        """Makes the other ranks raise what this rank raises already."""
        if self.size == 1:
            self.calls.note_shared_error()
            return
        # The others are in the exchange that this rank does not reach. There they find this record.
        self.calls.number += 1
        own = records.pack_record(
            self.calls.number, self.calls.escaped_hash, records.FAILED, bytes(16), 0
        )
        try:
            with self.calls.waiting:
                self._disagree(
                    self.exchange_records(own, 0, None),
                    records.CallDescription(current_call()),
                    error,
                )
        except BaseException as interruption:
            self.calls.interrupt(interruption, current_call())
            raise

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

    # ---- verbs

    def barrier(self) -> None:
        """Waits until every rank has called it. Collective."""
        self.exchange(signature_of(current_call()))

    @span(COMMUNICATION, _describe)
    def all_reduce(self, arrays: Sequence[Array], op: ReduceOp, *must_match: str) -> list[Array]:
        """Reduces arrays, of any shape, layout and reducible dtype, elementwise over all ranks.

        All arrays are sent together. The results are new C-contiguous arrays on the arrays'
        devices, bit-identical on every rank. `MEAN` of integers over several ranks has the dtype of
        `mean_dtype`. Collective.

        Args:
            arrays: this rank's arrays.
            op: how they are reduced.
            *must_match: what else must be equal on all ranks.

        Raises:
            TypeError: a dtype does not support the reduction.
            ReplicaMismatchError: shapes, dtypes, `op` or `must_match` differ between ranks.
        """
        calls = self.calls
        if calls.barred:
            calls.refuse(current_call())
        number = calls.number
        try:  # as `raise_together`, without the four calls of its block
            natives, casts = self._as_reducible(arrays, op)
            # `_name_` is what the property `name`, which is Python code, returns.
            results = self.reduce_arrays((op._name_, *must_match, *casts), natives, op)
            return _as_means(results, arrays) if casts else results
        except BaseException as error:
            calls.share_error(error, number)
            raise

    def _as_reducible(self, arrays: Sequence[Array], op: ReduceOp) -> tuple[list[Array], list[str]]:
        """The arrays as transports take them; and casts, which must match and be undone.

        They are cast here, so that all transports reduce the same dtype.
        """
        for array in arrays:
            reduction.check_reducible(array.dtype, op)
        natives = [*map(as_native, arrays)]
        if self.size == 1 or not reduction.REDUCTIONS[op].is_mean:
            return natives, []
        integers = [array.dtype for array in natives if array.dtype.kind in "iu"]
        if integers:
            natives = [
                array.astype(np.float64) if array.dtype.kind in "iu" else array for array in natives
            ]
        return natives, [f"{dtype.name} as float64" for dtype in integers]

    @span(COMMUNICATION, _describe)
    def reduce_scatter(
        self, arrays: Sequence[Array], op: ReduceOp, axis: int, *must_match: str
    ) -> list[Array]:
        """This rank's part, along `axis`, of each array that `all_reduce` would return.

        The parts are in rank order; where the size is not divisible, the first ranks get one
        element more. The results are new C-contiguous arrays on the arrays' devices. Collective.

        Raises:
            TypeError: a dtype does not support the reduction.
            ValueError: an array has no such axis.
            ReplicaMismatchError: shapes, dtypes, `op`, `axis` or `must_match` differ between ranks.
        """
        with self.raise_together():
            facts = (
                op.name,
                f"axis={axis}",
                *must_match,
                *[(array.dtype, array.shape) for array in arrays],
            )
            natives, casts = self._as_reducible(arrays, op)
            parts = [_parts_along(array, axis, self.size) for array in natives]
            results = self.reduce_parts(facts, parts, op)
            return _as_means(results, arrays) if casts else results

    @span(COMMUNICATION, _describe)
    def broadcast(self, arrays: Sequence[Array], root: int, *must_match: str) -> list[Array]:
        """New copies of rank `root`'s arrays, on the devices of this rank's arrays. Collective.

        Args:
            arrays: this rank's arrays, of the root's shapes and dtypes.
            root: the rank whose arrays are copied.
            *must_match: what else must be equal on all ranks.

        Raises:
            TypeError: an array holds Python objects.
            ReplicaMismatchError: shapes, dtypes, `root` or `must_match` differ between ranks.
        """
        with self.raise_together():
            _check_no_objects(arrays)
            return self.broadcast_arrays(
                (f"root={root}", *must_match), [as_native(a) for a in arrays], root
            )

    @span(COMMUNICATION, lambda _, outgoing, *__: (current_call(), _bytes_of(outgoing)))
    def all_to_all(self, outgoing: Sequence[Outgoing], *must_match: str) -> list[dict[int, Array]]:
        """Sends arrays to other ranks; returns, for each of `outgoing`, what came, by its source.

        Collective.

        Args:
            outgoing: as many, and of the same dtypes, on all ranks; each rank's `sources` are the
                ranks that have an array for it.
            *must_match: what else must be equal on all ranks.

        Raises:
            TypeError: an array holds Python objects.
            ReplicaMismatchError: dtypes or `must_match` differ between ranks.
        """
        with self.raise_together():
            for item in outgoing:
                _check_no_objects(list(item.to.values()))
            return self.exchange_parts((*must_match, *[item.dtype for item in outgoing]), outgoing)

    @span(COMMUNICATION, _describe)
    def all_gather(self, arrays: Sequence[Array], axis: int, *must_match: str) -> list[Array]:
        """Concatenates each array over all ranks, in rank order, along `axis`.

        Only the sizes along `axis` may differ. The results are new arrays on the arrays' devices,
        bit-identical on every rank. `must_match` is what else must be equal on all ranks.
        Collective.

        Raises:
            TypeError: an array holds Python objects.
            ReplicaMismatchError: an array has no such axis, or its other sizes differ; the message
                names every rank's shape.
        """
        with self.raise_together():
            _check_no_objects(arrays)
            arrays = [as_native(array) for array in arrays]
            return self.gather_arrays((f"axis={axis}", *must_match), arrays, axis)

    def all_gather_obj(self, obj: Any, *must_match: Any) -> list[Any]:
        """Every rank's object, in rank order; arrays in them are new copies. Collective.

        Args:
            obj: this rank's object.
            *must_match: what must be equal on all ranks.

        Raises:
            TypeError: `obj` cannot be pickled.
        """
        with self.raise_together():
            messages = self.exchange(
                signature_of(current_call(), *must_match), *records.pack_object(obj)
            )
            return [records.load_object(message) for message in messages]

    def all_gather_differing_obj(self, obj: Any, *must_match: Any) -> list[Any]:
        """`all_gather_obj` of objects that are usually equal: many ranks compare digests first.

        If all pickle to the same bytes, this rank's own object stands for all. Collective.
        """
        if self.has_many_ranks:
            with self.raise_together():
                message = b"".join(records.pickled(obj))
                digest = hashlib.blake2b(message, digest_size=8).digest()
            own = np.frombuffer(digest, np.uint64)
            # The lowest of all, and the complement of the highest.
            both = np.concatenate([own, ~own])
            (lowest,) = self.all_reduce([both], ReduceOp.MIN, *map(str, must_match))
            if np.array_equal(lowest, both):
                return [obj] * self.size
        return self.all_gather_obj(obj, *must_match)

    def broadcast_obj(self, obj: Any, root: int = 0) -> Any:
        """The object of rank `root`; what the others pass is ignored. Collective.

        Raises:
            TypeError: the object cannot be pickled.
        """
        with self.raise_together():
            signature = signature_of(current_call(), f"root={root}")
            if self.rank == root:
                messages = self.exchange(signature, *records.pack_object(obj))
            else:
                messages = self.exchange(signature)
            return records.load_object(messages[root])


def _as_means(results: Sequence[Array], arrays: Sequence[Array]) -> list[Array]:
    """The means of these arrays, of which integers were cast to be reduced."""
    return [
        mean.astype(reduction.mean_dtype(array.dtype), copy=False)
        if array.dtype.kind in "iu"
        else mean
        for mean, array in zip(results, arrays, strict=True)
    ]


def _check_no_objects(arrays: Sequence[Array]) -> None:
    for array in arrays:
        if array.dtype.hasobject:
            raise TypeError(
                f"{current_call()}: an array of dtype {array.dtype} cannot travel between ranks; "
                "pass numbers"
            )


def _bytes_of(outgoing: Sequence[Outgoing]) -> int:
    return sum(array.nbytes for item in outgoing for array in item.to.values())


def _parts_along(array: Array, axis: int, size: int) -> list[Array]:
    """The array in `size` parts, as views."""
    if not -array.ndim <= axis < array.ndim:
        raise ValueError(
            f"{current_call()}: axis {axis} does not exist in an array of shape {array.shape}; "
            "pass one that does"
        )
    least, longer = divmod(array.shape[axis], size)
    ends = [0, *itertools.accumulate(least + (rank < longer) for rank in range(size))]
    before = (slice(None),) * (axis % array.ndim)
    return [array[(*before, slice(start, stop))] for start, stop in itertools.pairwise(ends)]


def check_gatherable(shapes: Sequence[tuple[int, ...]], axis: int) -> None:
    """Checks that arrays of these shapes, one per rank, can be concatenated along `axis`.

    Raises:
        ReplicaMismatchError: they cannot.
    """
    along = axis % (len(shapes[0]) or 1)
    if any(not -len(shape) <= axis < len(shape) for shape in shapes):
        what = f"axis {axis} does not exist in every array: the shapes are"
        remedy = "pass an axis that all have"
    elif len({(len(shape), *shape[:along], *shape[along + 1 :]) for shape in shapes}) > 1:
        what = f"shapes may differ along axis {axis} only, but are"
        remedy = "pad the other dimensions"
    else:
        return
    listed = join_by_rank(enumerate(map(str, shapes)))
    raise ReplicaMismatchError(f"{current_call()}: {what} {listed}; {remedy}")
