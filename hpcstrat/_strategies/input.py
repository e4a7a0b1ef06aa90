"""The methods of a strategy that bring data to the replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpcstrat._context import require_cross_replica
from hpcstrat._edge import names_call
from hpcstrat._group import ReplicaGroup
from hpcstrat._warnings import warn_renamed
from hpcstrat.data import _distributed
from hpcstrat.data._dataset import Dataset
from hpcstrat.data._distributed import DistributedDataset
from hpcstrat.data._splitting import InputContext, InputOptions, Prefetcher


class InputMethods:
    """A part of `Strategy`, which has its group."""

    _group: ReplicaGroup

    @names_call("Strategy.experimental_distribute_dataset")
    def experimental_distribute_dataset(self, dataset: Any, options: InputOptions | None = None) -> DistributedDataset:
        """Spreads the batches of a dataset over the replicas. Collective, and so is iterating.

        Args:
            dataset: a `hpcstrat.data.Dataset` that is batched by the global batch size, or any re-iterable of nests of
                arrays, such as a PyTorch `DataLoader`, whose batches are split evenly. Every rank iterates over it and
                must get the same batches; the first of each pass are compared, with `HPCSTRAT_CHECK=1` all. With N
                replicas and a batch of B, replica r gets the next `B // N + (1 if r < B % N else 0)` elements; a short
                last batch fills the replicas in order, and those left without elements get an empty batch. The first
                time that happens rank 0 warns (`UserWarning`); `InputOptions(even_batches=True)` splits it evenly.
            options: see `InputOptions`.

        Returns:
            A re-iterable of nests of `PerReplica`; plain values with one replica. On a GPU the arrays are CuPy's, and
            the next batches are copied there ahead of their use, unless the options say otherwise.

        Raises:
            ValueError: the dataset is not batched, and there are several replicas.
            TypeError: it is nothing that can be iterated.

        Examples:
            As one replica prints it; two get one element each:

            >>> import hpcstrat as hs
            >>> strategy = hs.CentralStorageStrategy()
            >>> for x in strategy.experimental_distribute_dataset(hs.data.Dataset.range(10).batch(2)):
            ...     print(strategy.experimental_local_results(x))
            (array([0, 1]),)
            (array([2, 3]),)
            (array([4, 5]),)
            (array([6, 7]),)
            (array([8, 9]),)
        """
        require_cross_replica(self._group)
        return _distributed.distribute_dataset(dataset, self._group.communicator, options, self._prefetcher(options))

    @names_call("Strategy.distribute_datasets_from_function")
    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Deals the elements of `dataset_fn(InputContext)` out to the replicas. Collective, and so is iterating.

        Args:
            dataset_fn: gives a dataset batched by the batch size of a replica; called once on every rank. The ranks
                of a host must all get the same elements: in step t the r-th of its n replicas takes element
                `t * n + r`. On several hosts the context tells which pipeline this is, and each host may have others.
            options: see `InputOptions`.

        Returns:
            A re-iterable of nests of `PerReplica`; plain values with one replica. Where the elements run out within a
            step, the replicas without one get an empty batch.

        Raises:
            TypeError: `dataset_fn` does not give a dataset.

        Examples:
            With a batch of 4 for each replica:

            >>> import hpcstrat as hs
            >>> strategy = hs.CentralStorageStrategy()
            >>> def dataset_fn(context):
            ...     batch_size = context.get_per_replica_batch_size(4 * context.num_replicas_in_sync)
            ...     dataset = hs.data.Dataset.from_tensors(1.0).repeat()
            ...     dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
            ...     return dataset.batch(batch_size)
            >>> iterator = iter(strategy.distribute_datasets_from_function(dataset_fn))
            >>> strategy.experimental_local_results(next(iterator))[0]
            array([1., 1., 1., 1.], dtype=float32)
        """
        require_cross_replica(self._group)
        return _distributed.distribute_from_function(
            dataset_fn, self._group.communicator, options, self._prefetcher(options), self._group.workers
        )

    def _prefetcher(self, options: Any) -> Prefetcher | None:
        """What brings batches to this replica's GPU: two ahead, unless the options say otherwise."""
        options = options if isinstance(options, InputOptions) else InputOptions()
        if self._group.stream is None or not options.experimental_fetch_to_device:
            return None
        from hpcstrat.data._device_prefetch import prefetch_to_gpu

        return prefetch_to_gpu(self._group.stream, 1 + options.experimental_per_replica_buffer_size)

    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """The older name of `distribute_datasets_from_function`."""
        warn_renamed(
            "Strategy.experimental_distribute_datasets_from_function", "Strategy.distribute_datasets_from_function"
        )
        return self.distribute_datasets_from_function(dataset_fn, options)

    def experimental_make_numpy_dataset(self, numpy_input: Any) -> Dataset:
        """A dataset of the slices of a nest of arrays along their first dimension, which must be equal."""
        return Dataset.from_tensor_slices(numpy_input)
