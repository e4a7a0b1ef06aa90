"""The gradients that a step is given: checked, paired with their variables, and clipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hpcstrat._communicators.reduction import accumulator
from hpcstrat._core.arrays import as_read_only
from hpcstrat._core.call_name import call_named, current_call
from hpcstrat._core.types import Array, IndexedSlices
from hpcstrat._core.values import DistributedValues
from hpcstrat._replicas.group import ReplicaGroup
from hpcstrat._update.rows import combine_rows
from hpcstrat._variable.variable import Variable, state_of


def clipped(
    xp: Any, most: float, gradients: Sequence[Array], rows: Sequence[tuple[Array, Array]]
) -> tuple[list[Array], list[tuple[Array, Array]]]:
    """All gradients, scaled down together so that their norm is at most `most`."""
    arrays = [*gradients, *(values for _, values in rows)]
    with np.errstate(
        all="ignore"
    ):  # as in the update: infinite gradients are no reason to stop on one rank
        # In float64, where the squares of large float32 numbers do not overflow.
        norm = xp.sqrt(sum(xp.sum(xp.abs(g).astype(np.float64) ** 2) for g in arrays))
        scale = xp.where(xp.isfinite(norm), xp.where(norm > most, most / norm, 1.0), np.nan)
        return [g * scale.astype(g.dtype) for g in gradients], [
            (i, v * scale.astype(v.dtype)) for i, v in rows
        ]


def clipped_each(
    xp: Any, most: float, gradients: Sequence[Array], rows: Sequence[tuple[Array, Array]]
) -> tuple[list[Array], list[tuple[Array, Array]]]:
    """Each gradient, scaled down so that its own norm is at most `most`."""
    dense = [clipped(xp, most, [gradient], [])[0][0] for gradient in gradients]
    return dense, [clipped(xp, most, [], [pair])[1][0] for pair in rows]


class Accumulator:
    """Adds gradients up on this replica, until there are those of several calls.

    Attributes:
        steps: the number of calls.
        calls: how many of them were made.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.calls: int = 0
        self._sums: dict[int, tuple[Variable, Array]] = {}

    def add(
        self, gradients: Sequence[Array], variables: Sequence[Variable]
    ) -> list[tuple[Array, Variable]] | None:
        """Adds the gradients of a call.

        Returns the means over the calls where it is the last, otherwise `None`.
        """
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
        """The variables of what was added up."""
        return [v for v, _ in self._sums.values()]

    def clear(self) -> None:
        """Drops what was added up."""
        self.calls = 0
        self._sums.clear()

    def copied(self, variables: Mapping[int, Variable]) -> Accumulator:
        """The same for copies of the variables, which are given by the ids of the originals."""
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
    indices, values = checked_slices(slices, variable)
    with group.on_stream():
        rows, sums = combine_rows(indices, values)
        found = group.xp.zeros(variable.shape, variable.dtype)
        found[rows] = sums
    return found


def checked_slices(slices: IndexedSlices, variable: Variable) -> tuple[Array, Array]:
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
    if (
        indices.size and int(indices.view(np.uint64).max()) >= variable.shape[0]
    ):  # negative ones are large ones there
        raise ValueError(
            f"{current_call()}: an index for {variable.name!r} is not in "
            f"0..{variable.shape[0] - 1}; all must be"
        )
    if not np.can_cast(values.dtype, variable.dtype, "same_kind"):
        raise ValueError(
            f"{current_call()}: the gradient of {variable.name!r} is {values.dtype.name}, which "
            f"does not go into {variable.dtype.name}; cast it first"
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
            f"{current_call()}: it takes (gradient, variable) pairs, and in one {pair[0].name!r} "
            "comes first; pass the variable second"
        )
    kind = f"({', '.join(type(one).__name__ for one in pair)})" if is_pair else type(pair).__name__
    raise ValueError(
        f"{current_call()}: it takes (gradient, variable) pairs, and one is {kind}; pass "
        "zip(gradients, variables)"
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
            "one value a replica; apply it inside Strategy.run, or reduce it first: "
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
            f"does not go into {view.dtype.name}; cast it first"
        )
    if state.group.stream is None or isinstance(view, np.ndarray):
        return array
    with state.group.on_stream():
        return state.group.stream.here(array)


def computed(call: str, loss: Any, count: int) -> tuple[Any, list[Any]]:
    """What the function that `Optimizer.minimize` is given returns: the loss, and `count` gradients.

    Raises:
        TypeError: it is no function, or returns something else.
        ValueError: it returns another number of gradients.
    """
    if not callable(loss):
        raise TypeError(
            f"{call}: loss is of type {type(loss).__name__}; it must be a function without "
            "arguments that returns the loss and its gradients, because NumPy has no gradients of "
            "its own"
        )
    found: Any = loss()
    if not isinstance(found, (tuple, list)) or len(found) != 2:
        raise TypeError(
            f"{call}: loss() returned {type(found).__name__}; it must return (loss, gradients)"
        )
    value, gradients = found[0], list(found[1])
    if len(gradients) != count:
        raise ValueError(
            f"{call}: {len(gradients)} gradients for {count} variables; return one for each"
        )
    return value, gradients


def group_of_variables(variable: Variable, preposition: str) -> ReplicaGroup:
    """The variable's group, which must be that of this line's context."""
    with call_named(f"{current_call()} {preposition} {variable.name!r}"):
        state_of(variable).require_strategy()
    return state_of(variable).group


def check_variables(group: ReplicaGroup, variables: Sequence[Variable]) -> None:
    """Checks the variables of an update.

    Raises:
        ValueError: one of another strategy, one that no optimizer can change, or that occurs twice.
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
                f"{call}: the variable {v.name!r} is ON_READ, one value a replica; make it an "
                "ordinary one"
            )


def summed_rows(
    group: ReplicaGroup, slices: IndexedSlices, variable: Variable, summed: bool
) -> tuple[Array, Array]:
    """The rows that occur in any replica's slices, each once, and their gradients, summed in rank order."""
    communicator = group.communicator
    with communicator.raise_together():
        indices, values = checked_slices(slices, variable)
    if not summed:
        rows = f"rows of {variable.name!r}, variable {state_of(variable).block.number}"
        with call_named(f"{current_call()} of {rows}"):
            indices, values = communicator.all_gather([indices, values], 0)
    with group.on_stream():
        return combine_rows(indices, values)


def accumulated(
    pairs: Sequence[tuple[Any, Variable]], accumulator: Accumulator
) -> list[tuple[Any, Variable]] | None:
    """Adds gradients to those of the calls before; gives the means of all with their variables where they are due."""
    for pair in pairs:
        check_pair(pair)
    gradients, dense, sparse = sorted_pairs(pairs)
    variables = [*dense, *(v for _, v in sparse)]
    if variables:
        check_variables(group_of_variables(variables[0], "to"), variables)
    return accumulator.add([*gradients, *(as_dense(slices, v) for slices, v in sparse)], variables)
