"""Distributed datasets: pipelines whose steps are shared out to the replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, final

from hpcstrat import _settings
from hpcstrat._group import Workers
from hpcstrat.data._dataset import Dataset, node_of
from hpcstrat.data._iterator import DistributedIterator, Distribution
from hpcstrat.data._node import Node
from hpcstrat.data._pass import InputCommunicator, ResumableDataset, begin_together
from hpcstrat.data._sources import Batches
from hpcstrat.data._splitting import (
    FROM_FUNCTION,
    InputContext,
    InputOptions,
    InputReplicationMode,
    Prefetcher,
    assign_elements,
    split_batches,
    split_evenly,
)

_DISTRIBUTE = "Strategy.experimental_distribute_dataset"


@final
class DistributedDataset(ResumableDataset):
    """A dataset whose steps are nests of `PerReplica`, or of plain arrays where there is one replica.

    Strategies make them. They can be iterated over again and again, and take no further transformation: transform the
    dataset before it is distributed. Iterating is collective: all ranks take the same steps.
    """

    def __init__(self, distribution: Distribution) -> None:
        super().__init__(distribution.node)
        self._distribution = distribution
        self._is_compared = False

    @property
    def element_spec(self) -> Any:
        """The nest of `PerReplicaSpec` of a step, or of `TensorSpec` where there is one replica.

        A first dimension that can differ between replicas or steps is `None`.
        """
        return self._distribution.element_spec()

    def __iter__(self) -> DistributedIterator:
        """Begins an iteration. Collective: the ranks compare their pipelines and share the orders of shuffles.

        In the first they also compare samples of the arrays that elements come from, with `HPCSTRAT_CHECK=1` in each
        all that there is in memory.

        Raises:
            ReplicaMismatchError: the ranks' pipelines, or arrays, differ.
        """
        rounds, taken = self._next_start()
        distribution = self._distribution
        call = f"iterating over {distribution.call}"
        every = _settings.is_on("HPCSTRAT_CHECK")
        arrays = None if self._is_compared and not every else functools.partial(self._node.checksums, every)
        epoch = begin_together(self._node, distribution.communicator, call, rounds, taken, distribution.workers, arrays)
        self._is_compared = True
        iterator = DistributedIterator(distribution, epoch, taken)
        self._note_begun(iterator)
        return iterator

    def __repr__(self) -> str:
        return f"{self._distribution.call}({self._node!r})"


def distribute_dataset(
    dataset: Any, communicator: InputCommunicator, options: InputOptions | None, prefetcher: Prefetcher | None = None
) -> DistributedDataset:
    """Shares out each batch of `dataset` to the replicas.

    Of a batch of B elements replica r gets the next `B // N + (1 if r < B % N else 0)`. A short batch fills the
    replicas in order, each up to this share; those left without get arrays whose first dimension is 0.

    Args:
        dataset: a `Dataset` batched by the global batch size, or anything that can be iterated over again and again, or
            a generator function, that gives batches: nests of arrays of one first dimension, the same on every rank.
        communicator: the replicas.
        options: see `InputOptions`; with `even_batches` a short batch is split like a full one of its size.
        prefetcher: what the steps pass through on their way.

    Raises:
        NotImplementedError: `options` asks for a dataset for each replica.
        TypeError: `dataset` cannot be iterated over again, or is an array or a nest; or `options` is no `InputOptions`.
        ValueError: `dataset` is not batched and there are several replicas, or options do not go together.
    """
    _check_options(options, _DISTRIBUTE)
    node = _node_of(dataset, _DISTRIBUTE)
    if communicator.size > 1 and not node.batch_sizes:
        raise ValueError(
            f"{_DISTRIBUTE}: the dataset {node!r} is not batched, and {communicator.size} replicas share out its "
            "batches; call Dataset.batch(global_batch_size) on it before. (A generator function that yields batches "
            "can be passed itself, without Dataset.from_generator)"
        )
    share_out = split_evenly if options is not None and options.even_batches else split_batches
    workers = Workers((0,) * communicator.size, communicator.rank)
    return DistributedDataset(Distribution(node, communicator, share_out, _DISTRIBUTE, prefetcher, workers))


def distribute_from_function(
    dataset_fn: Callable[[InputContext], Any],
    communicator: InputCommunicator,
    options: InputOptions | None,
    prefetcher: Prefetcher | None = None,
    workers: Workers | None = None,
) -> DistributedDataset:
    """Hands the elements of the dataset that `dataset_fn` makes to the replicas in turn.

    In step t replica r of N gets element `t * N + r`. Where the elements end within a step the replicas without one get
    arrays whose first dimension is 0; if elements have no dimensions, the step is left out, with a warning. Several
    workers have a pipeline each, for their own replicas; where one's elements have ended it gets empty arrays until all
    have.

    Args:
        dataset_fn: called once on each rank, with an `InputContext`; returns what `distribute_dataset` takes, batched
            by the size for one replica.
        communicator: the replicas.
        options: see `InputOptions`.
        prefetcher: what the steps pass through on their way.
        workers: those that have a pipeline each; one by default.

    Raises:
        NotImplementedError: `options` asks for a dataset for each replica.
        TypeError: `dataset_fn` is no function, or returns no dataset; or `options` is no `InputOptions`.
        ValueError: options do not go together.
    """
    _check_options(options, FROM_FUNCTION)
    if options is not None and options.even_batches:
        raise ValueError(
            f"{FROM_FUNCTION}: even_batches is True, which goes with {_DISTRIBUTE} only, where batches are split; "
            "leave it False"
        )
    if not callable(dataset_fn):
        raise TypeError(
            f"{FROM_FUNCTION}: dataset_fn is {type(dataset_fn).__name__}; it must be a function of an InputContext "
            f"that returns a Dataset. A dataset itself goes to {_DISTRIBUTE}"
        )
    workers = workers or Workers((0,) * communicator.size, communicator.rank)
    dataset = dataset_fn(InputContext(workers.count, workers.index, communicator.size))
    node = _node_of(dataset, f"{FROM_FUNCTION}: what dataset_fn returned")
    return DistributedDataset(Distribution(node, communicator, assign_elements, FROM_FUNCTION, prefetcher, workers))


def _check_options(options: InputOptions | None, call: str) -> None:
    if options is None:
        return
    if not isinstance(options, InputOptions):
        raise TypeError(f"{call}: options is {type(options).__name__}; it must be an InputOptions or None")
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        raise NotImplementedError(
            f"{call}: experimental_replication_mode is PER_REPLICA; only PER_WORKER is implemented: pass it, and one "
            "pipeline feeds all replicas"
        )
    if options.experimental_place_dataset_on_device:
        raise ValueError(
            f"{call}: experimental_place_dataset_on_device is True, which goes with "
            "experimental_replication_mode=PER_REPLICA only; leave it False, and experimental_fetch_to_device=True to "
            "have batches copied ahead"
        )


def _node_of(dataset: Any, call: str) -> Node:
    if isinstance(dataset, Dataset):
        return node_of(dataset)
    kind = type(dataset).__name__
    if isinstance(dataset, (str, bytes, tuple, dict)) or hasattr(dataset, "__array__"):
        raise TypeError(
            f"{call}: {kind} is not a dataset; make one with "
            "Dataset.from_tensor_slices(...).batch(global_batch_size), or pass a list of batches"
        )
    if isinstance(dataset, DistributedDataset):
        raise TypeError(f"{call}: the dataset is distributed as it is; pass the Dataset it was made of")
    if isinstance(dataset, Iterator):
        raise TypeError(
            f"{call}: {kind} can be iterated over once only; pass the generator function itself (`f`, not `f()`), a "
            "list or a Dataset"
        )
    if not (hasattr(dataset, "__iter__") or callable(dataset)):
        raise TypeError(
            f"{call}: {kind} is not a dataset; pass a Dataset, a generator function or an iterable of batches"
        )
    return Batches(dataset)
