"""Strategy: everything that does not depend on where variables live."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, TracebackType
from typing import Any

import numpy as np

from hpcstrat import _context, _devices, _nest
from hpcstrat._array_protocols import as_array
from hpcstrat._communicators import Communicator, disconnect_devices, keep_connected
from hpcstrat._communicators.device import DeviceCommunicator
from hpcstrat._communicators.records import signature
from hpcstrat._context import CrossReplicaContext, ReplicaContext, UpdateContext, check_arguments
from hpcstrat._storage.base import Storage
from hpcstrat._strategies import reduction, travel
from hpcstrat._strategies.arguments import explain_empty_part, require_equal_arguments
from hpcstrat._strategies.extended import StrategyExtended
from hpcstrat._strategies.input import InputMethods
from hpcstrat._strategies.logical_devices import LogicalDeviceMethods
from hpcstrat._strategies.reduction import as_numbers
from hpcstrat._strategies.regroup import check_alike, regroup
from hpcstrat._strategies.renamed import warn_renamed
from hpcstrat._strategies.scope import Scope
from hpcstrat._types import ReduceOp
from hpcstrat._values import DistributedValues, PerReplica, select
from hpcstrat._variable_reading import note_read_only
from hpcstrat.data.options import RunOptions, ValueContext
from hpcstrat.data.workers import Workers


class Strategy(InputMethods, LogicalDeviceMethods):
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
        self._root = 0  # the parameter rank
        self._stream = communicator.stream if isinstance(communicator, DeviceCommunicator) else None
        self._aggregates_nothing = False  # a write in a replica context needs no aggregation
        self._mirrors = False  # each replica keeps a copy of every variable
        self._updates_everywhere = True  # StrategyExtended.update runs on every rank, each on its own copy
        self._workers = Workers((0,) * communicator.size, communicator.rank)
        self._closed = False
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

    def __repr__(self) -> str:
        replicas = self.num_replicas_in_sync
        places = ", ".join(dict.fromkeys(device.short for device in self._devices))
        variables = "" if self._mirrors or replicas == 1 else f", variables on {self._parameter_device.short}"
        state = ", closed" if self._closed else ""
        return f"{type(self).__name__}({replicas} replica{'s' * (replicas != 1)} on {places}{variables}{state})"

    # ---- life

    def scope(self) -> Scope:
        """A context manager: variables made inside are the strategy's.

        Raises:
            RuntimeError: on entering, inside a replica function or the scope of another strategy.
        """
        return Scope(self)

    def close(self) -> None:
        """Ends the use of the strategy; its variables can still be read. Collective. Again: nothing happens."""
        if not self._closed:
            self._communicator.barrier("Strategy.close")
            self._closed = True
            if isinstance(self._communicator, DeviceCommunicator):
                disconnect_devices(self._communicator)

    def __enter__(self) -> Strategy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:  # after an error the ranks do not meet again
            self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        """A copy that shares the communicator and the variables, and whose `extended` belongs to the copy."""
        other = copy.copy(self)
        memo[id(self)] = other
        if isinstance(self._communicator, DeviceCommunicator):
            keep_connected(self._communicator)
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
            args: positional arguments, a tuple of nests. Distributed values in them are replaced by this replica's
                component.
            kwargs: keyword arguments, likewise.
            options: taken for TensorFlow's sake.

        Returns:
            A nest like the one `fn` returns, whose leaves are `PerReplica`; plain values with one replica. A variable
            of the strategy comes back as itself, `None` as `None`.

        Raises:
            RuntimeError: called inside a replica function or the scope of another strategy.
            TypeError: `fn` cannot be called, or `args` is no tuple or list.
            ReplicaMismatchError: with `HPCSTRAT_CHECK=1`, arrays or numbers of `args` or `kwargs` that are no
                distributed values differ between ranks. Every rank must make the call then.
            Exception: what `fn` raised. The program may catch it and go on only where every replica raised.

        Examples:
            As one replica prints it:

            >>> import hpcstrat as hs
            >>> strategy = hs.CentralStorageStrategy()
            >>> dataset = strategy.experimental_distribute_dataset(hs.data.Dataset.range(5).batch(2))
            >>> for x in dataset:
            ...     print(strategy.run(lambda value: value + 1, args=(x,)))
            [1 2]
            [3 4]
            [5]
        """
        del options
        self._require_cross_replica("Strategy.run")
        if self._stream is None:
            return self._run(fn, args, kwargs)
        with self._stream.current():
            return self._run(fn, args, kwargs)

    def _run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
        before = _context.current.get()
        try:  # in which the context is set: a signal's exception may come right behind that
            check_arguments("Strategy.run", fn, args)
            if self._communicator.checks:
                require_equal_arguments(self._communicator, args, kwargs or {})
            own = [select(one) for one in args]
            own_by_name = {name: select(one) for name, one in kwargs.items()} if kwargs else {}
            _context.current.set(self._replica_context)
            result = regroup(self, fn(*own, **own_by_name))
            if self._communicator.checks:
                check_alike(self, result)
            return result
        except BaseException as error:
            note_read_only(error)
            self._communicator.note_fault(error)
            explain_empty_part(error, args, kwargs)
            raise
        finally:
            _context.current.set(before)

    def experimental_run_v2(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The name of `run` in TensorFlow 2.0."""
        warn_renamed("experimental_run_v2", "run")
        return self.run(fn, args, kwargs)

    def _merge_call(self, merge_fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, structure = _nest.flatten((args, kwargs))
        self._communicator.exchange(signature("ReplicaContext.merge_call", _nest.describe(structure)))
        merged_args, merged_kwargs = regroup(self, (args, kwargs)) if leaves else (args, kwargs)
        before = _context.current.get()
        try:
            _context.current.set(self._cross_context)
            result = merge_fn(self, *merged_args, **merged_kwargs)
        finally:
            _context.current.set(before)
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
            A nest like `value` of plain arrays. Sums of integers keep their dtype, except that those of 8 bits have 64
            along an axis, as in NumPy; means of integers are `float64`. Of a plain value, the mean is itself, or its
            mean along `axis`; a plain zero sums to itself.

        Raises:
            RuntimeError: called inside a replica function or the scope of another strategy.
            TypeError: a leaf is no array of numbers, or its dtype cannot be reduced so.
            ValueError: an axis that is not there, or the sum of a plain value over several replicas.
            ReplicaMismatchError: shapes or dtypes differ between replicas.

        Examples:
            As one replica prints it; two have `[0 1 2 3]` and `[4 5 6 7]`, whose sums are `[4 6 8 10]` and 28:

            >>> import hpcstrat as hs
            >>> strategy = hs.CentralStorageStrategy()
            >>> for x in strategy.experimental_distribute_dataset(hs.data.Dataset.range(8).batch(8)):
            ...     result = strategy.run(lambda value: value, args=(x,))
            >>> print(strategy.reduce(hs.ReduceOp.SUM, result, axis=None))
            [0 1 2 3 4 5 6 7]
            >>> print(strategy.reduce(hs.ReduceOp.SUM, result, axis=0))
            28
            >>> print(strategy.reduce(hs.ReduceOp.MEAN, result, axis=0))
            3.5
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

        Examples:
            As one replica prints it; two give the shapes (2, 2, 3), (1, 4, 3) and (1, 2, 6):

            >>> import numpy as np
            >>> import hpcstrat as hs
            >>> strategy = hs.CentralStorageStrategy()
            >>> value = strategy.experimental_distribute_values_from_function(
            ...     lambda context: np.array([[[0, 1, 2], [3, 4, 5]]]) + context.replica_id_in_sync_group)
            >>> for axis in (0, 1, 2):
            ...     print(strategy.gather(value, axis).shape)
            (1, 2, 3)
            (1, 2, 3)
            (1, 2, 3)
        """
        self._require_cross_replica("Strategy.gather")
        return reduction.gather(self._communicator, "Strategy.gather", value, axis)

    def _all_reduce(self, call: str, reduce_op: ReduceOp | str, value: Any) -> Any:
        return reduction.all_reduce(self._communicator, call, reduce_op, value)

    def _all_gather(self, call: str, value: Any, axis: int) -> Any:
        return reduction.all_gather(self._communicator, call, value, axis)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """The components of this worker's replicas. Collective: all ranks call this, but in a replica function.

        Args:
            value: anything.

        Returns:
            For a `PerReplica` value a tuple of components, in replica order, on every rank: of all replicas, but in a
            `MultiWorkerMirroredStrategy` of those of this host. For a nest that holds such leaves a tuple of nests; for
            anything else `(value,)`. Arrays of other libraries are NumPy's, or CuPy's, there.

        Raises:
            TypeError: a component cannot travel between ranks.
            ReplicaMismatchError: the replicas' values have different structures.
        """
        leaves, structure = _nest.flatten(value)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, DistributedValues)]
        call = "Strategy.experimental_local_results"
        if not any(isinstance(leaf, PerReplica) for leaf in leaves) and _is_cross_replica():
            reduction.require_alike(self._communicator, call, structure)
        if not places:
            return (reduction.as_own(call, value),)
        own = [leaves[i]._component for i in places]
        if any(isinstance(leaf, PerReplica) for leaf in leaves):
            with self._on_stream():
                with self._communicator.joint(call):
                    packed = travel.to_send(call, own)
                    at = [f"distributed at {places}"] if len(places) < len(leaves) else []
                    everyones = self._communicator.all_gather_obj(call, packed, _nest.describe(structure), *at)
                    everyones = [travel.received(everyones[rank], self._stream) for rank in self._workers.peers]
        else:
            everyones = [own] * len(self._workers.peers)
        results = []
        for components in everyones:
            nest = list(leaves)
            for i, component in zip(places, components, strict=True):
                nest[i] = component
            results.append(structure.unflatten(nest))
        return tuple(results)

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Distributed values whose components on each replica are `value_fn(ValueContext)`, called there.

        Collective, so that a failure of one replica is one of all.

        Args:
            value_fn: returns a nest of arrays, or of what becomes one.

        Returns:
            The nest with `PerReplica` leaves; with plain ones where there is one replica.

        Raises:
            TypeError: a leaf is no array of numbers and does not become one.
            ReplicaMismatchError: the replicas' nests differ in structure.

        Examples:
            As one replica prints it: a constant, an element of an array by the replica's index, a computed value:

            >>> import hpcstrat as hs
            >>> strategy = hs.CentralStorageStrategy()
            >>> constant = strategy.experimental_distribute_values_from_function(lambda context: 1.0)
            >>> strategy.experimental_local_results(constant)
            (1.0,)
            >>> values = [3.0, 2.0, 1.0, 0.0]
            >>> by_index = strategy.experimental_distribute_values_from_function(
            ...     lambda context: values[context.replica_id_in_sync_group])
            >>> strategy.experimental_local_results(by_index)
            (3.0,)
            >>> computed = strategy.experimental_distribute_values_from_function(
            ...     lambda context: context.num_replicas_in_sync)
            >>> strategy.experimental_local_results(computed)
            (1,)
        """
        call = "Strategy.experimental_distribute_values_from_function"
        self._require_cross_replica(call)
        communicator = self._communicator
        with communicator.joint(call):
            nest = value_fn(ValueContext(communicator.rank, communicator.size))
            leaves, structure = _nest.flatten(nest)
            leaves = [self._own_value(call, leaf) for leaf in leaves]
            communicator.exchange(signature(call, _nest.describe(structure)))
        if communicator.size > 1:
            leaves = [PerReplica(leaf, communicator.rank, communicator.size) for leaf in leaves]
        return structure.unflatten(leaves)

    def _own_value(self, call: str, value: Any) -> Any:
        """A number as it is, anything else as an array on this replica's device."""
        if isinstance(value, (np.generic, bool, int, float, complex)):
            return value
        array = as_array(call, value, on_gpu=True) if isinstance(value, np.ndarray) else as_numbers(call, value)
        if self._stream is None or not isinstance(array, np.ndarray):
            return array
        with self._stream.current():
            return self._stream.xp.asarray(array)

    # ---- help

    def _on_stream(self) -> contextlib.AbstractContextManager[None]:
        """In this context the strategy's stream, and its GPU, is the current one; on the CPU there is none."""
        return contextlib.nullcontext() if self._stream is None else self._stream.current()

    def _require_cross_replica(self, call: str) -> None:
        """Raises unless this line runs in this strategy's cross-replica context or outside of every scope."""
        if self._closed:
            raise RuntimeError(f"{call} was called on a strategy that is closed; make another")
        context = _context.context()
        if context is None or context is self._cross_context:
            self._communicator.require_open(call)
            return
        if isinstance(context, UpdateContext):
            raise RuntimeError(
                f"{call} was called inside an update, which one rank runs: nothing may communicate there; "
                "call it before or after"
            )
        if isinstance(context, ReplicaContext):
            raise RuntimeError(
                f"{call} was called inside a replica function; call it outside of Strategy.run, or inside "
                "ReplicaContext.merge_call. For a sum over replicas there is ReplicaContext.all_reduce"
            )
        if context.strategy is not self:
            raise RuntimeError(f"{call} was called in the scope of another strategy; leave that scope first")


def _is_cross_replica() -> bool:
    context = _context.context()
    return context is None or type(context) is CrossReplicaContext
