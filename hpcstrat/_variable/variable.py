"""Variables: arrays that keep their values between calls of `Strategy.run`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from hpcstrat._calls.collective import collective
from hpcstrat._communicators.base import Communicator
from hpcstrat._core import gpu
from hpcstrat._core.call_name import call_named, current_call, names_call
from hpcstrat._core.types import FIRST_REPLICA, Array, parse_choice
from hpcstrat._replicas import contexts
from hpcstrat._replicas.contexts import InReplica, InUpdate, require_cross_replica
from hpcstrat._replicas.group import default_group
from hpcstrat._variable.assign import Assignable
from hpcstrat._variable.options import (
    NO_AGGREGATION,
    OPERATIONS,
    VariableAggregation,
    VariableSynchronization,
    VariableType,
)
from hpcstrat._variable.state import VariableState
from hpcstrat._variable.writing import RULES, as_initial_value


class Variable(Assignable, metaclass=VariableType):  # pyright: ignore[reportGeneralTypeIssues]
    """An array in the strategy's storage, which replicas read, write and update together.

    A variable acts as its array in arithmetic, and has the methods of an array.

    Making a variable is collective: all ranks make it, and it starts with the parameter rank's
    initial value.

    Reading never communicates, except `read_value` and `numpy` of an `ON_READ` variable in the
    cross-replica context. In a replica context, `value()`, arithmetic and indexing read the array
    in storage itself, which is read-only and valid until the next write to the variable; everywhere
    else `value()` and indexing return copies. `copy.deepcopy` makes another variable of the same
    strategy and is collective; `copy.copy` makes another object that shares the storage. A variable
    is pickled as its array, on the host.

    Args:
        initial_value: an array, a number, a sequence of numbers, or a callable without arguments
            that returns one of these. As in TensorFlow, Python floats become `float32` and ints
            `int32`; arrays keep their dtype.
        trainable: whether optimizers should update it. By default true, except for `ON_READ`.
        name: a name; by default `Variable`.
        dtype: the dtype, if not the initial value's.
        synchronization: `ON_READ` keeps a separate value on each replica, and aggregates them when
            the variable is read in the cross-replica context.
        aggregation: how the values that the replicas write are combined into one.
        shape: the shape that the initial value must have.
        validate_shape: must be true: a variable keeps the shape of its initial value.
        constraint: must be `None`: optimizers do not call it.
        caching_device: ignored; accepted for compatibility with TensorFlow.

    Raises:
        NotImplementedError: `constraint` is given.
        TypeError: the initial value is not a numeric array, or `name` is not a string.
        ValueError: the shape is not `shape`, or an argument is not one of its choices.
        RuntimeError: made inside the function of `StrategyExtended.update`.
        ReplicaMismatchError: the shape or dtype differs between ranks.
        MemoryError: a rank does not have enough memory; every rank raises it.

    Examples:
        With one replica; with two, `seen` would be 2:

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

    __slots__ = ("__weakref__", "synchronization", "trainable")
    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]

    @collective("Variable", lambda _: _require_no_update(), lambda _: contexts.group().communicator)
    def __init__(
        self,
        initial_value: Any = None,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: npt.DTypeLike | None = None,
        synchronization: VariableSynchronization | str | None = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | str | None = VariableAggregation.NONE,
        shape: Sequence[int] | None = None,
        *,
        validate_shape: bool = True,
        constraint: None = None,
        caching_device: str | None = None,
    ) -> None:
        del caching_device
        if not validate_shape:
            raise ValueError(
                f"{current_call()}: validate_shape is {validate_shape}, but a variable keeps the "
                "shape of its initial value; leave it out"
            )
        if constraint is not None:
            raise NotImplementedError(
                f"{current_call()}: constraint is {constraint!r}, but optimizers do not call it; "
                "apply it after the update: optimizer.apply_gradients(...), then "
                "v.assign(constraint(v)) in the cross-replica context"
            )
        group = contexts.group()
        if name is not None and not isinstance(name, str):
            raise TypeError(f"{current_call()}: name is {name!r}; it must be a string")
        self.synchronization: VariableSynchronization = parse_choice(
            VariableSynchronization, synchronization or "AUTO", current_call(), "synchronization"
        )
        self.aggregation: VariableAggregation = parse_choice(
            VariableAggregation, aggregation or "NONE", current_call(), "aggregation"
        )
        # Without synchronization a write would change this rank's copy only; mirrors must be equal.
        if self.synchronization is VariableSynchronization.NONE and group.mirrors:
            raise ValueError(
                f"Variable: synchronization is NONE, and the copies that {group.name} keeps on the "
                "replicas change together; leave it out, or use ON_READ for one value per replica"
            )
        is_on_read = self.synchronization is VariableSynchronization.ON_READ
        self.trainable: bool = not is_on_read if trainable is None else bool(trainable)
        initial = as_initial_value(initial_value, dtype, shape, group.stream is not None)
        self.name: str = _common_name(group.communicator, "Variable" if name is None else name)
        with call_named(f"Variable {self.name!r}"):
            # Only the parameter rank's value is used: a rank with another value would never notice.
            group.communicator.require_equal([initial])
            self._state = VariableState(group, is_on_read, initial)

    @names_call(lambda self, _: f"Variable: deepcopy of {self.name!r}")
    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        # Another variable of the same strategy with the same value; collective, as making one is.
        state = self._state
        _require_no_update()
        # Storage allocates it as it does any new variable, at the same place on every rank.
        copied = VariableState(state.group, state.is_on_read, state.block.view)
        if state.is_on_read:  # every replica was given the parameter rank's value
            state.storage.local.write(copied.block, state.block.view, RULES["assign"])
        memo[id(self)] = other = self._with_state(copied)
        return other

    def __copy__(self) -> Variable:
        return self._with_state(self._state)

    def _with_state(self, state: VariableState) -> Variable:
        # Not by calling the class, which would call the variable creators again.
        other = object.__new__(type(self))
        other.name, other.synchronization, other.aggregation = (
            self.name,
            self.synchronization,
            self.aggregation,
        )
        other.trainable, other._state = self.trainable, state
        return other

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        # As its array, which any process can load: the variable itself exists in this job only.
        self._check_readable()
        return self.numpy().__reduce_ex__(protocol)

    @property
    def distribute_strategy(self) -> Any:
        """The strategy in whose scope it was made.

        Raises:
            AttributeError: it was made outside every scope, as in TensorFlow.

        Examples:
            >>> strategy = hs.MirroredStrategy()
            >>> with strategy.scope():
            ...     v = hs.Variable(0.0)
            >>> v.distribute_strategy is strategy
            True
        """
        if self._state.group is default_group():
            raise AttributeError(
                f"Variable {self.name!r} has no distribute_strategy: it was made outside of every "
                "scope; make it under `with strategy.scope():`"
            )
        return self._state.group.lifetime.strategy

    # ---- reading the aggregated value

    def read_value(self) -> Array:
        """A copy of the value.

        Collective for an `ON_READ` variable in the cross-replica context: all ranks call it, and it
        aggregates the replicas' values.

        Raises:
            ValueError: an `ON_READ` variable of aggregation `NONE` is read in the cross-replica
                context.

        Examples:
            Each replica counts by itself, and a read adds up what all have counted:

            >>> strategy = hs.MirroredStrategy()
            >>> with strategy.scope():
            ...     count = hs.Variable(0, synchronization="ON_READ", aggregation="SUM")
            >>> for _ in range(3):
            ...     _ = strategy.run(lambda: count.assign_add(2))
            >>> int(count.read_value()) // strategy.num_replicas_in_sync
            6
        """
        if not self._state.needs_aggregation_to_read():
            return self._state.block.view.copy()
        with call_named("Variable.read_value"):
            return self._aggregate()

    def numpy(self) -> np.ndarray[Any, Any]:
        """A copy of the value in host memory. Collective where `read_value` is.

        Examples:
            >>> v = hs.Variable([1.0, 2.0])
            >>> before = v.numpy()
            >>> _ = v.assign([3.0, 4.0])
            >>> before, v.numpy()
            (array([1., 2.], dtype=float32), array([3., 4.], dtype=float32))
        """
        value = self._state.block.view
        if self._state.needs_aggregation_to_read():
            with call_named("Variable.numpy"):
                value = self._aggregate()
        return value.get() if gpu.is_on_gpu(value) else value.copy()

    def __repr__(self) -> str:
        is_per_replica = self._state.needs_aggregation_to_read()
        value = "one value per replica" if is_per_replica else repr(self._state.block.view)
        return f"Variable({self.name!r}, shape={self.shape}, dtype={self.dtype.name}, {value})"

    # ---- help

    def _aggregate(self) -> Array:
        group, array = self._state.group, self._state.block.view
        if self.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"{current_call()} of {self.name!r} in the cross-replica context: {NO_AGGREGATION}"
            )
        op = OPERATIONS[self.aggregation]
        require_cross_replica(group)
        if op is FIRST_REPLICA:
            with group.on_stream():
                own = group.communicator.broadcast_obj(gpu.to_host(array))
                return group.xp.asarray(own)
        return group.communicator.all_reduce([array], op)[0]


def state_of(variable: Variable) -> VariableState:
    """The state of a variable."""
    return variable._state


def _common_name(communicator: Communicator, name: str) -> str:
    """The first replica's name if the names end in the replicas' numbers; otherwise `name`."""
    if communicator.size == 1 or not isinstance(contexts.context(), InReplica):
        return name
    names = communicator.all_gather_obj(name)
    # A replica function may number its names: `w0` on replica 0 and `w1` on replica 1 name one
    # variable, which TensorFlow calls `w0`.
    stem = names[0].removesuffix("0")
    return names[0] if names == [f"{stem}{rank}" for rank in range(len(names))] else name


def _require_no_update() -> None:
    if isinstance(contexts.context(), InUpdate):
        raise RuntimeError(
            f"{current_call()} was made inside an update, which one rank runs; make it under "
            "strategy.scope()"
        )
