"""How the elements of a pipeline are split between the replicas, step by step, and what users say about it."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hpcstrat import _nest
from hpcstrat.data import _elements
from hpcstrat.data._node import EpochPass, Failure, Node, caught, load_rows

FROM_FUNCTION = "Strategy.distribute_datasets_from_function"


@dataclasses.dataclass(frozen=True)
class InputContext:
    """What a function that makes a dataset is told about where its elements will go.

    Attributes:
        num_input_pipelines: how many pipelines feed the replicas: one a worker.
        input_pipeline_id: the index of this pipeline.
        num_replicas_in_sync: the number of replicas of all workers together.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """The number of elements of each replica's batch.

        Raises:
            ValueError: the replicas do not divide `global_batch_size`.
        """
        share, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise ValueError(
                f"InputContext.get_per_replica_batch_size: global_batch_size is {global_batch_size}, which "
                f"{self.num_replicas_in_sync} replicas do not divide; pass a multiple, such as "
                f"{(share + 1) * self.num_replicas_in_sync}"
            )
        return share


class InputReplicationMode(enum.Enum):
    """For what a function that makes a dataset is called: once for each worker, or for each replica."""

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@dataclasses.dataclass(frozen=True)
class InputOptions:
    """How a dataset is distributed.

    Attributes:
        experimental_fetch_to_device: whether batches are copied to the replicas' devices ahead of their use; `None`
            stands for `True`.
        experimental_replication_mode: `InputReplicationMode.PER_WORKER`; `PER_REPLICA` is not implemented.
        experimental_place_dataset_on_device: must be `False`: pipelines run on the host.
        experimental_per_replica_buffer_size: the number of batches that are copied ahead besides the next one.
        even_batches: whether a short batch is split evenly too, so that replicas' parts differ by at most one element.
            Else it fills the replicas in order, each up to its share of a full batch, and can leave some without any.
            Nothing is left out, and nothing is there twice. With `experimental_distribute_dataset` only.
    """

    experimental_fetch_to_device: bool | None = None
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1
    even_batches: bool = False

    def __post_init__(self) -> None:
        if self.experimental_fetch_to_device is None:
            object.__setattr__(self, "experimental_fetch_to_device", True)


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


Prefetcher: TypeAlias = Callable[[Iterator[Step]], Iterator[Step]]
"""Passes steps on, perhaps ahead of their use, with arrays moved elsewhere. It communicates with no other rank."""


def split_batches(node: Node, epoch: EpochPass, rank: int, size: int) -> Iterator[Step]:
    """Each batch's part of one replica: what it would be of a full one, as far as the batch goes."""
    return _whole(node, epoch) if size == 1 else _split(node, epoch, rank, size, node.batch_sizes[-1])


def split_evenly(node: Node, epoch: EpochPass, rank: int, size: int) -> Iterator[Step]:
    """Each batch's part of one replica, where the parts differ by one element at most."""
    return _whole(node, epoch) if size == 1 else _split(node, epoch, rank, size, 0)


def _split(node: Node, epoch: EpochPass, rank: int, size: int, batch_size: int) -> Iterator[Step]:
    full = _bounds(rank, size, batch_size, batch_size)
    for chunk in node.chunks(epoch):
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
            yield Step(total, part, epoch.checksum.value, failed, is_scarce)


def _bounds(rank: int, size: int, batch_size: int, count: int) -> tuple[int, int]:
    """Which of `count` elements replica `rank` gets where `batch_size` make a full batch."""
    share, rest = divmod(max(batch_size, count), size)
    start = rank * share + min(rank, rest)
    return min(count, start), min(count, start + share + (rank < rest))


def _is_scarce(size: int, batch_size: int, count: int) -> bool:
    """Whether the last replica gets none of `count` elements."""
    start, stop = _bounds(size - 1, size, batch_size, count)
    return start == stop and count > 0


def _whole(node: Node, epoch: EpochPass) -> Iterator[Step]:
    """Each element, for the only replica."""
    for element in caught(node.elements(epoch)):
        yield Step(1, None, 0, element.error) if isinstance(element, Failure) else Step(1, element)


def assign_elements(node: Node, epoch: EpochPass, rank: int, size: int) -> Iterator[Step]:
    """Each step's element of one replica."""
    if size == 1:
        yield from _whole(node, epoch)
        return
    items = (item for chunk in node.chunks(epoch) for item in chunk)
    while step := list(itertools.islice(items, size)):
        try:
            if rank < len(step):
                part = node.load(step[rank])
            elif node.rows is not None:
                part = load_rows(node.rows, step[0], 0, 0)
            else:
                part = node.load(step[0])
        except Exception as error:
            yield Step(len(step), None, epoch.checksum.value, error)
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
        yield Step(len(step), part, epoch.checksum.value, is_scarce=len(step) < size)
