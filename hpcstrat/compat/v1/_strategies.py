"""The strategies with the methods of `tf.compat.v1.distribute`, and `StrategyExtended` with its."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any, final

from hpcstrat._core.call_name import current_call, names_call
from hpcstrat._core.types import ReduceOp
from hpcstrat._replicas.contexts import require_cross_replica
from hpcstrat._replicas.group import ReplicaGroup
from hpcstrat._strategies import strategies
from hpcstrat._strategies.base import Strategy
from hpcstrat._strategies.current import get_replica_context, get_strategy
from hpcstrat._strategies.extended import StrategyExtended
from hpcstrat.data import Dataset, DistributedDataset, InputContext, InputReplicationMode


@final
class MultiStepContext:
    """Takes outputs of the steps of `experimental_run_steps_on_iterator`, and returns them.

    Attributes:
        last_step_outputs: the outputs of the last step by name; arrays that were reduced, or else
            what was set.
        non_tensor_outputs: other outputs by name; what was set, or the values of all replicas in a
            tuple if replicas set it.
        run_op: `None`: the steps have been run.
    """

    def __init__(self) -> None:
        self.last_step_outputs: dict[str, Any] = {}
        self.non_tensor_outputs: dict[str, Any] = {}
        self.run_op: None = None

    @names_call("MultiStepContext.set_last_step_output")
    def set_last_step_output(
        self, name: str, output: Any, reduce_op: ReduceOp | str | None = None
    ) -> None:
        """Sets an output of the step; a later step replaces it.

        Collective with a `reduce_op`: all ranks call it.

        Args:
            name: the name of the output.
            output: with a `reduce_op`, what `Strategy.reduce` takes, and in a replica context this
                replica's array.
            reduce_op: reduces the output over the replicas.

        Raises:
            ValueError: there is no `reduce_op` in a replica context.

        Examples:
            >>> strategy = hs.compat.v1.MirroredStrategy()
            >>> context = hs.compat.v1.MultiStepContext()
            >>> with strategy.scope():
            ...     for step in 1, 2:
            ...         context.set_last_step_output("loss", strategy.run(lambda: step / 2), "SUM")
            >>> print(context.last_step_outputs["loss"])
            1.0
        """
        context = get_replica_context()
        if context is None:
            if reduce_op is not None:
                output = get_strategy().reduce(reduce_op, output, axis=None)
        elif reduce_op is None:
            raise ValueError(
                f"{current_call()}: reduce_op is None, and each replica has its own output "
                f"{name!r}; pass ReduceOp.SUM or ReduceOp.MEAN, or return the output from run and "
                "set it in the cross-replica context"
            )
        else:
            output = context.all_reduce(reduce_op, output)
        self.last_step_outputs[name] = output

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Sets an output of any type. Collective in a replica context.

        Examples:
            >>> context = hs.compat.v1.MultiStepContext()
            >>> strategy = hs.compat.v1.MirroredStrategy()
            >>> strategy.run(lambda: context.set_non_tensor_output("names", "of this replica"))
            >>> context.non_tensor_outputs  # of one replica
            {'names': ('of this replica',)}
        """
        context = get_replica_context()
        if context is not None:
            output = context.merge_call(
                lambda strategy, value: strategy.experimental_local_results(value), (output,)
            )
        self.non_tensor_outputs[name] = output


