"""Strategy and its scope."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, TracebackType
from typing import Any

from hpcstrat._agreement.collective import collective
from hpcstrat._core.call_name import names_call
from hpcstrat._core.graph import drop_graphs
from hpcstrat._core.timeline import RUN, span
from hpcstrat._core.types import ReduceOp, RunOptions, ValueContext, select
from hpcstrat._replicas import contexts
from hpcstrat._replicas.contexts import (
    AcrossReplicas,
    InReplica,
    check_arguments,
    check_cross_replica,
    require_cross_replica,
)
from hpcstrat._replicas.group import ReplicaGroup
from hpcstrat._strategies import collectives, distribution, function, reduce
from hpcstrat._strategies.extended import StrategyExtended
from hpcstrat._strategies.tensorflow_names import StrategyNames
from hpcstrat._strategies.transfer import (
    check_same_structure,
    explain_empty_part,
    regroup,
    require_equal_arguments,
)
from hpcstrat._transports.connection import disconnect_devices
from hpcstrat._transports.device import DeviceCommunicator
from hpcstrat.data import _distributing
from hpcstrat.data._arguments import InputContext, InputOptions
from hpcstrat.data._distributed import DistributedDataset


def _describe_run(_: Strategy, fn: Any, *__: Any, **___: Any) -> tuple[str, None]:
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    return f"run {name.rpartition('.<locals>.')[2]}", None


class Strategy(StrategyNames):
    """Runs one program on several replicas: one replica per rank, each on its own device.

    Construct one of the subclasses. All ranks must call the methods marked collective, in the same
    order. Code at the top level of the script does so automatically, because every rank runs the
    same lines. They and `run` are for the cross-replica context and for the lines outside all
    scopes; elsewhere they raise `RuntimeError`.

    Examples:
        A program with one replica or any number of them. All print the sum of 0, 1, 2, 3 and 4:

        >>> import numpy as np
        >>> import hpcstrat as hs
        >>> with hs.CentralStorageStrategy() as strategy:
        ...     parts = strategy.scatter(np.arange(5))
        ...     sums = strategy.run(lambda part: part.sum(), args=(parts,))
        ...     print(strategy.reduce("SUM", sums, axis=None))
        10
    """

    def __init__(self, group: ReplicaGroup | None = None) -> None:
        if not isinstance(group, ReplicaGroup):
            raise TypeError(
                "Strategy: make a MirroredStrategy, a MultiWorkerMirroredStrategy, a "
                "CentralStorageStrategy or a OneDeviceStrategy"
            )
        self._connect(group)

    # Separate from the constructor, because copying a strategy does not place devices again.
    def _connect(self, group: ReplicaGroup) -> None:
        self.replica_group = group
        group.strategy = self
        self._in_replica = InReplica(group)
        self._extended = StrategyExtended(group)

    # ---- properties

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas."""
        return self.replica_group.communicator.size

    @property
    def extended(self) -> StrategyExtended:
        """More methods, for libraries built on strategies."""
        return self._extended

    @property
    def xp(self) -> ModuleType:
        """The array module of this rank's device: `numpy` or `cupy`."""
        return self.replica_group.xp

    def __repr__(self) -> str:
        group, replicas = self.replica_group, self.num_replicas_in_sync
        devices = ", ".join(dict.fromkeys(device.short for device in group.devices))
        is_central = not group.mirrors and replicas > 1
        variables = f", variables on {group.parameter_device.short}" if is_central else ""
        state = ", closed" if group.is_closed else ""
        placed = f"{replicas} replica{'s' * (replicas != 1)} on {devices}"
        return f"{type(self).__name__}({placed}{variables}{state})"

    # ---- life

    def scope(self) -> Scope:
        """A context manager in which the strategy is current and new variables belong to it.

        Raises:
            RuntimeError: entered inside a replica function or the scope of another strategy.

        Examples:
            >>> strategy = hs.MirroredStrategy()
            >>> with strategy.scope():
            ...     weights = hs.Variable(np.ones(2))
            >>> weights.distribute_strategy is strategy
            True
        """
        return Scope(self.replica_group)

    @names_call("Strategy.close")
    def close(self) -> None:
        """Closes the strategy; its variables can still be read. Collective.

        Closing it again does nothing.

        Examples:
            `with` closes the strategy too, unless its block raises:

            >>> with hs.MirroredStrategy() as strategy, strategy.scope():
            ...     step = hs.Variable(3)
            >>> print(step.numpy())
            3
        """
        group = self.replica_group
        if not group.is_closed:
            # An NCCL communicator may be closed only when no rank uses it any more.
            group.communicator.barrier()
            group.is_closed = True
            if group.stream is not None:
                drop_graphs(group.stream, group)
            if isinstance(group.communicator, DeviceCommunicator):
                disconnect_devices(group.communicator)

    def __enter__(self) -> Strategy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is None:  # after an error the other ranks may never call `close`
            self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        """A copy with its own `extended`, which shares the communicator and the variables."""
        other = copy.copy(self)
        memo[id(self)] = other
        group = self.replica_group
        if isinstance(group.communicator, DeviceCommunicator):
            # Each copy is closed separately; the last one closes the connection.
            group.communicator.users += 1
        other._connect(dataclasses.replace(group, replica_context=None))
        return other

    # ---- replicas

    @span(RUN, _describe_run)
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Runs `fn(*args, **kwargs)` once on each replica, in its replica context.

        Args:
            fn: the replica function.
            args: positional arguments, a tuple of nests. Each distributed value in them is replaced
                by this replica's component.
            kwargs: keyword arguments, treated as `args` are.
            options: ignored; accepted for compatibility with TensorFlow.

        Returns:
            A nest like the one that `fn` returns, with `PerReplica` leaves; with one replica, plain
            values. A variable is returned as itself, `None` as `None`.

        Raises:
            TypeError: `fn` is not callable, or `args` is not a tuple or list.
            ReplicaMismatchError: with `HPCSTRAT_CHECK=1`, arrays or numbers in `args` or `kwargs`,
                other than distributed values, differ between ranks. All ranks must then call `run`.
            Exception: whatever `fn` raised. The program may catch it and continue only if every
                replica raised.

        Examples:
            With one replica; the first of two would get `[1 2]`:

            >>> strategy = hs.CentralStorageStrategy()
            >>> parts = strategy.scatter(np.arange(3))
            >>> print(strategy.run(lambda part: part + 1, args=(parts,)))
            [1 2 3]
        """
        del options
        # Not recorded as the current call: that would cost time in every step, and the code that
        # runs inside is the program's.
        require_cross_replica(self.replica_group, "Strategy.run")
        # On the CPU no context manager is entered: every step would pay for it.
        stream = self.replica_group.stream
        if stream is None:
            return self._run(fn, args, kwargs)
        around: Any = function.active.get()
        steps = getattr(fn, function.STEPS, None) if around is None else around or None
        with stream.current():
            return self._run(fn, args, kwargs, steps)

    def _run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        steps: function.StepFunction | None = None,
    ) -> Any:
        communicator, before = self.replica_group.communicator, contexts.current.get()
        # The context is set inside the `try`: a signal may raise right after it was set.
        try:
            check_arguments(fn, args, "Strategy.run")
            if communicator.checks:
                # A plain value is the same for all replicas. Only HPCSTRAT_CHECK compares it,
                # because comparing communicates.
                require_equal_arguments(communicator, args, kwargs or {})
            own = [select(arg) for arg in args]
            own_by_name = {name: select(arg) for name, arg in kwargs.items()} if kwargs else {}
            contexts.current.set(self._in_replica)
            if steps is None:
                result = fn(*own, **own_by_name)
            else:
                result = steps.run(self.replica_group, fn, own, own_by_name)
            result = regroup(self.replica_group, result)
            if communicator.checks:
                check_same_structure(communicator, result)
            return result
        except BaseException as error:
            # Other ranks may not have raised. If the program catches the exception, the next
            # collective call compares the ranks and ends the job.
            communicator.calls.note_escaped(error)
            explain_empty_part(error, args, kwargs)
            raise
        finally:
            contexts.current.set(before)

    # ---- values of the replicas

    @collective(check_cross_replica)
    def reduce(
        self, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None
    ) -> Any:
        """Reduces the replicas' values to one value, the same on every rank. Collective.

        Args:
            reduce_op: a `ReduceOp` or its name.
            value: a nest of distributed values of arrays or numbers. They are sent in one message.
            axis: `None` reduces elementwise over the replicas, whose shapes must be equal. An int,
                or several, reduces along these axes within each replica too, and `MEAN` divides by
                the true number of elements: of a last batch of 6 elements, 4 on one replica and 2
                on the other, the mean is the sum of the six divided by six. The mean of no elements
                is nan.

        Returns:
            A nest like `value` of plain arrays. Sums of integers keep their dtype, except that 8-
            and 16-bit integers become 64-bit along an axis, as in NumPy. Means of integers are
            `float32` for up to 16 bits and `float64` for more. The mean of a plain value is the
            value itself, or its mean along `axis`; the sum of a plain zero is that zero.

        Raises:
            TypeError: a leaf is not a numeric array, or its dtype does not support the reduction.
            ValueError: an axis does not exist, or a plain value other than zero is summed over
                several replicas.
            ReplicaMismatchError: shapes or dtypes differ between replicas.

        Examples:
            With one replica; two would have `[0 1 2 3]` and `[4 5 6 7]`, whose sum is `[4 6 8 10]`:

            >>> strategy = hs.CentralStorageStrategy()
            >>> parts = strategy.scatter(np.arange(8))
            >>> print(strategy.reduce(hs.ReduceOp.SUM, parts, axis=None))
            [0 1 2 3 4 5 6 7]
            >>> print(strategy.reduce("SUM", parts, axis=0), strategy.reduce("MEAN", parts, axis=0))
            28 3.5
        """
        return reduce.reduce_distributed(self.replica_group.communicator, reduce_op, value, axis)

    @collective(check_cross_replica)
    def gather(self, value: Any, axis: int) -> Any:
        """Concatenates the replicas' values along `axis`, in replica order. Collective.

        Args:
            value: a distributed value, or a nest of them, of arrays with at least one dimension.
                Sizes may differ along `axis` only. A plain array is returned as it is.
            axis: the axis; a negative one counts from the end.

        Returns:
            A nest like `value` of plain arrays, the same on every rank.

        Raises:
            NotImplementedError: a leaf is an `IndexedSlices`.
            ReplicaMismatchError: the shapes do not match; the message lists every replica's.

        Examples:
            With one replica; with two the shapes would be (4, 3) and (2, 6):

            >>> strategy = hs.CentralStorageStrategy()
            >>> value = strategy.run(lambda: np.full((2, 3), hs.replica_id()))
            >>> [strategy.gather(value, axis).shape for axis in (0, 1)]
            [(2, 3), (2, 3)]
        """
        return collectives.gather(self.replica_group.communicator, value, axis)

    @names_call("Strategy.experimental_local_results")
    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """The components of this worker's replicas. Collective, except in a replica function.

        Args:
            value: any value.

        Returns:
            For a `PerReplica` value, a tuple of its components in replica order, on every rank.
            These are the components of all replicas or, in a `MultiWorkerMirroredStrategy`, of this
            host's replicas. For a nest with such leaves, a tuple of nests. For any other value,
            `(value,)`. Arrays of other libraries become NumPy or CuPy arrays.

        Raises:
            TypeError: a component cannot be pickled, and so cannot be sent between ranks.
            ReplicaMismatchError: the replicas' values have different structures.

        Examples:
            With one replica; two would have `({'rank': 0}, {'rank': 1})`, on both ranks:

            >>> strategy = hs.CentralStorageStrategy()
            >>> strategy.experimental_local_results(strategy.run(lambda: {"rank": hs.replica_id()}))
            ({'rank': 0},)
            >>> strategy.experimental_local_results("any other value")
            ('any other value',)
        """
        return distribution.local_results(self.replica_group, value)

    @collective(check_cross_replica)
    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """Makes distributed values, calling `value_fn(ValueContext)` on each replica. Collective.

        Args:
            value_fn: returns this replica's component, a nest of arrays or of values that become
                arrays.

        Returns:
            The nest with `PerReplica` leaves; with one replica, plain leaves.

        Raises:
            TypeError: a leaf is not a numeric array and cannot become one.
            ReplicaMismatchError: the replicas' nests differ in structure.

        Examples:
            With one replica; the second of two would have 2.0:

            >>> strategy = hs.CentralStorageStrategy()
            >>> values = [3.0, 2.0, 1.0, 0.0]
            >>> by_index = strategy.experimental_distribute_values_from_function(
            ...     lambda context: values[context.replica_id_in_sync_group])
            >>> strategy.experimental_local_results(by_index)
            (3.0,)
        """
        return distribution.values_from_function(self.replica_group, value_fn)

    # ---- data

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
                empty batch, and the first time rank 0 warns (`UserWarning`).
            options: see `InputOptions`.

        Returns:
            A re-iterable of nests of `PerReplica`; with one replica, of plain values. On a GPU they
            are CuPy arrays, and the next batches are copied there in advance, unless the options
            say otherwise.

        Raises:
            ValueError: the dataset is not batched, or the options place it on the device.
            TypeError: `dataset` cannot be iterated over.
            NotImplementedError: the options ask for a pipeline per replica.

        Examples:
            With one replica; two would get one element each:

            >>> strategy = hs.CentralStorageStrategy()
            >>> dataset = hs.data.Dataset.range(5).batch(2)
            >>> print(*strategy.experimental_distribute_dataset(dataset))
            [0 1] [2 3] [4]
        """
        require_cross_replica(self.replica_group)
        return _distributing.distribute_dataset(
            dataset, self.replica_group.communicator, options, self.replica_group.stream
        )

    @names_call("Strategy.distribute_datasets_from_function")
    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Distributes the elements of `dataset_fn(InputContext)`. Collective, and so is iterating.

        Args:
            dataset_fn: returns a dataset batched by the batch size per replica; called once on
                every rank. All ranks of a host must get the same elements: in step t, replica r of
                its n replicas takes element `t * n + r`. On several hosts the context tells which
                pipeline this is, and each host may have different elements.
            options: see `InputOptions`.

        Returns:
            A re-iterable of nests of `PerReplica`; with one replica, of plain values. If the
            elements run out within a step, the replicas without an element get an empty batch.

        Raises:
            TypeError: `dataset_fn` does not return a dataset.
            NotImplementedError: the options ask for a pipeline per replica.
            ValueError: the options place the pipeline on the device.

        Examples:
            With a batch size of 4 per replica:

            >>> strategy = hs.CentralStorageStrategy()
            >>> def dataset_fn(context):
            ...     dataset = hs.data.Dataset.range(8)
            ...     dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
            ...     return dataset.batch(4)
            >>> print(*strategy.distribute_datasets_from_function(dataset_fn))
            [0 1 2 3] [4 5 6 7]
        """
        require_cross_replica(self.replica_group)
        group = self.replica_group
        return _distributing.distribute_from_function(
            dataset_fn, group.communicator, options, group.stream, group.workers
        )

    @collective(check_cross_replica)
    def scatter(self, value: Any, axis: int = 0, return_indices: bool = False) -> Any:
        """Splits arrays among the replicas: the inverse of `gather`. Collective.

        Args:
            value: a nest of arrays of one size along `axis`, the same on every rank. Their shapes
                and dtypes are compared, and samples of those on the host; with `HPCSTRAT_CHECK=1`
                all of the contents.
            axis: the axis; a negative one counts from the end.
            return_indices: whether to also return which elements along `axis` each replica has.

        Returns:
            A nest like `value` of `PerReplica`; with one replica, of arrays. Of S elements along
            `axis`, replica r of N has the next `S // N + (1 if r < S % N else 0)`, which may be
            none. The parts are copies on the replicas' devices.

            With `return_indices` a tuple of that nest and of a `PerReplica` of `range`s; with one
            replica, a `range`. Its `start` is the part's offset.

        Raises:
            TypeError: a leaf is not a numeric array, or is distributed already.
            ValueError: the axis does not exist, or sizes along it differ within `value`.
            ReplicaMismatchError: the arrays differ between ranks.

        Examples:
            With one replica; two would have `[0 1 2]` and `[3 4]`:

            >>> strategy = hs.CentralStorageStrategy()
            >>> parts = strategy.scatter(np.arange(5))
            >>> print(strategy.gather(strategy.run(lambda part: part * 10, args=(parts,)), axis=0))
            [ 0 10 20 30 40]
        """
        return distribution.scatter(self.replica_group, value, axis, return_indices)


class Scope:
    """Enters a strategy's cross-replica context; see `Strategy.scope`."""

    __slots__ = ("_entered", "_group")

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group
        self._entered: list[Any] = []

    @names_call("Strategy.scope")
    def __enter__(self) -> Strategy:
        require_cross_replica(self._group)
        # A scope in a scope changes nothing, so that it may be left after the outer one, as by a
        # generator that is closed late. A token could be reset only where it was made.
        is_outside = contexts.current.get() is None and not self._group.is_default
        here = AcrossReplicas(self._group) if is_outside else None
        self._entered.append(here)
        if here is not None:
            contexts.current.set(here)
        return self._group.strategy

    def __exit__(self, *_: object) -> None:
        if contexts.current.get() is self._entered.pop():
            contexts.current.set(None)
