"""Reduces and gathers nests of values over the replicas, for the collective methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat._calls.records import signature_of
from hpcstrat._communicators.base import Communicator, check_gatherable
from hpcstrat._communicators.reduction import REDUCTIONS, accumulator, check_reducible, mean_dtype
from hpcstrat._core import gpu, nests
from hpcstrat._core.arrays import as_array, as_native, from_foreign, is_foreign, is_numeric
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import Array, IndexedSlices, ReduceOp
from hpcstrat._core.values import DistributedValues, component_of
from hpcstrat._variable.variable import Variable


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
    if not is_numeric(array.dtype):
        raise TypeError(
            f"{current_call()}: {value!r} is not an array of numbers and cannot become one; pass "
            "an array"
        )
    return as_native(array)


def convert_foreign_leaves(nest: Any) -> Any:
    """`nest` with arrays of other libraries as NumPy's or CuPy's; itself if there are none."""
    leaves, structure = nests.flatten(nest)
    indices = [
        i for i, leaf in enumerate(leaves) if not isinstance(leaf, Variable) and is_foreign(leaf)
    ]
    if not indices:
        return nest
    for i in indices:
        leaves[i] = from_foreign(current_call(), leaves[i])
    return structure.unflatten(leaves)


def all_reduce(communicator: Communicator, reduce_op: ReduceOp | str, value: Any) -> Any:
    """Reduces elementwise over the replicas; `value` is a nest of this replica's values."""
    op = ReduceOp.parse(reduce_op, current_call())
    leaves, structure = nests.flatten(value)
    return structure.unflatten(_reduce_leaves(communicator, op, leaves, nests.describe(structure)))


def _reduce_leaves(
    communicator: Communicator, op: ReduceOp, leaves: Sequence[Any], *must_match: str
) -> list[Any]:
    """Reduces all arrays in one message, since a message costs more than its bytes.

    `None` stays `None`; slices are gathered, not made dense.
    """
    results: list[Any] = list(leaves)
    indices = [
        i
        for i, leaf in enumerate(leaves)
        if leaf is not None and not isinstance(leaf, IndexedSlices)
    ]
    # A call with `None` only still communicates: another rank may pass arrays.
    if indices or all(leaf is None for leaf in leaves):
        arrays = [as_numeric(leaves[i]) for i in indices]
        if len(indices) < len(leaves):
            must_match = (*must_match, f"arrays at {indices}")
        for i, array in zip(indices, communicator.all_reduce(arrays, op, *must_match), strict=True):
            results[i] = scalar(array)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, IndexedSlices):
            results[i] = _reduce_slices(communicator, op, leaf)
    return results


# An overflow is inf on all ranks, instead of an exception on a rank that enabled those.
@np.errstate(all="ignore")
def _reduce_slices(
    communicator: Communicator, op: ReduceOp, slices: IndexedSlices
) -> IndexedSlices:
    # The arrays of the nest have been reduced by now, so an error here must reach every rank.
    with communicator.raise_together():
        if op not in (ReduceOp.SUM, ReduceOp.MEAN):
            raise ValueError(
                f"{current_call()}: IndexedSlices are reduced by SUM or MEAN, not by {op.name}; "
                "pass one of these"
            )
        values, indices = as_numeric(slices.values), as_numeric(slices.indices)
        check_reducible(values.dtype, op)
    # Gathered, not summed: a dense sum would need memory for every row of, say, an embedding.
    values, indices = communicator.all_gather([values, indices], 0)
    if op is ReduceOp.MEAN and communicator.size > 1:
        values = (values / communicator.size).astype(mean_dtype(values.dtype), copy=False)
    return IndexedSlices(values, indices, slices.dense_shape)


def reduce(
    communicator: Communicator,
    reduce_op: ReduceOp | str,
    value: Any,
    axis: int | Sequence[int] | None,
) -> Any:
    """See `Strategy.reduce`."""
    op = ReduceOp.parse(reduce_op, current_call())
    leaves, structure = nests.flatten(value)
    results: list[Any] = list(leaves)
    indices: list[int] = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, DistributedValues) or (communicator.size == 1 and leaf is not None):
            indices.append(i)
        elif leaf is not None:
            results[i] = _reduce_plain(op, leaf, axis)
    if indices:
        own = [component_of(leaves[i]) for i in indices]
        # Differences that the sums alone do not show: other nests, or other axes.
        must_match = [nests.describe(structure), f"axis={axis}"]
        if len(indices) < len(leaves):
            must_match.append(f"distributed at {indices}")
        if axis is None:
            reduced = _reduce_leaves(communicator, op, own, *must_match)
        else:
            reduced = _reduce_along(communicator, op, own, axis, *must_match)
        for i, result in zip(indices, reduced, strict=True):
            results[i] = result
    else:
        require_same_structure(communicator, structure, op.name, f"axis={axis}")
    return structure.unflatten(results)


def require_same_structure(
    communicator: Communicator, structure: nests.Structure, *must_match: str
) -> None:
    """Checks that no rank has values to exchange, since this rank has none. Collective.

    Without this a rank that has some would wait for the others.
    """
    if communicator.size > 1:
        communicator.exchange(
            signature_of(current_call(), *must_match, nests.describe(structure), "not distributed")
        )