class StrategyExtendedV1(StrategyExtended):
    """`hpcstrat.StrategyExtended` with the method of version 1."""

    @names_call("StrategyExtended.experimental_run_steps_on_iterator")
    def experimental_run_steps_on_iterator(
        self,
        fn: Callable[[MultiStepContext, Any], Any],
        iterator: Any,
        iterations: int = 1,
        initial_loop_values: Any = None,
    ) -> MultiStepContext:
        """Runs `fn(context, inputs)` for each of the next elements of an iterator. Collective.

        Args:
            fn: a step in the cross-replica context, which calls `Strategy.run`, and sets outputs of
                the `MultiStepContext`.
            iterator: has `get_next()`, as those of `make_dataset_iterator`.
            iterations: the number of steps.
            initial_loop_values: ignored: the first step sets the outputs.

        Returns:
            The context, with the outputs of the last step.

        Raises:
            ValueError: `iterations` is less than 1.
            RuntimeError: called inside a replica function or the scope of another strategy.
            StopIteration: the iterator has fewer elements; the steps before have been run.

        Examples:
            >>> strategy = hs.compat.v1.MirroredStrategy()
            >>> iterator = strategy.make_dataset_iterator(hs.data.Dataset.range(6).batch(2))
            >>> iterator.initialize()
            >>> def step(context, batch):
            ...     total = strategy.run(np.sum, args=(batch,))
            ...     context.set_last_step_output("total", total, "SUM")
            >>> extended = strategy.extended
            >>> context = extended.experimental_run_steps_on_iterator(step, iterator, iterations=2)
            >>> print(context.last_step_outputs["total"])  # of the second batch, [2 3]
            5
        """
        del initial_loop_values
        require_cross_replica(self._group)
        if iterations < 1:
            raise ValueError(f"{current_call()}: iterations is {iterations}; it must be at least 1")
        context = MultiStepContext()
        with self._group.strategy.scope():
            for _ in range(iterations):
                fn(context, iterator.get_next())
        return context


class DistributedInputIterator:
    """Steps through a distributed dataset by hand. Collective: all ranks call its methods."""

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset
        self._iterator: Any = None

    def initialize(self) -> None:
        """Goes to the first element. Call it before `get_next`, and again to start over.

        Examples:
            >>> strategy = hs.compat.v1.MirroredStrategy()
            >>> iterator = strategy.make_dataset_iterator(hs.data.Dataset.range(2).batch(1))
            >>> for epoch in range(2):
            ...     iterator.initialize()  # starts over
            ...     print(iterator.get_next())
            [0]
            [0]
        """
        self._iterator = iter(self._dataset)

    def get_next(self) -> Any:
        """The next element, a nest of distributed values.

        Raises:
            RuntimeError: `initialize` has not been called.
            StopIteration: the iteration is over.

        Examples:
            >>> strategy = hs.compat.v1.MirroredStrategy()
            >>> iterator = strategy.make_dataset_iterator(hs.data.Dataset.range(4).batch(2))
            >>> iterator.initialize()
            >>> print(iterator.get_next(), iterator.get_next())
            [0 1] [2 3]
        """
        if self._iterator is None:
            raise RuntimeError(
                "DistributedInputIterator.get_next was called before initialize; call initialize() "
                "first"
            )
        return next(self._iterator)


