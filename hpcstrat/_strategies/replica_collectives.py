"""The collective methods of a replica context, by which replicas communicate."""

from __future__ import annotations

import abc
import operator
from collections.abc import Callable, Sequence
from typing import Any

from hpcstrat._calls.collective import collective
from hpcstrat._core.types import ReduceOp
from hpcstrat._replicas.group import ReplicaGroup
from hpcstrat._strategies import exchange, reduction

_REQUIRE: Callable[[Any], None] = operator.methodcaller("_require")


class ReplicaCollectives(abc.ABC):
    """The part of `ReplicaContext` that communicates; `ReplicaContext` sets the group."""

    __slots__ = ()

    _group: ReplicaGroup

    @abc.abstractmethod
    def _require(self) -> None:
        """Refuses a call outside the replica function that this context belongs to."""

    @collective("ReplicaContext.all_reduce", _REQUIRE)
    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: Any = None) -> Any:
        """Reduces `value` elementwise over all replicas. Collective: all replicas call this.

        Args:
            reduce_op: a `ReduceOp` or its name.
            value: a nest of arrays or numbers, of equal shapes and dtypes on all replicas. They are
                sent in one message.
            options: ignored; accepted for compatibility with TensorFlow.

        Returns:
            A nest like `value`, the same on every replica. Sums of integers keep their dtype. Means
            of integers over several replicas are `float32` for up to 16 bits, `float64` for more.

        Raises:
            RuntimeError: called outside a replica function. With one rank, calls outside all scopes
                are allowed.
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
        return reduction.all_reduce(self._group.communicator, reduce_op, value)

    @collective("ReplicaContext.all_gather", _REQUIRE)
    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Concatenates `value` over all replicas along `axis`, in replica order.

        Collective: all replicas call this.

        Args:
            value: a nest of arrays with at least one dimension; sizes may differ along `axis` only.
            axis: the axis; a negative one counts from the end.
            options: ignored; accepted for compatibility with TensorFlow.

        Returns:
            A nest like `value`, the same on every replica.

        Raises:
            RuntimeError: called outside a replica function. With one rank, calls outside all scopes
                are allowed.
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
        return exchange.all_gather(self._group.communicator, value, axis)

    @collective("ReplicaContext.broadcast", _REQUIRE)
    def broadcast(self, value: Any, root: int = 0) -> Any:
        """Copies `value` from replica `root` to all replicas. Collective: all replicas call this.

        Args:
            value: a nest of arrays or numbers, of equal structure, shapes and dtypes on all
                replicas. Only the root's values are used. For other objects there is
                `hpcstrat.broadcast_object`.
            root: the index of the replica whose value is sent.

        Returns:
            A new nest like `value`, the same on every replica.

        Raises:
            RuntimeError: called outside a replica function. With one rank, calls outside all scopes
                are allowed.
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
        return exchange.broadcast(self._group.communicator, value, root)

    @collective("ReplicaContext.reduce_scatter", _REQUIRE)
    def reduce_scatter(self, reduce_op: ReduceOp | str, value: Any, axis: int = 0) -> Any:
        """Returns this replica's part of the result of `all_reduce`. Collective.

        All replicas call this. It needs half the communication of `all_reduce`, because each
        replica receives only its own part.

        Args:
            reduce_op: a `ReduceOp` or its name.
            value: a nest of arrays, of equal shapes and dtypes on all replicas. They are sent
                together.
            axis: the axis along which each array is split, as evenly as possible. The parts are
                those of `numpy.array_split`: replica r gets part r, and `all_gather` along this
                axis joins them.

        Returns:
            A nest like `value`, with the dtypes of `all_reduce`.

        Raises:
            RuntimeError: called outside a replica function. With one rank, calls outside all scopes
                are allowed.
            TypeError: a leaf is not a numeric array, its dtype does not support the reduction, or
                `axis` is not an int.
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
        return exchange.reduce_scatter(self._group.communicator, reduce_op, value, axis)

    @collective("ReplicaContext.scan", _REQUIRE)
    def scan(self, reduce_op: ReduceOp | str, value: Any, inclusive: bool = False) -> Any:
        """Reduces `value` elementwise over the replicas before this one, in replica order.

        Collective: all replicas call this. With `"SUM"` of the sizes of the replicas' parts, each
        gets the offset of its own. Every replica receives all values, so they should be small.

        Args:
            reduce_op: `"SUM"`, `"MIN"` or `"MAX"`.
            value: a nest of arrays or numbers, of equal shapes and dtypes on all replicas.
            inclusive: whether the replica's own value counts too. Then it is the prefix reduction
                of NumPy's `cumsum`, and the last replica has the result of `all_reduce`.

        Returns:
            A nest like `value`. Without `inclusive` the first replica has the neutral elements, 0
            for sums, the highest or infinity for minima, the lowest or -infinity for maxima.

        Raises:
            RuntimeError: called outside a replica function. With one rank, calls outside all scopes
                are allowed.
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
        return exchange.scan(self._group.communicator, reduce_op, value, inclusive)

    @collective("ReplicaContext.all_to_all", _REQUIRE)
    def all_to_all(self, values: Sequence[Any]) -> list[Any]:
        """Sends each replica a different value. Collective: all replicas call this.

        Args:
            values: a list or tuple with one nest of arrays per replica, in replica order. Shapes
                may differ, and an array may be empty. Structures and dtypes must be equal for all
                replicas, and on all replicas.

        Returns:
            A list of the values that the replicas sent to this replica, in replica order.

        Raises:
            RuntimeError: called outside a replica function. With one rank, calls outside all scopes
                are allowed.
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
        return exchange.all_to_all(self._group.communicator, values)

    @collective("ReplicaContext.neighbor_exchange", _REQUIRE)
    def neighbor_exchange(
        self, to_left: Any, to_right: Any, periodic: bool = False
    ) -> tuple[Any, Any]:
        """Sends a value to each neighbor, such as the edges of this replica's part of a grid.

        Collective: all replicas call this. Replica r has the left neighbor r - 1 and the right
        neighbor r + 1.

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
            RuntimeError: called outside a replica function. With one rank, calls outside all scopes
                are allowed.
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
        return exchange.neighbor_exchange(self._group.communicator, to_left, to_right, periodic)
