"""The gradients of a step: checks them, sums and clips them, or adds them up over steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from hpcstrat._communicators.reduction import accumulator
from hpcstrat._core.arrays import as_read_only
from hpcstrat._core.call_name import call_named, current_call
from hpcstrat._core.types import Array, IndexedSlices
from hpcstrat._core.values import DistributedValues
from hpcstrat._replicas.group import ReplicaGroup
from hpcstrat._update.rows import combine_rows
from hpcstrat._update.rule import UpdateRule
from hpcstrat._variable.variable import Variable, state_of

_Clipped: TypeAlias = tuple[Sequence[Array], Sequence[tuple[Array, Array]]]


def clip(
    group: ReplicaGroup,
    global_clipnorm: float | None,
    clipnorm: float | None,
    gradients: Sequence[Array],
    rows: Sequence[tuple[Array, Array]],
) -> _Clipped:
    """Scales gradients down to the largest norm of all together, or of each."""
    with group.on_stream():
        if global_clipnorm is not None:
            gradients, rows = _clip_together(group.xp, global_clipnorm, gradients, rows)
        if clipnorm is not None:
            gradients, rows = _clip_each(group.xp, clipnorm, gradients, rows)
    return gradients, rows


def _clip_together(
    xp: Any, most: float, gradients: Sequence[Array], rows: Sequence[tuple[Array, Array]]
) -> _Clipped:
    arrays = [*gradients, *(values for _, values in rows)]
    with np.errstate(all="ignore"):  # as in the update: infinite gradients stop no rank
        # In float64, where the squares of large float32 numbers do not overflow.
        norm = xp.sqrt(sum(xp.sum(xp.abs(g).astype(np.float64) ** 2) for g in arrays))
        scale = xp.where(xp.isfinite(norm), xp.where(norm > most, most / norm, 1.0), np.nan)
        return [g * scale.astype(g.dtype) for g in gradients], [
            (i, v * scale.astype(v.dtype)) for i, v in rows
        ]


def _clip_each(
    xp: Any, most: float, gradients: Sequence[Array], rows: Sequence[tuple[Array, Array]]
) -> _Clipped:
    dense = [_clip_together(xp, most, [gradient], [])[0][0] for gradient in gradients]
    return dense, [_clip_together(xp, most, [], [pair])[1][0] for pair in rows]


class Accumulator:
    """Adds up the gradients of several calls on this replica.

    Attributes:
        steps: the number of calls to add up.
        calls: the number of calls made.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.calls: int = 0
        self._sums: dict[int, tuple[Variable, Array]] = {}

    def add(
        self, gradients: Sequence[Array], variables: Sequence[Variable]
    ) -> list[tuple[Array, Variable]] | None:
        """Adds the gradients of a call; returns the means over the calls after the last."""
        for gradient, v in zip(gradients, variables, strict=True):
            with state_of(v).group.on_stream():
                if id(v) in self._sums:
                    total = self._sums[id(v)][1]
                    total += gradient
                else:
                    self._sums[id(v)] = (v, gradient.astype(accumulator(v.dtype)))
        self.calls += 1
        if self.calls < self.steps:
            return None
        means: list[tuple[Array, Variable]] = []
        for v, total in self._sums.values():
            with state_of(v).group.on_stream():
                means.append(((total / self.steps).astype(v.dtype, copy=False), v))
        self.clear()
        return means

    def variables(self) -> list[Variable]:
        """The variables whose gradients were added up."""
        return [v for v, _ in self._sums.values()]

    def clear(self) -> None:
        """Drops what was added up."""
        self.calls = 0
        self._sums.clear()

    def copy_for(self, variables: Mapping[int, Variable]) -> Accumulator:
        """A copy for copies of the variables, which are passed by the ids of the originals."""
        other = Accumulator(self.steps)
        other.calls = self.calls
        for key, (_, total) in self._sums.items():
            other._sums[id(variables[key])] = (variables[key], total.copy())
        return other


def as_dense(slices: IndexedSlices, variable: Variable) -> Array:
    """A sparse gradient as an array of the variable's shape.

    Raises:
        ValueError: they do not fit the variable.
    """
    group = state_of(variable).group
    indices, values = check_slices(slices, variable)
    with group.on_stream():
        rows, sums = combine_rows(indices, values)
        gradient = group.xp.zeros(variable.shape, variable.dtype)
        gradient[rows] = sums
    return gradient


