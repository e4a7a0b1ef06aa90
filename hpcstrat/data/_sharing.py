"""How the elements of a pipeline are shared out to the replicas, step by step."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hpcstrat import _nest
from hpcstrat.data import _elements
from hpcstrat.data._node import Failure, Node, caught, load_rows
from hpcstrat.data._walk import Walk

FROM_FUNCTION = "Strategy.distribute_datasets_from_function"


class Step(NamedTuple):
    """What one replica gets in one step.

    Attributes:
        total: how many elements the step has over all replicas, in which all ranks must agree; `None` after the last.
        part: a nest of arrays: this replica's part.
        checksum: of what the user's code has yielded so far, in which all ranks must agree; see `Checksum`.
        error: what a function of the user's raised on this rank; there is no part then, and the next step follows.
        is_scarce: whether some replicas have no elements.
    """

    total: int | None
    part: Any
    checksum: int = 0
    error: Exception | None = None
    is_scarce: bool = False


Stage: TypeAlias = Callable[[Iterator[Step]], Iterator[Step]]
"""Passes steps on, perhaps ahead of their use, with arrays moved elsewhere. It communicates with no other rank."""


def split_batches(node: Node, walk: Walk, rank: int, size: int) -> Iterator[Step]:
    """Each batch's part of one replica: what it would be of a full one, as far as the batch goes."""
    return _whole(node, walk) if size == 1 else _split(node, walk, rank, size, node.batch_sizes[-1])


def split_evenly(node: Node, walk: Walk, rank: int, size: int) -> Iterator[Step]:
    """Each batch's part of one replica, where the parts differ by one element at most."""
    return _whole(node, walk) if size == 1 else _split(node, walk, rank, size, 0)


def _split(node: Node, walk: Walk, rank: int, size: int, batch_size: int) -> Iterator[Step]:
    full = _bounds(rank, size, batch_size, batch_size)
    for chunk in node.chunks(walk):
        for item in chunk:
            total, part, failed = 0, None, None
            try:
                if node.rows is not None:
                    total = len(item)
                    start, stop = full if total == batch_size else _bounds(rank, size, batch_size, total)
                    part = load_rows(node.rows, item, start, stop)
                else:
                    batch = node.load(item)
                    total = _elements.leading_size(_nest.flatten(batch)[0])
                    part = _elements.rows(batch, *_bounds(rank, size, batch_size, total))
            except Exception as error:
                failed = error
            is_scarce = 0 < total < size if total == batch_size else _is_scarce(size, batch_size, total)
            yield Step(total, part, walk.checksum.value, failed, is_scarce)


def _bounds(rank: int, size: int, batch_size: int, count: int) -> tuple[int, int]:
    """Which of `count` elements replica `rank` gets where `batch_size` make a full batch."""
    share, rest = divmod(max(batch_size, count), size)
    start = rank * share + min(rank, rest)
    return min(count, start), min(count, start + share + (rank < rest))


def _is_scarce(size: int, batch_size: int, count: int) -> bool:
    """Whether the last replica gets none of `count` elements."""
    start, stop = _bounds(size - 1, size, batch_size, count)
    return start == stop and count > 0


def _whole(node: Node, walk: Walk) -> Iterator[Step]:
    """Each element, for the only replica."""
    for element in caught(node.elements(walk)):
        yield Step(1, None, 0, element.error) if isinstance(element, Failure) else Step(1, element)


def deal_elements(node: Node, walk: Walk, rank: int, size: int) -> Iterator[Step]:
    """Each step's element of one replica."""
    if size == 1:
        yield from _whole(node, walk)
        return
    items = (item for chunk in node.chunks(walk) for item in chunk)
    while step := list(itertools.islice(items, size)):
        try:
            if rank < len(step):
                part = node.load(step[rank])
            elif node.rows is not None:
                part = load_rows(node.rows, step[0], 0, 0)
            else:
                part = node.load(step[0])
        except Exception as error:
            yield Step(len(step), None, walk.checksum.value, error)
            continue
        if len(step) < size:
            if any(np.ndim(leaf) == 0 for leaf in _nest.flatten(part)[0]):
                warnings.warn(
                    f"{FROM_FUNCTION}: the last step has elements for {len(step)} of {size} replicas. They are left "
                    "out, because elements without dimensions have no empty form for the other replicas; "
                    "batch the dataset",
                    stacklevel=2,
                )
                return
            if rank >= len(step):
                part = _elements.rows(part, 0, 0)
        yield Step(len(step), part, walk.checksum.value, is_scarce=len(step) < size)
