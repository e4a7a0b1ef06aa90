"""What enters and leaves replica functions, and arrays in objects that are sent between ranks."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hpcstrat._calls.records import signature_of
from hpcstrat._communicators.base import Communicator
from hpcstrat._core import gpu, nests
from hpcstrat._core.arrays import (
    PLAIN,
    exports_array,
    foreign_copy,
    from_foreign,
    host_copy,
    is_foreign,
)
from hpcstrat._core.call_name import current_call, names_call
from hpcstrat._core.types import IndexedSlices, ReplicaMismatchError
from hpcstrat._core.values import DistributedValues, PerReplica, component_of, refuse
from hpcstrat._process import failure
from hpcstrat._replicas.group import ReplicaGroup
from hpcstrat._variable.variable import Variable
from hpcstrat.data._checksum import of_array

_CALL = "Strategy.run"

# ---- arguments of replica functions


@names_call(_CALL)
def require_equal_arguments(
    communicator: Communicator, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Checks that the arrays and numbers among the arguments, but for distributed values, are equal. Collective.

    Raises:
        ReplicaMismatchError: they are not.
    """
    names = [f"args[{i}]" for i in range(len(args))] + [f"kwargs[{name!r}]" for name in kwargs]
    with communicator.raise_together():
        own = {
            name: list(_described(value))
            for name, value in zip(names, (*args, *kwargs.values()), strict=True)
        }
    by_rank = communicator.all_gather_obj(own)
    # Every name of any rank, since one may pass an argument that another does not.
    for name in dict.fromkeys(name for one in by_rank for name in one):
        found = [one.get(name, "nothing") for one in by_rank]
        if any(one != found[0] for one in found):
            seen = "; ".join(f"rank {rank} {one}" for rank, one in enumerate(found))
            raise ReplicaMismatchError(
                f"{current_call()}: {name} differs between ranks (HPCSTRAT_CHECK): {seen}. "
                "Anything but a distributed value must be equal on all ranks. Seed random numbers, "
                "pass rank 0's value to all with hs.broadcast_object or, if each replica should "
                "have its own, make it in the function or with "
                "Strategy.experimental_distribute_values_from_function"
            )


@names_call(_CALL)
def explain_empty_part(error: BaseException, args: Any, kwargs: Any) -> None:
    """Adds a note to an exception of a replica function that was given an empty distributed value."""
    leaves, _ = nests.flatten((args, kwargs))
    # A mean of no elements, or an index out of them, says nothing of the batch that was too small.
    parts = [component_of(leaf) for leaf in leaves if isinstance(leaf, DistributedValues)]
    if isinstance(error, Exception) and any(
        np.shape(part)[:1] == (0,) for part in parts if hasattr(part, "shape")
    ):
        failure.add_note(
            error,
            f"{current_call()}: this replica's part of the batch has no elements: the batch had "
            "too few for all replicas. Drop it by Dataset.batch(..., drop_remainder=True), or "
            "write the function so that it takes arrays of first dimension 0",
        )


def _described(nest: Any) -> Iterator[str]:
    """A description of each array and number in a nest, equal where they are."""
    for leaf in nests.flatten(nest)[0]:
        if isinstance(leaf, (bool, int, float, complex)):
            yield repr(leaf)
        elif isinstance(leaf, (np.ndarray, np.generic)) or gpu.is_on_gpu(leaf) or _is_tensor(leaf):
            array = host_copy(current_call(), leaf)
            yield f"{array.dtype}{list(array.shape)} of checksum {of_array(array):08x}"


def _is_tensor(leaf: Any) -> bool:
    return is_foreign(leaf) and not isinstance(leaf, Variable)


# ---- results of replica functions

_NUMBERS = frozenset({bool, int, float, complex, np.float32, np.float64})