def check_slices(slices: IndexedSlices, variable: Variable) -> tuple[Array, Array]:
    """The indices and the values of a sparse gradient, on the variable's device and in its dtype.

    Raises:
        ValueError: they do not fit the variable.
    """
    group = state_of(variable).group
    on_gpu = group.stream is not None
    indices, values = (
        as_read_only(current_call(), array, on_gpu) for array in (slices.indices, slices.values)
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
    if not np.can_cast(values.dtype, variable.dtype, "same_kind"):
        raise ValueError(
            f"{current_call()}: the gradient of {variable.name!r} is {values.dtype.name}, which "
            f"cannot be cast to {variable.dtype.name} without loss; cast it first"
        )
    return indices, values.astype(variable.dtype, copy=False)


def check_pair(pair: Any) -> None:
    """Checks an argument of `apply_gradients`.

    Raises:
        ValueError: it is not a pair of a gradient and its variable.
    """
    is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
    if is_pair and isinstance(pair[1], Variable):
        return
    if is_pair and isinstance(pair[0], Variable):
        raise ValueError(
            f"{current_call()}: it takes (gradient, variable) pairs, but the variable "
            f"{pair[0].name!r} comes first in its pair; pass the variable second"
        )
    kind = type(pair).__name__
    if is_pair:
        kind = f"({', '.join(type(member).__name__ for member in pair)})"
    raise ValueError(
        f"{current_call()}: it takes (gradient, variable) pairs, but one is {kind}; pass "
        "zip(gradients, variables)"
    )


def sort_pairs(
    pairs: Sequence[tuple[Any, Variable]],
) -> tuple[list[Array], list[Variable], list[tuple[IndexedSlices, Variable]]]:
    """Returns the gradients that are arrays, their variables, and the pairs with slices."""
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
    if array.dtype != view.dtype and not np.can_cast(array.dtype, view.dtype, "same_kind"):
        raise ValueError(
            f"{current_call()}: the gradient of {variable.name!r} is {array.dtype.name}, which "
            f"cannot be cast to {view.dtype.name} without loss; cast it first"
        )
    if state.group.stream is None or isinstance(view, np.ndarray):
        return array
    with state.group.on_stream():
        return state.group.stream.here(array)


def compute_gradients(call: str, loss: Any, count: int) -> tuple[Any, list[Any]]:
    """Calls the `loss` of `Optimizer.minimize`; returns the loss and `count` gradients.

    Raises:
        TypeError: it is not a function, or returns something else.
        ValueError: it returns another number of gradients.
    """
    if not callable(loss):
        raise TypeError(
            f"{call}: loss is of type {type(loss).__name__}; it must be a function without "
            "arguments that returns the loss and its gradients, because NumPy computes none"
        )
    result: Any = loss()
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise TypeError(
            f"{call}: loss() returned {type(result).__name__}; it must return (loss, gradients)"
        )
    value, gradients = result[0], list(result[1])
    if len(gradients) != count:
        raise ValueError(
            f"{call}: {len(gradients)} gradients for {count} variables; return one for each"
        )
    return value, gradients


def group_of_variables(variable: Variable, preposition: str) -> ReplicaGroup:
    """The variable's group, which must be the group of this line's context."""
    with call_named(f"{current_call()} {preposition} {variable.name!r}"):
        state_of(variable).require_strategy()
    return state_of(variable).group


def check_variables(group: ReplicaGroup, variables: Sequence[Variable]) -> None:
    """Checks the variables of an update.

    Raises:
        ValueError: a variable occurs twice, is another strategy's, or cannot be changed by
            optimizers.
    """
    call = current_call()
    if len({id(v) for v in variables}) < len(variables):
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


def check_norms(rule: UpdateRule, sparse: Sequence[tuple[IndexedSlices, Variable]]) -> None:
    """Checks that an update with norms of whole variables gets whole gradients.

    Raises:
        ValueError: a gradient has rows of its variable only.
    """
    if sparse and rule.norms is not None:
        raise ValueError(
            f"{current_call()}: the update takes norms of whole variables, but the gradient of "
            f"{sparse[0][1].name!r} is an IndexedSlices; pass an array"
        )


def sum_rows(
    group: ReplicaGroup, slices: IndexedSlices, variable: Variable, are_summed: bool
) -> tuple[Array, Array]:
    """The rows in any replica's slices, each once, and their gradients, summed in rank order."""
    communicator = group.communicator
    with communicator.raise_together():
        indices, values = check_slices(slices, variable)
    if not are_summed:
        rows = f"rows of {variable.name!r}, variable {state_of(variable).block.number}"
        with call_named(f"{current_call()} of {rows}"):
            indices, values = communicator.all_gather([indices, values], 0)
    with group.on_stream():
        return combine_rows(indices, values)


def accumulate(
    pairs: Sequence[tuple[Any, Variable]], accumulator: Accumulator
) -> list[tuple[Any, Variable]] | None:
    """Adds up gradients; returns the means, with their variables, if this call is the last."""
    for pair in pairs:
        check_pair(pair)
    gradients, dense, sparse = sort_pairs(pairs)
    variables = [*dense, *(v for _, v in sparse)]
    if variables:
        check_variables(group_of_variables(variables[0], "to"), variables)
    return accumulator.add([*gradients, *(as_dense(slices, v) for slices, v in sparse)], variables)
