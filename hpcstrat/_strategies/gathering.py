"""Gathers nests of values over the replicas, for the collective methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat._communicators.base import Communicator, check_gatherable
from hpcstrat._core import nests
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import Array, IndexedSlices
from hpcstrat._core.values import DistributedValues, component_of
from hpcstrat._strategies.leaves import as_numeric, positions, require_same_structure
from hpcstrat._variable.variable import Variable


def all_gather(communicator: Communicator, value: Any, axis: int) -> Any:
    """Concatenates over the replicas; `value` is a nest of this replica's values."""
    leaves, structure = nests.flatten(value)
    return structure.unflatten(
        _gather_leaves(communicator, leaves, axis, nests.describe(structure))
    )


def gather(communicator: Communicator, value: Any, axis: int) -> Any:
    """See `Strategy.gather`."""
    leaves, structure = nests.flatten(value)
    own: dict[int, Any] = {}  # this replica's components of distributed leaves, by index
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, DistributedValues):
            own[i] = component_of(leaf)
        elif leaf is not None:
            array = _as_gatherable(leaf, axis)
            check_gatherable([array.shape], axis)
            leaves[i] = leaf if isinstance(leaf, Variable) else array
    if not own:
        require_same_structure(communicator, structure, f"axis={axis}")
        return structure.unflatten(leaves)
    must_match = [nests.describe(structure), *positions("distributed", own, leaves)]
    gathered = _gather_leaves(communicator, list(own.values()), axis, *must_match)
    for i, result in zip(own, gathered, strict=True):
        leaves[i] = result
    return structure.unflatten(leaves)


def _gather_leaves(
    communicator: Communicator, leaves: Sequence[Any], axis: int, *must_match: str
) -> list[Any]:
    """Gathers all leaves in one message. `None` stays `None`."""
    arrays = {i: _as_gatherable(leaf, axis) for i, leaf in enumerate(leaves) if leaf is not None}
    must_match = (*must_match, *positions("arrays", arrays, leaves))
    results: list[Any] = list(leaves)
    gathered = communicator.all_gather(list(arrays.values()), axis, *must_match)
    for i, array in zip(arrays, gathered, strict=True):
        results[i] = array
    return results


def _as_gatherable(value: Any, axis: int) -> Array:
    if isinstance(value, IndexedSlices):
        raise NotImplementedError(
            f"{current_call()}: IndexedSlices cannot be gathered; gather their values and indices"
        )
    if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)):
        raise TypeError(f"{current_call()}: axis is {axis!r}; it must be an int")
    return as_numeric(value)
