"""The gradients of a step: sums and clips them, or adds them up over several calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hpcstrat._communicators.reduction import accumulator
from hpcstrat._core.call_name import call_named, current_call
from hpcstrat._core.types import Array, IndexedSlices
from hpcstrat._replicas.group import ReplicaGroup
from hpcstrat._update.rows import combine_rows
from hpcstrat._variable.variable import Variable, state_of
from hpcstrat.optimizers._arguments import (
    check_pairs,
    check_variables,
    group_of_variable,
    prepare_pairs,
    prepare_slices,
)


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


def clip(
    group: ReplicaGroup,
    global_clipnorm: float | None,
    clipnorm: float | None,
    gradients: Sequence[Array],
    rows: Sequence[tuple[Array, Array]],
) -> tuple[list[Array], list[tuple[Array, Array]]]:
    """Scales gradients down to the largest norm of all together, or of each."""
    arrays = [*gradients, *(values for _, values in rows)]
    with group.on_stream():
        if global_clipnorm is not None:
            arrays = _scale_down(group.xp, global_clipnorm, arrays)
        if clipnorm is not None:
            arrays = [_scale_down(group.xp, clipnorm, [array])[0] for array in arrays]
    dense, sparse = arrays[: len(gradients)], arrays[len(gradients) :]
    return dense, [(indices, new) for (indices, _), new in zip(rows, sparse, strict=True)]


def _scale_down(xp: Any, most: float, arrays: Sequence[Array]) -> list[Array]:
    with np.errstate(all="ignore"):  # as in the update: infinite gradients stop no rank
        # In float64, where the squares of large float32 numbers do not overflow.
        norm = xp.sqrt(sum(xp.sum(xp.abs(a).astype(np.float64) ** 2) for a in arrays))
        scale = xp.where(xp.isfinite(norm), xp.where(norm > most, most / norm, 1.0), np.nan)
        return [array * scale.astype(array.dtype) for array in arrays]


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

    def add(self, pairs: Sequence[tuple[Any, Variable]]) -> list[tuple[Array, Variable]] | None:
        """Adds the gradients of a call; returns their means after the last call, else `None`.

        Raises:
            ValueError: as `Optimizer.apply_gradients`.
        """
        check_pairs(pairs)
        gradients, dense, sparse = prepare_pairs(pairs)
        variables = [*dense, *(v for _, v in sparse)]
        if variables:
            check_variables(group_of_variable(variables[0], "to"), variables)
        gradients += [_as_dense(slices, v) for slices, v in sparse]
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


def _as_dense(slices: IndexedSlices, variable: Variable) -> Array:
    """A sparse gradient as an array of the variable's shape.

    Raises:
        ValueError: they do not fit the variable.
    """
    group = state_of(variable).group
    indices, values = prepare_slices(slices, variable)
    with group.on_stream():
        rows, sums = combine_rows(indices, values)
        gradient = group.xp.zeros(variable.shape, variable.dtype)
        gradient[rows] = sums
    return gradient
