"""Strategy: everything that does not depend on where variables live."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, TracebackType
from typing import Any

import numpy as np

from hpcstrat import _context, _devices, _nest
from hpcstrat._communicators import Communicator
from hpcstrat._communicators.records import signature
from hpcstrat._context import CrossReplicaContext, ReplicaContext, UpdateContext
from hpcstrat._storage.base import Storage
from hpcstrat._strategies import logical_devices, reduction
from hpcstrat._strategies.extended import StrategyExtended
from hpcstrat._strategies.renamed import warn_renamed
from hpcstrat._types import ReduceOp
from hpcstrat._values import DistributedValues, PerReplica, select
from hpcstrat._variables import Variable
from hpcstrat.data import distributed
from hpcstrat.data.dataset import Dataset
from hpcstrat.data.distributed import DistributedDataset
from hpcstrat.data.options import InputContext, InputOptions, RunOptions, ValueContext


class Strategy:
    """Runs one program on several replicas: one a rank, each on its own device.

    Make one of its subclasses. Methods marked collective are called by all ranks, in one order; the script's own level
    does so by itself, because every rank runs the same lines.
    """

    def __init__(
        self,
        communicator: Communicator,
        devices: Sequence[_devices.Device],
        variable_device: _devices.Device,
        storage: Storage,
        replica_storage: Storage,
    ) -> None:
        self._communicator = communicator
        self._devices = tuple(devices)
        self._device = self._devices[communicator.rank]
        self._parameter_device = variable_device
        self._variable_device = str(variable_device)
        self._storage = storage
        self._replica_storage = replica_storage
        self._aggregates_nothing = False  # a write in a replica context needs no aggregation
        self._updates_everywhere = True  # StrategyExtended.update runs on every rank, each on its own copy
        self._closed = False
        self._runs = 0
        self._connect_contexts()

    def _connect_contexts(self) -> None:
        self._replica_context = ReplicaContext(self)
        self._cross_context = CrossReplicaContext(self)
        self._extended = StrategyExtended(self)

    # ---- facts

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas."""
        return self._communicator.size

    @property
    def cluster_resolver(self) -> Any:
        """None: this strategy has one worker."""
        return None

    @property
    def extended(self) -> StrategyExtended:
        """Further methods, for those who write libraries on top of strategies."""
        return self._extended

    @property
    def xp(self) -> ModuleType:
        """The array module of this rank's device: `numpy` or `cupy`."""
        return self._device.array_module

    # ---- life

    def scope(self) -> _Scope:
        """A context manager: variables made inside are the strategy's.

        Raises:
            RuntimeError: on entering, inside a replica function or the scope of another strategy.
        """
        return _Scope(self)

    def close(self) -> None:
        """Ends the use of the strategy; its variables can still be read. Collective. Again: nothing happens."""
        if not self._closed:
            self._communicator.barrier("Strategy.close")
            self._closed = True

    def __enter__(self) -> Strategy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:  # after an error the ranks do not meet again
            self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        """A copy that shares the communicator and the variables, and whose `extended` belongs to the copy."""
        other = copy.copy(self)
        memo[id(self)] = other
        other._connect_contexts()
        return other

    # ---- replicas

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Runs `fn(*args, **kwargs)` once on each replica.

        Args:
            fn: the replica function.
            args: positional arguments, nests. Distributed values in them are replaced by this replica's component.
            kwargs: keyword arguments, likewise.
            options: taken for TensorFlow's sake.

        Returns:
            A nest like the one `fn` returns, whose leaves are `PerReplica`; plain values with one replica. A variable
            of the strategy comes back as itself, `None` as `None`.

        Raises:
            RuntimeError: called inside a replica function or the scope of another strategy.
            Exception: what `fn` raised. The program may catch it and go on only where every replica raised.
        """
        del options
        self._require_cross_replica("Strategy.run")
        self._runs += 1
        arguments = select((tuple(args), dict(kwargs) if kwargs else {}))
        token = _context.current.set(self._replica_context)
        try:
            result = fn(*arguments[0], **arguments[1])
        except BaseException as error:
            self._communicator.note_fault(error, self._runs)
            raise
        finally:
            _context.current.reset(token)
        return self._regroup(result)

    def experimental_run_v2(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The name of `run` in TensorFlow 2.0."""
        warn_renamed("experimental_run_v2", "run")
        return self.run(fn, args, kwargs)

    def _regroup(self, result: Any) -> Any:
        """What the replicas return: each leaf as a distributed value of which this process has its component."""
        if result is None:
            return None
        alone = self._communicator.size == 1
        rank = self._communicator.rank
        leaves, structure = _nest.flatten(result)
        for i, leaf in enumerate(leaves):
            if leaf is None or isinstance(leaf, (Variable, DistributedValues)):
                continue
            if isinstance(leaf, np.ndarray) and not leaf.flags.writeable and leaf.base is not None:
                leaf = leaf.copy()  # it may be a variable's storage, which changes
            leaves[i] = leaf if alone else PerReplica(leaf, rank)
        return structure.unflatten(leaves)

    def _merge_call(self, merge_fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, structure = _nest.flatten((args, kwargs))
        self._communicator.exchange(signature("ReplicaContext.merge_call", str(structure)))
        merged_args, merged_kwargs = self._regroup((args, kwargs)) if leaves else (args, kwargs)
        token = _context.current.set(self._cross_context)
        try:
            result = merge_fn(self, *merged_args, **merged_kwargs)
        finally:
            _context.current.reset(token)
        return select(result)

    # ---- values of several replicas

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None) -> Any:
        """Combines the replicas' values into one, the same on every rank. Collective: all ranks call this.

        Args:
            reduce_op: a `ReduceOp` or its name.
            value: a nest of distributed values, of arrays or numbers. They travel together.
            axis: `None` combines elementwise over replicas, whose shapes must then be equal. An int, or several,
                reduces along these axes within each replica too; `MEAN` then divides by the number of elements that
                there really are. So with a last batch of 6 elements over 2 replicas, 4 and 2, the mean is the sum of
                six over six, and nan where there is none at all.

        Returns:
            A nest like `value` of plain arrays. Sums of integers keep their dtype, means of them are `float64`. Of a
            plain value, the mean is itself, or its mean along `axis`; a plain zero sums to itself.

        Raises:
            RuntimeError: called inside a replica function or the scope of another strategy.
            TypeError: a leaf is no array of numbers, or its dtype cannot be reduced so.
            ValueError: an axis that is not there, or the sum of a plain value over several replicas.
            ReplicaMismatchError: shapes or dtypes differ between replicas.
        """
        self._require_cross_replica("Strategy.reduce")
        return reduction.reduce(self._communicator, "Strategy.reduce", reduce_op, value, axis)

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenates the replicas' values along `axis`, in replica order. Collective: all ranks call this.

        Args:
            value: a distributed value, or a nest of them, of arrays with at least one dimension. Sizes may differ along
                `axis` only. A plain array is returned as it is.
            axis: the axis, counted from the end where negative.

        Returns:
            A nest like `value` of plain arrays, the same on every rank.

        Raises:
            RuntimeError: called inside a replica function or the scope of another strategy.
            NotImplementedError: a leaf is an `IndexedSlices`.
            ReplicaMismatchError: the shapes do not fit; every replica's is named.
        """
        self._require_cross_replica("Strategy.gather")
        return reduction.gather(self._communicator, "Strategy.gather", value, axis)

    def _all_reduce(self, call: str, reduce_op: ReduceOp | str, value: Any) -> Any:
        return reduction.all_reduce(self._communicator, call, reduce_op, value)

    def _all_gather(self, call: str, value: Any, axis: int) -> Any:
        return reduction.all_gather(self._communicator, call, value, axis)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """All replicas' components. Collective for values that are, or hold, `PerReplica` ones.

        Args:
            value: anything.

        Returns:
            For a `PerReplica` value a tuple of all components, in replica order, on every rank; for a nest that holds
            such leaves a tuple of nests; for anything else `(value,)`.

        Raises:
            TypeError: a component cannot travel between ranks.
        """
        leaves, structure = _nest.flatten(value)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, DistributedValues)]
        if not places:
            return (value,)
        own = [leaves[i]._component for i in places]
        if any(isinstance(leaf, PerReplica) for leaf in leaves):
            everyones = self._communicator.all_gather_obj("Strategy.experimental_local_results", own)
        else:
            everyones = [own] * self._communicator.size
        results = []
        for components in everyones:
            nest = list(leaves)
            for i, component in zip(places, components, strict=True):
                nest[i] = component
            results.append(structure.unflatten(nest))
        return tuple(results)

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """A distributed value whose component on each replica is `value_fn(ValueContext)`, called there.

        Collective, so that a failure of one replica is one of all.

        Args:
            value_fn: returns an array, or what becomes one.

        Returns:
            A `PerReplica`; a plain value with one replica.

        Raises:
            TypeError: the value is no array of numbers and does not become one.
        """
        call = "Strategy.experimental_distribute_values_from_function"
        self._require_cross_replica(call)
        communicator = self._communicator
        with communicator.joint(call):
            value = value_fn(ValueContext(communicator.rank, communicator.size))
            if not isinstance(value, (np.ndarray, np.generic)):
                array = reduction.as_numbers(call, value)
                value = value if isinstance(value, (bool, int, float, complex)) else array
            communicator.barrier(call)
        return value if communicator.size == 1 else PerReplica(value, communicator.rank)

    # ---- data

    def experimental_distribute_dataset(self, dataset: Any, options: InputOptions | None = None) -> DistributedDataset:
        """Spreads the batches of a dataset over the replicas. Collective, and so is iterating.

        Args:
            dataset: a `hpcstrat.data.Dataset` that is batched by the global batch size, or any re-iterable of nests of
                arrays, whose batches are split evenly. With N replicas and a batch of B, replica r gets the next
                `B // N + (1 if r < B % N else 0)` elements; a short last batch fills the replicas in order, and those
                left without elements get an empty batch.
            options: see `InputOptions`.

        Returns:
            A re-iterable of nests of `PerReplica`; plain values with one replica.

        Raises:
            ValueError: the dataset is not batched, and there are several replicas.
            TypeError: it is nothing that can be iterated.
        """
        self._require_cross_replica("Strategy.experimental_distribute_dataset")
        return distributed.distribute_dataset(dataset, self._communicator, options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Deals the elements of `dataset_fn(InputContext)` out to the replicas. Collective, and so is iterating.

        Args:
            dataset_fn: gives a dataset batched by the batch size of a replica; called once on every rank, which must
                all get the same elements. In step t replica r of N takes element `t * N + r`.
            options: see `InputOptions`.

        Returns:
            A re-iterable of nests of `PerReplica`; plain values with one replica. Where the elements run out within a
            step, the replicas without one get an empty batch.

        Raises:
            TypeError: `dataset_fn` does not give a dataset.
        """
        self._require_cross_replica("Strategy.distribute_datasets_from_function")
        return distributed.distribute_from_function(dataset_fn, self._communicator, options)

    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """The older name of `distribute_datasets_from_function`."""
        warn_renamed("experimental_distribute_datasets_from_function", "distribute_datasets_from_function")
        return self.distribute_datasets_from_function(dataset_fn, options)

    def experimental_make_numpy_dataset(self, numpy_input: Any) -> Dataset:
        """A dataset of the slices of a nest of arrays along their first dimension, which must be equal."""
        return Dataset.from_tensor_slices(numpy_input)

    # ---- logical devices

    def experimental_assign_to_logical_device(self, tensor: Any, logical_device_id: int) -> Any:
        """`tensor`, which is on the replica's one logical device, number 0, already.

        Raises:
            ValueError: another number.
        """
        return logical_devices.assign(tensor, logical_device_id)

    def experimental_split_to_logical_devices(self, tensor: Any, partition_dimensions: Sequence[int]) -> Any:
        """`tensor`, in one part for the replica's one logical device.

        Args:
            tensor: an array.
            partition_dimensions: for each dimension the number of parts along it; all of them are 1.

        Raises:
            ValueError: another number of entries than the tensor has dimensions, a product that is not the number of
                logical devices, or one that does not divide the shape.
        """
        return logical_devices.split(tensor, partition_dimensions)

    def experimental_replicate_to_logical_devices(self, tensor: Any) -> Any:
        """`tensor`, which is on every logical device of the replica already."""
        return tensor

    # ---- help

    def _require_cross_replica(self, call: str) -> None:
        """Raises unless this line runs in this strategy's cross-replica context or outside of every scope."""
        if self._closed:
            raise RuntimeError(f"{call} was called on a strategy that is closed; make another")
        context = _context.context()
        if context is None or context is self._cross_context:
            return
        if isinstance(context, UpdateContext):
            raise RuntimeError(
                f"{call} was called inside an update, which one rank runs: nothing may communicate there"
            )
        if isinstance(context, ReplicaContext):
            raise RuntimeError(
                f"{call} was called inside a replica function; call it outside of Strategy.run, or inside "
                "ReplicaContext.merge_call. For a sum over replicas there is ReplicaContext.all_reduce"
            )
        if context.strategy is not self:
            raise RuntimeError(f"{call} was called in the scope of another strategy; leave that scope first")


class _Scope:
    """See `Strategy.scope`."""

    __slots__ = ("_strategy", "_tokens")

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._tokens: list[Any] = []

    def __enter__(self) -> Strategy:
        self._strategy._require_cross_replica("Strategy.scope")
        self._tokens.append(_context.current.set(self._strategy._cross_context))
        return self._strategy

    def __exit__(self, *_: Any) -> None:
        _context.current.reset(self._tokens.pop())