class _V1Methods(Strategy):
    """The methods that the strategies of version 1 add."""

    def _connect(self, group: ReplicaGroup) -> None:
        super()._connect(group)
        self._extended: StrategyExtendedV1 = StrategyExtendedV1(group)

    @property
    def extended(self) -> StrategyExtendedV1:
        """More methods, for libraries built on strategies.

        Examples:
            >>> type(hs.compat.v1.MirroredStrategy().extended)
            <class 'hpcstrat.compat.v1.StrategyExtended'>
        """
        return self._extended

    def make_dataset_iterator(self, dataset: Any) -> DistributedInputIterator:
        """An iterator over a dataset batched by the global batch size. Collective.

        Examples:
            >>> strategy = hs.compat.v1.MirroredStrategy()
            >>> iterator = strategy.make_dataset_iterator(hs.data.Dataset.range(6).batch(3))
            >>> iterator.initialize()
            >>> print(strategy.experimental_run(lambda x: x.sum(), iterator))
            3
        """
        return DistributedInputIterator(self.experimental_distribute_dataset(dataset))

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Any],
        replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
    ) -> DistributedInputIterator:
        """An iterator over the dataset of `input_fn(InputContext)`, batched per replica.

        Collective.

        Args:
            input_fn: returns a dataset, batched by the batch size of a replica; or a function
                without arguments that returns an element per call, until it raises `StopIteration`.
                Every rank calls it for the elements of all replicas.
            replication_mode: `PER_WORKER`.

        Raises:
            ValueError: a mode other than `PER_WORKER`.

        Examples:
            >>> strategy = hs.compat.v1.MirroredStrategy()
            >>> def input_fn(context):
            ...     return hs.data.Dataset.range(8).batch(8 // context.num_replicas_in_sync)
            >>> iterator = strategy.make_input_fn_iterator(input_fn)
            >>> iterator.initialize()
            >>> print(iterator.get_next())
            [0 1 2 3 4 5 6 7]
        """
        if replication_mode is not InputReplicationMode.PER_WORKER:
            raise ValueError(
                f"{type(self).__name__}.make_input_fn_iterator: replication_mode is "
                f"{replication_mode!r}; it must be InputReplicationMode.PER_WORKER"
            )

        def dataset_fn(context: InputContext) -> Any:
            result = input_fn(context)
            # A dataset may be callable too; it is the one that can be iterated over.
            if not callable(result) or hasattr(result, "__iter__"):
                return result
            # Not a generator expression, which makes a RuntimeError of `StopIteration`.
            return Dataset.from_generator(lambda: map(lambda _: result(), itertools.count()))

        return DistributedInputIterator(self.distribute_datasets_from_function(dataset_fn))

    def experimental_run(
        self, fn: Callable[..., Any], input_iterator: DistributedInputIterator | None = None
    ) -> Any:
        """`Strategy.run` of `fn` on the next element of the iterator, or without an argument.

        Raises:
            StopIteration: the iterator has no further element.

        Examples:
            >>> strategy = hs.compat.v1.MirroredStrategy()
            >>> strategy.experimental_run(lambda: "no iterator, no argument")
            'no iterator, no argument'
        """
        return self.run(fn, args=() if input_iterator is None else (input_iterator.get_next(),))

    def reduce(
        self, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None = None
    ) -> Any:
        """`Strategy.reduce`, elementwise over the replicas unless told. Collective.

        Examples:
            >>> strategy = hs.compat.v1.MirroredStrategy()
            >>> print(strategy.reduce("SUM", strategy.run(lambda: np.arange(3))))  # axis=None
            [0 1 2]
        """
        return super().reduce(reduce_op, value, axis)

    def update_config_proto(self, config_proto: Any) -> Any:
        """A deep copy of `config_proto`: a strategy has nothing to set in it.

        Examples:
            >>> config = {"allow_growth": True}
            >>> hs.compat.v1.MirroredStrategy().update_config_proto(config) is config
            False
        """
        return copy.deepcopy(config_proto)

    def experimental_make_numpy_dataset(self, numpy_input: Any, session: Any = None) -> Dataset:
        """A dataset of the slices of a nest of arrays along their first, equal dimension.

        Examples:
            >>> strategy = hs.compat.v1.MirroredStrategy()
            >>> for element in strategy.experimental_make_numpy_dataset(np.array([3, 5])):
            ...     print(element)
            3
            5
        """
        del session
        return super().experimental_make_numpy_dataset(numpy_input)


@final
class CentralStorageStrategyV1(_V1Methods, strategies.CentralStorageStrategy):
    """`hpcstrat.CentralStorageStrategy` with the methods of version 1."""


@final
class MirroredStrategyV1(_V1Methods, strategies.MirroredStrategy):
    """`hpcstrat.MirroredStrategy` with the methods of version 1."""


@final
class OneDeviceStrategyV1(_V1Methods, strategies.OneDeviceStrategy):
    """`hpcstrat.OneDeviceStrategy` with the methods of version 1.

    Examples:
        >>> import numpy as np
        >>> from hpcstrat.compat import v1
        >>> strategy = v1.OneDeviceStrategy("CPU:0")
        >>> dataset = strategy.experimental_make_numpy_dataset(np.arange(4)).batch(2)
        >>> iterator = strategy.make_dataset_iterator(dataset)
        >>> iterator.initialize()
        >>> [strategy.experimental_run(lambda x: 2 * x, iterator).tolist() for _ in range(2)]
        [[0, 2], [4, 6]]
    """
