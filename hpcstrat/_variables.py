"""Variables: numbers that live as long as the program and that all replicas see."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hpcstrat import _context, _gpu
from hpcstrat._communicators.dtypes import check_reducible
from hpcstrat._context import CrossReplicaContext, ReplicaContext, UpdateContext
from hpcstrat._storage.base import Array
from hpcstrat._storage.plan import Plan
from hpcstrat._types import ReduceOp, parse_choice
from hpcstrat._variable_creators import VariableType
from hpcstrat._variable_values import (
    OPERATIONS,
    RULES,
    VariableAggregation,
    VariableSynchronization,
    initial_array,
    shared_out,
    written_array,
)

if TYPE_CHECKING:
    from hpcstrat._strategies.base import Strategy


class Variable(np.lib.mixins.NDArrayOperatorsMixin, metaclass=VariableType):  # pyright: ignore[reportGeneralTypeIssues]
    """Numbers that live in the strategy's storage. In arithmetic a variable acts as its array.

    Making one is collective under a strategy: all ranks do it, and the parameter rank's initial value counts.

    A read never communicates, but for `read_value` and `numpy` of an `ON_READ` variable in the cross-replica context.
    In a replica context `value()`, and what arithmetic and indexing use, is the array in storage itself, read-only,
    valid until the next write to the variable; everywhere else reads are copies.

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
    """

    __slots__ = (
        *("__weakref__", "_block", "_interface", "_is_on_read", "_plan", "_strategy"),
        *("aggregation", "name", "synchronization", "trainable"),
    )
    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]

    def __init__(
        self,
        initial_value: Any,
        trainable: bool | None,
        name: str | None,
        dtype: npt.DTypeLike | None,
        synchronization: VariableSynchronization | str,
        aggregation: VariableAggregation | str,
        shape: Sequence[int] | None,
    ) -> None:
        strategy = self._strategy = _context.get_strategy()
        if isinstance(_context.context(), UpdateContext):
            raise RuntimeError(
                "Variable was made inside an update, which one rank runs; make it under strategy.scope()"
            )
        with strategy._communicator.joint("Variable"):
            self.synchronization: VariableSynchronization = parse_choice(
                VariableSynchronization, synchronization, "Variable", "synchronization"
            )
            self.aggregation: VariableAggregation = parse_choice(
                VariableAggregation, aggregation, "Variable", "aggregation"
            )
            self._is_on_read: bool = self.synchronization is VariableSynchronization.ON_READ
            self.trainable: bool = not self._is_on_read if trainable is None else bool(trainable)
            self.name: str = "Variable" if name is None else str(name)
            initial = initial_array(initial_value, dtype, shape, strategy._stream is not None)
        strategy._communicator.require_equal(f"Variable {self.name!r}", [initial])
        storage = strategy._replica_storage if self._is_on_read else strategy._storage
        self._block = storage.create(f"Variable {self.name!r}", initial)
        self._plan: Plan | None = None
        view = self._block.view
        # A dtype of `ml_dtypes` has no name in it: then NumPy takes `__array__`, as everywhere outside of a replica.
        has_interface = isinstance(view, np.ndarray) and view.dtype.kind != "V"
        self._interface: dict[str, Any] | None = view.__array_interface__ if has_interface else None

    # ---- facts

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        return self._block.view.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype, which never changes."""
        return self._block.view.dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self._block.view.ndim

    @property
    def size(self) -> int:
        """The number of elements."""
        return self._block.view.size

    @property
    def device(self) -> str:
        """The canonical string of the device where it lives: the parameter device, or this replica's for a mirror."""
        return self._strategy._variable_device

    # ---- reading

    def value(self) -> Array:
        """The array: in a replica context storage itself, read-only; elsewhere a copy. Never communicates.

        Raises:
            RuntimeError: the variable is `ON_READ`, and this is the cross-replica context of several replicas.
        """
        view = self._block.view
        context = _context.current.get()
        if type(context) is ReplicaContext and context._strategy is self._strategy:
            return view.view()  # whose shape and flags the caller may change
        self._check_readable()
        return view.copy()

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

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        array = self._readable()
        if _gpu.is_on_gpu(array):
            raise TypeError(
                f"Variable {self.name!r} is on a GPU and does not become a NumPy array by itself; call numpy()"
            )
        in_place = _in_replica_of(self._strategy)
        if copy is False and not in_place:
            raise ValueError(
                f"Variable {self.name!r} is read without a copy, copy=False, in a replica context only; "
                "call value() there"
            )
        array = array.astype(dtype or array.dtype, copy=bool(copy) or not in_place)
        return array.view() if array is self._block.view else array

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        written = inputs[:1] if method == "at" else kwargs.get("out", ())  # NumPy's `at` writes read-only arrays too
        if any(isinstance(out, Variable) for out in written):
            raise TypeError(
                f"Variable in {ufunc.__name__}: it is not written by `out=` or `at`; use assign, assign_add, assign_sub"
            )
        arrays = [x._readable() if isinstance(x, Variable) else x for x in inputs]
        return getattr(ufunc, method)(*arrays, **kwargs)

    def __getitem__(self, index: Any) -> Array:
        part = self._readable()[index]
        return part if _in_replica_of(self._strategy) or isinstance(part, np.generic) else part.copy()

    def __len__(self) -> int:
        return len(self._block.view)

    def __bool__(self) -> bool:
        return bool(self._readable())

    def __int__(self) -> int:
        return int(self._readable())

    def __float__(self) -> float:
        return float(self._readable())

    def __complex__(self) -> complex:
        return complex(self._readable())

    def __index__(self) -> int:
        return operator.index(self._readable())

    @property
    def __array_interface__(self) -> dict[str, Any]:
        # It names memory, and keeps only the variable alive: a snapshot's would be gone before it is read.
        if self._interface is None or not _in_replica_of(self._strategy):
            raise AttributeError(
                f"Variable {self.name!r} has an __array_interface__ on the CPU in a replica context only; call numpy()"
            )
        return self._interface.copy()

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        if copy is False:
            raise BufferError(
                f"Variable {self.name!r} is exported as a copy, because who takes it could write to it; without a "
                "copy, and read-only, pass value() in a replica context"
            )
        if dl_device not in (None, self.__dlpack_device__()):
            raise BufferError(f"Variable {self.name!r} is on {self.device}; call numpy() for a copy in host memory")
        del max_version  # what is writable needs no flag of the newer ones
        self._check_readable()
        return self._block.view.copy().__dlpack__(stream=stream)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        array = self._block.view
        if not _gpu.is_on_gpu(array) or not _in_replica_of(self._strategy):  # as `__array_interface__`
            raise AttributeError(
                f"Variable {self.name!r} has a __cuda_array_interface__ on a GPU, in a replica context; call value()"
            )
        # Who takes it works on the stream that is current, with which the strategy's is ordered: nobody has to wait.
        return {**array.__cuda_array_interface__, "stream": None}

    @property
    def __cupy_get_ndarray__(self) -> Callable[[], Array]:
        if not _gpu.is_on_gpu(self._block.view):
            raise AttributeError(f"Variable {self.name!r} is not on a GPU; use it as a NumPy array")
        return self.value

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._block.view.__dlpack_device__()

    def __repr__(self) -> str:
        value = "one value a replica" if self._is_divided() else repr(self._block.view)
        return f"Variable({self.name!r}, shape={self.shape}, dtype={self.dtype.name}, {value})"

    # ---- writing

    def assign(
        self, value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Variable:
        """Sets the variable. Collective: all ranks call it; in a replica context their values are aggregated first.

        Args:
            value: an array, a number or a sequence, of exactly the variable's shape, whose dtype casts safely.
            use_locking: taken for TensorFlow's sake, as the next two.
            name: not used.
            read_value: not used; the variable is always returned.

        Returns:
            The variable.

        Raises:
            ValueError: a wrong shape; a dtype that does not cast; a `PerReplica` value; in a replica context an
                aggregation of `NONE`, or the same Python number on all replicas for `SUM`. Nothing has changed.
            RuntimeError: the variable belongs to another strategy than the one this line runs in.
            ReplicaMismatchError: the replicas' calls differ.
        """
        del use_locking, name, read_value
        return self._write("assign", value)

    def assign_add(
        self, value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Variable:
        """Adds to the variable, otherwise as `assign`. Collective."""
        del use_locking, name, read_value
        return self._write("assign_add", value)

    def assign_sub(
        self, value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Variable:
        """Subtracts from the variable, otherwise as `assign`. Collective."""
        del use_locking, name, read_value
        return self._write("assign_sub", value)

    def _write(self, verb: str, value: Any) -> Variable:
        call = f"Variable.{verb} of {self.name!r}"
        strategy, context = self._strategy, _context.context()
        if isinstance(context, UpdateContext):
            if not any(self is one for one in context.variables):
                raise RuntimeError(
                    f"{call}: this update may write only the variables that were passed to it; pass it too"
                )
            storage = strategy._replica_storage if self._is_on_read else strategy._storage
            storage.write(self._block, self._checked(call, verb, value), RULES[verb])
            return self
        if context is not None and context.strategy is not strategy and not self._is_plain_here(context):
            raise RuntimeError(self._foreign(call, context))
        if self._is_on_read:
            self._write_own(call, verb, value)
        elif isinstance(context, ReplicaContext) and not strategy._aggregates_nothing:
            self._write_aggregated(call, verb, value)
        else:
            with strategy._communicator.joint(call):
                new = self._checked(call, verb, value)
            strategy._communicator.require_equal(call, [new])
            self._update(call, new, None, verb)
        return self

    def _write_aggregated(self, call: str, verb: str, value: Any) -> None:
        """A write in a replica context: the replicas' values become one first."""
        communicator, aggregation = self._strategy._communicator, self.aggregation
        is_number = isinstance(value, (bool, int, float, complex)) and not isinstance(value, np.generic)
        with communicator.joint(call):
            if aggregation is VariableAggregation.NONE:
                raise ValueError(
                    f"{call} in a replica context: it is not said how the replicas' values become one. Make the "
                    "variable with aggregation=VariableAggregation.SUM, MEAN or ONLY_FIRST_REPLICA"
                )
            op = OPERATIONS[aggregation]
            if op is not None:
                check_reducible(call, self.dtype, op)
            new = self._checked(call, verb, value)
            if op is ReduceOp.MEAN and self.dtype.kind in "iu":
                raise ValueError(
                    f"{call}: the mean of the replicas' values is float64 and does not fit {self.dtype.name}; "
                    "make the variable a float one, or aggregate by SUM or ONLY_FIRST_REPLICA"
                )
        if aggregation is VariableAggregation.SUM and communicator.size > 1:
            numbers = communicator.all_gather_obj(call, value if is_number else None)
            if None not in numbers and len(set(numbers)) == 1:
                raise ValueError(
                    f"{call}: the sum of the number {value!r}, the same on every replica, is ambiguous. Write it in "
                    "the cross-replica context, or pass an array, which is summed over the replicas"
                )
        self._update(call, new, op, verb)

    def _write_own(self, call: str, verb: str, value: Any) -> None:
        """A write to an ON_READ variable: each replica has its own."""
        strategy = self._strategy
        if isinstance(_context.context(), ReplicaContext) or strategy.num_replicas_in_sync == 1:
            strategy._replica_storage.write(self._block, self._checked(call, verb, value), RULES[verb])
            return
        is_sum = self.aggregation is VariableAggregation.SUM
        with strategy._communicator.joint(call):
            if is_sum and verb != "assign":
                raise ValueError(
                    f"{call}: how a change is shared out over the replicas of an ON_READ variable that sums is not "
                    "defined in the cross-replica context; use assign, or write it in a replica context"
                )
            new = self._checked(call, verb, value)
            if is_sum:
                new = shared_out(call, new, strategy.num_replicas_in_sync)
        strategy._communicator.require_equal(call, [new])
        new = strategy._communicator.broadcast_obj(call, _gpu.to_host(new), strategy._root)
        strategy._replica_storage.write(self._block, new, RULES[verb])

    def _update(self, call: str, new: Array, op: ReduceOp | None, verb: str) -> None:
        storage = self._strategy._storage
        if self._plan is None:
            self._plan = storage.plan([self._block], [()])
        storage.update(call, self._plan, [new], op, RULES[verb])

    # ---- help

    def _readable(self) -> Array:
        """The array in storage, for a read whose result is a fresh array."""
        if self._is_on_read:
            self._check_readable()
        return self._block.view

    def _check_readable(self) -> None:
        if self._is_divided():
            raise RuntimeError(
                f"Variable {self.name!r} has one value a replica (ON_READ), and in the cross-replica context "
                "arithmetic does not bring them together; call read_value() or numpy(), which do"
            )

    def _is_divided(self) -> bool:
        """Whether a read here would have to bring several replicas' values together."""
        if not self._is_on_read or self._strategy.num_replicas_in_sync == 1:
            return False
        return not _in_replica_of(self._strategy)

    def _aggregated(self, call: str) -> Array:
        strategy, array = self._strategy, self._block.view
        if self.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"{call} of {self.name!r}: it is not said how the replicas' values become one. Make the variable with "
                "aggregation=VariableAggregation.SUM, MEAN or ONLY_FIRST_REPLICA"
            )
        op = OPERATIONS[self.aggregation]
        strategy._require_cross_replica(call)
        if op is None:
            with strategy._on_stream():
                own = strategy._communicator.broadcast_obj(call, _gpu.to_host(array))
                return strategy.xp.asarray(own)
        return strategy._communicator.all_reduce(call, [array], op)[0]

    def _checked(self, call: str, verb: str, value: Any) -> Array:
        return written_array(call, verb, value, self.shape, self.dtype, self._strategy._stream is not None)

    def _is_plain_here(self, context: CrossReplicaContext | ReplicaContext) -> bool:
        """Whether a variable made outside of every scope may be written here: all ranks do the same to theirs."""
        divided = isinstance(context, ReplicaContext) and context.num_replicas_in_sync > 1
        return self._strategy is _context.default_strategy() and not divided

    def _foreign(self, call: str, context: CrossReplicaContext | ReplicaContext) -> str:
        if self._strategy is _context.default_strategy():
            return (
                f"{call}: the variable was made outside of this strategy's scope, so every process has one of its own; "
                "make it under `with strategy.scope():`"
            )
        return (
            f"{call}: the variable belongs to another strategy than {type(context.strategy).__name__}, which runs "
            "here; write it in its own strategy's scope"
        )


def _in_replica_of(strategy: Strategy) -> bool:
    context = _context.current.get()
    return type(context) is ReplicaContext and context._strategy is strategy
