"""Distributed values of plain ones, and back: scatters arrays, collects components."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcstrat._agreement.records import ManyValues, signature_of
from hpcstrat._core import nests
from hpcstrat._core.arrays import as_array
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import DistributedValues, PerReplica, ValueContext, component_of
from hpcstrat._replicas import contexts
from hpcstrat._replicas.contexts import InReplica
from hpcstrat._replicas.group import ReplicaGroup
from hpcstrat._strategies.leaves import as_numeric, check_axis, convert_foreign_leaves, part_along
from hpcstrat._strategies.transfer import describe_array, from_wire, to_wire
from hpcstrat._transports.verbs import Communicator
from hpcstrat.data._splitting import bounds


def scatter(group: ReplicaGroup, value: Any, axis: int, return_indices: bool) -> Any:
    """See `Strategy.scatter`."""
    communicator = group.communicator
    leaves, structure = nests.flatten(value)
    with group.on_stream():
        arrays = [_as_scatterable(leaf, axis) for leaf in leaves]
        size = _size_along([array.shape for array in arrays], axis)
        contents = ManyValues(
            tuple([describe_array(array, communicator.checks) for array in arrays])
        )
        communicator.exchange(
            signature_of(current_call(), nests.describe(structure), f"axis={axis}", contents)
        )
        indices = range(*bounds(communicator.rank, communicator.size, size))
        own = [_own_part(group, array, axis) for array in arrays]
    parts = structure.unflatten([_distributed(communicator, part) for part in own])
    return (parts, _distributed(communicator, indices)) if return_indices else parts


def _distributed(communicator: Communicator, own: Any) -> Any:
    """This replica's component as a distributed value; with one replica itself."""
    if communicator.size == 1:
        return own
    return PerReplica(own, communicator.rank, communicator.size)


def _own_part(group: ReplicaGroup, array: Any, axis: int) -> Any:
    """A copy of this replica's part of an array, on its device."""
    part = part_along(array, axis, group.communicator)
    here = part if group.stream is None else group.stream.here(part)
    return part.copy() if here is part else here


def _as_scatterable(value: Any, axis: Any) -> Any:
    """`value` as an array, after a check that it has this axis."""
    if isinstance(value, DistributedValues):
        raise TypeError(
            f"{current_call()}: {value!r} is distributed already; pass an array that is the same "
            "on every rank"
        )
    array = as_numeric(value)
    check_axis(axis)
    if not array.ndim:
        raise ValueError(
            f"{current_call()}: axis {axis} does not exist in a leaf of the value, the number "
            f"{array}; a list is a nest, so pass np.array(value)"
        )
    check_axis(axis, array)
    return array


def _size_along(shapes: Sequence[tuple[int, ...]], axis: int) -> int:
    """The one size along an axis; 0 of no arrays."""
    # Arrays of different sizes would be split at different places: elements that belong together
    # would go to different replicas.
    sizes = {shape[axis] for shape in shapes}
    if len(sizes) > 1:
        raise ValueError(
            f"{current_call()}: the arrays have shapes {', '.join(map(str, shapes))}, whose sizes "
            f"along axis {axis} differ; pass arrays of one size, or each to a separate call"
        )
    return max(sizes, default=0)


def values_from_function(group: ReplicaGroup, value_fn: Callable[[ValueContext], Any]) -> Any:
    """See `Strategy.experimental_distribute_values_from_function`."""
    communicator = group.communicator
    leaves, structure = nests.flatten(value_fn(ValueContext(communicator.rank, communicator.size)))
    leaves = [_own_value(group, leaf) for leaf in leaves]
    communicator.exchange(signature_of(current_call(), nests.describe(structure)))
    return structure.unflatten([_distributed(communicator, leaf) for leaf in leaves])


def _own_value(group: ReplicaGroup, value: Any) -> Any:
    """A number as it is, any other value as an array on this replica's device."""
    if isinstance(value, (np.generic, bool, int, float, complex)):
        return value
    is_array = isinstance(value, np.ndarray)
    array = as_array(current_call(), value, on_gpu=True) if is_array else as_numeric(value)
    if group.stream is None or not isinstance(array, np.ndarray):
        return array
    with group.stream.current():
        return group.stream.xp.asarray(array)


def local_results(group: ReplicaGroup, value: Any) -> tuple[Any, ...]:
    """See `Strategy.experimental_local_results`."""
    leaves, structure = nests.flatten(value)
    indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, DistributedValues)]
    differ = any(isinstance(leaf, PerReplica) for leaf in leaves)
    # This rank has nothing to send, but another may have: the ranks must agree, not wait.
    in_replica = isinstance(contexts.current.get(), InReplica)
    if not differ and not in_replica and group.communicator.size > 1:
        group.communicator.exchange(
            signature_of(current_call(), nests.describe(structure), "not distributed")
        )
    if not indices:
        return (convert_foreign_leaves(value),)
    own = [component_of(leaves[i]) for i in indices]
    by_peer = [own] * len(group.workers.peers)
    if differ:
        must_match = [nests.describe(structure)]
        if len(indices) < len(leaves):
            must_match.append(f"distributed at {indices}")
        with group.on_stream(), group.communicator.raise_together():
            # Sent to all ranks: each returns the components of its worker's replicas.
            sent = group.communicator.all_gather_obj(to_wire(own), *must_match)
            by_peer = [from_wire(sent[rank], group.stream) for rank in group.workers.peers]
    results = []
    for components in by_peer:
        nest = list(leaves)
        for i, component in zip(indices, components, strict=True):
            nest[i] = component
        results.append(structure.unflatten(nest))
    return tuple(results)
