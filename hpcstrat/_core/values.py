"""Distributed values: one component per replica."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from hpcstrat._core import nests
from hpcstrat._core.other_names import ONE_EACH


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
    raise TypeError(f"{call}: {ONE_EACH}")


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
