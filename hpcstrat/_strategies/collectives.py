"""Gathers, broadcasts, scans and sends nests of this replica's values over the replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat._core import gpu
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import Array, IndexedSlices, ReduceOp
from hpcstrat._strategies.leaves import Nest, as_numeric, check_axis, part_along
from hpcstrat._transports.reduction import REDUCTIONS, check_reducible, reduce_rows
from hpcstrat._transports.verbs import Communicator, check_gatherable
from hpcstrat._variable.variable import Variable

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
        check_axis(axis, array)
    totals = communicator.all_reduce(arrays, op, f"axis={axis}", *nest.must_match)
    return nest.fill([part_along(total, axis, communicator).copy() for total in totals])


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
