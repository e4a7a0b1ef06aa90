"""How values leave replicas: results of `run` as distributed values, and arrays in objects sent between ranks."""

from __future__ import annotations

import copy
import operator
from typing import Any

import numpy as np

from hpcstrat import _gpu, _nest
from hpcstrat._arrays import PLAIN, exports_array, foreign_copy, from_foreign, is_foreign
from hpcstrat._communicators.base import Communicator
from hpcstrat._communicators.protocol import signature
from hpcstrat._group import ReplicaGroup
from hpcstrat._types import IndexedSlices
from hpcstrat._values import DistributedValues, PerReplica, refuse
from hpcstrat._variables import Variable

# ---- results of replica functions


def regroup(group: ReplicaGroup, result: Any) -> Any:
    """Each leaf of a replica's result as a distributed value, of which this process has its component.

    What lies in memory of variables, which changes, is copied.
    """
    if result is None:
        return None
    rank, size = group.communicator.rank, group.communicator.size
    leaves, structure = _nest.flatten(result)
    for i, leaf in enumerate(leaves):
        if leaf is None or isinstance(leaf, (Variable, DistributedValues)):
            continue
        if isinstance(leaf, np.ndarray):
            # A read-only view may be a variable's storage, which the next update changes under the result.
            if not leaf.flags.writeable and leaf.base is not None:
                leaf = leaf.copy()
        elif not isinstance(leaf, PLAIN):
            leaf = _apart(group, leaf)
        leaves[i] = leaf if size == 1 else PerReplica(leaf, rank, size)
    return structure.unflatten(leaves)


def check_alike(communicator: Communicator, result: Any) -> None:
    """Checks that all replicas returned nests of one structure. Collective.

    Raises:
        ReplicaMismatchError: they did not.
    """
    leaves, structure = _nest.flatten(result)
    nones = [i for i, leaf in enumerate(leaves) if leaf is None]
    returned = f"HPCSTRAT_CHECK: returns {_nest.describe(structure)}"
    communicator.exchange(signature("Strategy.run", returned, *([f"None at {nones}"] if nones else [])))


def _apart(group: ReplicaGroup, leaf: Any) -> Any:
    """What is no NumPy array, or a copy of it where it, or an attribute of it, lies in memory of variables."""
    if isinstance(leaf, IndexedSlices):
        parts = (leaf.values, leaf.indices, leaf.dense_shape)
        return IndexedSlices(*[_array_apart(group, part) for part in parts])
    if isinstance(leaf, memoryview):
        return np.array(leaf).data if _is_over_variables(group, np.asarray(leaf)) else leaf
    if _is_copied(leaf):
        return _array_apart(group, leaf)
    attributes = getattr(leaf, "__dict__", None)
    if not isinstance(attributes, dict):
        return leaf
    changed = {}
    for name, value in attributes.items():
        leaves, structure = _nest.flatten(value)
        copies = [_array_apart(group, one) for one in leaves]
        if not all(map(operator.is_, leaves, copies)):
            changed[name] = structure.unflatten(copies)
    if not changed:
        return leaf
    other = copy.copy(leaf)
    other.__dict__.update(changed)
    return other


def _array_apart(group: ReplicaGroup, value: Any) -> Any:
    """An array of any library, or a copy of it where it lies in memory of variables; all else as it is."""
    return foreign_copy(value) if _is_copied(value) and _is_over_variables(group, value) else value


def _is_copied(value: Any) -> bool:
    """Whether it is an array that can be copied."""
    if isinstance(value, (*PLAIN, Variable, DistributedValues)):
        return isinstance(value, np.ndarray)
    return exports_array(value) and (hasattr(value, "clone") or hasattr(value, "copy"))


def _is_over_variables(group: ReplicaGroup, value: Any) -> bool:
    """Whether an array of any library lies in memory of variables."""
    try:
        array = from_foreign("Strategy.run", value)
    except TypeError:  # it has no values in memory
        return False
    return group.storage.has(array) or group.replica_storage.has(array)


# ---- arrays in objects, which travel as host arrays; each rank puts what was on a GPU on a device of its own


class _FromGpu:
    """Stands for an array that was on a GPU."""

    __slots__ = ("host",)

    def __init__(self, host: np.ndarray[Any, Any]) -> None:
        self.host = host


def to_wire(call: str, nest: Any) -> Any:
    """`nest` with host copies of its arrays that are on the GPU, and other libraries' arrays as NumPy's.

    Raises:
        TypeError: an array has no values in memory, such as a sparse tensor, or a leaf is a distributed value.
    """

    def packed(leaf: Any) -> Any:
        if isinstance(leaf, DistributedValues):  # it would come as another replica's
            refuse(call)
        array = from_foreign(call, leaf) if is_foreign(leaf) else leaf
        return _FromGpu(array.get()) if _gpu.is_on_gpu(array) else array

    return _nest.map_leaves(packed, nest)


def from_wire(nest: Any, stream: _gpu.Stream | None) -> Any:
    """What `to_wire` was given, with the arrays on this rank's device."""
    if stream is None:
        return _nest.map_leaves(lambda leaf: leaf.host if isinstance(leaf, _FromGpu) else leaf, nest)
    asarray = stream.xp.asarray
    return _nest.map_leaves(lambda leaf: asarray(leaf.host) if isinstance(leaf, _FromGpu) else leaf, nest)
