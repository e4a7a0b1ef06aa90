"""Arguments and results of replica functions, and arrays in objects sent between ranks."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hpcstrat._agreement.records import signature_of
from hpcstrat._core import gpu, nests
from hpcstrat._core.arrays import PLAIN, exports_array, from_foreign, host_copy, is_foreign
from hpcstrat._core.call_name import current_call, names_call
from hpcstrat._core.ranks_in_words import join_by_rank
from hpcstrat._core.types import (
    DistributedValues,
    IndexedSlices,
    PerReplica,
    ReplicaMismatchError,
    component_of,
    refuse,
)
from hpcstrat._memory.slabs import holds
from hpcstrat._process import reports
from hpcstrat._replicas.group import ReplicaGroup
from hpcstrat._transports.verbs import Communicator
from hpcstrat._variable.variable import Variable
from hpcstrat.data._elements import checksum_of_arrays

_CALL = "Strategy.run"

# ---- arguments of replica functions


@names_call(_CALL)
def require_equal_arguments(
    communicator: Communicator, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raises unless arrays and numbers in the arguments are equal on all ranks. Collective."""
    names = [f"args[{i}]" for i in range(len(args))] + [f"kwargs[{name!r}]" for name in kwargs]
    with communicator.raise_together():
        own = {
            name: list(_describe_leaves(value))
            for name, value in zip(names, (*args, *kwargs.values()), strict=True)
        }
    by_rank = communicator.all_gather_differing_obj(own)
    # The names of all ranks, since a rank may pass an argument that another does not.
    for name in dict.fromkeys(name for descriptions in by_rank for name in descriptions):
        passed = [descriptions.get(name, "nothing") for descriptions in by_rank]
        if any(description != passed[0] for description in passed):
            seen = join_by_rank(enumerate(map(str, passed)))
            raise ReplicaMismatchError(
                f"{current_call()}: {name} differs between ranks (HPCSTRAT_CHECK): {seen}. "
                "Anything but a distributed value must be equal on all ranks. Seed random numbers, "
                "pass rank 0's value to all with hs.broadcast_object or, if each replica should "
                "have its own, make it in the function or with "
                "Strategy.experimental_distribute_values_from_function"
            )


@names_call(_CALL)
def explain_empty_part(error: BaseException, args: Any, kwargs: Any) -> None:
    """Adds a note to an exception of a replica function that got an empty distributed value."""
    leaves, _ = nests.flatten((args, kwargs))
    # Errors such as an index out of range do not mention the batch that was too small.
    parts = [component_of(leaf) for leaf in leaves if isinstance(leaf, DistributedValues)]
    if isinstance(error, Exception) and any(
        np.shape(part)[:1] == (0,) for part in parts if hasattr(part, "shape")
    ):
        reports.add_note(
            error,
            f"{current_call()}: this replica's part of the batch has no elements: the batch had "
            "too few for all replicas. Drop it by Dataset.batch(..., drop_remainder=True), or "
            "write the function so that it takes arrays whose first dimension is 0",
        )


def _describe_leaves(nest: Any) -> Iterator[str]:
    """A description of each array and number in a nest; equal values have equal descriptions."""
    for leaf in nests.flatten(nest)[0]:
        if isinstance(leaf, (bool, int, float, complex)):
            yield repr(leaf)
        elif isinstance(leaf, (np.ndarray, np.generic)) or gpu.is_on_gpu(leaf) or _is_tensor(leaf):
            yield describe_array(host_copy(current_call(), leaf), every=True)


def describe_array(array: Any, every: bool) -> str:
    """A description with a checksum of the array's contents, or of a sample unless `every`."""
    on_gpu = gpu.is_on_gpu(array)
    if on_gpu and not every:  # a copy to the host would wait for the GPU
        return f"{array.dtype}{list(array.shape)}"
    contents = checksum_of_arrays([host_copy(current_call(), array) if on_gpu else array], every)
    return f"{array.dtype}{list(array.shape)} of checksum {contents:08x}"


def _is_tensor(leaf: Any) -> bool:
    return is_foreign(leaf) and not isinstance(leaf, Variable)


# ---- results of replica functions

_NUMBERS = frozenset({bool, int, float, complex, np.float32, np.float64})


