"""How an update changes a variable and its slots."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hpcstrat._communicators.reduction import accumulator
from hpcstrat._core.types import Array
from hpcstrat._update.symbols import CONDITION, ELEMENT, NUMBER

NO_CONSTANTS: Mapping[str, float] = MappingProxyType({})
LANES = 16
"""Sums of squares that are kept in parallel, so that a compiler can use vectors in one order."""

Apply: TypeAlias = Callable[[Array, Array, Sequence[Array], Array], Any]
Evaluate: TypeAlias = Callable[..., tuple[float, ...]]
"""From the numbers that change from step to step, and norms, to a kernel's constants."""
Take: TypeAlias = "Callable[[np.dtype[Any], int], list[Array]]"
"""Returns this many arrays of a dtype, to work in."""


class UpdateRule(NamedTuple):
    """One step of an optimizer: how a gradient changes a variable and its slots.

    `apply(value, gradient, slots, scratch)` changes `value` and `slots` in place and may overwrite
    `gradient` and `scratch`. All are flat arrays of one length and dtype, NumPy's or CuPy's. The
    update must be elementwise: an element may depend on the same element of the other arrays and on
    nothing else, because `apply` is called on one range of elements at a time, on any rank.

    Attributes:
        apply: the function. NumPy's functions work on both kinds of array.
        constants: the numbers in `apply`, by name; the learning rate at least. Ranks whose
            constants differ raise `ReplicaMismatchError`, which names them.
        kernel: the same update as NumPy's calls, in C and in CUDA C++. Updates of whole variables,
            and all on a GPU, use it instead of `apply` if it is given.
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
    """The norms over variables that an update of their elements depends on.

    They are found in passes over all elements, which change nothing; a pass may depend on the norms
    of those before. A rank that has only a part of the elements sums its own, and the ranks add
    their sums. Squares are summed in float64.

    Attributes:
        kernels: of each pass, whose terms are those of its norms; then of the update.
        are_global: for each pass, whether each of its norms is over all variables of the update, or
            over each.
        codes: for each pass, statements in CUDA C++ that compute row `i` of `numbers`, the
            constants of the next kernel, in float64, from `norm_0`, `norm_1` and so on, of all
            passes up to this, and from `given_0` and so on.
        constants: for each kernel, what computes its constants from the numbers that change from
            step to step and the norms of all passes before.
        given: for each pass, what computes the numbers that its code is given, from the same and
            any norms of its own: on norms these do not depend.
        now: the numbers of this step.
        first: the rule of the first pass in this step.
    """

    kernels: tuple[Kernel, ...]
    are_global: tuple[tuple[bool, ...], ...]
    codes: tuple[str, ...]
    constants: tuple[Evaluate, ...]
    given: tuple[Evaluate, ...]
    now: tuple[float, ...] = ()
    first: UpdateRule | None = None

    def in_step(self, now: tuple[float, ...]) -> Norms:
        """These norms in a step with these numbers."""
        norms = self._replace(now=now)
        return norms._replace(first=norms.rule_of(0, ()))

    @property
    def most(self) -> int:
        """The norms of the pass that has most."""
        return max(map(len, self.are_global))

    def rule_of(self, k: int, found: Sequence[float]) -> UpdateRule:
        """The rule of a pass or, after all, of the update, from the norms of the passes before."""
        kernel, numbers = self.kernels[k], self.constants[k](*self.now, *found)
        apply = functools.partial(kernel.apply, numbers)
        return UpdateRule(apply, NO_CONSTANTS, kernel, numbers)

    def given_of(self, k: int) -> tuple[float, ...]:
        """The numbers that the code of a pass is given."""
        return self.given[k](*self.now, *[1.0] * sum(map(len, self.are_global[: k + 1])))

    def apply(self, value: Array, gradient: Array, slots: Sequence[Array], scratch: Array) -> None:
        """`UpdateRule.apply`, to a whole variable, as if there were no other."""
        found: list[float] = []
        for k in range(len(self.are_global)):
            terms = self.rule_of(k, found).apply(value, gradient, slots, scratch)
            found += np.sqrt(sums_of_squares(terms)).tolist()
        self.rule_of(len(self.are_global), found).apply(value, gradient, slots, scratch)


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """The computation of a formula, or of the terms of its norms. Equal kernels are one object.

    Attributes:
        name: the kernel's name in profilers.
        slots: names of the slots in `body`.
        constants: names of the constants in `body`.
        body: statements in C, CUDA C++ too, that change `value` and the slots by `gradient`, for
            one element. All have the variable's dtype; where that has 16 bits, `float`. Statements
            for norms change nothing and assign to `term_0` and so on.
        steps: the same as functions of NumPy, each with the places of its operands and its result.
            The first arrays are the gradient, the value and the slots.
        arrays: the number of arrays of each kind.
        terms: for norms, the arrays of their terms.
    """

    name: str
    slots: tuple[str, ...]
    constants: tuple[str, ...]
    body: str
    steps: list[tuple[Any, ...]]
    arrays: dict[str, int]
    terms: list[int]

    def bind(
        self,
        value: Array,
        gradient: Array,
        slots: Sequence[Array],
        numbers: Sequence[Array],
        take: Take,
    ) -> tuple[list[Callable[[], Any]], list[Array]]:
        """Calls that compute on flat NumPy arrays, and the arrays that then contain the terms.

        Bound once and called in every step: a loop over a table that looks up the operands would
        make a small update 5 to 10 % slower. The constants, of the `accumulator` of the value's
        dtype, are arrays without dimensions: NumPy takes these in half the time of a scalar.
        """
        given, dtype = [gradient, value, *slots], accumulator(value.dtype)
        is_wide = dtype != value.dtype
        if is_wide:
            elements = take(dtype, self.arrays[ELEMENT])
        else:
            elements = [*given, *take(dtype, self.arrays[ELEMENT] - len(given))]
        pools = {
            ELEMENT: elements,
            CONDITION: take(np.dtype(bool), self.arrays[CONDITION]),
            NUMBER: numbers,
        }
        calls: list[Callable[[], Any]] = [
            functools.partial(function, *[pools[kind][i] for kind, i in places])
            for function, *places in self.steps
        ]
        if is_wide:  # 16-bit numbers, as on a GPU: computed in float32, and rounded once
            pairs = list(zip(elements, given, strict=False))
            changed = [] if self.terms else pairs[1:]
            calls = [
                *[functools.partial(np.copyto, wide, short, "unsafe") for wide, short in pairs],
                *calls,
                *[functools.partial(np.copyto, short, wide, "unsafe") for wide, short in changed],
            ]
        return calls, [elements[i] for i in self.terms]

    def apply(
        self,
        constants: Sequence[float],
        value: Array,
        gradient: Array,
        slots: Sequence[Array],
        scratch: Array | None = None,
    ) -> list[Array]:
        """Computes once, on flat NumPy arrays; returns the terms."""
        calls, terms = self.bind(
            value,
            gradient,
            slots,
            scalars(np.array(constants, accumulator(value.dtype))),
            lambda dtype, count: [np.empty(value.size, dtype) for _ in range(count)],
        )
        for call in calls:
            call()
        return terms


def scalars(numbers: Array) -> list[Array]:
    """Views of the numbers in an array, without dimensions."""
    return [numbers[i : i + 1].reshape(()) for i in range(numbers.size)]


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
