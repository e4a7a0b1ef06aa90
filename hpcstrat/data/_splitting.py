"""The parts of a pipeline that one replica loads, step by step."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hpcstrat._core.user_frames import warn
from hpcstrat.data import _elements
from hpcstrat.data._node import EpochPass, Node

DISTRIBUTE = "Strategy.experimental_distribute_dataset"
FROM_FUNCTION = "Strategy.distribute_datasets_from_function"


class Step(NamedTuple):
    """One replica's part of one step.

    Attributes:
        total: the number of elements of all replicas, which must be equal on all ranks; `None`
            after the last step.
        value: this replica's nest of arrays.
        checksum: the checksum of all that user code has yielded so far, which must be equal on all
            ranks; see `PipelineChecksum`.
        is_scarce: whether some replicas have no elements.
    """

    total: int | None
    value: Any
    checksum: int = 0
    is_scarce: bool = False


Prefetcher: TypeAlias = Callable[[Iterator[Step]], Iterator[Step]]
"""Yields steps with their arrays moved elsewhere, perhaps ahead of use; does not communicate."""


def split_batches(node: Node, epoch: EpochPass, rank: int, size: int) -> Iterator[Step]:
    """One replica's rows of each batch: of b rows `b // size`, or one more if `rank < b % size`."""
    if node.rows is None:
        return _split_loaded(node, epoch, rank, size)
    return _split_rows(node, node.rows, epoch, rank, size)


def _split_rows(node: Node, rows: Node, epoch: EpochPass, rank: int, size: int) -> Iterator[Step]:
    """As `split_batches`, of batches whose items are chunks of rows: only its own are loaded."""
    loading: deque[tuple[int, int]] = deque()  # of each batch: how many rows, and the checksum

    def own_chunks() -> Iterator[Any]:
        for item in node.items(epoch):
            total = len(item)
            loading.append((total, epoch.checksum.value))
            start, stop = bounds(rank, size, total)
            # Only an element shows the shapes and dtypes of an empty batch of user code.
            yield item[start:stop] if start < stop or rows.gathers else item[:1]

    for value in node.load([chunk] for chunk in own_chunks()):
        total, checksum = loading.popleft()
        if total <= rank:
            value = _elements.rows(value, 0, 0)
        yield Step(total, value, checksum, total < size)


def _split_loaded(node: Node, epoch: EpochPass, rank: int, size: int) -> Iterator[Step]:
    """As `split_batches`, of batches that are known only once they are loaded."""
    loading: deque[int] = deque()  # the checksum of each batch

    def items() -> Iterator[Any]:
        for item in node.items(epoch):
            loading.append(epoch.checksum.value)
            yield item

    for batch in node.load([item] for item in items()):
        total = _elements.leading_size(_elements.flatten(batch)[0], DISTRIBUTE)
        value = _elements.rows(batch, *bounds(rank, size, total))
        yield Step(total, value, loading.popleft(), 0 < total < size)


@functools.lru_cache(maxsize=64)  # nearly all batches have one size
def bounds(rank: int, size: int, count: int) -> tuple[int, int]:
    """The part of replica `rank` of `count` elements: `count // size`, or one more.

    For example, of 5 elements, on 4 replicas: [0 1] [2] [3] [4].
    """
    share, rest = divmod(count, size)
    start = rank * share + min(rank, rest)
    return start, start + share + (rank < rest)


def assign_elements(node: Node, epoch: EpochPass, rank: int, size: int) -> Iterator[Step]:
    """The steps of one replica, with one element per replica each."""
    loading: deque[tuple[int, int]] = deque()  # of each step: how many elements, and the checksum

    def own_items() -> Iterator[Any]:
        items = node.items(epoch)
        while step := list(itertools.islice(items, size)):
            loading.append((len(step), epoch.checksum.value))
            # If this replica gets no element, the step's first element shows the shapes and dtypes
            # of its empty arrays.
            if rank < len(step):
                yield step[rank]
            else:
                yield step[0] if node.rows is None else step[0][:1]

    for value in node.load([item] for item in own_items()):
        total, checksum = loading.popleft()
        if total < size:
            if any(np.ndim(leaf) == 0 for leaf in _elements.flatten(value)[0]):
                warn(
                    f"{FROM_FUNCTION}: the last step has elements for only {total} of {size} "
                    "replicas. It is skipped, because elements without dimensions have no empty "
                    "form for the other replicas; batch the dataset",
                    UserWarning,
                )
                return
            if rank >= total:
                value = _elements.rows(value, 0, 0)
        yield Step(total, value, checksum, total < size)
