"""How strategies make distributed datasets of what users pass, after checking it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hpcstrat._communicators.base import Communicator
from hpcstrat._replicas.group import Workers
from hpcstrat.data._arguments import (
    AutoShardPolicy,
    InputContext,
    InputOptions,
    InputReplicationMode,
)
from hpcstrat.data._dataset import Dataset
from hpcstrat.data._distributed import DistributedDataset
from hpcstrat.data._node import Node
from hpcstrat.data._sources import batches_of
from hpcstrat.data._steps import (
    FROM_FUNCTION,
    Prefetcher,
    assign_elements,
    split_evenly,
    split_in_order,
)
from hpcstrat.data._transformations import check_node

_DISTRIBUTE = "Strategy.experimental_distribute_dataset"


def distribute_dataset(
    dataset: Any,
    communicator: Communicator,
    options: InputOptions | None,
    prefetcher: Prefetcher | None = None,
) -> DistributedDataset:
    """Splits each batch of `dataset` between the replicas; see `Strategy`.

    `dataset` is a `Dataset`, or a re-iterable object or a generator function that yields batches.
    `prefetcher` moves the arrays of steps, perhaps ahead of their use.
    """
    options = _check_options(options, _DISTRIBUTE)
    node = _node_of(dataset, _DISTRIBUTE)
    # Also with one replica: a program that works on one rank must not fail on two.
    if not node.batch_sizes:
        raise ValueError(
            f"{_DISTRIBUTE}: the dataset {node!r} is not batched, but only batches are split "
            "between replicas; call Dataset.batch(global_batch_size) on it first, or "
            ".unbatch().batch(global_batch_size) if its elements have several rows each. (Pass a "
            "generator function that yields batches as it is, without Dataset.from_generator)"
        )
    evenly = not _is_off(dataset) if options.even_batches is None else options.even_batches
    split = split_evenly if evenly else split_in_order
    workers = Workers((0,) * communicator.size, communicator.rank)
    return DistributedDataset(node, communicator, split, _DISTRIBUTE, prefetcher, workers)


def distribute_from_function(
    dataset_fn: Callable[[InputContext], Any],
    communicator: Communicator,
    options: InputOptions | None,
    prefetcher: Prefetcher | None = None,
    workers: Workers | None = None,
    takes_per_replica: bool = False,
) -> DistributedDataset:
    """Assigns the elements of the dataset that `dataset_fn` makes to the replicas in turn.

    In step t, replica r of N gets element `t * N + r`. If the elements end within a step, replicas
    without an element get arrays whose first dimension is 0; if elements have no dimensions, the
    step is left out, with a warning. Each worker has its own pipeline for its own replicas; a
    worker whose elements have ended gets empty arrays until all workers' elements have ended.

    By default there is one worker. If `takes_per_replica`, `options` may ask for one pipeline per
    replica, as if each replica were a worker.
    """
    options = _check_options(options, FROM_FUNCTION, takes_per_replica)
    if not callable(dataset_fn):
        raise TypeError(
            f"{FROM_FUNCTION}: dataset_fn is {type(dataset_fn).__name__}; it must be a function of "
            f"an InputContext that returns a Dataset. Pass a dataset itself to {_DISTRIBUTE}"
        )
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        workers = Workers(tuple(range(communicator.size)), communicator.rank)
    workers = workers or Workers((0,) * communicator.size, communicator.rank)
    dataset = dataset_fn(InputContext(workers.count, workers.index, communicator.size))
    node = _node_of(dataset, f"{FROM_FUNCTION}: what dataset_fn returned")
    return DistributedDataset(
        node, communicator, assign_elements, FROM_FUNCTION, prefetcher, workers
    )


def check_sharding(dataset: Dataset) -> None:
    """Refuses a dataset whose options do not let several workers share it."""
    if _is_off(dataset):
        raise ValueError(
            f"{_DISTRIBUTE}: the dataset's auto_shard_policy is OFF, so each worker would take all "
            "its elements, but batches are always split between all replicas; leave it AUTO, or "
            f"give each worker its own dataset with {FROM_FUNCTION}"
        )


def _is_off(dataset: Any) -> bool:
    if not isinstance(dataset, Dataset):
        return False
    return dataset.options().experimental_distribute.auto_shard_policy == AutoShardPolicy.OFF


def _check_options(
    options: InputOptions | None, call: str, takes_per_replica: bool = False
) -> InputOptions:
    if options is None:
        return InputOptions()
    if not isinstance(options, InputOptions):
        raise TypeError(
            f"{call}: options is {type(options).__name__}; it must be an InputOptions or None"
        )
    per_replica = options.experimental_replication_mode is InputReplicationMode.PER_REPLICA
    if per_replica and not takes_per_replica:
        raise NotImplementedError(
            f"{call}: experimental_replication_mode is PER_REPLICA, which only "
            "MirroredStrategy.distribute_datasets_from_function accepts, as in TensorFlow; pass "
            "PER_WORKER: one pipeline then feeds all replicas of a worker"
        )
    if options.experimental_place_dataset_on_device and not per_replica:
        raise ValueError(
            f"{call}: experimental_place_dataset_on_device is True, which needs "
            "experimental_replication_mode=PER_REPLICA; leave it False. "
            "experimental_fetch_to_device=True copies batches ahead"
        )
    if options.experimental_place_dataset_on_device and options.experimental_fetch_to_device:
        raise ValueError(
            f"{call}: experimental_place_dataset_on_device and experimental_fetch_to_device are "
            "both True; pass only one: each copies batches to the device"
        )
    return options


def _node_of(dataset: Any, call: str) -> Node:
    if isinstance(dataset, Dataset):
        return check_node(dataset, call)
    kind = type(dataset).__name__
    if isinstance(dataset, (str, bytes, tuple, dict)) or hasattr(dataset, "__array__"):
        raise TypeError(
            f"{call}: {kind} is not a dataset; make one with "
            "Dataset.from_tensor_slices(...).batch(global_batch_size), or pass a list of batches"
        )
    if isinstance(getattr(dataset, "__self__", None), Dataset):
        raise TypeError(
            f"{call}: {dataset.__name__} is a method of a Dataset; call it, and pass its result"
        )
    if isinstance(dataset, DistributedDataset):
        raise TypeError(
            f"{call}: the dataset is already distributed; pass the Dataset it was made from"
        )
    if isinstance(dataset, Iterator):
        raise TypeError(
            f"{call}: {kind} can be iterated over only once; pass the generator function itself "
            "(`f`, not `f()`), a list or a Dataset"
        )
    if not (hasattr(dataset, "__iter__") or callable(dataset)):
        raise TypeError(
            f"{call}: {kind} is not a dataset; pass a Dataset, a generator function or an iterable "
            "of batches"
        )
    return batches_of(dataset)
