"""Variables: numbers that live as long as the program and that all replicas see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcstrat import _context, _gpu
from hpcstrat._communicators.dtypes import check_reducible
from hpcstrat._context import Context, InReplica, InUpdate, require_cross_replica
from hpcstrat._group import ReplicaGroup, default_group
from hpcstrat._storage.base import Array, Storage
from hpcstrat._storage.plan import Plan
from hpcstrat._types import MaybeNone, ReduceOp, parse_choice
from hpcstrat._variable_creators import VariableType
from hpcstrat._variable_exports import ExportsArray
from hpcstrat._variable_values import (
    NO_AGGREGATION,
    OPERATIONS,
    RULES,
    VariableAggregation,
    VariableSynchronization,
    initial_array,
    shared_out,
    written_array,
)


class Variable(ExportsArray, metaclass=VariableType):  # pyright: ignore[reportGeneralTypeIssues]
    """Numbers that live in the strategy's storage. In arithmetic a variable acts as its array, and has its methods.

    Making one is collective under a strategy: all ranks do it, and the parameter rank's initial value counts.

    A read never communicates, but for `read_value` and `numpy` of an `ON_READ` variable in the cross-replica context.
    In a replica context `value()`, and what arithmetic and indexing use, is the array in storage itself, read-only,
    valid until the next write to the variable; everywhere else reads are copies. `copy.deepcopy` makes another variable
    of the same strategy, which is collective as making one is.

    Args:
        initial_value: an array, a number, a sequence of numbers, or a callable without arguments that gives one. As in
            TensorFlow Python floats make `float32` and ints `int32`; arrays keep their dtype.
        trainable: whether optimizers are meant to change it. By default true, but false for `ON_READ`.
        name: a name; by default `Variable`.
        dtype: the dtype, where it is not the initial value's.
        synchronization: `ON_READ` keeps a number of its own on each replica, brought together when it is read in the
            cross-replica context.
        aggregation: how values that the replicas write become one.
        shape: the shape that the initial value must have.

    Raises:
        TypeError: the initial value is no array of numbers.
        ValueError: it has another shape than `shape`, or an argument is no known choice.
        RuntimeError: made inside the function of `StrategyExtended.update`.
        ReplicaMismatchError: its shape or dtype differs between ranks.
        MemoryError: there is no room for it, on any rank.

    Examples:
        As one replica prints it; with two, `seen` is 2:

        >>> import numpy as np
        >>> import hpcstrat as hs
        >>> strategy = hs.CentralStorageStrategy()
        >>> with strategy.scope():
        ...     w = hs.Variable(np.ones((2, 3), np.float32), name="w")
        ...     seen = hs.Variable(0, aggregation="SUM")
        >>> w.assign_add(np.ones((2, 3)))
        Variable('w', shape=(2, 3), dtype=float32, array([[2., 2., 2.],
               [2., 2., 2.]], dtype=float32))
        >>> print((w @ w.T).sum(), f"{w.mean():.1f}")
        48.0 2.0
        >>> result = strategy.run(lambda: seen.assign_add(1))
        >>> print(int(seen))
        1
    """

    __slots__ = ("__weakref__", "_plan", "aggregation", "synchronization", "trainable")
    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]

    def __init__(
        self,
        initial_value: Any = None,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: npt.DTypeLike | None = None,
        synchronization: VariableSynchronization | str | None = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | str | None = VariableAggregation.NONE,
        shape: Sequence[int] | None = None,
    ) -> None:
        group = self._group = _context.group()
        _require_no_update("Variable")
        with group.communicator.joint("Variable"):
            self.synchronization: VariableSynchronization = parse_choice(
                VariableSynchronization, synchronization or "AUTO", "Variable", "synchronization"
            )
            self.aggregation: VariableAggregation = parse_choice(
                VariableAggregation, aggregation or "NONE", "Variable", "aggregation"
            )
            if self.synchronization is VariableSynchronization.NONE and group.mirrors:
                raise ValueError(
                    f"Variable: synchronization is NONE, and the copies that {group.name} keeps on the "
                    "replicas change together; leave it out, or take ON_READ for one value a replica"
                )
            self._is_on_read: bool = self.synchronization is VariableSynchronization.ON_READ
            self.trainable: bool = not self._is_on_read if trainable is None else bool(trainable)
            initial = initial_array(initial_value, dtype, shape, group.stream is not None)
        self.name: str = self._common_name("Variable" if name is None else str(name))
        call = f"Variable {self.name!r}"
        group.communicator.require_equal(call, [initial])
        self._store(call, initial)

    def _common_name(self, name: str) -> str:
        """The first replica's of the names that end in the replica's number, as TensorFlow takes it; else `name`."""
        communicator = self._group.communicator
        if communicator.size == 1 or not isinstance(_context.context(), InReplica):
            return name
        names = communicator.all_gather_obj("Variable", name)
        stem = names[0].removesuffix("0")
        return names[0] if names == [f"{stem}{rank}" for rank in range(len(names))] else name

    def _store(self, call: str, initial: Array) -> None:
        self._block = self._storage.create(call, initial)
        self._plan: Plan | None = None
        self._make_interface()

    @property
    def _storage(self) -> Storage:
        return self._group.replica_storage if self._is_on_read else self._group.storage

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        # One of its own with the same value, of the same strategy; as collective as making one is.
        call = f"Variable: deepcopy of {self.name!r}"
        _require_no_update(call)
        other = object.__new__(type(self))
        memo[id(self)] = other
        other._group, other._is_on_read, other.name = self._group, self._is_on_read, self.name
        other.synchronization, other.aggregation = self.synchronization, self.aggregation
        other.trainable = self.trainable
        other._store(call, self._block.view)
        if self._is_on_read:  # where making one took the first replica's value
            self._storage.write(other._block, self._block.view, RULES["assign"])
        return other

    # ---- reading what is brought together

    def read_value(self) -> Array:
        """A copy of the value.

        Collective for an `ON_READ` variable in the cross-replica context, where it aggregates the replicas' values:
        all ranks call it.

        Raises:
            ValueError: an `ON_READ` variable of aggregation `NONE` is read in the cross-replica context.
        """
        if not self._is_divided():
            return self._block.view.copy()
        return self._aggregated("Variable.read_value")

    def numpy(self) -> np.ndarray[Any, Any]:
        """A copy of the value in host memory. Collective where `read_value` is."""
        value = self._aggregated("Variable.numpy") if self._is_divided() else self._block.view
        return value.get() if _gpu.is_on_gpu(value) else value.copy()

    def __repr__(self) -> str:
        value = "one value a replica" if self._is_divided() else repr(self._block.view)
        return f"Variable({self.name!r}, shape={self.shape}, dtype={self.dtype.name}, {value})"

    # ---- writing

    def assign(
        self, value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Variable | MaybeNone:
        """Sets the variable. Collective: all ranks call it; in a replica context their values are aggregated first.

        Args:
            value: an array, a number or a sequence, of exactly the variable's shape, whose dtype casts safely. In a
                replica context a Python number is aggregated as an array is: with `SUM`, over all replicas.
            use_locking: taken for TensorFlow's sake, as the next.
            name: not used.
            read_value: whether the variable is returned.

        Returns:
            The variable; `None` without `read_value`.

        Raises:
            ValueError: a wrong shape; a dtype that does not cast; a `PerReplica` value; in a replica context an
                aggregation of `NONE`. Nothing has changed.
            RuntimeError: the variable belongs to another strategy than the one this line runs in.
            ReplicaMismatchError: the replicas' calls differ.
        """
        del use_locking, name
        self._write("assign", value)
        return self if read_value else None

    def assign_add(
        self, value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Variable | MaybeNone:
        """Adds to the variable, otherwise as `assign`. Collective."""
        del use_locking, name
        self._write("assign_add", value)
        return self if read_value else None

    def assign_sub(
        self, value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Variable | MaybeNone:
        """Subtracts from the variable, otherwise as `assign`. Collective."""
        del use_locking, name
        self._write("assign_sub", value)
        return self if read_value else None

    def _write(self, verb: str, value: Any) -> None:
        call = f"Variable.{verb} of {self.name!r}"
        group, context = self._group, _context.context()
        if isinstance(context, InUpdate):
            if not any(self is one for one in context.variables):
                raise RuntimeError(
                    f"{call}: this update may write only the variables that were passed to it; pass it too"
                )
            self._storage.write(self._block, self._checked(call, verb, value), RULES[verb])
            return
        if context is not None and context.group is not group and not self._is_plain_here(context):
            raise RuntimeError(self._foreign(call, context))
        if self._is_on_read:
            self._write_own(call, verb, value)
        elif isinstance(context, InReplica) and group.requires_aggregation:
            self._write_aggregated(call, verb, value)
        else:
            with group.communicator.joint(call):
                new = self._checked(call, verb, value)
            group.communicator.require_equal(call, [new])
            self._update(call, new, None, verb)

    def _write_aggregated(self, call: str, verb: str, value: Any) -> None:
        """A write in a replica context: the replicas' values become one first."""
        with self._group.communicator.joint(call):
            if self.aggregation is VariableAggregation.NONE:
                raise ValueError(f"{call} in a replica context: {NO_AGGREGATION}")
            op = OPERATIONS[self.aggregation]
            if op is not None:
                check_reducible(call, self.dtype, op)
            new = self._checked(call, verb, value)
            if op is ReduceOp.MEAN and self.dtype.kind in "iu":
                raise ValueError(
                    f"{call}: the mean of the replicas' values is float64 and does not fit {self.dtype.name}; "
                    "make the variable a float one, or aggregate by SUM or ONLY_FIRST_REPLICA"
                )
        self._update(call, new, op, verb)

    def _write_own(self, call: str, verb: str, value: Any) -> None:
        """A write to an ON_READ variable: each replica has its own."""
        group = self._group
        if isinstance(_context.context(), InReplica) or group.communicator.size == 1:
            group.replica_storage.write(self._block, self._checked(call, verb, value), RULES[verb])
            return
        is_sum = self.aggregation is VariableAggregation.SUM
        with group.communicator.joint(call):
            if is_sum and verb != "assign":
                raise ValueError(
                    f"{call}: how a change is shared out over the replicas of an ON_READ variable that sums is not "
                    "defined in the cross-replica context; use assign, or write it in a replica context"
                )
            new = self._checked(call, verb, value)
            if is_sum:
                new = shared_out(call, new, group.communicator.size)
        group.communicator.require_equal(call, [new])
        with group.communicator.change(call):
            new = group.communicator.broadcast_obj(call, _gpu.to_host(new), group.root)
            group.replica_storage.write(self._block, new, RULES[verb])

    def _update(self, call: str, new: Array, op: ReduceOp | None, verb: str) -> None:
        if self._plan is None:
            self._plan = self._storage.plan([self._block], [()])
        self._storage.update(call, self._plan, [new], op, RULES[verb])

    # ---- help

    def _aggregated(self, call: str) -> Array:
        group, array = self._group, self._block.view
        if self.aggregation is VariableAggregation.NONE:
            raise ValueError(f"{call} of {self.name!r} in the cross-replica context: {NO_AGGREGATION}")
        op = OPERATIONS[self.aggregation]
        require_cross_replica(group, call)
        if op is None:
            with group.on_stream():
                own = group.communicator.broadcast_obj(call, _gpu.to_host(array))
                return group.xp.asarray(own)
        return group.communicator.all_reduce(call, [array], op)[0]

    def _checked(self, call: str, verb: str, value: Any) -> Array:
        return written_array(call, verb, value, self.shape, self.dtype, self._group.stream is not None)

    def _group_here(self, call: str) -> ReplicaGroup:
        """The variable's group, for an update by its strategy in this line.

        Raises:
            RuntimeError: this line runs in another strategy.
        """
        context = _context.context()
        if context is not None and context.group is not self._group:
            raise RuntimeError(self._foreign(call, context))
        return self._group

    def _is_plain_here(self, context: Context) -> bool:
        """Whether a variable made outside of every scope may be written here: all ranks do the same to theirs."""
        divided = isinstance(context, InReplica) and context.group.communicator.size > 1
        return self._group is default_group() and not divided

    def _foreign(self, call: str, context: Context) -> str:
        if self._group is default_group():
            return (
                f"{call}: the variable was made outside of this strategy's scope, so every process has one of its own; "
                "make it under `with strategy.scope():`"
            )
        return (
            f"{call}: the variable belongs to another strategy than {context.group.name}, which runs "
            "here; write it in its own strategy's scope"
        )


def _require_no_update(call: str) -> None:
    if isinstance(_context.context(), InUpdate):
        raise RuntimeError(f"{call} was made inside an update, which one rank runs; make it under strategy.scope()")
