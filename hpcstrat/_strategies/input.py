"""The methods of a strategy that distribute data to the replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hpcstrat._calls.collective import collective
from hpcstrat._calls.records import ManyValues, signature_of
from hpcstrat._core import nests
from hpcstrat._core.arrays import host_copy
from hpcstrat._core.call_name import current_call, names_call
from hpcstrat._core.gpu import is_on_gpu
from hpcstrat._core.types import DistributedValues, PerReplica
from hpcstrat._replicas.contexts import check_cross_replica, require_cross_replica
from hpcstrat._replicas.group import ReplicaGroup
from hpcstrat._strategies.leaves import as_numeric, check_axis
from hpcstrat.data import _distributed
from hpcstrat.data._arguments import InputContext, InputOptions
from hpcstrat.data._dataset import Dataset
from hpcstrat.data._distributed import DistributedDataset
from hpcstrat.data._elements import checksum_of_arrays
from hpcstrat.data._steps import Prefetcher, bounds


class InputMethods:
    """The part of `Strategy` that distributes data; `Strategy` sets the group."""

    _group: ReplicaGroup
    _takes_pipeline_per_replica: bool = False

    @names_call("Strategy.experimental_distribute_dataset")
    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Splits each batch of a dataset among the replicas. Collective, and so is iterating.

        Args:
            dataset: a `hpcstrat.data.Dataset` that is batched by the global batch size, or any
                re-iterable of nests of arrays, such as a PyTorch `DataLoader`. Every rank iterates
                over it and must get the same batches; the first batches of each pass are compared,
                with `HPCSTRAT_CHECK=1` all batches. Of a batch of b elements, replica r of N gets
                the next `b // N + (1 if r < b % N else 0)`. If b < N, the last replicas get an
                empty batch, and the first time rank 0 warns (`UserWarning`). With
                `AutoShardPolicy.OFF` in the dataset's options a short batch fills the replicas in
                order, each up to its part of a full batch.
            options: see `InputOptions`.

        Returns:
            A re-iterable of nests of `PerReplica`; with one replica, of plain values. On a GPU they
            are CuPy arrays, and the next batches are copied there in advance, unless the options
            say otherwise.

        Raises:
            ValueError: the dataset is not batched, or its options say `AutoShardPolicy.OFF` and
                there are several workers.
            TypeError: `dataset` cannot be iterated over.

        Examples:
            With one replica; two would get one element each:

            >>> import hpcstrat as hs
            >>> strategy = hs.CentralStorageStrategy()
            >>> dataset = hs.data.Dataset.range(10).batch(2)
            >>> for x in strategy.experimental_distribute_dataset(dataset):
            ...     print(strategy.experimental_local_results(x))
            (array([0, 1]),)
            (array([2, 3]),)
            (array([4, 5]),)
            (array([6, 7]),)
            (array([8, 9]),)
        """
        require_cross_replica(self._group)
        if self._group.workers.count > 1 and isinstance(dataset, Dataset):
            _distributed.check_sharding(dataset)
        return _distributed.distribute_dataset(
            dataset, self._group.communicator, options, self._prefetcher(options)
        )

    @names_call("Strategy.distribute_datasets_from_function")
    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Distributes the elements of `dataset_fn(InputContext)` to the replicas.

        Collective, and so is iterating.

        Args:
            dataset_fn: returns a dataset batched by the batch size per replica; called once on
                every rank. All ranks of a host must get the same elements: in step t, replica r of
                its n replicas takes element `t * n + r`. On several hosts the context tells which
                pipeline this is, and each host may have different elements.
            options: see `InputOptions`. With `PER_REPLICA`, in a `MirroredStrategy`, each replica
                has its own pipeline, with different elements: the context has the pipeline's index,
                and as many pipelines as there are replicas.

        Returns:
            A re-iterable of nests of `PerReplica`; with one replica, of plain values. If the
            elements run out within a step, the replicas without an element get an empty batch.

        Raises:
            TypeError: `dataset_fn` does not return a dataset.
            NotImplementedError: the options ask for `PER_REPLICA` in a strategy other than
                `MirroredStrategy`.
            ValueError: the options contradict each other.

        Examples:
            With a batch size of 4 per replica:

            >>> import hpcstrat as hs
            >>> strategy = hs.CentralStorageStrategy()
            >>> def dataset_fn(context):
            ...     global_batch_size = 4 * context.num_replicas_in_sync
            ...     batch_size = context.get_per_replica_batch_size(global_batch_size)
            ...     dataset = hs.data.Dataset.from_tensors(1.0).repeat()
            ...     dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
            ...     return dataset.batch(batch_size)
            >>> iterator = iter(strategy.distribute_datasets_from_function(dataset_fn))
            >>> strategy.experimental_local_results(next(iterator))[0]
            array([1., 1., 1., 1.], dtype=float32)
        """
        require_cross_replica(self._group)
        return _distributed.distribute_from_function(
            dataset_fn,
            self._group.communicator,
            options,
            self._prefetcher(options),
            self._group.workers,
            self._takes_pipeline_per_replica,
        )

    @collective("Strategy.scatter", check_cross_replica)
    def scatter(self, value: Any, axis: int = 0, return_indices: bool = False) -> Any:
        """Splits arrays among the replicas: the inverse of `gather`.

        Collective: all ranks call this.

        Args:
            value: a nest of arrays of one size along `axis`, the same on every rank. The shapes,
                dtypes and samples of the contents are compared; with `HPCSTRAT_CHECK=1` all of the
                contents.
            axis: the axis; a negative one counts from the end.
            return_indices: whether to also return which elements along `axis` each replica has.

        Returns:
            A nest like `value` of `PerReplica`; with one replica, of arrays. Of S elements along
            `axis`, replica r of N has the next `S // N + (1 if r < S % N else 0)`, which may be
            none. The parts are copies on the replicas' devices.

            With `return_indices` a tuple of that nest and of a `PerReplica` of `range`s; with one
            replica, a `range`. Its `start` is the part's offset.

        Raises:
            RuntimeError: called inside a replica function or the scope of another strategy.
            TypeError: a leaf is not a numeric array, or is distributed already.
            ValueError: the axis does not exist, or sizes along it differ within `value`.
            ReplicaMismatchError: the arrays differ between ranks.

        Examples:
            With one replica; two would have `[0 1 2]` and `[3 4]`:

            >>> import numpy as np
            >>> import hpcstrat as hs
            >>> strategy = hs.CentralStorageStrategy()
            >>> parts = strategy.scatter(np.arange(5))
            >>> print(strategy.gather(strategy.run(lambda part: part * 10, args=(parts,)), axis=0))
            [ 0 10 20 30 40]
        """
        communicator = self._group.communicator
        leaves, structure = nests.flatten(value)
        with self._group.on_stream():
            arrays = [_as_scatterable(leaf, axis) for leaf in leaves]
            size = _size_along([array.shape for array in arrays], axis)
            contents = ManyValues(
                tuple([_describe_array(array, communicator.checks) for array in arrays])
            )
            communicator.exchange(
                signature_of(current_call(), nests.describe(structure), f"axis={axis}", contents)
            )
            indices = range(*bounds(communicator.rank, communicator.size, 0, size))
            own = [indices, *[self._own_part(array, axis, indices) for array in arrays]]
        if communicator.size > 1:
            own = [PerReplica(part, communicator.rank, communicator.size) for part in own]
        parts = structure.unflatten(own[1:])
        return (parts, own[0]) if return_indices else parts

    def _own_part(self, array: Any, axis: int, indices: range) -> Any:
        """A copy of this replica's part of an array, on its device."""
        stream, rows = self._group.stream, slice(indices.start, indices.stop)
        part = array[(slice(None),) * (axis % array.ndim) + (rows,)]
        here = part if stream is None else stream.here(part)
        return part.copy() if here is part else here

    def _prefetcher(self, options: Any) -> Prefetcher | None:
        """Copies batches to this replica's GPU, two in advance unless the options say otherwise."""
        options = options if isinstance(options, InputOptions) else InputOptions()
        moves = options.experimental_fetch_to_device or options.experimental_place_dataset_on_device
        if self._group.stream is None or not moves:
            return None
        # Imported here: only a GPU needs it.
        from hpcstrat.data._device_prefetch import prefetch_to_gpu

        return prefetch_to_gpu(self._group.stream, 1 + options.experimental_per_replica_buffer_size)

    def experimental_make_numpy_dataset(self, numpy_input: Any) -> Dataset:
        """`Dataset.from_tensor_slices`: the slices of a nest of arrays along their first dimension.

        Examples:
            >>> strategy = hs.CentralStorageStrategy()
            >>> arrays = np.arange(6).reshape(3, 2), np.array([0, 1, 0])
            >>> dataset = strategy.experimental_make_numpy_dataset(arrays).batch(2)
            >>> for x, y in dataset:
            ...     print(x.tolist(), y)
            [[0, 1], [2, 3]] [0 1]
            [[4, 5]] [0]
        """
        return Dataset.from_tensor_slices(numpy_input)


