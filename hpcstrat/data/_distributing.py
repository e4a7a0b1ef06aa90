"""How strategies make distributed datasets of what users pass, after checking it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hpcstrat._core import gpu
from hpcstrat._replicas.group import Workers
from hpcstrat._transports.verbs import Communicator
from hpcstrat.data._arguments import InputContext, InputOptions, check_input_options
from hpcstrat.data._dataset import Dataset, check_node
from hpcstrat.data._device_prefetch import prefetch_to_gpu
from hpcstrat.data._distributed import DistributedDataset
from hpcstrat.data._loaders import Batches
from hpcstrat.data._node import Node
from hpcstrat.data._splitting import (
    DISTRIBUTE,
    FROM_FUNCTION,
    Prefetcher,
    assign_elements,
    split_batches,
)


def distribute_dataset(
    dataset: Any,
    communicator: Communicator,
    options: InputOptions | None,
    stream: gpu.Stream | None = None,
) -> DistributedDataset:
    """See `Strategy.experimental_distribute_dataset`.

    `dataset` is a `Dataset`, or a re-iterable object or a generator function that yields batches;
    `stream` that of this replica's GPU.
    """
    check_input_options(options, DISTRIBUTE)
    node = _node_of(dataset, DISTRIBUTE)
    # Also with one replica: a program that works on one rank must not fail on two.
    if not node.batched:
        raise ValueError(
            f"{DISTRIBUTE}: the dataset {node!r} is not batched, but only batches are split "
            "between replicas; call Dataset.batch(global_batch_size) on it first, or "
            ".unbatch().batch(global_batch_size) if its elements have several rows each. (Pass a "
            "generator function that yields batches as it is, without Dataset.from_generator)"
        )
    workers = Workers((0,) * communicator.size, communicator.rank)
    return DistributedDataset(
        node, communicator, split_batches, DISTRIBUTE, _prefetcher(stream, options), workers
    )


def distribute_from_function(
    dataset_fn: Callable[[InputContext], Any],
    communicator: Communicator,
    options: InputOptions | None,
    stream: gpu.Stream | None = None,
    workers: Workers | None = None,
) -> DistributedDataset:
    """See `Strategy.distribute_datasets_from_function`.

    If elements without dimensions end within a step, the step is left out, with a warning. A worker
    whose elements have ended gets empty arrays until all workers' elements have ended. By default
    there is one worker.
    """
    check_input_options(options, FROM_FUNCTION)
    if not callable(dataset_fn):
        raise TypeError(
            f"{FROM_FUNCTION}: dataset_fn is {type(dataset_fn).__name__}; it must be a function of "
            f"an InputContext that returns a Dataset. Pass a dataset itself to {DISTRIBUTE}"
        )
    workers = workers or Workers((0,) * communicator.size, communicator.rank)
    dataset = dataset_fn(InputContext(workers.count, workers.index, communicator.size))
    node = _node_of(dataset, f"{FROM_FUNCTION}: what dataset_fn returned")
    return DistributedDataset(
        node, communicator, assign_elements, FROM_FUNCTION, _prefetcher(stream, options), workers
    )


def _prefetcher(stream: gpu.Stream | None, options: InputOptions | None) -> Prefetcher | None:
    """Copies batches to a stream's GPU, two in advance unless the options say otherwise."""
    options = options or InputOptions()
    if stream is None or not options.experimental_fetch_to_device:
        return None
    return prefetch_to_gpu(stream, 1 + options.experimental_per_replica_buffer_size)


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
    return Batches(dataset)
