"""Variables: arrays that keep their values between calls of `Strategy.run`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from hpcstrat._agreement.collective import collective
from hpcstrat._core import gpu
from hpcstrat._core.call_name import call_named, current_call, enter_call, leave_call, names_call
from hpcstrat._core.types import FIRST_REPLICA, Array, IndexedSlices, MaybeNone, parse_choice
from hpcstrat._replicas import contexts
from hpcstrat._replicas.contexts import InReplica, require_cross_replica
from hpcstrat._transports.verbs import Communicator
from hpcstrat._update.rows import combine_rows
from hpcstrat._variable.array import ReadableAsArray
from hpcstrat._variable.options import (
    NO_AGGREGATION,
    OPERATIONS,
    VariableAggregation,
    VariableSynchronization,
)
from hpcstrat._variable.state import VariableState
from hpcstrat._variable.writing import (
    RULES,
    as_initial_value,
    as_written_value,
    gather_rows,
    parse_slices,
    share_out,
    write_operation,
)


class Variable(ReadableAsArray):
    """An array in the strategy's storage, which replicas read, write and update together.

    Making a variable is collective: all ranks make it, and it starts with the parameter rank's
    initial value.

    In arithmetic a variable acts as its array, and it has these of its methods: `T`, `all`, `any`,
    `argmax`, `argmin`, `astype`, `copy`, `dot`, `flatten`, `item`, `max`, `mean`, `min`, `prod`,
    `ravel`, `reshape`, `squeeze`, `std`, `sum`, `tolist`, `transpose`, `var`.

    Reading never communicates, except `read_value` and `numpy` of an `ON_READ` variable in the
    cross-replica context. In a replica context `value()`, indexing, `T`, `transpose`, `reshape`,
    `ravel` and `squeeze` read the array in storage itself, which is read-only and changes with the
    next write to the variable; everywhere else they return copies. `copy.deepcopy` makes another
    variable of the same strategy and is collective; `copy.copy` returns the variable itself. A
    variable is pickled as its array, on the host.

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
        >>> print(w.shape, w.size, (w @ w.T).sum(), f"{w.mean():.1f}", w.max(axis=0))
        (2, 3) 6 48.0 2.0 [2. 2. 2.]
        >>> result = strategy.run(lambda: seen.assign_add(1))
        >>> print(int(seen))
        1
    """

    __slots__ = ("__weakref__", "aggregation", "synchronization", "trainable")
    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]

    @collective(communicator_of=lambda _: contexts.group().communicator)
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
        # Without synchronization a write would change one replica's value; mirrors must be equal.
        if self.synchronization is VariableSynchronization.NONE and group.mirrors:
            raise ValueError(
                f"Variable: synchronization is NONE, and {group.name} keeps variables equal on all "
                "replicas; leave it out, or use ON_READ for one value per replica"
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
        # Storage allocates it as it does any new variable, at the same place on every rank.
        copied = VariableState(state.group, state.is_on_read, state.block.view)
        if state.is_on_read:  # every replica was given the parameter rank's value
            state.storage.write(copied.block, state.block.view, RULES["assign"])
        # Not by calling the class, which makes a variable of the current strategy.
        memo[id(self)] = other = object.__new__(type(self))
        other.name, other.trainable, other._state = self.name, self.trainable, copied
        other.synchronization, other.aggregation = self.synchronization, self.aggregation
        return other

    def __copy__(self) -> Variable:
        return self

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
        if self._state.group.is_default:
            raise AttributeError(
                f"Variable {self.name!r} has no distribute_strategy: it was made outside of every "
                "scope; make it under `with strategy.scope():`"
            )
        return self._state.group.strategy

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

    # ---- writing all of it

    def assign(
        self,
        value: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Variable | MaybeNone:
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
        self,
        value: Any = None,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
        *,
        delta: Any = None,
    ) -> Variable | MaybeNone:
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
        self,
        value: Any = None,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
        *,
        delta: Any = None,
    ) -> Variable | MaybeNone:
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
            state, context = self._state, contexts.current.get()
            is_replica = isinstance(context, InReplica)
            if context is not None and context.group is not state.group and context.group.stream:
                context.group.stream.refuse_in_graph("a write to a variable of no strategy")
            state.require_writable()
            if not state.is_on_read:
                self._write_common(verb, value, is_replica)
            elif not is_replica and state.group.communicator.size > 1:
                self._write_every_replicas(verb, value)
            else:  # the replica's own value
                state.storage.write(state.block, as_written_value(verb, value, state), RULES[verb])
        finally:
            leave_call(outer)

    def _write_common(self, verb: str, value: Any, is_replica: bool) -> None:
        """Writes a variable that all replicas share."""
        state, communicator = self._state, self._state.group.communicator
        # Each replica writes a value, and these are aggregated. The cross-replica context writes
        # one value, the same on all ranks.
        is_aggregated = is_replica and state.group.requires_aggregation
        with communicator.raise_together():
            op = write_operation(self.aggregation, self.dtype) if is_aggregated else FIRST_REPLICA
            new = as_written_value(verb, value, state)
        if not is_aggregated:
            communicator.require_equal([new])
        state.storage.update(state.plan_alone(), [new], op, RULES[verb])

    def _write_every_replicas(self, verb: str, value: Any) -> None:
        """Writes one value for all replicas of an `ON_READ` variable, which a read returns."""
        state, group = self._state, self._state.group
        # Reading must return it, even if reading sums over replicas.
        is_sum = self.aggregation is VariableAggregation.SUM
        with group.communicator.raise_together():
            if is_sum and verb != "assign":
                raise ValueError(
                    f"{current_call()}: how a change is divided among the replicas of an ON_READ "
                    "variable that sums is not defined in the cross-replica context; use assign, "
                    "or write it in a replica context"
                )
            new = as_written_value(verb, value, state)
            if is_sum:
                new = share_out(new, group.communicator.size)
        group.communicator.require_equal([new])
        with group.communicator.change():
            # The root's value, so that all replicas have the same bits even if ranks computed
            # slightly different values.
            new = group.communicator.broadcast_obj(gpu.to_host(new), group.root)
            state.storage.write(state.block, new, RULES[verb])

    # ---- writing rows

    def scatter_add(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Variable:
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
        return self._scatter("scatter_add", "assign_add", sparse_delta)

    def scatter_sub(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Variable:
        """Subtracts values from some rows; otherwise as `scatter_add`. Collective.

        Examples:
            >>> v = hs.Variable(np.array([1.0, 2.0, 4.0]))
            >>> v.scatter_sub(hs.IndexedSlices([1.0, 1.0], [0, 2])).numpy()
            array([0., 2., 3.])
        """
        return self._scatter("scatter_sub", "assign_sub", sparse_delta)

    def scatter_update(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Variable:
        """Sets some rows; otherwise as `scatter_add`. Collective.

        If an index occurs several times, its last value is used. In a replica context the
        aggregation must be `ONLY_FIRST_REPLICA`; with `SUM` and `MEAN` it raises
        `NotImplementedError`, as in TensorFlow.

        Examples:
            >>> v = hs.Variable(np.array([1.0, 2.0, 4.0]))
            >>> v.scatter_update(hs.IndexedSlices([7.0, 8.0, 9.0], [0, 2, 2])).numpy()
            array([7., 2., 9.])
        """
        return self._scatter("scatter_update", "assign", sparse_delta)

    def _scatter(self, method: str, verb: str, slices: Any) -> Variable:
        with call_named(f"Variable.{method} of {self.name!r}"):
            state = self._state
            group, communicator = state.group, state.group.communicator
            rule, combination = RULES[verb], None if verb == "assign" else np.add
            state.require_writable()
            in_replica = (
                isinstance(contexts.current.get(), InReplica) and group.requires_aggregation
            )
            with communicator.raise_together(), group.on_stream():
                op = FIRST_REPLICA
                if in_replica:
                    op = write_operation(self.aggregation, self.dtype, sets_rows=verb == "assign")
                rows, values = parse_slices(verb, slices, state)
            if not in_replica:
                communicator.require_equal([rows, values])
            if communicator.size > 1:
                rows, values = gather_rows(group, rows, values, op, in_replica)
            with group.on_stream():
                rows, values = combine_rows(rows, values, combination)
            state.storage.update_rows(state.block, (), rows, values, rule)
        return self

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
    if communicator.size == 1 or not isinstance(contexts.current.get(), InReplica):
        return name
    names = communicator.all_gather_obj(name)
    # A replica function may number its names: `w0` on replica 0 and `w1` on replica 1 name one
    # variable, which TensorFlow calls `w0`.
    stem = names[0].removesuffix("0")
    return names[0] if names == [f"{stem}{rank}" for rank in range(len(names))] else name