@np.errstate(all="ignore")  # as in `_reduce_slices`
def _reduce_along(
    communicator: Communicator,
    op: ReduceOp,
    own: Sequence[Any],
    axis: int | Sequence[int],
    *must_match: str,
) -> list[Any]:
    """Reduces along axes within each replica, and over the replicas."""
    parts = [_Part(op, leaf, axis) for leaf in own]
    if op in (ReduceOp.SUM, ReduceOp.MEAN):
        # Sums and counts in one message. Dividing by the true number of elements makes the mean
        # right for a short last batch.
        totals = [array for part in parts for array in (part.total, part.count)]
        sums = communicator.all_reduce(totals, ReduceOp.SUM, op.name, *must_match)
        return [
            part.mean_or_sum(total, count)
            for part, total, count in zip(parts, sums[::2], sums[1::2], strict=True)
        ]
    extremes = communicator.all_reduce([part.total for part in parts], op, *must_match)
    # Counts are always summed, so they need another message here.
    counts = communicator.all_reduce([part.count for part in parts], ReduceOp.SUM)
    return [
        part.extreme(total, count)
        for part, total, count in zip(parts, extremes, counts, strict=True)
    ]


class _Part:
    """This replica's part of a reduction along axes.

    Attributes:
        total: the value reduced along the axes, in the dtype of the accumulator.
        count: the number of elements that were reduced to each element of `total`.
    """

    def __init__(self, op: ReduceOp, value: Any, axis: int | Sequence[int]) -> None:
        if isinstance(value, IndexedSlices):
            raise ValueError(
                f"{current_call()}: IndexedSlices are not reduced along axis {axis}; pass axis=None"
            )
        array = as_numeric(value)
        check_reducible(array.dtype, op)
        axes = _axes(axis, array.ndim)
        # An array, because it is sent with the total.
        self.count = np.array(np.prod([array.shape[a] for a in axes], dtype=np.int64))
        self._op, self._dtype = op, array.dtype
        xp = self._xp = gpu.array_module(array)
        if op is ReduceOp.SUM or op is ReduceOp.MEAN:
            wide = accumulator(array.dtype)
            if array.dtype.kind in "iu" and op is ReduceOp.MEAN:
                wide, self._dtype = np.dtype(np.float64), mean_dtype(array.dtype)
            # Sums of 8- and 16-bit integers soon overflow: the pixels of an image do.
            elif array.dtype.kind in "iu" and array.dtype.itemsize <= 2:
                wide = self._dtype = np.dtype(f"{array.dtype.kind}8")
            self.total = xp.asarray(xp.sum(array, axis=axes, dtype=wide))
            return
        reduction = REDUCTIONS[op]
        extreme = getattr(xp, reduction.along_axes)
        if array.size:
            self.total = xp.asarray(extreme(array, axis=axes))
        else:
            shape = [n for i, n in enumerate(array.shape) if i not in axes]
            # A replica without elements must not change the others' result, nor fail alone.
            self.total = xp.full(shape, reduction.neutral(array.dtype), array.dtype)

    def mean_or_sum(self, total: Array, count: Array) -> Any:
        if self._op is ReduceOp.MEAN:
            total = self._xp.asarray(total / np.float64(count) if count else total * np.nan)
        return scalar(total.astype(self._dtype, copy=False))

    def extreme(self, total: Array, count: Array) -> Any:
        # Floats have nan for the result without elements; integers have nothing like it.
        if count == 0:
            if self._dtype.kind in "iub":
                raise ValueError(
                    f"{current_call()}: {self._op.name} along an axis that has no elements on any "
                    "replica; pass at least one element"
                )
            total = self._xp.full_like(total, np.nan)
        return scalar(total)


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
    part = _Part(op, array, axis)
    finish = part.mean_or_sum if op is ReduceOp.MEAN else part.extreme
    return finish(part.total, part.count)


def all_gather(communicator: Communicator, value: Any, axis: int) -> Any:
    """Concatenates over the replicas; `value` is a nest of this replica's values."""
    leaves, structure = nests.flatten(value)
    return structure.unflatten(
        _gather_leaves(communicator, leaves, axis, nests.describe(structure))
    )


def gather(communicator: Communicator, value: Any, axis: int) -> Any:
    """See `Strategy.gather`."""
    leaves, structure = nests.flatten(value)
    indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, DistributedValues)]
    for i, leaf in enumerate(leaves):
        if i not in indices and leaf is not None:
            array = _as_gatherable(leaf, axis)
            check_gatherable([array.shape], axis)
            leaves[i] = leaf if isinstance(leaf, Variable) else array
    if indices:
        must_match = [nests.describe(structure)]
        if len(indices) < len(leaves):
            must_match.append(f"distributed at {indices}")
        gathered = _gather_leaves(
            communicator, [component_of(leaves[i]) for i in indices], axis, *must_match
        )
        for i, result in zip(indices, gathered, strict=True):
            leaves[i] = result
    else:
        require_same_structure(communicator, structure, f"axis={axis}")
    return structure.unflatten(leaves)


def _gather_leaves(
    communicator: Communicator, leaves: Sequence[Any], axis: int, *must_match: str
) -> list[Any]:
    """Gathers all leaves in one message. `None` stays `None`."""
    indices = [i for i, leaf in enumerate(leaves) if leaf is not None]
    arrays = [_as_gatherable(leaves[i], axis) for i in indices]
    results: list[Any] = list(leaves)
    if len(indices) < len(leaves):
        must_match = (*must_match, f"arrays at {indices}")
    for i, array in zip(indices, communicator.all_gather(arrays, axis, *must_match), strict=True):
        results[i] = array
    return results


def _as_gatherable(value: Any, axis: int) -> Array:
    if isinstance(value, IndexedSlices):
        raise NotImplementedError(
            f"{current_call()}: IndexedSlices cannot be gathered; gather their values and indices"
        )
    if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)):
        raise TypeError(f"{current_call()}: axis is {axis!r}; it must be an int")
    return as_numeric(value)


def scalar(array: Array) -> Any:
    """A NumPy array without dimensions as a NumPy scalar; any other array as it is.

    CuPy has no scalars: its arrays stay arrays.
    """
    return array[()] if array.ndim == 0 else array


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
