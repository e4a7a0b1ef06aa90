"""Reduces nests of values over the replicas, for the collective methods."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat._communicators.base import Communicator
from hpcstrat._communicators.reduction import REDUCTIONS, check_reducible, mean_dtype
from hpcstrat._core import gpu, nests
from hpcstrat._core.arrays import is_foreign
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import Array, DistributedValues, IndexedSlices, ReduceOp, component_of
from hpcstrat._strategies.exchange import as_numeric, positions, require_same_structure, scalar
from hpcstrat._variable.variable import Variable


def all_reduce(communicator: Communicator, reduce_op: ReduceOp | str, value: Any) -> Any:
    """Reduces elementwise over the replicas; `value` is a nest of this replica's values."""
    op = ReduceOp.parse(reduce_op, current_call())
    leaves, structure = nests.flatten(value)
    return structure.unflatten(
        _reduce_elementwise(communicator, op, leaves, nests.describe(structure))
    )


def reduce(
    communicator: Communicator,
    reduce_op: ReduceOp | str,
    value: Any,
    axis: int | Sequence[int] | None,
) -> Any:
    """See `Strategy.reduce`."""
    op = ReduceOp.parse(reduce_op, current_call())
    leaves, structure = nests.flatten(value)
    own: dict[int, Any] = {}  # this replica's components of distributed leaves, by index
    for i, leaf in enumerate(leaves):
        if leaf is None:
            continue
        # A plain value is distributed too if there is only a single replica.
        if communicator.size == 1 or isinstance(leaf, DistributedValues):
            own[i] = component_of(leaf)
        else:
            leaves[i] = _reduce_plain(op, leaf, axis)
    if not own:
        require_same_structure(communicator, structure, op.name, f"axis={axis}")
        return structure.unflatten(leaves)
    # Differences that the sums alone do not show: other nests, or other axes.
    must_match = [
        nests.describe(structure),
        f"axis={axis}",
        *positions("distributed", own, leaves),
    ]
    values = list(own.values())
    if axis is None:
        reduced = _reduce_elementwise(communicator, op, values, *must_match)
    else:
        reduced = _reduce_along(communicator, op, values, axis, *must_match)
    for i, result in zip(own, reduced, strict=True):
        leaves[i] = result
    return structure.unflatten(leaves)


def _reduce_elementwise(
    communicator: Communicator, op: ReduceOp, leaves: Sequence[Any], *must_match: str
) -> list[Any]:
    """Reduces all arrays in one message, since a message costs more than its bytes.

    `None` stays `None`; slices are gathered, not made dense.
    """
    arrays: dict[int, Array] = {}
    slices: dict[int, IndexedSlices] = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, IndexedSlices):
            slices[i] = leaf
        elif leaf is not None:
            arrays[i] = as_numeric(leaf)
    results: list[Any] = list(leaves)
    # A call with `None` only still communicates: another rank may pass arrays.
    if arrays or not slices:
        are_arrays = positions("arrays", arrays, leaves)
        reduced = communicator.all_reduce(list(arrays.values()), op, *must_match, *are_arrays)
        for i, array in zip(arrays, reduced, strict=True):
            results[i] = scalar(array)
    if slices:
        are_slices = positions("slices", slices, leaves)
        for i, leaf in slices.items():
            results[i] = _reduce_slices(communicator, op, leaf, *must_match, *are_slices)
    return results


# An overflow is inf on all ranks, instead of an exception on a rank that enabled those.
@np.errstate(all="ignore")
def _reduce_slices(
    communicator: Communicator, op: ReduceOp, slices: IndexedSlices, *must_match: str
) -> IndexedSlices:
    # The arrays of the nest have been reduced by now, so an error here must reach every rank.
    with communicator.raise_together():
        if REDUCTIONS[op].ufunc is not np.add:
            raise ValueError(
                f"{current_call()}: IndexedSlices are reduced by SUM or MEAN, not by {op.name}; "
                "pass one of these"
            )
        values, indices = as_numeric(slices.values), as_numeric(slices.indices)
        check_reducible(values.dtype, op)
    # Gathered, not summed: a dense sum would need memory for every row of, say, an embedding.
    values, indices = communicator.all_gather([values, indices], 0, op.name, *must_match)
    if REDUCTIONS[op].is_mean and communicator.size > 1:
        values = (values / communicator.size).astype(mean_dtype(values.dtype), copy=False)
    return IndexedSlices(values, indices, slices.dense_shape)