def _as_scatterable(value: Any, axis: Any) -> Any:
    """`value` as an array, after a check that it has this axis."""
    if isinstance(value, DistributedValues):
        raise TypeError(
            f"{current_call()}: {value!r} is distributed already; pass an array that is the same "
            "on every rank"
        )
    array = as_numeric(value)
    check_axis(axis)
    if not array.ndim:
        raise ValueError(
            f"{current_call()}: axis {axis} does not exist in a leaf of the value, the number "
            f"{array}; a list is a nest, so pass np.array(value)"
        )
    if not -array.ndim <= axis < array.ndim:
        raise ValueError(
            f"{current_call()}: axis {axis} does not exist in an array of shape {array.shape}; "
            "pass an axis that does"
        )
    return array


def _size_along(shapes: Sequence[tuple[int, ...]], axis: int) -> int:
    """The one size along an axis; 0 of no arrays."""
    # Arrays of different sizes would be split at different places: elements that belong together
    # would go to different replicas.
    sizes = {shape[axis] for shape in shapes}
    if len(sizes) > 1:
        raise ValueError(
            f"{current_call()}: the arrays have shapes {', '.join(map(str, shapes))}, whose sizes "
            f"along axis {axis} differ; pass arrays of one size, or each to a separate call"
        )
    return max(sizes, default=0)


def _describe_array(array: Any, every: bool) -> str:
    """A description with a checksum of the array's contents, or of a sample unless `every`.

    Equal arrays have equal descriptions. An array on a GPU has a checksum only if `every`.
    """
    on_gpu = is_on_gpu(array)
    if on_gpu and not every:
        return f"{array.dtype}{list(array.shape)}"
    contents = checksum_of_arrays([host_copy(current_call(), array) if on_gpu else array], every)
    return f"{array.dtype}{list(array.shape)} of checksum {contents:08x}"
