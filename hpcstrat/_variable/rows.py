"""Writes rows and elements of a variable by their indices, without copying all of it."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from hpcstrat._communicators.reduction import check_reducible, mean_dtype
from hpcstrat._core.call_name import call_named, current_call
from hpcstrat._core.types import FIRST_REPLICA, Aggregation, Array, IndexedSlices, ReduceOp
from hpcstrat._replicas import contexts
from hpcstrat._replicas.contexts import InReplica, InUpdate
from hpcstrat._update.rows import combine_rows, row_view
from hpcstrat._variable.options import NO_AGGREGATION, OPERATIONS, VariableAggregation
from hpcstrat._variable.row_reads import ReadableByRows
from hpcstrat._variable.writing import RULES, SCATTERS, Scatter, as_castable_value

_Variable = TypeVar("_Variable", bound="WritableByRows")


class WritableByRows(ReadableByRows):
    """The part of `Variable` that writes its rows.

    Each `scatter_...` is collective, as `assign` is. In the cross-replica context it takes one
    value, the same on all ranks. In a replica context the replicas' rows are combined as in
    TensorFlow's mirrored variables: with `SUM` all are applied, with `MEAN` all are applied after
    division by the number of replicas, with `ONLY_FIRST_REPLICA` the first replica's are applied.
    If an index occurs several times, sums add up, products multiply, and the last update is used.
    """

    __slots__ = ("aggregation",)

    aggregation: VariableAggregation

    # ---- writing

    def scatter_add(
        self: _Variable,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> _Variable:
        """Adds values to some rows. Collective: all ranks call it.

        Args:
            sparse_delta: `indices` of rows, integers of any shape, and a row of `values` for each,
                whose dtype casts safely, or one number for all elements. If an index occurs several
                times, all its values are added.
            use_locking: ignored; accepted for compatibility with TensorFlow.
            name: ignored; accepted for compatibility with TensorFlow.

        Returns:
            The variable.

        Raises:
            TypeError: `sparse_delta` is not an `IndexedSlices`.
            ValueError: an index is out of range; the values have another shape, or a dtype that
                does not cast safely or that the operation does not take; an aggregation of `NONE`
                in a replica context. The variable is unchanged.
            NotImplementedError: the variable is `ON_READ`.
            RuntimeError: the variable belongs to another strategy than the caller's.
            ReplicaMismatchError: the replicas' calls differ.

        Examples:
            >>> table = hs.Variable(np.zeros((3, 2)))
            >>> rows = hs.IndexedSlices(np.array([[1.0, 2.0], [10.0, 20.0], [5.0, 5.0]]), [2, 2, 0])
            >>> table.scatter_add(rows).numpy()
            array([[ 5.,  5.],
                   [ 0.,  0.],
                   [11., 22.]])
        """
        return self._scatter("scatter_add", sparse_delta)

    def scatter_sub(
        self: _Variable,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> _Variable:
        """Subtracts values from some rows; otherwise as `scatter_add`. Collective.

        Examples:
            >>> v = hs.Variable(np.array([1.0, 2.0, 4.0]))
            >>> v.scatter_sub(hs.IndexedSlices([1.0, 1.0], [0, 2])).numpy()
            array([0., 2., 3.])
        """
        return self._scatter("scatter_sub", sparse_delta)

    def scatter_mul(
        self: _Variable,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> _Variable:
        """Multiplies some rows by values; otherwise as `scatter_add`. Collective.

        Examples:
            >>> v = hs.Variable(np.array([1.0, 2.0, 4.0]))
            >>> v.scatter_mul(hs.IndexedSlices([3.0, 5.0], [2, 2])).numpy()  # 4 * 3 * 5
            array([ 1.,  2., 60.])
        """
        return self._scatter("scatter_mul", sparse_delta)

    def scatter_div(
        self: _Variable,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> _Variable:
        """Divides some rows by values; otherwise as `scatter_add`. Collective.

        The values must not be 0, and the variable must not be of integers.

        Examples:
            >>> v = hs.Variable(np.array([1.0, 2.0, 4.0]))
            >>> v.scatter_div(hs.IndexedSlices(2.0, [1, 2])).numpy()
            array([1., 1., 2.])
        """
        return self._scatter("scatter_div", sparse_delta)

    def scatter_min(
        self: _Variable,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> _Variable:
        """Takes the minimum of some rows and values; otherwise as `scatter_update`. Collective.

        Examples:
            >>> v = hs.Variable(np.array([1.0, 2.0, 4.0]))
            >>> v.scatter_min(hs.IndexedSlices([3.0, 3.0], [1, 2])).numpy()
            array([1., 2., 3.])
        """
        return self._scatter("scatter_min", sparse_delta)

    def scatter_max(
        self: _Variable,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> _Variable:
        """Takes the maximum of some rows and values; otherwise as `scatter_update`. Collective.

        Examples:
            >>> v = hs.Variable(np.array([1.0, 2.0, 4.0]))
            >>> v.scatter_max(hs.IndexedSlices([3.0, 3.0], [1, 2])).numpy()
            array([1., 3., 4.])
        """
        return self._scatter("scatter_max", sparse_delta)

    def scatter_update(
        self: _Variable,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> _Variable:
        """Sets some rows; otherwise as `scatter_add`. Collective.

        If an index occurs several times, its last value is used. In a replica context the
        aggregation must be `ONLY_FIRST_REPLICA`; with `SUM` and `MEAN` it raises
        `NotImplementedError`, as in TensorFlow.

        Examples:
            >>> v = hs.Variable(np.array([1.0, 2.0, 4.0]))
            >>> v.scatter_update(hs.IndexedSlices([7.0, 8.0, 9.0], [0, 2, 2])).numpy()
            array([7., 2., 9.])
        """
        return self._scatter("scatter_update", sparse_delta)

    def scatter_nd_add(
        self: _Variable, indices: Any, updates: Any, name: str | None = None
    ) -> _Variable:
        """Adds values to elements, or to parts; otherwise as `scatter_add`. Collective.

        Args:
            indices: integers of shape `(..., k)`; each row is an index into the first k dimensions.
            updates: an array of shape `(*indices.shape[:-1], *shape[k:])`.
            name: ignored; accepted for compatibility with TensorFlow.

        Examples:
            >>> table = hs.Variable(np.zeros((2, 3)))
            >>> table.scatter_nd_add([[0, 1], [1, 2]], [5.0, 7.0]).numpy()  # elements
            array([[0., 5., 0.],
                   [0., 0., 7.]])
            >>> table.scatter_nd_add([[1]], [[1.0, 1.0, 1.0]]).numpy()  # a row
            array([[0., 5., 0.],
                   [1., 1., 8.]])
        """
        return self._scatter("scatter_nd_add", IndexedSlices(updates, indices))

    def scatter_nd_sub(
        self: _Variable, indices: Any, updates: Any, name: str | None = None
    ) -> _Variable:
        """Subtracts values from elements, or parts; otherwise as `scatter_nd_add`. Collective.

        Examples:
            >>> table = hs.Variable(np.ones((2, 3)))
            >>> table.scatter_nd_sub([[0, 1], [0, 1], [1, 2]], [1.0, 2.0, 1.0]).numpy()
            array([[ 1., -2.,  1.],
                   [ 1.,  1.,  0.]])
        """
        return self._scatter("scatter_nd_sub", IndexedSlices(updates, indices))

    def scatter_nd_update(
        self: _Variable, indices: Any, updates: Any, name: str | None = None
    ) -> _Variable:
        """Sets elements, or parts; otherwise as `scatter_nd_add`, `scatter_update`. Collective.

        Examples:
            >>> table = hs.Variable(np.ones((2, 3)))
            >>> table.scatter_nd_update([[0, 1], [1, 2]], [5.0, 7.0]).numpy()
            array([[1., 5., 1.],
                   [1., 1., 7.]])
        """
        return self._scatter("scatter_nd_update", IndexedSlices(updates, indices))

    def _scatter(self: _Variable, method: str, slices: Any) -> _Variable:
        with call_named(f"Variable.{method} of {self.name!r}"):
            state, context = self._state, contexts.context()
            group, communicator = state.group, state.group.communicator
            scatter = SCATTERS[method.rpartition("_")[2]]
            if isinstance(context, InUpdate):
                context.require_writable(self)
                with group.on_stream():
                    rows, values = self._parse_slices(method, scatter, slices)
                    rows, values = combine_rows(rows, values, scatter.combination)
                    self._scatter_alone(scatter, rows, values)
                return self
            state.require_writable()
            in_replica = isinstance(context, InReplica) and group.requires_aggregation
            with communicator.raise_together(), group.on_stream():
                op = self._scatter_operation(scatter) if in_replica else FIRST_REPLICA
                rows, values = self._parse_slices(method, scatter, slices)
            if not in_replica:
                communicator.require_equal([rows, values])
            if communicator.size > 1:
                rows, values = self._gather_rows(rows, values, op, in_replica)
            with group.on_stream():
                rows, values = combine_rows(rows, values, scatter.combination)
            state.storage.update_rows(state.block, (), rows, values, scatter.rule)
        return self

    def _gather_rows(
        self, rows: Array, values: Array, op: Aggregation, in_replica: bool
    ) -> tuple[Array, Array]:
        """The rows and values of all replicas, in rank order, prepared for the aggregation."""
        communicator = self._state.group.communicator
        # Outside a replica all ranks have the same rows, so the same number; replicas may differ.
        must_match = () if in_replica else (f"{rows.size} rows",)
        if op is FIRST_REPLICA and communicator.rank:
            rows, values = rows[:0], values[:0]
        rows, values = communicator.all_gather([rows, values], 0, *must_match)
        if op is ReduceOp.MEAN:
            # Overflow is ignored, as in the update itself.
            with self._state.group.on_stream(), np.errstate(all="ignore"):
                values = (values / communicator.size).astype(values.dtype, copy=False)
        return rows, values

    def _scatter_alone(self, scatter: Scatter, rows: Array, values: Array) -> None:
        """Writes rows in the function of `StrategyExtended.update`, on this rank alone."""
        state = self._state
        new = state.block.view.copy()
        target = row_view(new, values.ndim - 1)
        changed = target[rows]
        scatter.rule.apply(changed, values, (), changed)
        target[rows] = changed
        state.storage.local.write(state.block, new, RULES["assign"])

    def _scatter_operation(self, scatter: Scatter) -> Aggregation:
        """The operation that combines the rows that replicas write."""
        op = self._write_operation()
        if op is not FIRST_REPLICA and not scatter.is_sum:
            raise NotImplementedError(
                f"{current_call()} in a replica context: the variable's aggregation is "
                f"{self.aggregation.name}, and it needs ONLY_FIRST_REPLICA; make the variable with "
                "that, or call it outside of Strategy.run"
            )
        return op

    def _write_operation(self) -> Aggregation:
        """The operation that combines the values that replicas write."""
        if self.aggregation is VariableAggregation.NONE:
            raise ValueError(f"{current_call()} in a replica context: {NO_AGGREGATION}")
        op = OPERATIONS[self.aggregation]
        if op is not FIRST_REPLICA:
            check_reducible(self.dtype, op)
        if op is ReduceOp.MEAN and self.dtype.kind in "iu":
            raise ValueError(
                f"{current_call()}: the mean of the replicas' values is {mean_dtype(self.dtype)} "
                f"and does not fit {self.dtype.name}; make it a float variable, or aggregate by "
                "SUM or ONLY_FIRST_REPLICA"
            )
        return op

    # ---- arguments

    def _parse_slices(self, method: str, scatter: Scatter, slices: Any) -> tuple[Array, Array]:
        """The indices of rows and a value for each, on the variable's device and in its dtype."""
        dtype, group = self.dtype, self._state.group
        if self._state.is_on_read:
            raise NotImplementedError(
                f"{current_call()}: the variable is ON_READ, one value per replica, and rows of it "
                "cannot be written; use assign"
            )
        if not isinstance(slices, IndexedSlices):
            raise TypeError(
                f"{current_call()}: sparse_delta is of type {type(slices).__name__}; pass "
                "IndexedSlices(values, indices)"
            )
        if dtype.kind not in scatter.kinds:
            raise ValueError(
                f"{current_call()}: it is not defined for {dtype.name}; use scatter_update or "
                "assign"
            )
        indices, is_nd = self._as_indices(slices.indices), method.startswith("scatter_nd")
        rows, shape = self._rows(indices if is_nd else indices[..., None])
        wanted = (*(indices.shape[:-1] if is_nd else indices.shape), *shape)

        def check_shape(array: Array) -> None:
            if array.shape != wanted and (is_nd or array.shape != ()):
                raise ValueError(
                    f"{current_call()}: the values have shape {array.shape}; for indices of shape "
                    f"{indices.shape} and a variable of shape {self.shape} it must be {wanted}"
                )

        values = as_castable_value(slices.values, dtype, group.stream is not None, check_shape)
        values = group.xp.asarray(
            values if group.stream is None else group.stream.here(values), dtype
        )
        if scatter is SCATTERS["div"] and not values.all():
            raise ValueError(f"{current_call()}: a value is 0; divide by other numbers")
        values = group.xp.broadcast_to(values, wanted).reshape(rows.size, *shape)
        return rows, group.xp.ascontiguousarray(values)
