"""The steps of each replica: a pipeline is split into them, and all ranks take them together."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

import numpy as np

from hpcstrat._core.call_name import INPUT, join_by_rank, names_call, span, warn_together
from hpcstrat._core.types import PerReplica, ReplicaMismatchError
from hpcstrat._process import settings
from hpcstrat._replicas import contexts
from hpcstrat._replicas.contexts import InReplica
from hpcstrat.data import _elements
from hpcstrat.data._node import (
    Chunk,
    EpochPass,
    FailedElement,
    Node,
    PipelineChecksum,
    load_rows,
    with_failures,
)
from hpcstrat.data._resuming import DatasetIterator
from hpcstrat.data._threads import map_in_threads

if TYPE_CHECKING:
    from hpcstrat.data._distributed import DistributedDataset

FROM_FUNCTION = "Strategy.distribute_datasets_from_function"


class Step(NamedTuple):
    """One replica's part of one step.

    Attributes:
        total: the number of elements of all replicas, which must be equal on all ranks; `None`
            after the last step.
        value: this replica's nest of arrays.
        checksum: the checksum of all that user code has yielded so far, which must be equal on all
            ranks; see `PipelineChecksum`.
        error: the exception that user code raised on this rank; there is then no value, and the
            next step follows.
        is_scarce: whether some replicas have no elements.
    """

    total: int | None
    value: Any
    checksum: int = 0
    error: Exception | None = None
    is_scarce: bool = False


Prefetcher: TypeAlias = Callable[[Iterator[Step]], Iterator[Step]]
"""Yields steps with their arrays moved elsewhere, perhaps ahead of use; does not communicate."""


def _whole(element: Any) -> Step:
    """The step of an element that is for one replica alone."""
    if isinstance(element, FailedElement):
        return Step(1, None, error=element.error)
    return Step(1, element)


def split_evenly(node: Node, epoch: EpochPass, rank: int, size: int) -> Iterator[Step]:
    """One replica's rows of each batch: of b rows `b // size`, or one more if `rank < b % size`."""
    return _split(node, epoch, rank, size, 0)


def split_in_order(node: Node, epoch: EpochPass, rank: int, size: int) -> Iterator[Step]:
    """As `split_evenly`, but a short batch fills the replicas in order, each to its full share."""
    return _split(node, epoch, rank, size, node.batch_sizes[-1])


def _split(node: Node, epoch: EpochPass, rank: int, size: int, batch_size: int) -> Iterator[Step]:
    if node.rows is not None and node.rows.fetches_freely:
        return _split_keys(node.rows, node.chunks(epoch), rank, size, batch_size)

    def step(item: Any, checksum: int) -> Step:
        total, value, failed = 0, None, None
        try:
            # If the item is the keys of the batch's rows, only this replica's rows are loaded.
            if node.rows is not None:
                total = len(item)
                value = load_rows(node.rows, item, *bounds(rank, size, batch_size, total))
            else:
                batch = node.load(item)
                total = _elements.leading_size(_elements.flatten(batch)[0])
                value = _elements.rows(batch, *bounds(rank, size, batch_size, total))
        except Exception as error:
            # Every rank must reach the exchange of this step, in which all ranks raise.
            failed = error
        return Step(total, value, checksum, failed, _is_scarce(size, batch_size, total))

    items = ((item, epoch.checksum.value) for chunk in node.chunks(epoch) for item in chunk)
    return map_in_threads(lambda of_item: step(*of_item), items, node.threads)


def _split_keys(
    rows: Node, chunks: Iterator[Chunk], rank: int, size: int, batch_size: int
) -> Iterator[Step]:
    """As `_split`, for batches of keys.

    Loading a few rows takes microseconds, so the loop does little per batch.
    """
    fetch = rows.fetch
    for chunk in chunks:
        for batches in (
            [chunk] if isinstance(chunk, np.ndarray) else [keys[np.newaxis] for keys in chunk]
        ):
            total = batches.shape[1]
            start, stop = bounds(rank, size, batch_size, total)
            is_scarce = _is_scarce(size, batch_size, total)
            for own in batches[:, start:stop]:
                try:
                    yield Step(total, fetch(own), 0, None, is_scarce)
                except Exception as error:  # every rank must reach the next step, as in `_split`
                    yield Step(total, None, error=error)


@functools.lru_cache(maxsize=64)  # nearly all batches have one size
def bounds(rank: int, size: int, batch_size: int, count: int) -> tuple[int, int]:
    """The rows of replica `rank` among `count`: its even part of `max(batch_size, count)` rows.

    For example, of 5 rows of a batch of 8, on 4 replicas:

        batch_size 0 (evenly):     [0 1] [2] [3] [4]
        batch_size 8 (in order):   [0 1] [2 3] [4] []
    """
    share, rest = divmod(max(batch_size, count), size)
    start = rank * share + min(rank, rest)
    return min(count, start), min(count, start + share + (rank < rest))


