"""What replica functions return, on its way out of `run`."""

from __future__ import annotations

import copy
import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcstrat import _nest
from hpcstrat._array_protocols import PLAIN, converted, copy_of, speaks
from hpcstrat._communicators.records import signature
from hpcstrat._types import IndexedSlices
from hpcstrat._values import DistributedValues, PerReplica
from hpcstrat._variables import Variable

if TYPE_CHECKING:
    from hpcstrat._strategies.base import Strategy


def regroup(strategy: Strategy, result: Any) -> Any:
    """Each leaf of a replica's result as a distributed value, of which this process has its component.

    What lies in memory of variables, which changes, is copied.
    """
    if result is None:
        return None
    rank, size = strategy._communicator.rank, strategy._communicator.size
    leaves, structure = _nest.flatten(result)
    for i, leaf in enumerate(leaves):
        if leaf is None or isinstance(leaf, (Variable, DistributedValues)):
            continue
        if isinstance(leaf, np.ndarray):
            if not leaf.flags.writeable and leaf.base is not None:
                leaf = leaf.copy()  # it may be a variable's storage
        elif not isinstance(leaf, PLAIN):
            leaf = _apart(strategy, leaf)
        leaves[i] = leaf if size == 1 else PerReplica(leaf, rank, size)
    return structure.unflatten(leaves)


def check_alike(strategy: Strategy, result: Any) -> None:
    """Checks that all replicas returned nests of one structure. Collective.

    Raises:
        ReplicaMismatchError: they did not.
    """
    leaves, structure = _nest.flatten(result)
    nones = [i for i, leaf in enumerate(leaves) if leaf is None]
    returned = f"HPCSTRAT_CHECK: returns {_nest.describe(structure)}"
    strategy._communicator.exchange(signature("Strategy.run", returned, *([f"None at {nones}"] if nones else [])))


def _apart(strategy: Strategy, leaf: Any) -> Any:
    """What is no NumPy array, or a copy of it where it, or an attribute of it, lies in memory of variables."""
    if isinstance(leaf, IndexedSlices):
        parts = (leaf.values, leaf.indices, leaf.dense_shape)
        return IndexedSlices(*[_array_apart(strategy, part) for part in parts])
    if isinstance(leaf, memoryview):
        return np.array(leaf).data if _is_over_variables(strategy, np.asarray(leaf)) else leaf
    if _is_copied(leaf):
        return _array_apart(strategy, leaf)
    attributes = getattr(leaf, "__dict__", None)
    if not isinstance(attributes, dict):
        return leaf
    changed = {}
    for name, value in attributes.items():
        leaves, structure = _nest.flatten(value)
        copies = [_array_apart(strategy, one) for one in leaves]
        if not all(map(operator.is_, leaves, copies)):
            changed[name] = structure.unflatten(copies)
    if not changed:
        return leaf
    other = copy.copy(leaf)
    other.__dict__.update(changed)
    return other


def _array_apart(strategy: Strategy, value: Any) -> Any:
    """An array of any library, or a copy of it where it lies in memory of variables; all else as it is."""
    return copy_of(value) if _is_copied(value) and _is_over_variables(strategy, value) else value


def _is_copied(value: Any) -> bool:
    """Whether it is an array that can be copied."""
    if isinstance(value, (*PLAIN, Variable, DistributedValues)):
        return isinstance(value, np.ndarray)
    return speaks(value) and (hasattr(value, "clone") or hasattr(value, "copy"))


def _is_over_variables(strategy: Strategy, value: Any) -> bool:
    """Whether an array of any library lies in memory of variables."""
    try:
        array = converted("Strategy.run", value)
    except TypeError:  # it has no values in memory
        return False
    return strategy._storage.has(array) or strategy._replica_storage.has(array)
