"""The steps of each replica, into which a pipeline is split."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hpcstrat.data import _elements
from hpcstrat.data._elements import FailedElement
from hpcstrat.data._node import Chunk, EpochPass, Node
from hpcstrat.data._threads import map_in_threads

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


def step_of_one(element: Any) -> Step:
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
                value = _load_rows(node.rows, item, *bounds(rank, size, batch_size, total))
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


def _load_rows(node: Node, chunk: Chunk, start: int, stop: int) -> Any:
    """The elements `start` to `stop` of a chunk, stacked; the range may be empty."""
    if start == stop and not node.fetches_freely:
        # Only an element shows the shapes and dtypes of an empty batch, so load one and drop it.
        return _elements.rows(node.fetch(chunk[:1]), 0, 0)
    return node.fetch(chunk[start:stop])


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
                value = _load_rows(node.rows, step[0], 0, 0)
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
