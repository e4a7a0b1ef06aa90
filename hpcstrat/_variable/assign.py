"""Assigns to a whole variable, or adds to it."""

from __future__ import annotations

from typing import Any, TypeVar

from hpcstrat._core import gpu
from hpcstrat._core.call_name import current_call, enter_call, leave_call
from hpcstrat._core.types import FIRST_REPLICA, Array, MaybeNone
from hpcstrat._replicas import contexts
from hpcstrat._replicas.contexts import InReplica, InUpdate
from hpcstrat._variable.options import VariableAggregation
from hpcstrat._variable.rows import WritableByRows
from hpcstrat._variable.writing import RULES, as_written_value, share_out

_Variable = TypeVar("_Variable", bound="Assignable")


class Assignable(WritableByRows):
    """The part of `Variable` that writes all of it."""

    __slots__ = ()

    def assign(
        self: _Variable,
        value: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> _Variable | MaybeNone:
        """Sets the variable.

        Collective: all ranks call it. In a replica context the replicas' values are aggregated
        first.

        Args:
            value: an array, a number or a sequence, of exactly the variable's shape, whose dtype
                casts safely. In a replica context a Python number is aggregated as an array is:
                with `SUM`, over all replicas.
            use_locking: ignored; accepted for compatibility with TensorFlow.
            name: ignored; accepted for compatibility with TensorFlow.
            read_value: whether to return the variable.

        Returns:
            The variable; `None` without `read_value`.

        Raises:
            ValueError: a wrong shape; a dtype that does not cast safely; a `PerReplica` value; an
                aggregation of `NONE` in a replica context. The variable is unchanged.
            RuntimeError: the variable belongs to another strategy than the caller's.
            ReplicaMismatchError: the replicas' calls differ.

        Examples:
            >>> v = hs.Variable([1.0, 2.0], name="v")
            >>> v.assign([5, 6])
            Variable('v', shape=(2,), dtype=float32, array([5., 6.], dtype=float32))
            >>> v.assign(7.0)
            Traceback (most recent call last):
            ...
            ValueError: Variable.assign of 'v': the value has shape () and the variable (2,)...
        """
        del use_locking, name
        self._write("assign", value)
        return self if read_value else None

    def assign_add(
        self: _Variable,
        value: Any = None,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
        *,
        delta: Any = None,
    ) -> _Variable | MaybeNone:
        """Adds `value` to the variable; otherwise as `assign`. Collective.

        `delta` is TensorFlow's name of `value` for a variable outside every scope.

        Examples:
            In a replica function the replicas' values are aggregated: with 3 replicas this adds 6.

            >>> strategy = hs.MirroredStrategy()
            >>> with strategy.scope():
            ...     seen = hs.Variable(10, aggregation="SUM")
            >>> _ = strategy.run(lambda: seen.assign_add(2))
            >>> int(seen)
            12
        """
        del use_locking, name
        self._write("assign_add", delta if value is None else value)
        return self if read_value else None

    def assign_sub(
        self: _Variable,
        value: Any = None,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
        *,
        delta: Any = None,
    ) -> _Variable | MaybeNone:
        """Subtracts `value`, or `delta`, from the variable; otherwise as `assign_add`.

        Examples:
            >>> hs.Variable([1.0, 2.0]).assign_sub([0.5, 0.5]).numpy()
            array([0.5, 1.5], dtype=float32)
        """
        del use_locking, name
        self._write("assign_sub", delta if value is None else value)
        return self if read_value else None

    def _write(self, verb: str, value: Any) -> None:
        outer = enter_call(f"Variable.{verb} of {self.name!r}")
        try:
            state, context = self._state, contexts.context()
            if isinstance(context, InUpdate):
                self._write_in_update(context, verb, value)
                return
            state.require_writable()
            if state.is_on_read:
                self._write_own(verb, value)
            else:
                self._write_common(verb, value, is_replica=isinstance(context, InReplica))
        finally:
            leave_call(outer)

    def _write_in_update(self, update: InUpdate, verb: str, value: Any) -> None:
        """Writes in the function of `StrategyExtended.update`, on this rank alone."""
        update.require_writable(self)
        state = self._state
        state.storage.local.write(state.block, self._as_written(verb, value), RULES[verb])

    def _write_common(self, verb: str, value: Any, is_replica: bool) -> None:
        """Writes a variable that all replicas share."""
        state, communicator = self._state, self._state.group.communicator
        # Each replica writes a value, and these are aggregated. The cross-replica context writes
        # one value, the same on all ranks.
        is_aggregated = is_replica and state.group.requires_aggregation
        with communicator.raise_together():
            op = self._write_operation() if is_aggregated else FIRST_REPLICA
            new = self._as_written(verb, value)
        if not is_aggregated:
            communicator.require_equal([new])
        state.storage.update(state.plan_alone(), [new], op, RULES[verb])

    def _write_own(self, verb: str, value: Any) -> None:
        """Writes an `ON_READ` variable, of which each replica has its own value."""
        state, group = self._state, self._state.group
        if isinstance(contexts.context(), InReplica) or group.communicator.size == 1:
            state.storage.local.write(state.block, self._as_written(verb, value), RULES[verb])
            return
        # One value for all replicas. Reading must return it, even if reading sums over replicas.
        is_sum = self.aggregation is VariableAggregation.SUM
        with group.communicator.raise_together():
            if is_sum and verb != "assign":
                raise ValueError(
                    f"{current_call()}: how a change is divided among the replicas of an ON_READ "
                    "variable that sums is not defined in the cross-replica context; use assign, "
                    "or write it in a replica context"
                )
            new = self._as_written(verb, value)
            if is_sum:
                new = share_out(new, group.communicator.size)
        group.communicator.require_equal([new])
        with group.communicator.change():
            # The root's value, so that all replicas have the same bits even if ranks computed
            # slightly different values.
            new = group.communicator.broadcast_obj(gpu.to_host(new), group.root)
            state.storage.local.write(state.block, new, RULES[verb])

    def _as_written(self, verb: str, value: Any) -> Array:
        return as_written_value(
            verb, value, self.shape, self.dtype, self._state.group.stream is not None
        )
