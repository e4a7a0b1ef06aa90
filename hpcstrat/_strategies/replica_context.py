"""The context of a replica: which replica it is, and its calls outside collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hpcstrat._agreement.collective import collective
from hpcstrat._agreement.records import signature_of
from hpcstrat._core import nests
from hpcstrat._core.call_name import current_call, names_call
from hpcstrat._core.types import ReduceOp, select
from hpcstrat._replicas import contexts
from hpcstrat._replicas.contexts import AcrossReplicas, InReplica, check_arguments
from hpcstrat._replicas.group import ReplicaGroup
from hpcstrat._strategies import collectives, reduce
from hpcstrat._strategies.base import Strategy
from hpcstrat._strategies.transfer import regroup
from hpcstrat._transports.connection import count_ranks


def _check_own(context: ReplicaContext) -> None:
    """Refuses a call outside of the context of this replica."""
    here = contexts.current.get()
    # Outside every scope each process is the only replica of the default strategy.
    if here is None:
        is_own = context.replica_group.is_default
    else:
        is_own = isinstance(here, InReplica) and here.group is context.replica_group
    if not is_own:
        raise RuntimeError(
            f"{current_call()} was called outside of its replica context; call it inside the "
            "function that Strategy.run runs"
        )
    # The default strategy has one replica: a sum would silently be this rank's own value.
    if here is None and (ranks := count_ranks()) > 1:
        raise RuntimeError(
            f"{current_call()} was called outside of Strategy.run, where each of the {ranks} "
            "ranks is alone; call it inside the function that strategy.run runs, or use "
            "strategy.reduce and strategy.gather"
        )


class ReplicaContext:
    """Tells a replica function which replica it is, and lets it communicate with the others.

    `hpcstrat.get_replica_context()` returns it inside `Strategy.run`. All replicas call the methods
    marked collective; these raise `RuntimeError` outside of the replica function, except, with one
    rank, outside all scopes.

    Examples:
        With one replica; of two, the second prints `1 of 2` and the sum is 3:

        >>> import hpcstrat as hs
        >>> strategy = hs.CentralStorageStrategy()
        >>> def step():
        ...     context = hs.get_replica_context()
        ...     print(context.rank, "of", context.num_replicas_in_sync)
        ...     return context.all_reduce("SUM", 1 + context.rank)
        >>> print(strategy.run(step))
        0 of 1
        1
    """

    __slots__ = ("replica_group",)

    def __init__(self, group: ReplicaGroup) -> None:
        self.replica_group: ReplicaGroup = group

    @property
    def strategy(self) -> Strategy:
        """The strategy that runs this replica."""
        return self.replica_group.strategy

    @property
    def replica_id_in_sync_group(self) -> int:
        """The index of this replica, from 0 to `num_replicas_in_sync - 1`."""
        return self.replica_group.communicator.rank

    @property
    def rank(self) -> int:
        """`replica_id_in_sync_group`, by its short name."""
        return self.replica_group.communicator.rank

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas."""
        return self.replica_group.communicator.size

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of this replica, as a tuple of one canonical string."""
        return (str(self.replica_group.device),)

    @names_call("ReplicaContext.merge_call")
    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs `merge_fn(strategy, *args, **kwargs)` in the cross-replica context. Collective.

        Args:
            merge_fn: the function to run on every rank, with the leaves of `args` and `kwargs` as
                `PerReplica` values.
            args: positional arguments, a tuple of nests.
            kwargs: keyword arguments, nests.

        Returns:
            This replica's component of the result of `merge_fn`.

        Raises:
            TypeError: `merge_fn` is not callable, or `args` is not a tuple or list.

        Examples:
            With several replicas `value` is a `PerReplica`, and each gets the sum of all:

            >>> strategy = hs.CentralStorageStrategy()
            >>> def total(strategy, value):
            ...     return strategy.reduce("SUM", value, axis=0)
            >>> def step(value):
            ...     return hs.get_replica_context().merge_call(total, args=(value,))
            >>> parts = strategy.scatter(np.array([1.0, 2.0, 3.0]))
            >>> print(strategy.run(step, args=(parts,)))
            6.0
        """
        _check_own(self)
        check_arguments(merge_fn, args)
        # `args` and `kwargs` as one nest: it is flattened and compared once.
        given = (tuple(args), dict(kwargs or {}))
        _, structure = nests.flatten(given)
        # The function runs only after all replicas have called this with nests of one structure.
        self.replica_group.communicator.exchange(
            signature_of(current_call(), nests.describe(structure))
        )
        merged_args, merged_kwargs = regroup(self.replica_group, given)
        before = contexts.current.get()
        try:
            contexts.current.set(AcrossReplicas(self.replica_group))
            result = merge_fn(self.strategy, *merged_args, **merged_kwargs)
        finally:
            contexts.current.set(before)
        return select(result)

    def random_generator(self, seed: int) -> Any:
        """A random generator for this replica: `numpy.random.Generator`, or CuPy's on a GPU.

        One seed gives each replica an independent stream, and the same streams in every run of the
        program.

        Examples:
            Each replica has its own numbers, and the same ones each time it asks:

            >>> strategy = hs.OneDeviceStrategy("CPU:0")
            >>> def noise():
            ...     return hs.get_replica_context().random_generator(seed=7).integers(100, size=4)
            >>> print(strategy.run(noise), strategy.run(noise))
            [30 79 20  5] [30 79 20  5]
        """
        xp = self.replica_group.xp
        own = np.random.SeedSequence(entropy=seed, spawn_key=(self.replica_id_in_sync_group,))
        if xp is np:
            return np.random.default_rng(own)
        return xp.random.default_rng(int(own.generate_state(1, np.uint64)[0]))

    # ---- communication

    @collective(_check_own)
    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: Any = None) -> Any:
        """Reduces `value` elementwise over all replicas. Collective.

        Args:
            reduce_op: a `ReduceOp` or its name.
            value: a nest of arrays or numbers, of equal shapes and dtypes on all replicas. They are
                sent in one message.
            options: ignored; accepted for compatibility with TensorFlow.

        Returns:
            A nest like `value`, the same on every replica. Sums of integers keep their dtype. Means
            of integers over several replicas are `float32` for up to 16 bits, `float64` for more.

        Raises:
            TypeError: a leaf is not a numeric array, or its dtype does not support the reduction.
            ReplicaMismatchError: shapes or dtypes differ between replicas.

        Examples:
            With one replica; two would get `[2. 4.]` and 6:

            >>> strategy = hs.CentralStorageStrategy()
            >>> def step():
            ...     given = {"gradient": np.array([1.0, 2.0]), "count": 3}
            ...     return hs.get_replica_context().all_reduce("SUM", given)
            >>> totals = strategy.run(step)
            >>> print(totals["gradient"], totals["count"])
            [1. 2.] 3
        """
        del options
        return reduce.all_reduce(self.replica_group.communicator, reduce_op, value)

    @collective(_check_own)
    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Concatenates `value` over all replicas along `axis`, in replica order. Collective.

        Args:
            value: a nest of arrays with at least one dimension; sizes may differ along `axis` only.
            axis: the axis; a negative one counts from the end.
            options: ignored; accepted for compatibility with TensorFlow.

        Returns:
            A nest like `value`, the same on every replica.

        Raises:
            NotImplementedError: a leaf is an `IndexedSlices`.
            ReplicaMismatchError: the shapes do not match; the message lists every replica's.

        Examples:
            With one replica; with two, which have 1 and 2 rows, each would get 3 rows:

            >>> strategy = hs.CentralStorageStrategy()
            >>> def step():
            ...     context = hs.get_replica_context()
            ...     return context.all_gather(np.full((1 + context.rank, 2), context.rank), axis=0)
            >>> print(strategy.run(step))
            [[0 0]]
        """
        del options
        return collectives.all_gather(self.replica_group.communicator, value, axis)

    @collective(_check_own)
    def broadcast(self, value: Any, root: int = 0) -> Any:
        """Copies `value` from replica `root` to all replicas. Collective.

        Args:
            value: a nest of arrays or numbers, of equal structure, shapes and dtypes on all
                replicas. Only the root's values are used. For other objects there is
                `hpcstrat.broadcast_object`.
            root: the index of the replica whose value is sent.

        Returns:
            A new nest like `value`, the same on every replica.

        Raises:
            TypeError: a leaf is not a numeric array.
            ValueError: replica `root` does not exist.
            ReplicaMismatchError: shapes, dtypes or `root` differ between replicas.

        Examples:
            With any number of replicas, the numbers that replica 0 draws:

            >>> strategy = hs.OneDeviceStrategy("CPU:0")
            >>> def step():
            ...     context = hs.get_replica_context()
            ...     drawn = context.random_generator(seed=7).integers(100, size=4)
            ...     return context.broadcast(drawn, root=0)
            >>> print(strategy.run(step))
            [30 79 20  5]
        """
        return collectives.broadcast(self.replica_group.communicator, value, root)

    @collective(_check_own)
    def reduce_scatter(self, reduce_op: ReduceOp | str, value: Any, axis: int = 0) -> Any:
        """A slice of the result of `all_reduce`, which sends as much. Collective.

        Args:
            reduce_op: a `ReduceOp` or its name.
            value: a nest of arrays, of equal shapes and dtypes on all replicas.
            axis: the axis along which each result is split. Replica r gets part r of
                `numpy.array_split`; `all_gather` along this axis joins the parts.

        Returns:
            A nest like `value`, with the dtypes of `all_reduce`.

        Raises:
            TypeError: as `all_reduce`, or `axis` is not an int.
            ValueError: an array does not have that axis.
            ReplicaMismatchError: shapes, dtypes or arguments differ between replicas.

        Examples:
            With one replica; of two, the first would get `[0 2 4]` and the second `[6 8]`:

            >>> strategy = hs.CentralStorageStrategy()
            >>> def step():
            ...     return hs.get_replica_context().reduce_scatter("SUM", np.arange(5))
            >>> print(strategy.run(step))
            [0 1 2 3 4]
        """
        return collectives.reduce_scatter(self.replica_group.communicator, reduce_op, value, axis)

    @collective(_check_own)
    def scan(self, reduce_op: ReduceOp | str, value: Any, inclusive: bool = False) -> Any:
        """Reduces `value` elementwise over the replicas before this one, in order. Collective.

        With `"SUM"` of the sizes of the replicas' parts, each gets the offset of its own. Every
        replica receives all values, so they should be small.

        Args:
            reduce_op: `"SUM"`, `"MIN"` or `"MAX"`.
            value: a nest of arrays or numbers, of equal shapes and dtypes on all replicas.
            inclusive: whether the replica's own value counts too. Then it is the prefix reduction
                of NumPy's `cumsum`, and the last replica has the result of `all_reduce`.

        Returns:
            A nest like `value`. Without `inclusive` the first replica has the neutral elements, 0
            for sums, the highest or infinity for minima, the lowest or -infinity for maxima.

        Raises:
            TypeError: a leaf is not a numeric array, its dtype does not support the reduction, or
                `inclusive` is not a bool.
            ValueError: `reduce_op` is another operation.
            ReplicaMismatchError: shapes, dtypes or arguments differ between replicas.

        Examples:
            The offset of this replica's rows, and of the next one's; a second replica with 4 rows
            would print `4 8`:

            >>> strategy = hs.CentralStorageStrategy()
            >>> def step(rows):
            ...     context = hs.get_replica_context()
            ...     print(context.scan("SUM", rows), context.scan("SUM", rows, inclusive=True))
            >>> strategy.run(step, args=(4,))
            0 4
        """
        return collectives.scan(self.replica_group.communicator, reduce_op, value, inclusive)

    @collective(_check_own)
    def all_to_all(self, values: Sequence[Any]) -> list[Any]:
        """Sends each replica a different value. Collective.

        Args:
            values: a list or tuple with one nest of arrays per replica, in replica order. Shapes
                may differ, and an array may be empty. Structures and dtypes must be equal for all
                replicas, and on all replicas.

        Returns:
            A list of the values that the replicas sent to this replica, in replica order.

        Raises:
            TypeError: a leaf is not a numeric array.
            ValueError: `values` does not have one value per replica, or they differ in structure or
                dtypes.
            ReplicaMismatchError: structures or dtypes differ between replicas.

        Examples:
            From rows to columns. Two replicas, with a row each, would get half of the columns of
            both rows:

            >>> strategy = hs.CentralStorageStrategy()
            >>> def transpose(rows):
            ...     context = hs.get_replica_context()
            ...     columns = np.array_split(rows, context.num_replicas_in_sync, axis=1)
            ...     return np.concatenate(context.all_to_all(columns))
            >>> print(strategy.run(transpose, args=(np.arange(4).reshape(1, 4),)))
            [[0 1 2 3]]
        """
        return collectives.all_to_all(self.replica_group.communicator, values)

    @collective(_check_own)
    def neighbor_exchange(
        self, to_left: Any, to_right: Any, periodic: bool = False
    ) -> tuple[Any, Any]:
        """Sends each neighbor a value, such as an edge of this part of a grid. Collective.

        Replica r has the left neighbor r - 1 and the right neighbor r + 1.

        Args:
            to_left: a nest of arrays or numbers for the left neighbor; `None` sends nothing. Shapes
                may differ between replicas. Structures and dtypes must be equal on all replicas,
                including those without a left neighbor.
            to_right: the same for the right neighbor.
            periodic: whether the first and the last replica are neighbors.

        Returns:
            The left neighbor's `to_right` and the right neighbor's `to_left`; `None` in place of a
            neighbor that does not exist.

        Raises:
            TypeError: a leaf is not a numeric array.
            ReplicaMismatchError: structures, dtypes or `periodic` differ between replicas.

        Examples:
            One replica has no neighbor, or, in a periodic grid, is its own:

            >>> strategy = hs.CentralStorageStrategy()
            >>> def edges(periodic):
            ...     part = np.array([1.0, 2.0, 3.0])
            ...     return hs.get_replica_context().neighbor_exchange(part[:1], part[-1:], periodic)
            >>> print(*strategy.run(edges, args=(False,)))
            None None
            >>> print(*strategy.run(edges, args=(True,)))
            [3.] [1.]
        """
        return collectives.neighbor_exchange(
            self.replica_group.communicator, to_left, to_right, periodic
        )

    def __repr__(self) -> str:
        index, count = self.replica_id_in_sync_group, self.num_replicas_in_sync
        return f"ReplicaContext(replica {index} of {count})"