@functools.lru_cache(maxsize=64)
def _is_scarce(size: int, batch_size: int, count: int) -> bool:
    """Whether `count` elements are too few to reach the last replica."""
    start, stop = bounds(size - 1, size, batch_size, count)
    return start == stop and count > 0


def assign_elements(node: Node, epoch: EpochPass, rank: int, size: int) -> Iterator[Step]:
    """The steps of one replica, with one element per replica each."""
    items = (item for chunk in node.chunks(epoch) for item in chunk)
    while step := list(itertools.islice(items, size)):
        try:
            if rank < len(step):
                value = node.load(step[rank])
            elif node.rows is not None:
                value = load_rows(node.rows, step[0], 0, 0)
            else:
                # This replica gets no element; the step's first element shows the shapes and dtypes
                # of its empty arrays.
                value = node.load(step[0])
        except Exception as error:
            yield Step(len(step), None, epoch.checksum.value, error)
            continue
        if len(step) < size:
            if any(np.ndim(leaf) == 0 for leaf in _elements.flatten(value)[0]):
                warnings.warn(
                    f"{FROM_FUNCTION}: the last step has elements for only {len(step)} of {size} "
                    "replicas. It is skipped, because elements without dimensions have no empty "
                    "form for the other replicas; batch the dataset",
                    stacklevel=2,
                )
                return
            if rank >= len(step):
                value = _elements.rows(value, 0, 0)
        yield Step(len(step), value, epoch.checksum.value, is_scarce=len(step) < size)


_END = Step(None, None)


