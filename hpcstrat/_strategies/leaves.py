"""Nests of this replica's values: what a leaf may be, and which leaves the replicas exchange."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from hpcstrat._core import nests
from hpcstrat._core.arrays import as_array, as_native, from_foreign, is_foreign, is_numeric
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import Array, DistributedValues, component_of
from hpcstrat._transports.verbs import Communicator
from hpcstrat._variable.variable import Variable
from hpcstrat.data._splitting import bounds


def as_numeric(value: Any) -> Array:
    """An array of any library, a variable or a number as an array, in this machine's byte order.

    Raises:
        TypeError: `value` is something else, or a masked array.
    """
    if isinstance(value, Variable):
        value = value.value()
    array = as_array(current_call(), value, on_gpu=True)
    if array.dtype.kind not in "biufc" and not is_numeric(array.dtype):
        raise TypeError(
            f"{current_call()}: {value!r} is not an array of numbers and cannot become one; pass "
            "an array"
        )
    return array if array.dtype.isnative else as_native(array)


def check_axis(axis: Any, array: Array | None = None) -> None:
    """Raises unless an argument `axis` is an int and, with an array, an axis of that."""
    if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)):
        raise TypeError(f"{current_call()}: axis is {axis!r}; it must be an int")
    if array is not None and not -array.ndim <= axis < array.ndim:
        raise ValueError(
            f"{current_call()}: axis {axis} does not exist in an array of shape {array.shape}; "
            "pass an axis that does"
        )


def scalar(value: Any) -> Any:
    """A NumPy array without dimensions as a NumPy scalar, which CuPy does not have."""
    return value[()] if isinstance(value, np.ndarray) and value.ndim == 0 else value


def convert_foreign_leaves(nest: Any) -> Any:
    """`nest` with arrays of other libraries as NumPy's or CuPy's; itself if there are none."""
    leaves, structure = nests.flatten(nest)
    converted = [
        from_foreign(current_call(), leaf)
        if not isinstance(leaf, Variable) and is_foreign(leaf)
        else leaf
        for leaf in leaves
    ]
    return nest if all(map(operator.is_, converted, leaves)) else structure.unflatten(converted)


class Nest:
    """A nest of which the replicas exchange some leaves. The others stay, and so does `None`.

    Attributes:
        own: this replica's values of the leaves that are exchanged, by the leaf's index.
        must_match: the structure, and which leaves are exchanged, for ranks to compare.

    Args:
        value: a nest of this replica's own values or, with `keep`, of distributed values.
        keep: returns what a leaf becomes that is not distributed, and so is not exchanged.
    """

    __slots__ = ("_leaves", "_structure", "must_match", "own")

    def __init__(self, value: Any, keep: Callable[[Any], Any] | None = None) -> None:
        leaves, structure = nests.flatten(value)
        own: dict[int, Any] = {}
        for i, leaf in enumerate(leaves):
            if leaf is None:
                continue
            if keep is None:
                own[i] = leaf
            elif isinstance(leaf, DistributedValues):
                own[i] = component_of(leaf)
            else:
                leaves[i] = keep(leaf)
        self._leaves, self._structure = leaves, structure
        self.own: dict[int, Any] = own
        self.must_match: list[str] = [nests.describe(structure)]
        if keep is not None and not own:
            self.must_match.append("not distributed")
        elif len(own) < len(leaves):
            self.must_match.append(f"{'arrays' if keep is None else 'distributed'} at {list(own)}")

    def arrays(self) -> list[Array]:
        """The values that are exchanged, as numeric arrays."""
        return [as_numeric(value) for value in self.own.values()]

    def fill(self, results: Iterable[Any]) -> Any:
        """The nest with these results in place of the leaves in `own`, in its order."""
        for i, result in zip(self.own, results, strict=True):
            self._leaves[i] = scalar(result)
        return self._structure.unflatten(self._leaves)


def part_along(array: Any, axis: int, communicator: Communicator) -> Any:
    """This replica's part of an array, a view."""
    part = slice(*bounds(communicator.rank, communicator.size, array.shape[axis]))
    return array[(slice(None),) * (axis % array.ndim) + (part,)]
