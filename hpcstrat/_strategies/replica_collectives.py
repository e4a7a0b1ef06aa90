"""The methods of a replica context by which replicas communicate."""

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
    """A part of `ReplicaContext`, which has its group."""

    __slots__ = ()

    _group: ReplicaGroup

    @abc.abstractmethod
    def _require(self) -> None:
        """Refuses a call outside of the replica function that was given this context."""

    @collective("ReplicaContext.all_reduce", _REQUIRE)
    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: Any = None) -> Any:
        """Reduces `value` elementwise over all replicas. Collective: all replicas call this.

        Args:
            reduce_op: a `ReduceOp` or its name.
            value: a nest of arrays or numbers, of equal shapes and dtypes on all replicas, sent in
                one message.
            options: ignored; accepted for compatibility with TensorFlow.

        Returns:
            A nest like `value`, the same on every replica; integers keep their dtype in a sum.
            Their mean over several replicas is `float32` of up to 16 bits, `float64` of more.

        Raises:
            RuntimeError: called outside the replica context, or outside every strategy with several
                ranks.
            TypeError: a leaf is not an array of numbers, or its dtype does not support the
                reduction.
            ReplicaMismatchError: shapes or dtypes differ between replicas.
        """
        del options
        return reduction.all_reduce(self._group.communicator, reduce_op, value)

    @collective("ReplicaContext.all_gather", _REQUIRE)
    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Concatenates `value` over all replicas along `axis`, in replica order.

        Collective: all replicas call this.

        Args:
            value: a nest of arrays with at least one dimension; sizes may differ along `axis` only.
            axis: the axis, counted from the end where negative.
            options: ignored; accepted for compatibility with TensorFlow.

        Returns:
            A nest like `value`, the same on every replica.

        Raises:
            RuntimeError: called outside the replica context, or outside every strategy with several
                ranks.
            NotImplementedError: a leaf is an `IndexedSlices`.
            ReplicaMismatchError: the shapes do not match; the message lists every replica's.
        """
        del options
        return reduction.all_gather(self._group.communicator, value, axis)

    @collective("ReplicaContext.broadcast", _REQUIRE)
    def broadcast(self, value: Any, root: int = 0) -> Any:
        """A copy of `value` of replica `root`. Collective: all replicas call this.

        Args:
            value: a nest of arrays or numbers, of one structure and one set of shapes and dtypes on
                all replicas. Only the root's numbers count. `hpcstrat.broadcast_object` sends what
                has no such shape.
            root: the index of the replica whose value counts.

        Returns:
            A nest like `value`, fresh and the same on every replica.

        Raises:
            RuntimeError: called outside of the replica context; outside of every strategy there are
                several ranks.
            TypeError: a leaf is no array of numbers.
            ValueError: there is no replica `root`.
            ReplicaMismatchError: shapes, dtypes or `root` differ between replicas.
        """
        return exchange.broadcast(self._group.communicator, value, root)

    @collective("ReplicaContext.reduce_scatter", _REQUIRE)
    def reduce_scatter(self, reduce_op: ReduceOp | str, value: Any, axis: int = 0) -> Any:
        """This replica's part of what `all_reduce` gives; together they are all of it. Collective.

        It takes half of the communication of `all_reduce`: nobody gets what is another replica's
        part.

        Args:
            reduce_op: a `ReduceOp` or its name.
            value: a nest of arrays, of equal shapes and dtypes on all replicas. They travel
                together.
            axis: the axis along which each array is split, as evenly as can be: `numpy.array_split`
                has the same parts, of which replica r gets number r, and `all_gather` along this
                axis joins them.

        Returns:
            A nest like `value`, of the dtypes that `all_reduce` gives.

        Raises:
            RuntimeError: called outside of the replica context; outside of every strategy there are
                several ranks.
            TypeError: a leaf is no array of numbers, or its dtype cannot be reduced so; `axis` is
                no int.
            ValueError: an array without that axis.
            ReplicaMismatchError: shapes, dtypes or arguments differ between replicas.
        """
        return exchange.reduce_scatter(self._group.communicator, reduce_op, value, axis)

    @collective("ReplicaContext.all_to_all", _REQUIRE)
    def all_to_all(self, values: Sequence[Any]) -> list[Any]:
        """Sends each replica a value of its own. Collective: all replicas call this.

        Args:
            values: a list, or tuple, of a nest of arrays for each replica, in replica order. Shapes
                may differ, and an array may be empty; structures and dtypes are equal for all
                replicas and on all of them.

        Returns:
            A list of what each replica has sent to this one, in replica order.

        Raises:
            RuntimeError: called outside of the replica context; outside of every strategy there are
                several ranks.
            TypeError: a leaf is no array of numbers.
            ValueError: `values` has not one value for each replica, or they differ in more than
                shapes.
            ReplicaMismatchError: structures or dtypes differ between replicas.
        """
        return exchange.all_to_all(self._group.communicator, values)

    @collective("ReplicaContext.neighbor_exchange", _REQUIRE)
    def neighbor_exchange(
        self, to_left: Any, to_right: Any, periodic: bool = False
    ) -> tuple[Any, Any]:
        """Sends a value to each neighbor, such as the edges of a part of a grid.

        Collective: all replicas call this.

        The left neighbor of replica r is r - 1, the right one r + 1.

        Args:
            to_left: a nest of arrays or numbers for the left neighbor; `None` sends nothing. Shapes
                may differ between replicas; structures and dtypes are equal on all of them, also
                where there is no such neighbor.
            to_right: likewise, for the right neighbor.
            periodic: whether the first replica and the last one are neighbors.

        Returns:
            What the left neighbor has sent, as `to_right`, and what the right one has, as
            `to_left`; `None` where there is no neighbor.

        Raises:
            RuntimeError: called outside of the replica context; outside of every strategy there are
                several ranks.
            TypeError: a leaf is no array of numbers.
            ReplicaMismatchError: structures, dtypes or `periodic` differ between replicas.
        """
        return exchange.neighbor_exchange(self._group.communicator, to_left, to_right, periodic)
