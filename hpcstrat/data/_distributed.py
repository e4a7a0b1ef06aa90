"""Distributed datasets, and how strategies make them of what users pass, after checking it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

from hpcstrat._communicators.base import Communicator
from hpcstrat._core.call_name import call_named, current_call, explained, join_by_rank, list_by_rank
from hpcstrat._core.types import PerReplicaSpec, ReplicaMismatchError
from hpcstrat._process import settings
from hpcstrat._replicas.group import Workers
from hpcstrat.data import _elements
from hpcstrat.data._arguments import (
    AutoShardPolicy,
    InputContext,
    InputOptions,
    InputReplicationMode,
)
from hpcstrat.data._dataset import Dataset
from hpcstrat.data._node import INFINITE, UNKNOWN, EpochPass, Node, ShuffleState
from hpcstrat.data._resuming import ResumableDataset, length
from hpcstrat.data._sources import batches_of
from hpcstrat.data._steps import (
    FROM_FUNCTION,
    DistributedIterator,
    Prefetcher,
    Step,
    assign_elements,
    split_evenly,
    split_in_order,
)
from hpcstrat.data._transformations import check_node

_DISTRIBUTE = "Strategy.experimental_distribute_dataset"


@final
class DistributedDataset(ResumableDataset):
    """A dataset whose steps are nests of `PerReplica`, or of plain arrays if there is one replica.

    Strategies make them. They can be iterated over repeatedly but not transformed: transform the
    dataset before you distribute it. Iterating is collective: all ranks take the same steps.

    Examples:
        With one replica; of two, the first gets `[0 1]` and `[4 5]`, and the sums are the same:

        >>> import hpcstrat as hs
        >>> strategy = hs.CentralStorageStrategy()
        >>> dataset = hs.data.Dataset.range(7).batch(4)
        >>> for x in strategy.experimental_distribute_dataset(dataset):
        ...     sums = strategy.run(lambda x: x.sum(), args=(x,))
        ...     print(x, strategy.reduce("SUM", sums, axis=None))
        [0 1 2 3] 6
        [4 5 6] 15
    """

    def __init__(
        self,
        node: Node,
        communicator: Communicator,
        split: Callable[[Node, EpochPass, int, int], Iterator[Step]],
        call: str,
        prefetcher: Prefetcher | None,
        workers: Workers,
    ) -> None:
        super().__init__(node)
        self._communicator, self._workers = communicator, workers
        self._split = split  # returns one replica's steps of a pipeline
        self._prefetcher = prefetcher
        self._call = call  # the public name of the method that distributed the dataset
        self._is_compared = False
        self._has_warned = False

    @property
    def element_spec(self) -> Any:
        """A step's nest of `PerReplicaSpec`, or of `TensorSpec` if there is one replica.

        A first dimension that may differ between replicas or steps is `None`.

        Examples:
            With one replica; with two, it is `PerReplicaSpec(shape=(2,), ...)`:

            >>> strategy = hs.CentralStorageStrategy()
            >>> batches = hs.data.Dataset.range(8).batch(4, drop_remainder=True)
            >>> strategy.experimental_distribute_dataset(batches).element_spec
            TensorSpec(shape=(4,), dtype=int64, name=None)
        """
        spec, size, steps = self._node.spec(), self._communicator.size, self._node.cardinality()
        if size == 1:
            return spec
        assigns = self._split is assign_elements
        whole = assigns and self._workers.count == 1
        whole = whole and (steps == INFINITE or (steps >= 0 and steps % size == 0))

        def component(leaf: Any) -> PerReplicaSpec:
            if not leaf.shape or whole:
                return PerReplicaSpec(leaf.shape, leaf.dtype)
            rows = leaf.shape[0]
            share = None if assigns or rows is None or rows % size else rows // size
            return PerReplicaSpec((share, *leaf.shape[1:]), leaf.dtype)

        return _elements.map_leaves(component, spec)

    @property
    def cardinality(self) -> int:
        """The number of steps; -1 if infinite, -2 if unknown, as it is with several workers.

        Examples:
            >>> strategy = hs.CentralStorageStrategy()
            >>> batches = hs.data.Dataset.range(7).batch(4)
            >>> strategy.experimental_distribute_dataset(batches).cardinality
            2
        """
        count, size = self._node.cardinality(), self._communicator.size
        if self._workers.count > 1:
            return UNKNOWN
        if self._split is not assign_elements or size == 1 or count < 0:
            return count
        steps, rest = divmod(count, size)
        return steps + (
            rest > 0 and all(leaf.shape for leaf in _elements.flatten(self._node.spec())[0])
        )

    def __len__(self) -> int:
        """The number of steps.

        Raises:
            TypeError: it is infinite or unknown.
        """
        return length(self.cardinality, self._call)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> DistributedIterator:
        """Starts an iteration.

        Collective: the ranks compare their pipelines and share the seeds of shuffles.

        In the first iteration they also compare samples of the arrays that elements come from; with
        `HPCSTRAT_CHECK=1` they compare all arrays in memory, in every iteration.

        Raises:
            ReplicaMismatchError: the ranks' pipelines, or arrays, differ.
        """
        rounds, taken = self._next_start()
        with call_named(f"iterating over {self._call}"):
            epoch = self._start_together(rounds, taken)
        self._is_compared = True
        iterator = DistributedIterator(self, epoch, taken)
        self._note_start(iterator)
        return iterator

    def _start_together(self, starts: Mapping[ShuffleState, int], taken: int) -> EpochPass:
        """A pass in which all ranks of a worker meet the same elements in the same order.

        Collective. `starts` has the rounds with which shuffles start, if not with their next.
        """
        node, communicator, workers = self._node, self._communicator, self._workers
        if communicator.size == 1:
            return EpochPass(starts)
        with communicator.raise_together():
            shuffles = node.shuffles()
            pipeline = f"{node!r} with {node.cardinality()} elements" + (
                f" after the first {taken}" if taken else ""
            )
            states = [
                (seed, starts.get(shuffle, number))
                for shuffle in shuffles
                for seed, number in [shuffle.state()]
            ]
            # Arrays seldom change between epochs, so their samples, which may have to be read from
            # disk, are compared only once.
            every = settings.is_on("HPCSTRAT_CHECK")
            arrays = [] if self._is_compared and not every else node.checksums(every)
            everyones = communicator.all_gather_obj((pipeline, states, arrays))
        pipelines, orders, contents = zip(*everyones, strict=True)
        if any(len(set(of_worker)) > 1 for of_worker in workers.group_by_worker(pipelines)):
            seen = "".join(f"\n  {line}" for line in list_by_rank(enumerate(pipelines)))
            raise ReplicaMismatchError(
                f"{current_call()}: every rank must make the same dataset; each replica then gets "
                f"its share:{seen}"
            )
        for of_worker in workers.group_by_worker(list(enumerate(contents))):
            _require_equal_arrays(of_worker)
        # All take the seeds and rounds of the worker's first rank: shuffles without a seed may
        # differ, and a rank may have iterated on its own.
        rounds = {}
        for shuffle, (seed, number) in zip(shuffles, orders[workers.peers[0]], strict=True):
            shuffle.seed = seed
            rounds[shuffle] = number
        return EpochPass(rounds)

    def __repr__(self) -> str:
        return f"{self._call}({self._node!r})"


def _require_equal_arrays(of_worker: Sequence[tuple[int, list[tuple[str, int]]]]) -> None:
    """Compares the checksums of a worker's ranks, given as pairs of a rank and its arrays'."""
    ranks, contents = zip(*of_worker, strict=True)
    for checksums in zip(*contents, strict=True):
        if len(set(checksums)) > 1:
            seen = join_by_rank(
                (rank, f"{checksum:08x}")
                for rank, (_, checksum) in zip(ranks, checksums, strict=True)
            )
            raise ReplicaMismatchError(
                f"{current_call()}: the ranks have different arrays in {checksums[0][0]}, with "
                f"checksums {seen}. Every rank must have the same data in the same order; each "
                "replica then gets its share. Draw, shuffle and split with a seed that all ranks "
                "share, such as np.random.default_rng(0) or train_test_split(..., random_state=0), "
                "or send rank 0's arrays to all: hs.broadcast_object(arrays)"
            )


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
    make = explained(dataset_fn, "dataset_fn is called with an InputContext")
    dataset = make(InputContext(workers.count, workers.index, communicator.size))
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
