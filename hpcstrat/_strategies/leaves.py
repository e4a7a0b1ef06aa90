"""Leaves of nests, as the collective methods take and return them."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sized
from typing import Any

import numpy as np

from hpcstrat._calls.records import signature_of
from hpcstrat._communicators.base import Communicator
from hpcstrat._core import nests
from hpcstrat._core.arrays import as_array, as_native, from_foreign, is_foreign, is_numeric
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import Array
from hpcstrat._variable.variable import Variable


def as_numeric(value: Any) -> Array:
    """`value` as a numeric array on its own device, in this machine's byte order.

    Args:
        value: an array of any library, a variable or a number.

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


def check_axis(axis: Any) -> None:
    """Checks that an argument `axis` is an int.

    Raises:
        TypeError: it is not.
    """
    if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)):
        raise TypeError(f"{current_call()}: axis is {axis!r}; it must be an int")


def scalar(array: Array) -> Any:
    """A NumPy array without dimensions as a NumPy scalar; any other array as it is.

    CuPy has no scalars: its arrays stay arrays.
    """
    return array[()] if array.ndim == 0 else array


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


def positions(kind: str, indices: Collection[int], leaves: Sized) -> list[str]:
    """Which leaves are of this kind, for ranks to compare; nothing if all are."""
    return [f"{kind} at {list(indices)}"] if len(indices) < len(leaves) else []


def require_same_structure(
    communicator: Communicator, structure: nests.Structure, *must_match: str
) -> None:
    """Checks that no rank has values to exchange, since this rank has none. Collective.

    Without this a rank that has some would wait for the others.
    """
    if communicator.size > 1:
        communicator.exchange(
            signature_of(current_call(), *must_match, nests.describe(structure), "not distributed")
        )
