"""The gradients of a step: checks them and their variables, and sums those of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat._agreement.records import signature_of
from hpcstrat._core.arrays import as_read_only
from hpcstrat._core.call_name import call_named, current_call
from hpcstrat._core.types import Array, DistributedValues, IndexedSlices
from hpcstrat._replicas.group import ReplicaGroup
from hpcstrat._update.rows import combine_rows
from hpcstrat._update.rule import Clip
from hpcstrat._variable.variable import Variable, state_of


def check_pairs(pairs: Sequence[Any]) -> None:
    """Checks that these are pairs of a gradient and its variable."""
    for pair in pairs:
        is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
        if is_pair and isinstance(pair[1], Variable):
            continue
        takes = f"{current_call()}: it takes (gradient, variable) pairs, but"
        if is_pair and isinstance(pair[0], Variable):
            raise ValueError(
                f"{takes} the variable {pair[0].name!r} comes first in its pair; pass the "
                "variable second"
            )
        kind = type(pair).__name__
        if is_pair:
            kind = f"({', '.join(type(member).__name__ for member in pair)})"
        raise ValueError(f"{takes} one is {kind}; pass zip(gradients, variables)")


def prepare_pairs(
    pairs: Sequence[tuple[Any, Variable]],
) -> tuple[list[Array], list[Variable], list[tuple[IndexedSlices, Variable]]]:
    """The gradients that are arrays, on the device; their variables; and the pairs with slices."""
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
        if (
            type(gradient) is not type(view)
            or gradient.shape != view.shape
            or gradient.dtype != view.dtype
        ):
            gradient = _as_gradient(gradient, variable)
        gradients.append(gradient)
        dense.append(variable)
    return gradients, dense, sparse


def _as_gradient(gradient: Any, variable: Variable) -> Array:
    if isinstance(gradient, DistributedValues):
        raise ValueError(
            f"{current_call()}: the gradient of {variable.name!r} is a {type(gradient).__name__}, "
            "with one value per replica; apply it inside Strategy.run, or reduce it first: "
            "strategy.reduce(ReduceOp.SUM, gradient, axis=None)"
        )
    state = state_of(variable)
    view = state.block.view
    array = as_read_only(current_call(), gradient, state.group.stream is not None)
    if array.shape != view.shape:
        raise ValueError(
            f"{current_call()}: the gradient of {variable.name!r} has shape {array.shape} and the "
            f"variable {view.shape}; they must be equal"
        )
    _check_cast(array, variable)
    if state.group.stream is None or isinstance(view, np.ndarray):
        return array
    with state.group.on_stream():
        return state.group.stream.here(array)


def _check_cast(gradient: Array, variable: Variable) -> None:
    if not np.can_cast(gradient.dtype, variable.dtype, "same_kind"):
        raise ValueError(
            f"{current_call()}: the gradient of {variable.name!r} is {gradient.dtype.name}, which "
            f"cannot be cast to {variable.dtype.name} without loss; cast it first"
        )


def prepare_slices(slices: IndexedSlices, variable: Variable) -> tuple[Array, Array]:
    """The indices and values of a sparse gradient, on the variable's device and in its dtype."""
    if not variable.shape:
        raise ValueError(
            f"{current_call()}: the gradient of {variable.name!r} is an IndexedSlices, but the "
            "variable is a scalar and has no rows; pass an array"
        )
    group = state_of(variable).group
    indices, values = (
        as_read_only(current_call(), array, group.stream is not None)
        for array in (slices.indices, slices.values)
    )
    if group.stream is not None:
        with group.on_stream():
            indices, values = group.stream.here(indices), group.stream.here(values)
    if (
        indices.ndim != 1
        or indices.dtype.kind not in "iu"
        or values.shape != (*indices.shape, *variable.shape[1:])
    ):
        raise ValueError(
            f"{current_call()}: the IndexedSlices for {variable.name!r} has values of shape "
            f"{values.shape} and indices of shape {indices.shape} and dtype {indices.dtype.name}; "
            f"for k rows of a variable of shape {variable.shape} they must be "
            f"{('k', *variable.shape[1:])} and ('k',), of integers"
        )
    indices = indices.astype(np.int64)
    # As uint64, where negative indices are large.
    if indices.size and int(indices.view(np.uint64).max()) >= variable.shape[0]:
        raise ValueError(
            f"{current_call()}: an index for {variable.name!r} is not in "
            f"0..{variable.shape[0] - 1}; all must be"
        )
    _check_cast(values, variable)
    return indices, values.astype(variable.dtype, copy=False)


