"""Splits a pipeline's elements between replicas, step by step, and the options that users give for it."""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hpcstrat._core import nests
from hpcstrat.data import _elements
from hpcstrat.data._node import Chunk, EpochPass, FailedElement, Node, load_rows, with_failures
from hpcstrat.data._threads import map_in_threads

FROM_FUNCTION = "Strategy.distribute_datasets_from_function"


@dataclasses.dataclass(frozen=True)
class InputContext:
    """Tells a function that makes a dataset which replicas its elements will go to.

    Attributes:
        num_input_pipelines: the number of pipelines that feed the replicas: one per worker.
        input_pipeline_id: the index of this pipeline.
        num_replicas_in_sync: the number of replicas of all workers together.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """The size of each replica's batch.

        Raises:
            ValueError: `global_batch_size` is not a multiple of the number of replicas.
        """
        share, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise ValueError(
                "InputContext.get_per_replica_batch_size: global_batch_size is "
                f"{global_batch_size}, not a multiple of {self.num_replicas_in_sync}, the number "
                f"of replicas; pass a multiple, such as {(share + 1) * self.num_replicas_in_sync}"
            )
        return share


class InputReplicationMode(enum.Enum):
    """Whether a function that makes a dataset is called once for each worker, or for each replica."""

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@dataclasses.dataclass(frozen=True)
class InputOptions:
    """How a dataset is distributed.

    Attributes:
        experimental_fetch_to_device: whether batches are copied to the replicas' devices before
            they are used; `None` means `True`.
        experimental_replication_mode: `InputReplicationMode.PER_WORKER`; or `PER_REPLICA`, as in
            TensorFlow only with `MirroredStrategy.distribute_datasets_from_function`.
        experimental_place_dataset_on_device: `True` only with `PER_REPLICA` and without
            `experimental_fetch_to_device`. Pipelines run on the host anyway, and batches are copied
            to the device.
        experimental_per_replica_buffer_size: the number of batches that are copied ahead, besides
            the next one.
        even_batches: deprecated: `True`, every batch split evenly, is what happens anyway; `False`
            is what `AutoShardPolicy.OFF` of the dataset's options asks for.
    """

    experimental_fetch_to_device: bool | None = None
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1
    even_batches: bool | None = None

    def __post_init__(self) -> None:
        if self.experimental_fetch_to_device is None:
            object.__setattr__(self, "experimental_fetch_to_device", True)
        if self.even_batches is not None:
            warnings.warn(
                f"InputOptions: even_batches is {self.even_batches}, but every batch is split "
                "evenly now; leave it out"
                + (
                    ""
                    if self.even_batches
                    else ", and have AutoShardPolicy.OFF in the options of the dataset"
                ),
                DeprecationWarning,
                stacklevel=3,
            )


class Step(NamedTuple):
    """What one replica gets in one step.

    Attributes:
        total: the number of elements over all replicas, which must be equal on all ranks; `None`
            after the last step.
        value: this replica's nest of arrays.
        checksum: of all that user code has yielded so far, which must be equal on all ranks; see
            `PipelineChecksum`.
        error: what user code raised on this rank; there is no value then, and the next step
            follows.
        is_scarce: whether some replicas have no elements.
    """

    total: int | None
    value: Any
    checksum: int = 0
    error: Exception | None = None
    is_scarce: bool = False


Prefetcher: TypeAlias = Callable[[Iterator[Step]], Iterator[Step]]
"""Passes steps on with their arrays moved elsewhere, perhaps ahead of their use.

It does not communicate.
"""


def split_evenly(node: Node, epoch: EpochPass, rank: int, size: int) -> Iterator[Step]:
    """One replica's rows of each batch: of b rows `b // size`, or one more if `rank < b % size`."""
    return _whole(node, epoch) if size == 1 else _split(node, epoch, rank, size, 0)


