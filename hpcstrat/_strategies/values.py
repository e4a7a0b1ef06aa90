"""The methods of a strategy that reduce, gather or make the replicas' values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcstrat._calls.collective import collective
from hpcstrat._calls.records import signature_of
from hpcstrat._core import nests
from hpcstrat._core.arrays import as_array
from hpcstrat._core.call_name import current_call, explained, names_call
from hpcstrat._core.types import DistributedValues, PerReplica, ReduceOp, ValueContext, component_of
from hpcstrat._replicas import contexts
from hpcstrat._replicas.contexts import AcrossReplicas, check_cross_replica
from hpcstrat._replicas.group import ReplicaGroup
from hpcstrat._strategies import exchange, reduction
from hpcstrat._strategies.leaves import as_numeric, convert_foreign_leaves, require_same_structure
from hpcstrat._strategies.transfer import from_wire, to_wire

_LOGICAL_DEVICES = 1
"""The logical devices per replica. TensorFlow has methods for several."""


class ValueMethods:
    """The part of `Strategy` that reduces, gathers and makes values; `Strategy` sets the group."""

    _group: ReplicaGroup

    @collective("Strategy.reduce", check_cross_replica)
    def reduce(
        self, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None
    ) -> Any:
        """Reduces the replicas' values to one value, the same on every rank.

        Collective: all ranks call this.

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
            RuntimeError: called inside a replica function or the scope of another strategy.
            TypeError: a leaf is not a numeric array, or its dtype does not support the reduction.
            ValueError: an axis does not exist, or a plain value other than zero is summed over
                several replicas.
            ReplicaMismatchError: shapes or dtypes differ between replicas.

        Examples:
            With one replica; two would have `[0 1 2 3]` and `[4 5 6 7]`, whose sums are
            `[4 6 8 10]` and 28:

            >>> import hpcstrat as hs
            >>> strategy = hs.CentralStorageStrategy()
            >>> dataset = hs.data.Dataset.range(8).batch(8)
            >>> for x in strategy.experimental_distribute_dataset(dataset):
            ...     result = strategy.run(lambda value: value, args=(x,))
            >>> print(strategy.reduce(hs.ReduceOp.SUM, result, axis=None))
            [0 1 2 3 4 5 6 7]
            >>> print(strategy.reduce(hs.ReduceOp.SUM, result, axis=0))
            28
            >>> print(strategy.reduce(hs.ReduceOp.MEAN, result, axis=0))
            3.5
        """
        return reduction.reduce(self._group.communicator, reduce_op, value, axis)

    @collective("Strategy.gather", check_cross_replica)
    def gather(self, value: Any, axis: int) -> Any:
        """Concatenates the replicas' values along `axis`, in replica order.

        Collective: all ranks call this.

        Args:
            value: a distributed value, or a nest of them, of arrays with at least one dimension.
                Sizes may differ along `axis` only. A plain array is returned as it is.
            axis: the axis; a negative one counts from the end.

        Returns:
            A nest like `value` of plain arrays, the same on every rank.

        Raises:
            RuntimeError: called inside a replica function or the scope of another strategy.
            NotImplementedError: a leaf is an `IndexedSlices`.
            ReplicaMismatchError: the shapes do not match; the message lists every replica's.

        Examples:
            With one replica; with two the shapes would be (2, 2, 3), (1, 4, 3) and (1, 2, 6):

            >>> import numpy as np
            >>> import hpcstrat as hs
            >>> strategy = hs.CentralStorageStrategy()
            >>> array = np.array([[[0, 1, 2], [3, 4, 5]]])
            >>> value = strategy.experimental_distribute_values_from_function(
            ...     lambda context: array + context.replica_id_in_sync_group)
            >>> for axis in (0, 1, 2):
            ...     print(strategy.gather(value, axis).shape)
            (1, 2, 3)
            (1, 2, 3)
            (1, 2, 3)
        """
        return exchange.gather(self._group.communicator, value, axis)

    @names_call("Strategy.experimental_local_results")
    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """The components of this worker's replicas.

        Collective, except in a replica function: all ranks call this.

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
        leaves, structure = nests.flatten(value)
        indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, DistributedValues)]
        # This rank has nothing to send, but another may have: the ranks must agree, not wait.
        if not any(isinstance(leaf, PerReplica) for leaf in leaves) and _is_cross_replica():
            require_same_structure(self._group.communicator, structure)
        if not indices:
            return (convert_foreign_leaves(value),)
        own = [component_of(leaves[i]) for i in indices]
        if any(isinstance(leaf, PerReplica) for leaf in leaves):
            with self._group.on_stream():
                with self._group.communicator.raise_together():
                    # Sent to all ranks: each returns the components of its worker's replicas.
                    packed = to_wire(own)
                    at = [f"distributed at {indices}"] if len(indices) < len(leaves) else []
                    by_rank = self._group.communicator.all_gather_obj(
                        packed, nests.describe(structure), *at
                    )
                    by_rank = [
                        from_wire(by_rank[rank], self._group.stream)
                        for rank in self._group.workers.peers
                    ]
        else:
            by_rank = [own] * len(self._group.workers.peers)
        results = []
        for components in by_rank:
            nest = list(leaves)
            for i, component in zip(indices, components, strict=True):
                nest[i] = component
            results.append(structure.unflatten(nest))
        return tuple(results)

    @collective("Strategy.experimental_distribute_values_from_function", check_cross_replica)
    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """Makes distributed values, calling `value_fn(ValueContext)` on each replica.

        Collective: all ranks call this; an exception of one replica is raised on all.

        Args:
            value_fn: returns this replica's component, a nest of arrays or of values that become
                arrays.

        Returns:
            The nest with `PerReplica` leaves; with one replica, plain leaves.

        Raises:
            TypeError: a leaf is not a numeric array and cannot become one.
            ReplicaMismatchError: the replicas' nests differ in structure.

        Examples:
            With one replica: a constant, an element chosen by the replica's index, and a computed
            value:

            >>> import hpcstrat as hs
            >>> strategy = hs.CentralStorageStrategy()
            >>> constant = strategy.experimental_distribute_values_from_function(
            ...     lambda context: 1.0)
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
        communicator = self._group.communicator
        make = explained(value_fn, "value_fn is called with a ValueContext")
        nest = make(ValueContext(communicator.rank, communicator.size))
        leaves, structure = nests.flatten(nest)
        leaves = [self._own_value(leaf) for leaf in leaves]
        communicator.exchange(signature_of(current_call(), nests.describe(structure)))
        if communicator.size > 1:
            leaves = [PerReplica(leaf, communicator.rank, communicator.size) for leaf in leaves]
        return structure.unflatten(leaves)

    def _own_value(self, value: Any) -> Any:
        """A number as it is, any other value as an array on this replica's device."""
        if isinstance(value, (np.generic, bool, int, float, complex)):
            return value
        is_array = isinstance(value, np.ndarray)
        array = as_array(current_call(), value, on_gpu=True) if is_array else as_numeric(value)
        if self._group.stream is None or not isinstance(array, np.ndarray):
            return array
        with self._group.stream.current():
            return self._group.stream.xp.asarray(array)

    # ---- logical devices

    def experimental_assign_to_logical_device(self, tensor: Any, logical_device_id: int) -> Any:
        """Returns `tensor`, which is already on the replica's only logical device, number 0.

        Raises:
            ValueError: `logical_device_id` is not 0.

        Examples:
            >>> hs.CentralStorageStrategy().experimental_assign_to_logical_device(np.arange(3), 0)
            array([0, 1, 2])
        """
        if not 0 <= logical_device_id < _LOGICAL_DEVICES:
            raise ValueError(
                "Strategy.experimental_assign_to_logical_device: there is no logical device "
                f"{logical_device_id}; a replica has one, so pass 0"
            )
        return tensor

    def experimental_split_to_logical_devices(
        self, tensor: Any, partition_dimensions: Sequence[int]
    ) -> Any:
        """Returns `tensor` whole, because a replica has one logical device.

        Args:
            tensor: an array.
            partition_dimensions: the number of parts along each dimension; each must be 1.

        Raises:
            ValueError: the number of entries is not the number of dimensions, their product is not
                the number of logical devices, or an entry does not divide its dimension.

        Examples:
            >>> image = np.zeros((1, 28, 28))
            >>> strategy = hs.CentralStorageStrategy()
            >>> strategy.experimental_split_to_logical_devices(image, [1, 1, 1]) is image
            True
        """
        call = "Strategy.experimental_split_to_logical_devices"
        shape = np.shape(tensor)
        parts = list(partition_dimensions)
        # TensorFlow's checks, though there is one logical device only: a program for several must
        # not run as if it had them.
        if len(parts) != len(shape):
            raise ValueError(
                f"{call}: partition_dimensions is {parts}; it must have {len(shape)} entries, as "
                f"many as the shape {shape}"
            )
        if math.prod(parts) != _LOGICAL_DEVICES:
            raise ValueError(
                f"{call}: partition_dimensions is {parts}, which makes {math.prod(parts)} parts; "
                "for the replica's only logical device all must be 1"
            )
        if any(part < 1 or size % part for size, part in zip(shape, parts, strict=True)):
            raise ValueError(
                f"{call}: partition_dimensions is {parts}; it must divide the shape {shape}"
            )
        return tensor

    def experimental_replicate_to_logical_devices(self, tensor: Any) -> Any:
        """Returns `tensor`, which is already on every logical device of the replica.

        Examples:
            >>> hs.CentralStorageStrategy().experimental_replicate_to_logical_devices(np.arange(3))
            array([0, 1, 2])
        """
        return tensor


def _is_cross_replica() -> bool:
    context = contexts.context()
    return context is None or type(context) is AcrossReplicas
