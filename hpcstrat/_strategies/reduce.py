"""Reduces nests of values over the replicas, for the collective methods."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat._core import gpu
from hpcstrat._core.arrays import is_foreign
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import Array, IndexedSlices, ReduceOp, component_of
from hpcstrat._strategies.leaves import Nest, as_numeric, scalar
from hpcstrat._transports.reduction import REDUCTIONS, check_reducible, mean_dtype
from hpcstrat._transports.verbs import Communicator
from hpcstrat._variable.variable import Variable


def all_reduce(communicator: Communicator, reduce_op: ReduceOp | str, value: Any) -> Any:
    """Reduces elementwise over the replicas; `value` is a nest of this replica's values."""
    op = ReduceOp.parse(reduce_op, current_call())
    return _reduce(communicator, op, Nest(value), None)


def reduce_distributed(
    communicator: Communicator,
    reduce_op: ReduceOp | str,
    value: Any,
    axis: int | Sequence[int] | None,
) -> Any:
    """See `Strategy.reduce`."""
    op = ReduceOp.parse(reduce_op, current_call())
    if communicator.size == 1:  # then plain values are this replica's too
        nest = Nest(value)
        nest.own = {i: component_of(leaf) for i, leaf in nest.own.items()}
    else:
        nest = Nest(value, lambda plain: _reduce_plain(op, plain, axis))
    return _reduce(communicator, op, nest, axis, f"axis={axis}")


def _reduce(
    communicator: Communicator,
    op: ReduceOp,
    nest: Nest,
    axis: int | Sequence[int] | None,
    *must_match: str,
) -> Any:
    """Reduces all arrays in one message, since a message costs more than its bytes.

    Slices are gathered, in another message, not made dense.
    """
    arrays: list[Array] = []
    slices: dict[int, IndexedSlices] = {}
    for i, value in nest.own.items():
        if isinstance(value, IndexedSlices):
            slices[i] = _as_summable(op, value, axis)
        else:
            arrays.append(as_numeric(value))
    if arrays and slices:
        nest.must_match.append(f"slices at {list(slices)}")
    must_match += (*nest.must_match,)
    results: list[Any] = []
    # Also without any values: another rank may have some, and would wait.
    if arrays or not slices:
        if axis is None:
            results = communicator.all_reduce(arrays, op, *must_match)
        else:
            results = _reduce_along(communicator, op, arrays, axis, *must_match)
    if slices:
        reduced, gathered = iter(results), _gather_slices(communicator, op, slices, *must_match)
        results = [gathered[i] if i in gathered else next(reduced) for i in nest.own]
    return nest.fill(results)


def _as_summable(
    op: ReduceOp, slices: IndexedSlices, axis: int | Sequence[int] | None
) -> IndexedSlices:
    """Slices of numeric arrays, after a check that they can be reduced in this way."""
    if axis is not None:
        raise ValueError(
            f"{current_call()}: IndexedSlices are not reduced along axis {axis}; pass axis=None"
        )
    if REDUCTIONS[op].ufunc is not np.add:
        raise ValueError(
            f"{current_call()}: IndexedSlices are reduced by SUM or MEAN, not by {op.name}; pass "
            "one of these"
        )
    values, indices = as_numeric(slices.values), as_numeric(slices.indices)
    check_reducible(values.dtype, op)
    return IndexedSlices(values, indices, slices.dense_shape)


# An overflow is inf on all ranks, instead of an exception on a rank that enabled those.
@np.errstate(all="ignore")
def _gather_slices(
    communicator: Communicator, op: ReduceOp, slices: dict[int, IndexedSlices], *must_match: str
) -> dict[int, IndexedSlices]:
    # Gathered, not summed: a dense sum would need memory for every row of, say, an embedding.
    parts = [part for own in slices.values() for part in (own.values, own.indices)]
    gathered = iter(communicator.all_gather(parts, 0, op.name, *must_match))
    results: dict[int, IndexedSlices] = {}
    for i, own in slices.items():
        values, indices = next(gathered), next(gathered)
        if REDUCTIONS[op].is_mean and communicator.size > 1:
            values = (values / communicator.size).astype(mean_dtype(values.dtype), copy=False)
        results[i] = IndexedSlices(values, indices, own.dense_shape)
    return results


@np.errstate(all="ignore")  # as in `_gather_slices`
def _reduce_along(
    communicator: Communicator,
    op: ReduceOp,
    arrays: Sequence[Array],
    axis: int | Sequence[int],
    *must_match: str,
) -> list[Any]:
    """Reduces along axes within each replica, and over the replicas."""
    reduction = REDUCTIONS[op]
    parts = [_reduce_own(op, array, axis) for array in arrays]
    # Counts are always added. If totals are too, a single message has both.
    if reduction.ufunc is np.add:
        both = [sent for total, count, _ in parts for sent in (total, count)]
        of_mean = ("for MEAN",) * reduction.is_mean
        sums = communicator.all_reduce(both, ReduceOp.SUM, *of_mean, *must_match)
        totals, counts = sums[::2], sums[1::2]
    else:
        totals = communicator.all_reduce([total for total, *_ in parts], op, *must_match)
        counts = communicator.all_reduce([count for _, count, _ in parts], ReduceOp.SUM)
    return [
        reduction.finish(total, count, dtype)
        for total, count, (*_, dtype) in zip(totals, counts, parts, strict=True)
    ]


def _reduce_own(
    op: ReduceOp, array: Array, axis: int | Sequence[int]
) -> tuple[Array, Array, np.dtype[Any]]:
    """Reduces this replica's elements along axes.

    Returns:
        The totals, the number of elements in each, and the elements' dtype. Dividing by the number
        of all replicas' elements makes the mean right for a short last batch.
    """
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
    array = as_numeric(value)
    if axis is None:
        return array if is_foreign(value) else value
    return scalar(REDUCTIONS[op].finish(*_reduce_own(op, array, axis)))


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
