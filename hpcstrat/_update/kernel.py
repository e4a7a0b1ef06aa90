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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hpcstrat._communicators.reduction import accumulator
from hpcstrat._core.types import Array
from hpcstrat._update.symbols import (
    CONDITION,
    ELEMENT,
    NUMBER,
    OPERATIONS,
    Symbol,
    functions_of_reals,
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
        of_reals: names of the functions in it that only real numbers have.
        steps: the same as calls of NumPy's functions. The first arrays are the gradient, the value
            and the slots.
        arrays: the number of arrays of each kind.
        terms: for norms, which arrays have their terms then.
    """

    name: str
    slots: tuple[str, ...]
    constants: tuple[str, ...]
    body: str
    of_reals: tuple[str, ...]
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
        """`UpdateRule.apply`, with the kernel's constants, on NumPy arrays; returns the terms."""
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
    name: str, elements: Mapping[str, Symbol], results: Mapping[str, Symbol]
) -> tuple[Kernel, list[Symbol]]:
    """A kernel, and its constants: the numbers that its operations on elements take.

    Args:
        name: of the kernel.
        elements: the gradient, the value and the slots, by their names in C.
        results: what is assigned to the value and the slots, or to terms of norms.
    """
    changed: dict[str, Symbol] = {}
    for to, new in results.items():
        # A new slot may be another slot's old value. It is copied first, as a result of its own, so
        # that no result is where another one will be.
        is_copy = to in elements and new in elements.values()
        if new is not elements.get(to):
            changed[to] = Symbol(ELEMENT, np.positive, new) if is_copy else new
    order = in_order([*changed.values()])
    computed = [symbol for symbol in order if symbol.kind != NUMBER and symbol.is_computed]
    taken = {operand for symbol in computed for operand in symbol.operands}
    constants = [symbol for symbol in order if symbol.kind == NUMBER and symbol in taken]
    names = tuple([f"number_{i}" for i in range(len(constants))])
    texts = {symbol: text for text, symbol in elements.items()}
    texts |= zip(constants, names, strict=True)
    lines = statements_in_c(computed, texts, "step")
    lines += [f"{to} = {texts[new]};" for to, new in changed.items()]
    key = (name, tuple(elements)[2:], names, "\n".join(lines))
    if key not in _kernels:
        steps = _numpy_steps(elements, constants, computed, changed)
        _kernels[key] = Kernel(*key, functions_of_reals(computed), *steps)
    return _kernels[key], constants


def _numpy_steps(
    elements: Mapping[str, Symbol],
    constants: Sequence[Symbol],
    computed: Sequence[Symbol],
    results: Mapping[str, Symbol],
) -> tuple[list[KernelStep], dict[str, int], list[int]]:
    """The steps of a kernel, its numbers of arrays, and the arrays of its terms.

    There are as few arrays as possible: together they should fit in cache. A new value or slot is
    written over the old one, its *home*, if no later step reads that. Any other result is written
    over what no later step reads: the gradient, or scratch memory, of which there is one array more
    if that is needed. (Without homes, with a copy at the end for each new value and slot, updates
    took 1.5 to 2.5 times as long.) Adam, for example, has one scratch array:

        step                      reads             writes      free after it
        a = gradient * gradient   gradient          scratch
        b = a - v                 scratch, v        scratch
        c = number_0 * b          scratch           scratch
        new_v = v + c             v, scratch        v (home)    scratch
        d = gradient - m          gradient, m       gradient    scratch
        e = number_1 * d          gradient          gradient    scratch
        new_m = m + e             m, gradient       m (home)    scratch, gradient
        f = sqrt(new_v)           v                 gradient    scratch
        g = f + number_3          gradient          gradient    scratch
        h = new_m / g             m, gradient       gradient    scratch
        k = number_2 * h          gradient          gradient    scratch
        new = value - k           value, gradient   value (home)
    """
    places = {symbol: Place(ELEMENT, i) for i, symbol in enumerate(elements.values())}
    contents = {place: symbol for symbol, place in places.items()}
    homes = {new: places[elements[name]] for name, new in results.items() if name in elements}
    # A pass for norms changes nothing, so that the next finds the same gradient.
    scratch = [places[elements["gradient"]]] if homes else []
    arrays = {ELEMENT: len(elements), CONDITION: 0}
    places |= {number: Place(NUMBER, i) for i, number in enumerate(constants)}
    last_read = dict.fromkeys(elements.values(), -1)  # of each symbol, the last step that reads it
    last_read |= {operand: i for i, one in enumerate(computed) for operand in one.operands}
    last_read |= dict.fromkeys(results.values(), len(computed))  # after all
    steps: list[KernelStep] = []
    for i, symbol in enumerate(computed):
        fitting = [homes[symbol]] if symbol in homes else []
        fitting += [place for place in scratch if place.kind == symbol.kind]
        free = [place for place in fitting if last_read[contents[place]] <= i]
        if free:
            out = free[0]
        else:
            out = Place(symbol.kind, arrays[symbol.kind])
            arrays[symbol.kind] += 1
            scratch.append(out)
        operands = tuple([places[operand] for operand in symbol.operands])
        function: Any = OPERATIONS[symbol.function].on_arrays or symbol.function
        steps.append(KernelStep(function, operands, out))
        places[symbol], contents[out] = out, symbol
    for name, new in results.items():  # those that could not be written to their homes
        if name in elements and places[new] != places[elements[name]]:
            steps.append(KernelStep(np.positive, (places[new],), places[elements[name]]))
    terms = [places[term].position for name, term in results.items() if name not in elements]
    return steps, arrays, terms
