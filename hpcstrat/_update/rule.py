"""How an update changes a variable and its slots."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hpcstrat._core.types import Array
from hpcstrat._update.kernel import Kernel
from hpcstrat._update.passes import Pass

NO_CONSTANTS: Mapping[str, float] = MappingProxyType({})
LANES = 16
"""Sums of squares that are kept in parallel, so that a compiler can use vectors in one order."""

Apply: TypeAlias = Callable[[Array, Array, Sequence[Array], Array], Any]


class UpdateRule(NamedTuple):
    """One step of an optimizer: how a gradient changes a variable and its slots.

    `apply(value, gradient, slots, scratch)` changes `value` and `slots` in place and may overwrite
    `gradient` and `scratch`. All are flat arrays of one length and dtype, NumPy's or CuPy's. The
    update must be elementwise: an element may depend on the same element of the other arrays and on
    nothing else, because `apply` is called on one range of elements at a time, on any rank.

    Attributes:
        apply: the function. NumPy's functions work on both kinds of array.
        constants: the numbers in `apply`, by name. Ranks whose constants differ raise
            `ReplicaMismatchError`, which names them; so do ranks whose learning rates differ, which
            need not be among these.
        kernel: the same update as NumPy's calls, in C and in CUDA C++. If it is given, updates use
            it instead of `apply`, but not those of rows in host memory.
        kernel_constants: the constants of the kernel, in its order.
        norms: the norms of whole variables that it needs. Then `apply` takes a whole variable, and
            the kernel's constants are those of `norms.rule_of`.

    Examples:
        SGD as a function of flat arrays, which `Optimizer.update_rule` returns:

        >>> class Plain(hs.optimizers.Optimizer):
        ...     slots = {}
        ...     def update_rule(self, learning_rate, step):
        ...         def apply(value, gradient, slots, scratch):
        ...             value -= np.multiply(gradient, learning_rate, out=scratch)
        ...         return hs.optimizers.UpdateRule(apply, {"learning_rate": learning_rate})
        >>> optimizer, w = Plain(0.5), hs.Variable(np.zeros((1, 2)))
        >>> optimizer.apply_gradients([(np.array([[2.0, 4.0]]), w)])
        >>> w.numpy()
        array([[-1., -2.]])
    """

    apply: Apply
    constants: Mapping[str, float] = NO_CONSTANTS
    kernel: Kernel | None = None
    kernel_constants: tuple[float, ...] = ()
    norms: Norms | None = None


class Norms(NamedTuple):
    """The norms over variables that an update of their elements depends on, in one step.

    They are found in passes over all elements, which change nothing; a pass may depend on the norms
    of those before. The LAMB algorithm with `clipnorm` has three passes, for example: one finds
    the gradient's norm, the next those of the value and of its change, which depends on the
    gradient's, and the last is the update. A rank that has only a part of the elements sums its
    own, and the ranks add their sums. Squares are summed in float64.

    Attributes:
        passes: those for norms, and last the update.
        given: of each pass, the numbers that do not depend on norms.
    """

    passes: tuple[Pass, ...]
    given: tuple[tuple[float, ...], ...]

    @property
    def most(self) -> int:
        """How many norms the pass with most has."""
        return max([len(each.are_global) for each in self.passes])

    def rule_of(self, k: int, found: Sequence[float]) -> UpdateRule:
        """The rule of a pass, from the norms of those before; the last pass is the update."""
        kernel = self.passes[k].kernel
        constants = self.passes[k].constants_of(*self.given[k], *found)
        apply = functools.partial(kernel.apply, constants)
        return UpdateRule(apply, NO_CONSTANTS, kernel, constants)

    def apply(self, value: Array, gradient: Array, slots: Sequence[Array], scratch: Array) -> None:
        """`UpdateRule.apply`, to a whole variable, as if there were no other."""
        found: list[float] = []
        for k in range(len(self.passes)):
            terms = self.rule_of(k, found).apply(value, gradient, slots, scratch)
            found += np.sqrt(sums_of_squares(terms)).tolist()


def sums_of_squares(terms: Sequence[Array]) -> Array:
    """The sum of the squares of each flat array, in float64, in the order of a compiled loop."""
    return np.array([_sum_of_squares(term) for term in terms])


def _sum_of_squares(term: Array) -> float:
    squares = np.abs(term).astype(np.float64)
    squares *= squares
    whole = squares.size // LANES * LANES
    lanes = np.zeros(LANES)
    lanes += np.add.reduce(squares[:whole].reshape(-1, LANES), axis=0)
    lanes[: squares.size - whole] += squares[whole:]
    # Not `sum`, which compensates rounding errors from Python 3.12 on.
    return functools.reduce(operator.add, lanes.tolist())
