"""The strategies with the methods of `tf.compat.v1.distribute`."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any, final

from hpcstrat._core.types import ReduceOp
from hpcstrat._strategies.base import Strategy
from hpcstrat._strategies.central_storage import CentralStorageStrategy
from hpcstrat._strategies.mirrored import MirroredStrategy
from hpcstrat._strategies.one_device import OneDeviceStrategy
from hpcstrat.data import Dataset, DistributedDataset, InputContext, InputReplicationMode


class DistributedInputIterator:
    """Steps through a distributed dataset by hand. Collective: all ranks call its methods."""

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset
        self._iterator: Any = None

    def initialize(self) -> None:
        """Goes to the first element. Call it before `get_next`, and again to start over."""
        self._iterator = iter(self._dataset)

    def get_next(self) -> Any:
        """The next element, a nest of distributed values.

        Raises:
            RuntimeError: `initialize` has not been called.
            StopIteration: the iteration is over.
        """
        if self._iterator is None:
            raise RuntimeError(
                "DistributedInputIterator.get_next was called before initialize; call initialize() "
                "first"
            )
        return next(self._iterator)


class _V1Methods(Strategy):
    """The methods that the strategies of version 1 add."""

    def make_dataset_iterator(self, dataset: Any) -> DistributedInputIterator:
        """An iterator over a dataset batched by the global batch size. Collective."""
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
        """
        return self.run(fn, args=() if input_iterator is None else (input_iterator.get_next(),))

    def reduce(
        self, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None = None
    ) -> Any:
        """`Strategy.reduce`, elementwise over the replicas unless told. Collective."""
        return super().reduce(reduce_op, value, axis)

    def update_config_proto(self, config_proto: Any) -> Any:
        """A deep copy of `config_proto`: a strategy has nothing to set in it."""
        return copy.deepcopy(config_proto)

    def experimental_make_numpy_dataset(self, numpy_input: Any, session: Any = None) -> Dataset:
        """A dataset of the slices of a nest of arrays along their first, equal dimension."""
        del session
        return super().experimental_make_numpy_dataset(numpy_input)


@final
class CentralStorageStrategyV1(_V1Methods, CentralStorageStrategy):
    """`hpcstrat.CentralStorageStrategy` with the methods of version 1."""


@final
class MirroredStrategyV1(_V1Methods, MirroredStrategy):
    """`hpcstrat.MirroredStrategy` with the methods of version 1."""


@final
class OneDeviceStrategyV1(_V1Methods, OneDeviceStrategy):
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
