"""How an update changes a variable and its slots."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from hpcstrat._core.types import Array
from hpcstrat._update.formula import Kernel


class Clip(NamedTuple):
    """Scales gradients down to a norm, before an update; the kernel's first number is the scale.

    Attributes:
        limit: the largest norm.
        is_global: whether it is the norm of all gradients together; else of each.
    """

    limit: float
    is_global: bool

    def scale(self, squares: float) -> float:
        """The factor of gradients with this sum of squares; nan if the norm is not finite."""
        norm = math.sqrt(squares)
        if not math.isfinite(norm):
            return math.nan
        return self.limit / norm if norm > self.limit else 1.0


def _assign(value: Array, new: Array) -> None:
    value[...] = new


class UpdateRule(NamedTuple):
    """One update: of an optimizer's step by a kernel, of an assignment by a function.

    Attributes:
        kernel: how an element changes, by its gradient.
        numbers: the kernel's numbers in this step, after the scale of `clip`.
        names: of the numbers that follow.
        agreed: the numbers on which the ranks must agree; those that differ raise
            `ReplicaMismatchError`.
        clip: which norms of the gradients are limited.
        assign: of a rule without a kernel: changes an array by another of its shape.
    """

    kernel: Kernel | None = None
    numbers: tuple[float, ...] = ()
    names: tuple[str, ...] = ()
    agreed: tuple[float, ...] = ()
    clip: Clip | None = None
    assign: Callable[[Array, Array], object] = _assign
