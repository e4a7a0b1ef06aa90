"""Types that every layer uses: the error, reductions, specifications, distributed values."""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from hpcstrat._core import nests

Array: TypeAlias = Any
"""A `numpy.ndarray` on a CPU device, a `cupy.ndarray` on a GPU."""

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"
"""Flat memory on the host."""

MaybeNone: TypeAlias = Any
"""`Thing | MaybeNone` is a `Thing`, or None on request; type checkers need not know."""

_Choice = TypeVar("_Choice", bound=enum.Enum)


class ReplicaMismatchError(ValueError):
    """Replicas disagree where they must agree: on the call, a shape, a dtype or an option.

    It is raised on every rank, and its message names every rank's value.
    """


class ReduceOp(enum.Enum):
    """How values of several replicas become one. `MIN` and `MAX` go beyond TensorFlow.

    Examples:
        >>> import hpcstrat as hs
        >>> strategy = hs.CentralStorageStrategy()
        >>> parts = strategy.scatter(np.array([1.0, 2.0, 6.0]))
        >>> for op in hs.ReduceOp:
        ...     print(op.name, strategy.reduce(op, parts, axis=0))
        SUM 9.0
        MEAN 3.0
        MIN 1.0
        MAX 6.0
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"

    # By identity, in C: members are singletons, and Enum's own hash is Python code, which every
    # reduction would run.
    if not TYPE_CHECKING:  # a type checker rejects the override
        __hash__ = object.__hash__

    @classmethod
    def parse(cls, op: ReduceOp | str, call: str) -> ReduceOp:
        """The operation that `op` names: a member, or its name in any case.

        Raises:
            ValueError: `op` is neither. `call` names the method in the message.
        """
        return op if isinstance(op, ReduceOp) else parse_choice(cls, op, call, "reduce_op")


class FirstReplica(enum.Enum):
    """In addition to `ReduceOp`: nothing is reduced, and the first replica's values count."""

    FIRST_REPLICA = "FIRST_REPLICA"

    if not TYPE_CHECKING:  # as for `ReduceOp`
        __hash__ = object.__hash__


FIRST_REPLICA: Final = FirstReplica.FIRST_REPLICA
Aggregation: TypeAlias = "ReduceOp | FirstReplica"
"""How an update combines the replicas' values, before a rule changes the variables by them."""


def parse_choice(choices: type[_Choice], given: Any, call: str, argument: str) -> _Choice:
    """The member of the enumeration that `given` names: a member, or its name in any case.

    Raises:
        ValueError: `given` is neither.
    """
    if isinstance(given, choices):
        return given
    if isinstance(given, str):
        try:
            return choices[given.upper()]
        except KeyError:
            pass
    names = ", ".join(f"{choices.__name__}.{name}" for name in choices.__members__)
    raise ValueError(
        f"{call}: {argument} is {given!r}; it must be one of {names}, or such a name as a string"
    )


def as_dtype(call: str, dtype: npt.DTypeLike) -> np.dtype[Any]:
    """`numpy.dtype(dtype)`, whose error names the call."""
    try:
        return np.dtype(dtype)
    except TypeError as error:
        raise TypeError(
            f"{call}: dtype is {dtype!r}, which NumPy does not take ({error}); write a dtype's "
            "name, such as 'float32'"
        ) from None


class TensorSpec:
    """The shape and dtype of an array.

    Attributes:
        shape: a tuple of ints; `None` is a size that is not known.
        dtype: the NumPy dtype.
        name: a name, or `None`.

    Examples:
        >>> import hpcstrat as hs
        >>> spec = hs.data.Dataset.range(5).batch(2).element_spec
        >>> spec
        TensorSpec(shape=(None,), dtype=int64, name=None)
        >>> spec == hs.TensorSpec([None], "int64"), spec == hs.TensorSpec([2], "int64")
        (True, False)
    """

    __slots__ = ("dtype", "name", "shape")

    def __init__(
        self,
        shape: Sequence[int | None],
        dtype: npt.DTypeLike = np.float32,
        name: str | None = None,
    ) -> None:
        self.shape: tuple[int | None, ...] = tuple(shape)
        self.dtype: np.dtype[Any] = as_dtype("TensorSpec", dtype)
        self.name: str | None = name

    # With the class: the specification of one replica's component does not equal a value's.
    def _key(self) -> tuple[Any, ...]:
        return (type(self), self.shape, self.dtype, self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorSpec) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        # A string's name, such as str832, counts bits.
        dtype = self.dtype.str if self.dtype.kind in "US" else self.dtype.name
        content = f"shape={self.shape}, dtype={dtype}, name={self.name!r}"
        return f"{type(self).__name__}({content})"