def split_in_order(node: Node, epoch: EpochPass, rank: int, size: int) -> Iterator[Step]:
    """As `split_evenly`, but a short batch fills the replicas in order, each up to its share of a full one."""
    return (
        _whole(node, epoch) if size == 1 else _split(node, epoch, rank, size, node.batch_sizes[-1])
    )


def _split(node: Node, epoch: EpochPass, rank: int, size: int, batch_size: int) -> Iterator[Step]:
    if node.rows is not None and node.rows.seekable:
        return _split_keys(node.rows, node.chunks(epoch), rank, size, batch_size)

    def step(item: Any, checksum: int) -> Step:
        total, value, failed = 0, None, None
        try:
            if (
                node.rows is not None
            ):  # the item is the batch's keys: only this replica's rows are loaded
                total = len(item)
                value = load_rows(node.rows, item, *bounds(rank, size, batch_size, total))
            else:
                batch = node.load(item)
                total = _elements.leading_size(nests.flatten(batch)[0])
                value = _elements.rows(batch, *bounds(rank, size, batch_size, total))
        except (
            Exception
        ) as error:  # every rank must come to the exchange of this step, where all raise
            failed = error
        return Step(total, value, checksum, failed, _is_scarce(size, batch_size, total))

    items = ((item, epoch.checksum.value) for chunk in node.chunks(epoch) for item in chunk)
    return map_in_threads(lambda of_item: step(*of_item), items, node.threads)


def _split_keys(
    rows: Node, chunks: Iterator[Chunk], rank: int, size: int, batch_size: int
) -> Iterator[Step]:
    """As `_split`, of batches of keys.

    Loading a few rows takes microseconds, so little is done for each batch.
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
                except Exception as error:  # every rank must come to the next step, as in `_split`
                    yield Step(total, None, error=error)


@functools.lru_cache(maxsize=64)  # nearly all batches have one size
def bounds(rank: int, size: int, batch_size: int, count: int) -> tuple[int, int]:
    """The rows, of `count`, that replica `rank` gets: even parts of them, or of the `batch_size` if that is larger."""
    share, rest = divmod(max(batch_size, count), size)
    start = rank * share + min(rank, rest)
    return min(count, start), min(count, start + share + (rank < rest))


@functools.lru_cache(maxsize=64)
def _is_scarce(size: int, batch_size: int, count: int) -> bool:
    """Whether `count` elements do not reach the last replica."""
    start, stop = bounds(size - 1, size, batch_size, count)
    return start == stop and count > 0


def _whole(node: Node, epoch: EpochPass) -> Iterator[Step]:
    """Each element, for the only replica."""
    for element in with_failures(node.elements(epoch)):
        yield (
            Step(1, None, 0, element.error)
            if isinstance(element, FailedElement)
            else Step(1, element)
        )


def assign_elements(node: Node, epoch: EpochPass, rank: int, size: int) -> Iterator[Step]:
    """Each step's element of one replica."""
    if size == 1:
        yield from _whole(node, epoch)
        return
    items = (item for chunk in node.chunks(epoch) for item in chunk)
    while step := list(itertools.islice(items, size)):
        try:
            if rank < len(step):
                value = node.load(step[rank])
            elif node.rows is not None:
                value = load_rows(node.rows, step[0], 0, 0)
            else:
                # This replica gets no element; another's tells it the shapes and dtypes of its
                # empty arrays.
                value = node.load(step[0])
        except Exception as error:
            yield Step(len(step), None, epoch.checksum.value, error)
            continue
        if len(step) < size:
            if any(np.ndim(leaf) == 0 for leaf in nests.flatten(value)[0]):
                warnings.warn(
                    f"{FROM_FUNCTION}: the last step has elements for only {len(step)} of {size} "
                    "replicas. It is left out, because elements without dimensions have no empty "
                    "form for the other replicas; batch the dataset",
                    stacklevel=2,
                )
                return
            if rank >= len(step):
                value = _elements.rows(value, 0, 0)
        yield Step(len(step), value, epoch.checksum.value, is_scarce=len(step) < size)
