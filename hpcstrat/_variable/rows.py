"""Single rows and elements of a variable: read by their indices, and written without a copy of the whole."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import numpy as np

from hpcstrat._communicators.reduction import check_reducible, mean_dtype
from hpcstrat._core.arrays import as_read_only
from hpcstrat._core.call_name import call_named, current_call
from hpcstrat._core.types import FIRST_REPLICA, Aggregation, Array, IndexedSlices, ReduceOp
from hpcstrat._replicas import contexts
from hpcstrat._replicas.contexts import InReplica, InUpdate
from hpcstrat._update.rows import combine_rows, row_view
from hpcstrat._variable.array import ReadableAsArray
from hpcstrat._variable.options import NO_AGGREGATION, OPERATIONS, VariableAggregation
from hpcstrat._variable.writing import RULES, SCATTERS, Scatter, as_castable_value

_Variable = TypeVar("_Variable", bound="WritableByRows")


class WritableByRows(ReadableAsArray):
    """What reads and writes rows of a variable.

    Each `scatter_...` is collective as `assign` is. At the script's level one value counts, the
    same on all ranks. In a replica context the replicas' rows come together as TensorFlow's
    mirrored variables have it: with `SUM` all of them are applied, with `MEAN` all of them after
    division by the number of replicas, with `ONLY_FIRST_REPLICA` the first replica's. The others of
    an index that occurs several times are not lost: sums add up, products multiply, and of an
    update the last one counts.
    """

    __slots__ = ("aggregation",)

    aggregation: VariableAggregation

    # ---- reading

    def sparse_read(self, indices: Any, name: str | None = None) -> Any:
        """A copy of the rows at these indices; never communicates.

        Args:
            indices: integers of any shape, each in `0..shape[0]-1`.
            name: taken for TensorFlow's sake.

        Returns:
            An array of shape `(*indices.shape, *shape[1:])`.

        Raises:
            ValueError: an index is out of range, or is no integer.
            RuntimeError: the variable is `ON_READ`, and this is the cross-replica context of
                several replicas.
        """
        del name
        with call_named(f"Variable.sparse_read of {self.name!r}"):
            return self._taken(self._as_indices(indices)[..., None])

    def gather_nd(self, indices: Any, name: str | None = None) -> Any:
        """A copy of the elements, or parts, at these indices; never communicates.

        Args:
            indices: integers of shape `(..., k)`: each row of them is an index into the first k
                dimensions.
            name: taken for TensorFlow's sake.

        Returns:
            An array of shape `(*indices.shape[:-1], *shape[k:])`.

        Raises:
            ValueError: an index is out of range or is no integer, or k is more than the number of
                dimensions.
            RuntimeError: the variable is `ON_READ`, and this is the cross-replica context of
                several replicas.
        """
        del name
        with call_named(f"Variable.gather_nd of {self.name!r}"):
            return self._taken(self._as_indices(indices))

    def _taken(self, indices: Array) -> Any:
        array = self._readable()
        with self._state.group.on_stream():
            rows, shape = self._rows(indices)
            return row_view(array, len(shape))[rows].reshape((*indices.shape[:-1], *shape))[()]

    # ---- writing

    def scatter_add(
        self: _Variable,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> _Variable:
        """Adds values to some rows. Collective: all ranks call it.

        Args:
            sparse_delta: `indices` of rows, integers of any shape; and for each a row of `values`,
                whose dtype casts safely, or one number for all elements. Of an index that occurs
                several times all values are added.
            use_locking: taken for TensorFlow's sake, as the next.
            name: not used.

        Returns:
            The variable.

        Raises:
            TypeError: `sparse_delta` is no `IndexedSlices`.
            ValueError: an index is out of range, values have another shape, or a dtype that does
                not cast or that the operation does not take; in a replica context an aggregation of
                `NONE`. Nothing has changed.
            NotImplementedError: the variable is `ON_READ`.
            RuntimeError: the variable belongs to another strategy than the one this line runs in.
            ReplicaMismatchError: the replicas' calls differ.
        """
        return self._scatter("scatter_add", sparse_delta)

    def scatter_sub(
        self: _Variable,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> _Variable:
        """Subtracts values from some rows, otherwise as `scatter_add`. Collective."""
        return self._scatter("scatter_sub", sparse_delta)

    def scatter_mul(
        self: _Variable,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> _Variable:
        """Multiplies some rows by values, otherwise as `scatter_add`. Collective."""
        return self._scatter("scatter_mul", sparse_delta)

    def scatter_div(
        self: _Variable,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> _Variable:
        """Divides some rows by values, none of them 0, otherwise as `scatter_add`; not of integers. Collective."""
        return self._scatter("scatter_div", sparse_delta)

    def scatter_min(
        self: _Variable,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> _Variable:
        """Sets some rows to the minimum of themselves and values, otherwise as `scatter_update`. Collective."""
        return self._scatter("scatter_min", sparse_delta)

    def scatter_max(
        self: _Variable,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> _Variable:
        """Sets some rows to the maximum of themselves and values, otherwise as `scatter_update`. Collective."""
        return self._scatter("scatter_max", sparse_delta)

    def scatter_update(
        self: _Variable,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> _Variable:
        """Sets some rows, otherwise as `scatter_add`. Collective.

        Of an index that occurs several times the last value counts. In a replica context the
        aggregation must be `ONLY_FIRST_REPLICA`; with `SUM` and `MEAN` it raises
        `NotImplementedError`, as in TensorFlow.
        """
        return self._scatter("scatter_update", sparse_delta)

    def scatter_nd_add(
        self: _Variable, indices: Any, updates: Any, name: str | None = None
    ) -> _Variable:
        """Adds to elements, or to parts, otherwise as `scatter_add`. Collective.

        Args:
            indices: integers of shape `(..., k)`: each row of them is an index into the first k
                dimensions.
            updates: of shape `(*indices.shape[:-1], *shape[k:])`.
            name: taken for TensorFlow's sake.
        """
        return self._scatter("scatter_nd_add", IndexedSlices(updates, indices))

    def scatter_nd_sub(
        self: _Variable, indices: Any, updates: Any, name: str | None = None
    ) -> _Variable:
        """Subtracts from elements, or from parts, otherwise as `scatter_nd_add`. Collective."""
        return self._scatter("scatter_nd_sub", IndexedSlices(updates, indices))

    def scatter_nd_update(
        self: _Variable, indices: Any, updates: Any, name: str | None = None
    ) -> _Variable:
        """Sets elements, or parts, otherwise as `scatter_nd_add` and `scatter_update`.

        Collective.
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
                    self._scatter_alone(
                        scatter,
                        *combine_rows(*self._checked(method, scatter, slices), scatter.combination),
                    )
                return self
            state.require_writable()
            in_replica = isinstance(context, InReplica) and group.requires_aggregation
            with communicator.raise_together(), group.on_stream():
                op = self._scatter_operation(scatter) if in_replica else FIRST_REPLICA
                rows, values = self._checked(method, scatter, slices)
            if not in_replica:
                communicator.require_equal([rows, values])
            if communicator.size > 1:
                rows, values = self._brought_together(rows, values, op, in_replica)
            with group.on_stream():
                rows, values = combine_rows(rows, values, scatter.combination)
            state.storage.update_rows(state.block, (), rows, values, scatter.rule)
        return self

    def _brought_together(
        self, rows: Array, values: Array, op: Aggregation, in_replica: bool
    ) -> tuple[Array, Array]:
        """The rows and values of all replicas, in rank order, as the aggregation has them."""
        communicator = self._state.group.communicator
        # One value on all ranks, so at least of one size; in a replica context the others may have
        # any.
        must_match = () if in_replica else (f"{rows.size} rows",)
        if op is FIRST_REPLICA and communicator.rank:
            rows, values = rows[:0], values[:0]
        rows, values = communicator.all_gather([rows, values], 0, *must_match)
        if op is ReduceOp.MEAN:
            with self._state.group.on_stream(), np.errstate(all="ignore"):  # as in the update
                values = (values / communicator.size).astype(values.dtype, copy=False)
        return rows, values

    def _scatter_alone(self, scatter: Scatter, rows: Array, values: Array) -> None:
        """In the function of `StrategyExtended.update`, which one rank runs."""
        state = self._state
        new = state.block.view.copy()
        target = row_view(new, values.ndim - 1)
        changed = target[rows]
        scatter.rule.apply(changed, values, (), changed)
        target[rows] = changed
        state.storage.write(state.block, new, RULES["assign"])

    def _scatter_operation(self, scatter: Scatter) -> Aggregation:
        """How the rows that replicas write come together."""
        op = self._write_operation()
        if op is not FIRST_REPLICA and not scatter.is_sum:
            raise NotImplementedError(
                f"{current_call()} in a replica context: the variable's aggregation is "
                f"{self.aggregation.name}, and it takes ONLY_FIRST_REPLICA; make the variable with "
                "that, or call it outside of Strategy.run"
            )
        return op

    def _write_operation(self) -> Aggregation:
        """How the values that replicas write become one."""
        if self.aggregation is VariableAggregation.NONE:
            raise ValueError(f"{current_call()} in a replica context: {NO_AGGREGATION}")
        op = OPERATIONS[self.aggregation]
        if op is not FIRST_REPLICA:
            check_reducible(self.dtype, op)
        if op is ReduceOp.MEAN and self.dtype.kind in "iu":
            raise ValueError(
                f"{current_call()}: the mean of the replicas' values is {mean_dtype(self.dtype)} "
                f"and does not fit {self.dtype.name}; make the variable a float one, or aggregate "
                "by SUM or ONLY_FIRST_REPLICA"
            )
        return op

    # ---- arguments

    def _checked(self, method: str, scatter: Scatter, slices: Any) -> tuple[Array, Array]:
        """The indices of rows and a value for each, on the variable's device and in its dtype."""
        dtype, group = self.dtype, self._state.group
        if self._state.is_on_read:
            raise NotImplementedError(
                f"{current_call()}: the variable is ON_READ, one value a replica, and rows of it "
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

    def _as_indices(self, indices: Any) -> Array:
        """As an array of `int64` on the variable's device."""
        group = self._state.group
        array = as_read_only(current_call(), indices, group.stream is not None)
        if array.dtype.kind not in "iu" and array.size:
            raise ValueError(
                f"{current_call()}: the indices are of dtype {array.dtype}; pass integers"
            )
        with group.on_stream():
            return (array if group.stream is None else group.stream.here(array)).astype(np.int64)

    def _rows(self, indices: Array) -> tuple[Array, tuple[int, ...]]:
        """Which rows indices of shape `(..., k)` are of the first k dimensions as one; and the shape of a row."""
        shape, depth = self.shape, indices.shape[-1]
        if depth > len(shape):
            raise ValueError(
                f"{current_call()}: indices of {depth} dimensions, and the variable has shape "
                f"{shape}; pass at most {len(shape)}"
            )
        count = math.prod(indices.shape[:-1])
        rows = self._state.group.xp.zeros(count, np.int64)
        for index, size in zip(indices.reshape(count, depth).T, shape, strict=False):
            if count and not 0 <= int(index.min()) <= int(index.max()) < size:
                raise ValueError(
                    f"{current_call()}: an index is not in 0..{size - 1}; all must be, of shape "
                    f"{shape}"
                )
            rows = rows * size + index
        return rows, shape[depth:]