class PerReplicaSpec(TensorSpec):
    """The specification of one replica's component of a distributed value.

    Examples:
        >>> import hpcstrat as hs
        >>> hs.PerReplicaSpec([2, 3], "float32")
        PerReplicaSpec(shape=(2, 3), dtype=float32, name=None)
        >>> hs.PerReplicaSpec([2, 3]) == hs.TensorSpec([2, 3])
        False
    """

    __slots__ = ()


class IndexedSlices:
    """Rows of a larger array, as of an embedding's gradient: `dense[indices[i]] += values[i]`.

    Attributes:
        values: array of shape `(k, ...)`.
        indices: integer array of shape `(k,)`; an index may occur several times.
        dense_shape: the shape of the whole array, or `None`.

    Examples:
        The gradient of the rows 3 and 0 of an embedding with 5 rows:

        >>> import numpy as np
        >>> import hpcstrat as hs
        >>> with hs.OneDeviceStrategy("CPU:0").scope():
        ...     table = hs.Variable(np.zeros((5, 2)))
        >>> gradient = hs.IndexedSlices(np.ones((2, 2)), np.array([3, 0]), dense_shape=(5, 2))
        >>> hs.optimizers.SGD(0.5).apply_gradients([(gradient, table)])
        >>> print(table.numpy()[:, 0])
        [-0.5  0.   0.  -0.5  0. ]
    """

    __slots__ = ("dense_shape", "indices", "values")

    def __init__(self, values: Array, indices: Array, dense_shape: Array | None = None) -> None:
        self.values: Array = values
        self.indices: Array = indices
        self.dense_shape: Array | None = dense_shape

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of the whole array, or `None` if it was not given.

        Examples:
            >>> slices = hs.IndexedSlices(np.ones((2, 3)), np.array([4, 0]), dense_shape=(9, 3))
            >>> slices.shape, slices.values.shape
            ((9, 3), (2, 3))
        """
        return None if self.dense_shape is None else tuple(int(n) for n in self.dense_shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of `values`.

        Examples:
            >>> hs.IndexedSlices(np.ones((2, 3), np.float32), np.array([4, 0])).dtype
            dtype('float32')
        """
        return self.values.dtype

    def __repr__(self) -> str:
        return (
            f"IndexedSlices(values={self.values!r}, indices={self.indices!r}, "
            f"dense_shape={self.dense_shape!r})"
        )


@dataclass(frozen=True)
class ValueContext:
    """Describes the replica to a function that makes its value.

    Attributes:
        replica_id_in_sync_group: the index of the replica.
        num_replicas_in_sync: the number of replicas.

    Examples:
        >>> import hpcstrat as hs
        >>> def offset(context):
        ...     return 10.0 * context.replica_id_in_sync_group / context.num_replicas_in_sync
        >>> print(hs.CentralStorageStrategy().experimental_distribute_values_from_function(offset))
        0.0
        >>> offset(hs.ValueContext(replica_id_in_sync_group=3, num_replicas_in_sync=4))
        7.5
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


@dataclass(frozen=True)
class RunOptions:
    """Options of `Strategy.run`. They concern compilation, and change nothing here.

    Attributes:
        experimental_enable_dynamic_batch_size: batches may differ in size.
        experimental_bucketizing_dynamic_shape: sizes are rounded up to a few different sizes.
        experimental_xla_options: options of a compiler.

    Examples:
        >>> import hpcstrat as hs
        >>> strategy = hs.CentralStorageStrategy()
        >>> options = hs.RunOptions(experimental_enable_dynamic_batch_size=False)
        >>> strategy.run(lambda x: x + 1, args=(3,), options=options)
        4
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None


# ---- distributed values: one component per replica