@final
class DistributedIterator(DatasetIterator):
    """One iteration over a `DistributedDataset`.

    Examples:
        >>> import hpcstrat as hs
        >>> strategy = hs.CentralStorageStrategy()
        >>> batches = strategy.experimental_distribute_dataset(hs.data.Dataset.range(9).batch(3))
        >>> iterator = iter(batches)
        >>> print(next(iterator), next(iterator))
        [0 1 2] [3 4 5]
        >>> print(*iterator)
        [6 7 8]
    """

    def __init__(self, dataset: DistributedDataset, epoch: EpochPass, taken: int) -> None:
        self._dataset = dataset
        self._call = f"iterating over {dataset._call}"
        self._communicator, self._workers = dataset._communicator, dataset._workers
        self._rank, self._size = self._communicator.rank, self._communicator.size
        self._assigns = dataset._split is assign_elements
        super().__init__(dataset._node, epoch, taken)

    def _elements_of(self, node: Node) -> Iterator[Step]:
        dataset, peers = self._dataset, self._workers.peers
        # Without user code, all ranks of a worker walk the same keys and need no exchange. Several
        # workers have separate pipelines, which may end at different steps.
        self._compares = self._size > 1 and (self._node.user_code or self._workers.count > 1)
        self._epoch.checksum = PipelineChecksum(
            self._compares, every=settings.is_on("HPCSTRAT_CHECK")
        )
        self._number = 0
        if len(peers) == 1:
            steps = map(_whole, with_failures(node.elements(self._epoch)))
        else:
            steps = dataset._split(node, self._epoch, peers.index(self._rank), len(peers))
        prefetcher = dataset._prefetcher
        return self._ahead(steps) if prefetcher is None else prefetcher(steps)

    @property
    def element_spec(self) -> Any:
        """As `DistributedDataset.element_spec`.

        Examples:
            >>> strategy = hs.CentralStorageStrategy()
            >>> batches = hs.data.Dataset.range(3).batch(2)
            >>> iter(strategy.experimental_distribute_dataset(batches)).element_spec
            TensorSpec(shape=(None,), dtype=int64, name=None)
        """
        return self._dataset.element_spec

    @span(INPUT, "next batch")
    def __next__(self) -> Any:
        """The next step: a nest of `PerReplica`, or of arrays if there is one replica.

        Collective. It communicates only if user code is part of the pipeline.

        Raises:
            ValueError: called inside a replica function.
            ReplicaMismatchError: the ranks' pipelines have different elements, or different numbers
                of them.
            Exception: whatever a function of the pipeline raised on any rank. The next call returns
                the next step.
        """
        if type(contexts.current.get()) is InReplica:
            raise ValueError(
                f"{self._call}: next was called inside a replica function, but a step is for all "
                "replicas; call it outside, and pass the result: strategy.run(fn, "
                "args=(next(iterator),))"
            )
        step = self._compare_step() if self._compares else next(self._elements, _END)
        total, value, _, error, is_scarce = step
        if total is None and error is None:
            self._end()
            raise StopIteration
        assert self._taken is not None
        # Positions count elements of the pipeline: one per step, or as many as the replicas got.
        self._taken += (total or 0) if self._assigns else 1
        if error is not None:
            try:
                raise error
            finally:
                del step, value, error  # the traceback keeps this frame alive, and thus the batch
        if is_scarce and not self._dataset._has_warned:
            self._warn(total)
        rank, size = self._rank, self._size
        if size == 1:
            return value
        # The most common nests need no flattening: an array, and a tuple of arrays.
        if type(value) is np.ndarray:
            return PerReplica(value, rank, size)
        if type(value) is tuple:
            parts = []
            for array in value:
                if type(array) is not np.ndarray:
                    break
                parts.append(PerReplica(array, rank, size))
            else:
                return tuple(parts)
        leaves, structure = _elements.flatten(value)
        return structure.unflatten([PerReplica(leaf, rank, size) for leaf in leaves])

    def _end(self) -> None:
        """Ends the pass, at the same step on all ranks."""
        super()._end()
        self._compares = False

    @names_call(lambda self: self._call)
    def _compare_step(self) -> Step:
        """The next step, after all ranks have checked that theirs are the same. Collective."""
        try:
            with self._communicator.raise_together():
                step = next(self._elements, _END)
                # One exchange covers everything that can differ. Without it, a rank whose generator
                # ends early would leave the other ranks waiting in a collective of the step.
                own = step.total, step.checksum, step.error is not None, step.is_scarce
                everyones = self._communicator.all_gather_differing_obj(
                    (*own, self._kinds(step.value))
                )
        except BaseException:
            self._end()
            raise
        number = self._number
        self._number += 1
        totals, checksums, failed, scarce, kinds = zip(*everyones, strict=True)
        if any(failed):
            return step._replace(error=self._error_of_all(step.error))
        if seen := self._differences(totals):
            raise ReplicaMismatchError(
                f"{self._call}: the ranks have different numbers of elements in step {number}: "
                f"{seen}. Every rank's generator, functions and files must give the same elements; "
                "each replica then gets its share"
            )
        if seen := self._differences(checksums):
            raise ReplicaMismatchError(
                f"{self._call}: the ranks have different elements up to step {number}, with "
                f"checksums {seen}. {self._node} must give the same elements in the same order on "
                "every rank; each replica then gets its share. Give shuffles a seed that all ranks "
                "share: DataLoader(..., shuffle=True, generator=torch.Generator().manual_seed(0)), "
                "or torch.manual_seed(0) before each epoch. Do not use a DistributedSampler: every "
                "batch is split between the replicas anyway"
            )
        if kinds.count(kinds[0]) < len(kinds):  # no replica alone has seen all rows of the batch
            return step._replace(error=_elements.mismatch_error(kinds))
        if None in totals and any(total is not None for total in totals):
            empty = self._empty()
            return (step if step.total is not None else empty)._replace(is_scarce=True)
        return step._replace(is_scarce=True) if any(scarce) else step

    def _kinds(self, value: Any) -> tuple[Any, ...] | None:
        """What all parts of a batch must share; `None` if parts were not loaded separately."""
        if value is None or self._assigns or self._node.rows is None:
            return None
        return _elements.kinds_of_rows(value)

    def _error_of_all(self, error: Exception | None) -> Exception | None:
        """The error of this step: this rank's own, or that of the first rank that has one.

        Collective.
        """
        try:
            with self._communicator.raise_together():
                if error is not None:
                    raise error
                self._communicator.all_gather_obj(None)
        except Exception as raised:
            return raised

    def _warn(self, total: int | None) -> None:
        """Warns, once per dataset, that some replicas have no elements in a step."""
        self._dataset._has_warned = True
        size = self._communicator.size
        if self._assigns:
            what = "some replicas have no elements in a step"
            remedy = "make the number of batches a multiple of the number of replicas"
        else:
            what = f"some of {size} replicas have no elements of a batch of {total}"
            remedy = "pass batch(..., drop_remainder=True)"
            if total and total >= size:
                remedy += ", or do without AutoShardPolicy.OFF"
        warn_together(
            f"{self._call}: {what}, whose means are nan; divide sums by the global batch size, or "
            f"{remedy}",
            UserWarning,
            is_lead=self._communicator.rank == 0,
        )

    def _differences(self, values: Sequence[int | None]) -> str:
        """The values as text, and ends the iteration, if they differ within a worker; else ""."""
        if all(len(set(of_worker)) == 1 for of_worker in self._workers.group_by_worker(values)):
            return ""
        self._end()
        return join_by_rank(enumerate("none" if n is None else str(n) for n in values))

    def _empty(self) -> Step:
        """The step of a worker whose elements have ended before another worker's."""
        spec = self._node.spec()
        if any(not leaf.shape for leaf in _elements.flatten(spec)[0]):
            self._end()
            raise ValueError(
                f"{self._call}: one worker's elements end before another's, and elements without "
                "dimensions have no empty form; batch the dataset"
            )
        value = _elements.map_leaves(
            lambda leaf: np.empty((0, *[n or 0 for n in leaf.shape[1:]]), leaf.dtype), spec
        )
        prefetcher = self._dataset._prefetcher
        step = Step(0, value)
        return step if prefetcher is None else next(prefetcher(iter([step])))