def sum_rows(
    group: ReplicaGroup, slices: IndexedSlices, variable: Variable, are_summed: bool
) -> tuple[Array, Array]:
    """The rows in any replica's slices, each once, and their gradients, summed in rank order."""
    communicator = group.communicator
    with communicator.raise_together():
        indices, values = prepare_slices(slices, variable)
    if not are_summed:
        rows = f"rows of {variable.name!r}, variable {state_of(variable).block.number}"
        with call_named(f"{current_call()} of {rows}"):
            indices, values = communicator.all_gather([indices, values], 0)
    with group.on_stream():
        return combine_rows(indices, values)


def clip_norms(
    group: ReplicaGroup,
    clip: Clip,
    gradients: Sequence[Array],
    rows: Sequence[tuple[Array, Array]],
) -> tuple[list[Array], list[tuple[Array, Array]]]:
    """Summed gradients, and rows with their values, that `Clip` has scaled down."""
    xp, arrays = group.xp, [*gradients, *[values for _, values in rows]]
    with group.on_stream(), np.errstate(all="ignore"):  # as in the update
        # In float64, where the squares of large float32 numbers do not overflow.
        squares = [xp.sum(abs(array).astype(np.float64) ** 2) for array in arrays]
        if clip.is_global:
            squares = [sum(squares)] * len(arrays)
        norms = [xp.sqrt(squared) for squared in squares]
        scales = [xp.where(norm > clip.limit, clip.limit / norm, 1.0) for norm in norms]
        scales = [xp.where(xp.isfinite(n), of, np.nan) for n, of in zip(norms, scales, strict=True)]
        scaled = [a * of.astype(a.dtype) for a, of in zip(arrays, scales, strict=True)]
    of_rows = zip([indices for indices, _ in rows], scaled[len(gradients) :], strict=True)
    return scaled[: len(gradients)], [*of_rows]


def group_of_variable(variable: Variable, preposition: str) -> ReplicaGroup:
    """The variable's group, which must be the group of this line's context."""
    with call_named(f"{current_call()} {preposition} {variable.name!r}"):
        state_of(variable).require_strategy()
    return state_of(variable).group


def check_variables(group: ReplicaGroup, variables: Sequence[Variable]) -> None:
    """Checks the variables of an update."""
    call = current_call()
    if len({*variables}) < len(variables):
        raise ValueError(f"{call}: a variable occurs twice; add its gradients up first")
    for v in variables:
        state = state_of(v)
        if state.group is not group:
            raise ValueError(
                f"{call}: the variables belong to different strategies; make them in one scope"
            )
        if v.dtype.kind not in "fc" and v.dtype.name != "bfloat16":
            raise ValueError(
                f"{call}: the variable {v.name!r} is of dtype {v.dtype.name}, and only floats have "
                "gradients; leave it out"
            )
        if state.is_on_read:
            raise ValueError(
                f"{call}: the variable {v.name!r} is ON_READ, with one value per replica; use an "
                "ordinary variable"
            )


def agree_on_group(variables: Sequence[Variable]) -> ReplicaGroup:
    """The group of variables for gradient buffers, which must be the same on all ranks."""
    if not variables or not all(isinstance(v, Variable) for v in variables):
        raise ValueError(
            f"{current_call()}: got {variables!r}; pass a list of variables, at least one"
        )
    group = group_of_variable(variables[0], "of")
    with group.communicator.raise_together():
        check_variables(group, variables)
        group.communicator.exchange(
            signature_of(current_call(), *[state_of(v).block.identity() for v in variables])
        )
    return group
