"""Kernels: what a pass computes from each element, in C and as calls of NumPy's functions.

The formula of SGD with momentum,

    velocity = momentum * velocity - learning_rate * gradient
    return value + velocity, velocity

becomes this kernel:

    body (C)                                             steps (NumPy)
    const auto step_0 = number_0 * slot_momentum;        multiply(number 0, slot, out=scratch)
    const auto step_1 = number_1 * gradient;             multiply(number 1, gradient, out=gradient)
    const auto step_2 = step_0 - step_1;                 subtract(scratch, gradient, out=slot)
    const auto step_3 = value + step_2;                  add(value, slot, out=value)
    value = step_3;
    slot_momentum = step_2;

The numbers are the kernel's constants, here the momentum and the learning rate; see `passes.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hpcstrat._communicators.reduction import accumulator
from hpcstrat._core.types import Array
from hpcstrat._update.symbols import (
    CONDITION,
    ELEMENT,
    NUMBER,
    NUMPY,
    Symbol,
    in_order,
    statements_in_c,
)

Take: TypeAlias = "Callable[[np.dtype[Any], int], list[Array]]"
"""Returns this many arrays of a dtype, to work in."""


class Place(NamedTuple):
    """Where an operand is: its position among the arrays, or the constants, of its kind."""

    kind: str
    position: int


class KernelStep(NamedTuple):
    """A call of a function of NumPy's, and where its operands and its result are."""

    function: Callable[..., Any]
    operands: tuple[Place, ...]
    out: Place


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
        steps: the same as calls of NumPy's functions. The first arrays are the gradient, the value
            and the slots.
        arrays: the number of arrays of each kind.
        terms: for norms, the arrays of their terms.
    """

    name: str
    slots: tuple[str, ...]
    constants: tuple[str, ...]
    body: str
    steps: Sequence[KernelStep]
    arrays: dict[str, int]
    terms: Sequence[int]

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
            functools.partial(function, *[pools[kind][i] for kind, i in (*operands, out)])
            for function, operands, out in self.steps
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


_kernels: dict[tuple[Any, ...], Kernel] = {}


def kernel_of(
    name: str, given: Sequence[Symbol], results: Sequence[Symbol], are_terms: bool
) -> tuple[Kernel, list[Symbol]]:
    """A kernel, and its constants: the numbers that its operations on elements take.

    Args:
        name: of the kernel.
        given: the gradient, the value and the slots.
        results: the new value and slots, or terms of norms.
        are_terms: which of the two.
    """
    if not are_terms:
        # A new slot may be another slot's old value. It is copied first, as a result of its own, so
        # that no result is where another one will be.
        results = [
            Symbol(ELEMENT, np.positive, new) if new in given and new is not old else new
            for new, old in zip(results, given[1:], strict=True)
        ]
    order = in_order(results)
    computed = [symbol for symbol in order if symbol.kind != NUMBER and symbol.is_computed]
    taken = {operand for symbol in computed for operand in symbol.operands}
    constants = [symbol for symbol in order if symbol.kind == NUMBER and symbol in taken]
    names = [f"number_{i}" for i in range(len(constants))]
    texts = {symbol: symbol.operands[0] for symbol in given}
    texts |= zip(constants, names, strict=True)
    lines = statements_in_c(computed, texts, "step")
    if are_terms:
        lines += [f"term_{i} = {texts[term]};" for i, term in enumerate(results)]
    else:
        changed = [(old, new) for old, new in zip(given[1:], results, strict=True) if new != old]
        lines += [f"{texts[old]} = {texts[new]};" for old, new in changed]
    key = (name, tuple([texts[slot] for slot in given[2:]]), tuple(names), "\n".join(lines))
    if key not in _kernels:
        _kernels[key] = Kernel(*key, *_numpy_steps(given, computed, constants, results, are_terms))
    return _kernels[key], constants


def _numpy_steps(
    given: Sequence[Symbol],
    computed: Sequence[Symbol],
    constants: Sequence[Symbol],
    results: Sequence[Symbol],
    are_terms: bool,
) -> tuple[list[KernelStep], dict[str, int], list[int]]:
    """The steps of a kernel, its numbers of arrays, and its terms.

    There are as few arrays as possible: together they should fit in cache. The gradient is
    overwritten, and a new value or slot goes to its place in storage, its *home*, as soon as the
    old content is no longer needed. For norms, nothing that was given changes.
    """
    places = {symbol: Place(ELEMENT, i) for i, symbol in enumerate(given)}
    places |= {number: Place(NUMBER, i) for i, number in enumerate(constants)}
    in_storage = [places[symbol] for symbol in given[1:]]
    homes = {} if are_terms else dict(zip(results, in_storage, strict=True))
    # The last step that reads it.
    last = {operand: i for i, symbol in enumerate(computed) for operand in symbol.operands}
    last |= dict.fromkeys([*results, *(given if are_terms else [])], len(computed))
    arrays = {ELEMENT: len(given), CONDITION: 0}
    free = [] if given[0] in last else [places[given[0]]]
    steps: list[KernelStep] = []
    for i, symbol in enumerate(computed):
        operands = tuple([places[operand] for operand in symbol.operands])
        free += [  # also for the result of this step
            places[operand]
            for operand in dict.fromkeys(symbol.operands)
            if last[operand] == i and operand.kind != NUMBER and places[operand] not in in_storage
        ]
        home = homes.get(symbol)
        fitting = [place for place in free if place.kind == symbol.kind]
        if home is not None and last.get(given[home.position], -1) <= i:
            out = home
        elif fitting:
            out = fitting[-1]
            free.remove(out)
        else:
            out = Place(symbol.kind, arrays[symbol.kind])
            arrays[symbol.kind] += 1
        places[symbol] = out
        function: Any = NUMPY.get(symbol.function, symbol.function)
        steps.append(KernelStep(function, operands, out))
    if are_terms:
        return steps, arrays, [places[term].position for term in results]
    for new, home in zip(results, in_storage, strict=True):
        if places[new] != home:
            steps.append(KernelStep(np.positive, (places[new],), home))
    return steps, arrays, []