class DistributedValues:
    """A value with one component per replica. A process holds only its own replica's component.

    `Strategy.experimental_local_results` collects the components of all replicas, `Strategy.reduce`
    and `Strategy.gather` combine them, and `Strategy.run` passes each replica its own.

    Operators never communicate, so none can work on the whole value: truth, comparison, arithmetic,
    conversion, indexing, iteration and array functions raise `TypeError`. A distributed value is
    hashed by identity, and can be copied and pickled.

    Examples:
        What replica 0 of 2 has; `Strategy.run` and others return such values:

        >>> import hpcstrat as hs
        >>> value = hs.PerReplica(3.0, 0, 2)
        >>> print(value)
        PerReplica(replica 0 of 2: 3.0)
        >>> value + 1
        Traceback (most recent call last):
        TypeError: PerReplica.__add__: this is one value per replica; reduce it first: ...
    """

    __slots__ = ("_component", "_replica_id", "_replicas")

    def __init__(self, component: Any, replica_id: int, replicas: int) -> None:
        self._component = component
        self._replica_id = replica_id
        self._replicas = replicas

    def __repr__(self) -> str:
        place = f"replica {self._replica_id} of {self._replicas}"
        return f"{type(self).__name__}({place}: {self._component!r})"

    def __format__(self, spec: str) -> str:
        if spec:
            refuse(f"{type(self).__name__}.__format__")
        return repr(self)


def refuse(call: str) -> NoReturn:
    """Raises the `TypeError` for a distributed value that is used as a number or an array."""
    raise TypeError(
        f"{call}: this is one value per replica; reduce it first: strategy.reduce('MEAN', value, "
        "axis=None), or look at all of them: strategy.experimental_local_results(value). A replica "
        "function is given its own: strategy.run(fn, args=(value,))"
    )


_REFUSED = """
    bool int float complex index round abs neg pos invert
    len iter contains getitem setitem eq ne lt le gt ge
    add sub mul matmul truediv floordiv mod divmod pow lshift rshift and xor or
    radd rsub rmul rmatmul rtruediv rfloordiv rmod rdivmod rpow rlshift rrshift rand rxor ror
    array array_ufunc array_function cupy_get_ndarray
"""


def _make_refusal(name: str) -> Callable[..., NoReturn]:
    def refuse_call(self: DistributedValues, *_: Any, **__: Any) -> NoReturn:
        refuse(f"{type(self).__name__}.{name}")

    return refuse_call


# Set after the class is made: a class body that defines __eq__ loses its hash.
for _name in _REFUSED.split():
    setattr(DistributedValues, f"__{_name}__", _make_refusal(f"__{_name}__"))


class PerReplica(DistributedValues):
    """A value that may differ between replicas.

    Examples:
        What replica 1 of 2 has of the results of `strategy.run(lambda: 10 * hs.replica_id())`:

        >>> import hpcstrat as hs
        >>> hs.PerReplica(10, 1, 2)
        PerReplica(replica 1 of 2: 10)
    """

    __slots__ = ()


class Mirrored(DistributedValues):
    """A value that is equal on all replicas, each of which holds a copy.

    Examples:
        What replica 1 of 2 has of a sum that `StrategyExtended.reduce_to` sent to all replicas:

        >>> import hpcstrat as hs
        >>> hs.Mirrored(3.0, 1, 2)
        Mirrored(replica 1 of 2: 3.0)
    """

    __slots__ = ()


def component_of(value: Any) -> Any:
    """This replica's component of a distributed value; anything else unchanged."""
    return value._component if isinstance(value, DistributedValues) else value


_PLAIN = frozenset({type(None), bool, int, float, complex, str, np.ndarray, np.float32, np.float64})


def select(nest: Any) -> Any:
    """`nest` with every distributed value replaced by the component of this process's replica.

    A nest without any is returned itself, not a copy: a function may append to its list.
    """
    kind = type(nest)
    if kind in _PLAIN:
        return nest
    if kind is PerReplica or kind is Mirrored:
        return nest._component
    # The nests of most batches, at a third of the cost of flattening them.
    if kind is tuple or kind is list:
        own = [select(value) for value in nest]
        return nest if all(map(operator.is_, own, nest)) else kind(own)
    if kind is dict:
        own = [select(value) for value in nest.values()]
        return (
            nest
            if all(map(operator.is_, own, nest.values()))
            else dict(zip(nest, own, strict=True))
        )
    leaves, structure = nests.flatten(nest)
    own = [component_of(leaf) for leaf in leaves]
    return nest if all(map(operator.is_, own, leaves)) else structure.unflatten(own)