def regroup(group: ReplicaGroup, result: Any) -> Any:
    """Each leaf of a replica's result as a distributed value, of which this process has its component.

    What lies in memory of variables, which changes, is copied.
    """
    kind = type(result)
    if kind in _NUMBERS:
        size = group.communicator.size
        return result if size == 1 else PerReplica(result, group.communicator.rank, size)
    # The nests that most functions return, without the flattening that costs more than all else
    # that `run` does.
    if kind is dict:
        return {key: regroup(group, value) for key, value in result.items()}
    if kind is list:
        return [regroup(group, value) for value in result]
    if kind is tuple:
        return tuple([regroup(group, value) for value in result])
    if result is None:
        return None
    rank, size = group.communicator.rank, group.communicator.size
    leaves, structure = nests.flatten(result)
    for i, leaf in enumerate(leaves):
        if leaf is None or isinstance(leaf, (Variable, DistributedValues)):
            continue
        if isinstance(leaf, np.ndarray):
            # A read-only view may be a variable's storage, which the next update changes under the
            # result.
            if not leaf.flags.writeable and leaf.base is not None:
                leaf = leaf.copy()
        elif not isinstance(leaf, PLAIN):
            leaf = _apart(group, leaf)
        leaves[i] = leaf if size == 1 else PerReplica(leaf, rank, size)
    return structure.unflatten(leaves)


@names_call(_CALL)
def check_alike(communicator: Communicator, result: Any) -> None:
    """Checks that all replicas returned nests of one structure. Collective.

    Raises:
        ReplicaMismatchError: they did not.
    """
    leaves, structure = nests.flatten(result)
    nones = [i for i, leaf in enumerate(leaves) if leaf is None]
    returned = f"HPCSTRAT_CHECK: returns {nests.describe(structure)}"
    communicator.exchange(
        signature_of(current_call(), returned, *([f"None at {nones}"] if nones else []))
    )


def _apart(group: ReplicaGroup, leaf: Any) -> Any:
    """A result other than a NumPy array; a copy of it if it, or an attribute of it, lies in memory of variables."""
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
        leaves, structure = nests.flatten(value)
        copies = [_array_apart(group, one) for one in leaves]
        if not all(map(operator.is_, leaves, copies)):
            changed[name] = structure.unflatten(copies)
    if not changed:
        return leaf
    # The object is the user's, who may hold it and expect to find it unchanged.
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
        array = from_foreign(_CALL, value)
    except TypeError:  # it has no values in memory
        return False
    # By address, not by type: a view of a view of a variable is over its memory too.
    return group.storage.has(array) or group.replica_storage.has(array)


# ---- arrays in objects, which travel as host arrays; each rank puts what was on a GPU on a device
# of its own


class _FromGpu:
    """Stands for an array that was on a GPU."""

    __slots__ = ("host",)

    def __init__(self, host: np.ndarray[Any, Any]) -> None:
        self.host = host


def to_wire(nest: Any) -> Any:
    """`nest` with host copies of its arrays that are on the GPU, and other libraries' arrays as NumPy's.

    Raises:
        TypeError: an array has no values in memory, such as a sparse tensor, or a leaf is a
            distributed value.
    """

    def packed(leaf: Any) -> Any:
        if isinstance(leaf, DistributedValues):  # it would come as another replica's
            refuse(current_call())
        # As host arrays: the rank that receives it may have no GPU, and no CuPy.
        array = from_foreign(current_call(), leaf) if is_foreign(leaf) else leaf
        return _FromGpu(array.get()) if gpu.is_on_gpu(array) else array

    return nests.map_leaves(packed, nest)


def from_wire(nest: Any, stream: gpu.Stream | None) -> Any:
    """What `to_wire` was given, with the arrays on this rank's device."""
    if stream is None:
        return nests.map_leaves(
            lambda leaf: leaf.host if isinstance(leaf, _FromGpu) else leaf, nest
        )
    asarray = stream.xp.asarray
    return nests.map_leaves(
        lambda leaf: asarray(leaf.host) if isinstance(leaf, _FromGpu) else leaf, nest
    )