def regroup(group: ReplicaGroup, result: Any) -> Any:
    """Makes components of distributed values of this replica's result; copies variables' arrays."""
    kind = type(result)
    if kind in _NUMBERS:
        size = group.communicator.size
        return result if size == 1 else PerReplica(result, group.communicator.rank, size)
    # The nests that most functions return. Flattening costs more than everything else in `run`.
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
            # A read-only view may be a variable's storage, which the next update overwrites.
            if not leaf.flags.writeable and leaf.base is not None:
                leaf = leaf.copy()
        elif not isinstance(leaf, PLAIN):
            leaf = _detach(leaf)
        leaves[i] = leaf if size == 1 else PerReplica(leaf, rank, size)
    return structure.unflatten(leaves)


@names_call(_CALL)
def check_same_structure(communicator: Communicator, result: Any) -> None:
    """Raises unless all replicas returned nests of one structure. Collective."""
    leaves, structure = nests.flatten(result)
    nones = [i for i, leaf in enumerate(leaves) if leaf is None]
    returned = f"HPCSTRAT_CHECK: returns {nests.describe(structure)}"
    communicator.exchange(
        signature_of(current_call(), returned, *([f"None at {nones}"] if nones else []))
    )


def _detach(leaf: Any) -> Any:
    """A leaf without views of variables' memory, also in its attributes; a copy if it has any."""
    if isinstance(leaf, IndexedSlices):
        parts = (leaf.values, leaf.indices, leaf.dense_shape)
        return IndexedSlices(*[_detach_array(part) for part in parts])
    if isinstance(leaf, memoryview):
        return np.array(leaf).data if _is_over_variables(np.asarray(leaf)) else leaf
    if _is_copyable(leaf):
        return _detach_array(leaf)
    attributes = getattr(leaf, "__dict__", None)
    if not isinstance(attributes, dict):
        return leaf
    changed = {}
    for name, value in attributes.items():
        leaves, structure = nests.flatten(value)
        copies = [_detach_array(array) for array in leaves]
        if not all(map(operator.is_, leaves, copies)):
            changed[name] = structure.unflatten(copies)
    if not changed:
        return leaf
    # The user may hold the object, and expects it to stay unchanged.
    other = copy.copy(leaf)
    other.__dict__.update(changed)
    return other


def _detach_array(value: Any) -> Any:
    """`value`; a copy if it is an array of any library that views a variable's memory."""
    is_view = _is_copyable(value) and _is_over_variables(value)
    if not is_view:
        return value
    return value.clone() if hasattr(value, "clone") else value.copy()


def _is_copyable(value: Any) -> bool:
    """Whether `value` is an array that can be copied."""
    if isinstance(value, (*PLAIN, Variable, DistributedValues)):
        return isinstance(value, np.ndarray)
    return exports_array(value) and (hasattr(value, "clone") or hasattr(value, "copy"))


def _is_over_variables(value: Any) -> bool:
    """Whether an array of any library views a variable's memory."""
    try:
        array = from_foreign(_CALL, value)
    except TypeError:  # an array without values in memory
        return False
    # By address, not by type, because views of views count too.
    return holds(array)


# ---- arrays in objects are sent as host arrays; the receiver moves GPU arrays to its own device


class _FromGpu:
    """The host copy of an array that was on a GPU."""

    __slots__ = ("host",)

    def __init__(self, host: np.ndarray[Any, Any]) -> None:
        self.host = host


def to_wire(nest: Any) -> Any:
    """`nest` with arrays of other libraries as NumPy's, and those on a GPU copied to the host."""

    def pack(leaf: Any) -> Any:
        if isinstance(leaf, DistributedValues):  # the receiver would take it for its own component
            refuse(current_call())
        # As host arrays: the receiving rank may have no GPU and no CuPy.
        array = from_foreign(current_call(), leaf) if is_foreign(leaf) else leaf
        return _FromGpu(array.get()) if gpu.is_on_gpu(array) else array

    return nests.map_leaves(pack, nest)


def from_wire(nest: Any, stream: gpu.Stream | None) -> Any:
    """The nest that `to_wire` packed, with its GPU arrays on this rank's device."""

    def unpack(leaf: Any) -> Any:
        if not isinstance(leaf, _FromGpu):
            return leaf
        return leaf.host if stream is None else stream.xp.asarray(leaf.host)

    return nests.map_leaves(unpack, nest)