@np.errstate(all="ignore")  # as in `_reduce_slices`
def _reduce_along(
    communicator: Communicator,
    op: ReduceOp,
    leaves: Sequence[Any],
    axis: int | Sequence[int],
    *must_match: str,
) -> list[Any]:
    """Reduces along axes within each replica, and over the replicas."""
    reduction = REDUCTIONS[op]
    parts = [_reduce_own(op, leaf, axis) for leaf in leaves]
    totals, counts, dtypes = zip(*parts, strict=True)
    # Counts are always added. If totals are too, a single message has both.
    if reduction.ufunc is np.add:
        both = [array for pair in zip(totals, counts, strict=True) for array in pair]
        sums = communicator.all_reduce(both, ReduceOp.SUM, op.name, *must_match)
        totals, counts = sums[::2], sums[1::2]
    else:
        totals = communicator.all_reduce(totals, op, *must_match)
        counts = communicator.all_reduce(counts, ReduceOp.SUM)
    return [scalar(reduction.finish(*part)) for part in zip(totals, counts, dtypes, strict=True)]


def _reduce_own(
    op: ReduceOp, value: Any, axis: int | Sequence[int]
) -> tuple[Array, Array, np.dtype[Any]]:
    """Reduces this replica's elements along axes.

    Returns:
        The totals, the number of elements in each, and the elements' dtype. Dividing by the number
        of all replicas' elements makes the mean right for a short last batch.
    """
    if isinstance(value, IndexedSlices):
        raise ValueError(
            f"{current_call()}: IndexedSlices are not reduced along axis {axis}; pass axis=None"
        )
    array = as_numeric(value)
    check_reducible(array.dtype, op)
    axes = _axes(axis, array.ndim)
    total = gpu.array_module(array).asarray(REDUCTIONS[op].along_axes(array, axes))
    # An array, because it is sent with the totals.
    count = np.array(math.prod(array.shape[a] for a in axes), np.int64)
    return total, count, array.dtype


@np.errstate(all="ignore")
def _reduce_plain(op: ReduceOp, value: Any, axis: int | Sequence[int] | None) -> Any:
    """Reduces a value that is not distributed over several replicas."""
    if op is ReduceOp.SUM:
        # TensorFlow's programs start their totals with a plain 0, which sums to 0. The sum of any
        # other plain value is ambiguous.
        if not isinstance(value, (Variable, IndexedSlices)) and not as_numeric(value).any():
            return value
        raise ValueError(
            f"{current_call()}: SUM of a value that is not distributed; did you mean one value, or "
            "one per replica? Return it from Strategy.run to have one per replica, or leave it as "
            "it is"
        )
    if isinstance(value, IndexedSlices):
        return value
    if axis is None:
        array = as_numeric(value)
        return array if is_foreign(value) else value
    return scalar(REDUCTIONS[op].finish(*_reduce_own(op, value, axis)))


def _axes(axis: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    axes: tuple[Any, ...] = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    if any(isinstance(a, bool) or not isinstance(a, (int, np.integer)) for a in axes):
        raise TypeError(
            f"{current_call()}: axis is {axis!r}; it must be None, an int, or a tuple or list of "
            "ints"
        )
    if any(not -ndim <= a < ndim for a in axes):
        raise ValueError(
            f"{current_call()}: axis {axis} does not exist in a value of {ndim} dimensions; pass "
            "an axis that does"
        )
    if len({a % ndim for a in axes}) < len(axes):
        raise ValueError(f"{current_call()}: axis {axis} names a dimension twice; name each once")
    return tuple(int(a) % ndim for a in axes)
