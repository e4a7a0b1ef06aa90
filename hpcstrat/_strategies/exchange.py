"""Gathers and sends nests of values between replicas, for the collective methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hpcstrat._communicators.base import Communicator, Outgoing, check_gatherable
from hpcstrat._communicators.reduction import REDUCTIONS, check_reducible, reduce_rows
from hpcstrat._core import gpu, nests
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import Array, DistributedValues, IndexedSlices, ReduceOp, component_of
from hpcstrat._strategies.leaves import (
    as_numeric,
    check_axis,
    positions,
    require_same_structure,
    scalar,
)
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
    check_axis(axis)
    return as_numeric(value)


def broadcast(communicator: Communicator, value: Any, root: int) -> Any:
    """Returns the nest of replica `root`; `value` is this replica's nest."""
    if (
        isinstance(root, bool)
        or not isinstance(root, (int, np.integer))
        or not 0 <= root < communicator.size
    ):
        raise ValueError(
            f"{current_call()}: root is {root!r}; it must be the index of a replica, "
            f"0..{communicator.size - 1}"
        )
    return _exchange(
        value, lambda arrays, *must_match: communicator.broadcast(arrays, int(root), *must_match)
    )


def reduce_scatter(
    communicator: Communicator, reduce_op: ReduceOp | str, value: Any, axis: int
) -> Any:
    """Returns this replica's part of a reduction; `value` is this replica's nest."""
    op = ReduceOp.parse(reduce_op, current_call())
    check_axis(axis)
    return _exchange(
        value,
        lambda arrays, *must_match: communicator.reduce_scatter(arrays, op, int(axis), *must_match),
    )


def scan(communicator: Communicator, reduce_op: ReduceOp | str, value: Any, inclusive: bool) -> Any:
    """Reduces the nests of the replicas before this one; `value` is this replica's nest."""
    op = ReduceOp.parse(reduce_op, current_call())
    if REDUCTIONS[op].is_mean:
        raise ValueError(
            f"{current_call()}: reduce_op is {op.name}, which has no result for the first replica; "
            "pass SUM, MIN or MAX"
        )
    if not isinstance(inclusive, bool):
        raise TypeError(f"{current_call()}: inclusive is {inclusive!r}; it must be True or False")

    def scan_arrays(arrays: list[Array], *must_match: str) -> list[Array]:
        for array in arrays:
            check_reducible(array.dtype, op)
        rows = [array[None] for array in arrays]
        by_rank = communicator.all_gather(rows, 0, op.name, f"inclusive={inclusive}", *must_match)
        count = communicator.rank + inclusive
        return [reduce_rows(parts[:count], op) for parts in by_rank]

    return _exchange(value, scan_arrays)


def all_to_all(communicator: Communicator, values: Sequence[Any]) -> list[Any]:
    """Returns each replica's nest for this one; `values` are this replica's nests for each."""
    size = communicator.size
    if not isinstance(values, (list, tuple)) or len(values) != size:
        given = (
            f"{len(values)} values"
            if isinstance(values, (list, tuple))
            else f"of type {type(values).__name__}"
        )
        raise ValueError(
            f"{current_call()}: values is {given}; pass a list of {size}, one per replica"
        )
    nests = [_Nest(value) for value in values]
    if len({(nest.description, nest.dtypes) for nest in nests}) > 1:
        raise ValueError(
            f"{current_call()}: the values for the replicas differ in structure or dtypes: "
            f"{'; '.join(f'{nest.description} of {nest.dtypes}' for nest in nests)}; only shapes "
            "may differ"
        )
    outgoing = [
        _outgoing(dict(enumerate(arrays)), range(size))
        for arrays in zip(*[n.arrays for n in nests], strict=True)
    ]
    received = communicator.all_to_all(outgoing, nests[0].description)
    return [nests[0].fill([of[source] for of in received]) for source in range(size)]


def neighbor_exchange(
    communicator: Communicator, to_left: Any, to_right: Any, periodic: bool
) -> tuple[Any, Any]:
    """Returns the left and the right neighbor's nests; `None` if a neighbor does not exist."""
    rank, size = communicator.rank, communicator.size
    left, right = (
        (rank + step) % size if periodic or 0 <= rank + step < size else None for step in (-1, 1)
    )
    nests = _Nest(to_left), _Nest(to_right)
    # (nest, destination, source): sending to the left means receiving from the right.
    sides = ((nests[0], left, right), (nests[1], right, left))
    outgoing = [
        _outgoing({} if to is None else {to: array}, [] if source is None else [source], array)
        for nest, to, source in sides
        for array in nest.arrays
    ]
    described = [f"to the left {nests[0].description}", f"to the right {nests[1].description}"]
    received = communicator.all_to_all(outgoing, *described, f"periodic={bool(periodic)}")
    results: list[Any] = []
    for nest, _, source in sides:
        own, received = received[: len(nest.arrays)], received[len(nest.arrays) :]
        results.append(None if source is None else nest.fill([of[source] for of in own]))
    from_right, from_left = results
    return from_left, from_right


class _Nest:
    """A nest and the arrays in it. `None` stays `None`.

    Attributes:
        arrays: the leaves that are not `None`.
        description: the structure, and which leaves are arrays.
        dtypes: the names of the arrays' dtypes.
    """

    def __init__(self, value: Any) -> None:
        self._leaves, self._structure = nests.flatten(value)
        self._places = [i for i, leaf in enumerate(self._leaves) if leaf is not None]
        self.arrays: list[Array] = [as_numeric(self._leaves[i]) for i in self._places]
        self.dtypes = ", ".join(array.dtype.name for array in self.arrays)
        self.description: str = nests.describe(self._structure)
        if len(self._places) < len(self._leaves):
            self.description += f", arrays at {self._places}"

    def fill(self, arrays: Sequence[Array]) -> Any:
        """A nest of this structure with these arrays."""
        leaves = list(self._leaves)
        for i, array in zip(self._places, arrays, strict=True):
            leaves[i] = scalar(array)
        return self._structure.unflatten(leaves)


def _exchange(value: Any, exchange_arrays: Callable[..., list[Array]]) -> Any:
    nest = _Nest(value)
    return nest.fill(exchange_arrays(nest.arrays, nest.description))


def _outgoing(to: Mapping[int, Array], sources: Sequence[int], like: Array = None) -> Outgoing:
    like = to[0] if like is None else like
    return Outgoing(like.dtype, to, sources, gpu.is_on_gpu(like))
