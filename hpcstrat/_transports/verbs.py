"""What ranks do together with arrays and objects: all_reduce, all_gather, broadcast, all_to_all."""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hpcstrat._agreement import records
from hpcstrat._agreement.agreement import Agreement
from hpcstrat._agreement.collective import CallState
from hpcstrat._agreement.records import signature_of
from hpcstrat._core.arrays import as_native, checksum
from hpcstrat._core.call_name import current_call
from hpcstrat._core.ranks_in_words import join_by_rank
from hpcstrat._core.timeline import COMMUNICATION, span
from hpcstrat._core.types import Array, ReduceOp, ReplicaMismatchError
from hpcstrat._process import settings
from hpcstrat._transports import reduction
from hpcstrat._watchdog.watchdog import Watchdog


def _describe(_: Communicator, arrays: Sequence[Array], *__: Any) -> tuple[str, int]:
    return current_call(), sum(array.nbytes for array in arrays)


class Communicator(Agreement):
    """Moves arrays and objects between the ranks of a group.

    Collective: all ranks make every call, in one order. All checks are here. A transport implements
    how records and messages travel (`exchange_records`, `collect_messages`), and how arrays do
    (`reduce_arrays`, `gather_arrays`, `broadcast_arrays`, `send_arrays`).

    Attributes:
        checks: whether values that must be equal are compared; see `require_equal`.
        watchdog: ends the job if ranks wait forever; `None` if there is none.
        has_many_ranks: whether to gather something from every rank, on every rank, costs much.
    """

    has_many_ranks: bool = False

    def __init__(self, rank: int, size: int, calls: CallState | None = None) -> None:
        super().__init__(rank, size, calls)
        self.checks: bool = size > 1 and settings.is_on("HPCSTRAT_CHECK")
        self.watchdog: Watchdog | None = None

    # ---- what a transport implements, without checks of its own
    #
    # Each starts with an exchange. On all ranks `must_match` and the dtypes are equal, and so are
    # the shapes where the verb says so.

    @abc.abstractmethod
    def reduce_arrays(
        self, must_match: tuple[Any, ...], arrays: Sequence[Array], op: ReduceOp
    ) -> list[Array]:
        """`all_reduce` of checked arrays."""

    @abc.abstractmethod
    def gather_arrays(
        self, must_match: tuple[Any, ...], arrays: Sequence[Array], axis: int
    ) -> list[Array]:
        """`all_gather` of arrays that are checked, except for their shapes."""

    @abc.abstractmethod
    def broadcast_arrays(
        self, must_match: tuple[Any, ...], arrays: Sequence[Array], root: int
    ) -> list[Array]:
        """`broadcast` of checked arrays."""

    @abc.abstractmethod
    def send_arrays(
        self,
        must_match: tuple[Any, ...],
        sent: Sequence[tuple[int, Array]],
        expected: Sequence[tuple[int, Array]],
    ) -> list[Array]:
        """`all_to_all` of checked arrays."""

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
            arrays: this rank's arrays, of the same shapes and dtypes on all ranks.
            op: how they are reduced.
            *must_match: what else must be equal on all ranks.

        Raises:
            TypeError: a dtype does not support the reduction.
            ReplicaMismatchError: shapes, dtypes, `op` or `must_match` differ between ranks.
        """
        with self.raise_together():
            for array in arrays:
                reduction.check_reducible(array.dtype, op)
            natives = [*map(as_native, arrays)]
            casts: list[str] = []
            # Here, so that all transports reduce the same dtype.
            if self.size > 1 and reduction.REDUCTIONS[op].is_mean:
                for i, array in enumerate(natives):
                    if array.dtype.kind in "iu":
                        natives[i] = array.astype(np.float64)
                        casts.append(f"{array.dtype.name} as float64")
            # `_name_` is what the property `name`, which is Python code, returns.
            results = self.reduce_arrays((op._name_, *must_match, *casts), natives, op)
            for i in range(len(arrays)) if casts else ():
                mean_dtype = reduction.mean_dtype(arrays[i].dtype)
                results[i] = results[i].astype(mean_dtype, copy=False)
            return results

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
            return self.gather_arrays(
                (f"axis={axis}", *must_match), [*map(as_native, arrays)], axis
            )

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
                (f"root={root}", *must_match), [*map(as_native, arrays)], root
            )

    @span(
        COMMUNICATION,
        lambda _, sent, *__: (current_call(), sum(array.nbytes for _, array in sent)),
    )
    def all_to_all(
        self,
        sent: Sequence[tuple[int, Array]],
        expected: Sequence[tuple[int, Array]],
        *must_match: Any,
    ) -> list[Array]:
        """Sends arrays, of any shapes, to some ranks; returns new arrays that others have sent.

        Collective.

        Args:
            sent: pairs of a rank and an array for it.
            expected: pairs of a rank that sends an array to this rank, and any array of its dtype
                and on its device. A rank's arrays come in the order in which it sends them.
            *must_match: what must be equal on all ranks.

        Raises:
            TypeError: an array holds Python objects.
            ReplicaMismatchError: `must_match` differs between ranks.
        """
        with self.raise_together():
            _check_no_objects(array for _, array in sent)
            return self.send_arrays(
                must_match, [(rank, as_native(array)) for rank, array in sent], expected
            )

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
                digest = hashlib.blake2b(records.pickled(obj), digest_size=8).digest()
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

    def highest(self, number: int) -> int:
        """The highest of the ranks' numbers, each of 0 to 255. Collective."""
        (result,) = self.all_reduce([np.array(number, np.uint8)], ReduceOp.MAX)
        return int(result)

    # ---- what else all calls need

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


def _check_no_objects(arrays: Iterable[Array]) -> None:
    for array in arrays:
        if array.dtype.hasobject:
            raise TypeError(
                f"{current_call()}: an array of dtype {array.dtype} cannot travel between ranks; "
                "pass numbers"
            )


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
