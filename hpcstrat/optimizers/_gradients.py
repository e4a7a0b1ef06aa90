"""The gradients that a step is given: checked, paired with their variables, and clipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat._arrays import as_read_only
from hpcstrat._edge import current_call
from hpcstrat._types import Array, IndexedSlices
from hpcstrat._values import DistributedValues
from hpcstrat._variables import Variable, state_of


def clipped(
    xp: Any, most: float, gradients: Sequence[Array], rows: Sequence[tuple[Array, Array]]
) -> tuple[list[Array], list[tuple[Array, Array]]]:
    """All gradients, scaled down together so that their norm is at most `most`."""
    arrays = [*gradients, *(values for _, values in rows)]
    with np.errstate(all="ignore"):  # as in the update: infinite gradients are no reason to stop on one rank
        # In float64, where the squares of large float32 numbers do not overflow.
        norm = xp.sqrt(sum(xp.sum(xp.abs(g).astype(np.float64) ** 2) for g in arrays))
        scale = xp.where(xp.isfinite(norm), xp.where(norm > most, most / norm, 1.0), np.nan)
        return [g * scale.astype(g.dtype) for g in gradients], [(i, v * scale.astype(v.dtype)) for i, v in rows]


def checked_slices(slices: IndexedSlices, variable: Variable) -> tuple[Array, Array]:
    """The indices and the values of a sparse gradient, on the variable's device and in its dtype.

    Raises:
        ValueError: they do not fit the variable.
    """
    group = state_of(variable).group
    on_gpu = group.stream is not None
    indices, values = (as_read_only(current_call(), array, on_gpu) for array in (slices.indices, slices.values))
    if on_gpu:
        indices, values = group.xp.asarray(indices), group.xp.asarray(values)
    if indices.ndim != 1 or indices.dtype.kind not in "iu" or values.shape != (*indices.shape, *variable.shape[1:]):
        raise ValueError(
            f"{current_call()}: the IndexedSlices for {variable.name!r} has values of shape {values.shape} and indices "
            f"of shape {indices.shape} and dtype {indices.dtype.name}; for k rows of a variable of shape "
            f"{variable.shape} they must be {('k', *variable.shape[1:])} and ('k',), of integers"
        )
    indices = indices.astype(np.int64)
    if indices.size and int(indices.view(np.uint64).max()) >= variable.shape[0]:  # negative ones are large ones there
        raise ValueError(
            f"{current_call()}: an index for {variable.name!r} is not in 0..{variable.shape[0] - 1}; all must be"
        )
    if not np.can_cast(values.dtype, variable.dtype, "same_kind"):
        raise ValueError(
            f"{current_call()}: the gradient of {variable.name!r} is {values.dtype.name}, which does not go into "
            f"{variable.dtype.name}; cast it first"
        )
    return indices, values.astype(variable.dtype, copy=False)


def check_pair(pair: Any) -> None:
    """Checks one of what `apply_gradients` takes.

    Raises:
        ValueError: it is not a gradient and its variable.
    """
    is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
    if is_pair and isinstance(pair[1], Variable):
        return
    if is_pair and isinstance(pair[0], Variable):
        raise ValueError(
            f"{current_call()}: it takes (gradient, variable) pairs, and in one {pair[0].name!r} comes first; pass the "
            "variable second"
        )
    kind = f"({', '.join(type(one).__name__ for one in pair)})" if is_pair else type(pair).__name__
    raise ValueError(
        f"{current_call()}: it takes (gradient, variable) pairs, and one is {kind}; pass zip(gradients, variables)"
    )


def sorted_pairs(
    pairs: Sequence[tuple[Any, Variable]],
) -> tuple[list[Array], list[Variable], list[tuple[IndexedSlices, Variable]]]:
    """The gradients that are arrays, their variables, and the pairs whose gradients are slices."""
    gradients: list[Array] = []
    dense: list[Variable] = []
    sparse: list[tuple[IndexedSlices, Variable]] = []
    for gradient, variable in pairs:
        if gradient is None:
            continue
        if isinstance(gradient, IndexedSlices):
            sparse.append((gradient, variable))
            continue
        view = state_of(variable).block.view
        if type(gradient) is not type(view) or gradient.shape != view.shape or gradient.dtype != view.dtype:
            gradient = _as_gradient(gradient, variable)
        gradients.append(gradient)
        dense.append(variable)
    return gradients, dense, sparse


def _as_gradient(gradient: Any, variable: Variable) -> Array:
    if isinstance(gradient, DistributedValues):
        raise ValueError(
            f"{current_call()}: the gradient of {variable.name!r} is a {type(gradient).__name__}, one value a replica; "
            "apply it inside Strategy.run, or reduce it first: strategy.reduce(ReduceOp.SUM, gradient, axis=None)"
        )
    state = state_of(variable)
    view = state.block.view
    array = as_read_only(current_call(), gradient, state.group.stream is not None)
    if array.shape != view.shape:
        raise ValueError(
            f"{current_call()}: the gradient of {variable.name!r} has shape {array.shape} and the variable "
            f"{view.shape}; they must be equal"
        )
    if array.dtype != view.dtype and not np.can_cast(array.dtype, view.dtype, "same_kind"):
        raise ValueError(
            f"{current_call()}: the gradient of {variable.name!r} is {array.dtype.name}, which does not go into "
            f"{view.dtype.name}; cast it first"
        )
    return array if isinstance(view, np.ndarray) else state.group.xp.asarray(array)
