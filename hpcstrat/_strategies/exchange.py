"""Nests of values between the replicas: what a leaf may be; gathers, sends and splits them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from hpcstrat._agreement.records import ManyValues, signature_of
from hpcstrat._core import gpu, nests
from hpcstrat._core.arrays import (
    as_array,
    as_native,
    from_foreign,
    is_foreign,
    is_numeric,
)
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import (
    Array,
    DistributedValues,
    IndexedSlices,
    PerReplica,
    ReduceOp,
    ValueContext,
    component_of,
)
from hpcstrat._replicas import contexts
from hpcstrat._replicas.contexts import AcrossReplicas
from hpcstrat._replicas.group import ReplicaGroup
from hpcstrat._strategies.transfer import describe_array, from_wire, to_wire
from hpcstrat._transports.reduction import REDUCTIONS, check_reducible, reduce_rows
from hpcstrat._transports.verbs import Communicator, check_gatherable
from hpcstrat._variable.variable import Variable
from hpcstrat.data._splitting import bounds

# ---- leaves of nests


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


def scalar(value: Any) -> Any:
    """A NumPy array without dimensions as a NumPy scalar; any other value as it is.

    CuPy has no scalars: its arrays stay arrays.
    """
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


# ---- collective calls
#
# They communicate even if this replica has nothing to exchange: another one may have something, and
# would wait.


def all_gather(communicator: Communicator, value: Any, axis: int) -> Any:
    """Concatenates over the replicas; `value` is a nest of this replica's values."""
    return _gather(communicator, Nest(value), axis)


def gather(communicator: Communicator, value: Any, axis: int) -> Any:
    """See `Strategy.gather`."""

    def keep(plain: Any) -> Any:
        array = _as_gatherable(plain, axis)
        check_gatherable([array.shape], axis)
        return plain if isinstance(plain, Variable) else array

    return _gather(communicator, Nest(value, keep), axis)


def _gather(communicator: Communicator, nest: Nest, axis: int) -> Any:
    arrays = [_as_gatherable(value, axis) for value in nest.own.values()]
    return nest.fill(communicator.all_gather(arrays, axis, *nest.must_match))


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
    nest = Nest(value)
    return nest.fill(communicator.broadcast(nest.arrays(), int(root), *nest.must_match))


def reduce_scatter(
    communicator: Communicator, reduce_op: ReduceOp | str, value: Any, axis: int
) -> Any:
    """Returns this replica's part of a reduction; `value` is this replica's nest."""
    op = ReduceOp.parse(reduce_op, current_call())
    check_axis(axis)
    nest = Nest(value)
    arrays = nest.arrays()
    for array in arrays:
        if not -array.ndim <= axis < array.ndim:
            raise ValueError(
                f"{current_call()}: axis {axis} does not exist in an array of shape {array.shape}; "
                "pass one that does"
            )
    totals = communicator.all_reduce(arrays, op, f"axis={axis}", *nest.must_match)
    return nest.fill([_part_along(total, axis, communicator).copy() for total in totals])


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
    nest = Nest(value)
    arrays = nest.arrays()
    for array in arrays:
        check_reducible(array.dtype, op)
    rows = [array[None] for array in arrays]
    by_rank = communicator.all_gather(rows, 0, op.name, f"inclusive={inclusive}", *nest.must_match)
    count = communicator.rank + inclusive
    return nest.fill([reduce_rows(parts[:count], op) for parts in by_rank])


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
    own = [Nest(value) for value in values]
    arrays = [nest.arrays() for nest in own]
    described = [
        f"{', '.join(nest.must_match)} of {', '.join([array.dtype.name for array in leaves])}"
        for nest, leaves in zip(own, arrays, strict=True)
    ]
    if len(set(described)) > 1:
        raise ValueError(
            f"{current_call()}: the values for the replicas differ in structure or dtypes: "
            f"{'; '.join(described)}; only shapes may differ"
        )
    sent = [(rank, array) for rank, leaves in enumerate(arrays) for array in leaves]
    expected = [(rank, array) for rank in range(size) for array in arrays[0]]
    received = iter(communicator.all_to_all(sent, expected, *own[0].must_match, *_kinds(arrays[0])))
    return [own[0].fill([next(received) for _ in arrays[0]]) for _ in range(size)]


def neighbor_exchange(
    communicator: Communicator, to_left: Any, to_right: Any, periodic: bool
) -> tuple[Any, Any]:
    """Returns the left and the right neighbor's nests; `None` if a neighbor does not exist."""
    rank, size = communicator.rank, communicator.size
    left, right = (
        (rank + step) % size if periodic or 0 <= rank + step < size else None for step in (-1, 1)
    )
    both, must_match = [Nest(to_left), Nest(to_right)], [f"periodic={bool(periodic)}"]
    sent, expected = list[tuple[int, Array]](), list[tuple[int, Array]]()
    # Who sends to the left receives from the right.
    for side, nest, to, source in (
        ("left", both[0], left, right),
        ("right", both[1], right, left),
    ):
        arrays = nest.arrays()
        must_match += [f"to the {side} {', '.join(nest.must_match)}", *_kinds(arrays)]
        sent += [] if to is None else [(to, array) for array in arrays]
        expected += [] if source is None else [(source, array) for array in arrays]
    received = iter(communicator.all_to_all(sent, expected, *must_match))
    from_right, from_left = (
        None if source is None else nest.fill([next(received) for _ in nest.own])
        for nest, source in zip(both, (right, left), strict=True)
    )
    return from_left, from_right


def _kinds(arrays: Sequence[Array]) -> list[str]:
    """What receivers must know of arrays beside their shapes."""
    return [f"{a.dtype.name}{' on the GPU' if gpu.is_on_gpu(a) else ''}" for a in arrays]


# ---- distributed values of plain ones, and back


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


def _part_along(array: Any, axis: int, communicator: Communicator) -> Any:
    """This replica's part of an array, a view."""
    part = slice(*bounds(communicator.rank, communicator.size, array.shape[axis]))
    return array[(slice(None),) * (axis % array.ndim) + (part,)]


def _own_part(group: ReplicaGroup, array: Any, axis: int) -> Any:
    """A copy of this replica's part of an array, on its device."""
    part = _part_along(array, axis, group.communicator)
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
    if not -array.ndim <= axis < array.ndim:
        raise ValueError(
            f"{current_call()}: axis {axis} does not exist in an array of shape {array.shape}; "
            "pass an axis that does"
        )
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
    context = contexts.context()
    # This rank has nothing to send, but another may have: the ranks must agree, not wait.
    is_across = context is None or isinstance(context, AcrossReplicas)
    if not differ and is_across and group.communicator.size > 1:
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
