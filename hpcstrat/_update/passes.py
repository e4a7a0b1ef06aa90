"""Passes over all elements, which an update is made of, and what computes their kernels' constants.

Numbers change at three times: attributes of the optimizer seldom, the learning rate and the step in
every step, and norms are known in the middle of a step. So of the numbers that lead to a kernel's
constants, those that depend on norms are *late*, and all others *early*. For the constant
`learning_rate / max(norm(gradient), beta**step)`:

    early    power = beta**step               once per step, in Python
    late     most = max(norm, power)          once per variable, in Python, or for all variables at
    late     constant = learning_rate / most  once on a GPU

The late ones are *given* the early ones that they take: here the power and the learning rate. The
code is, in Python and in CUDA C++:

    def compute(n0, n1, n2):  # beta, the learning rate, the step
        try:
            n3 = power(n0, n2)
            return (n3, n1, )
        except (ArithmeticError, ValueError):
            return again(n0, n1, n2)  # with functions that return inf or nan instead

    const auto late_0 = norm_0 > given_0 || norm_0 != norm_0 ? norm_0 : given_0;
    const auto late_1 = given_1 / late_0;
    numbers[i * 1 + 0] = late_1;
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from hpcstrat._update.kernel import Kernel, kernel_of
from hpcstrat._update.symbols import (
    OPERATIONS,
    Symbol,
    global_norm,
    in_order,
    layers_of,
    statements_in_c,
)

Compute: TypeAlias = Callable[..., tuple[float, ...]]
"""Computes numbers from others."""


@dataclasses.dataclass(frozen=True, eq=False)
class Pass:
    """A pass over all elements: one for norms, which changes nothing, or the update.

    Attributes:
        kernel: what it computes.
        are_global: of a pass for norms: whether each norm is over all variables of the update, or
            over each.
        given_in: computes, from the formula's numbers in a step, what is given to `constants_of`
            and `code`. Without norms it is the constants.
        constants_of: computes the kernel's constants from the numbers that are given, and the norms
            of all passes before.
        code: the same in CUDA C++: it computes row `i` of `numbers` from `given_0`, `given_1` and
            so on, and `norm_0` and so on, in float64.
    """

    kernel: Kernel
    are_global: tuple[bool, ...]
    given_in: Compute
    constants_of: Compute
    code: str


def passes_of(
    name: str,
    elements: Mapping[str, Symbol],
    numbers: Sequence[Symbol],
    results: Mapping[str, Symbol],
) -> tuple[Pass, ...]:
    """The passes of a formula: one for each layer of norms, and the update.

    Norms need all elements of a variable before any can change. A pass may depend on the norms of
    those before.

    Args:
        name: of the update's kernel.
        elements: see `kernel_of`.
        numbers: the formula's.
        results: see `kernel_of`.
    """
    passes: list[Pass] = []
    norms: list[Symbol] = []
    for layer in layers_of([*results.values()]):
        terms = {f"term_{i}": norm.operands[0] for i, norm in enumerate(layer)}
        are_global = tuple([norm.function is global_norm for norm in layer])
        passes.append(_pass(f"{name}_norms", elements, numbers, norms, terms, are_global))
        norms += layer
    return *passes, _pass(name, elements, numbers, norms, results, ())


def _pass(
    name: str,
    elements: Mapping[str, Symbol],
    numbers: Sequence[Symbol],
    norms: Sequence[Symbol],
    results: Mapping[str, Symbol],
    are_global: tuple[bool, ...],
) -> Pass:
    """The pass that computes these results from elements, numbers and the norms found before."""
    kernel, constants = kernel_of(name, elements, results)
    order = in_order(constants)
    late: list[Symbol] = []
    for symbol in order:
        if any(operand in norms or operand in late for operand in symbol.operands):
            late.append(symbol)
    early = [symbol for symbol in order if symbol not in late and symbol not in norms]
    # Exponentials on a GPU may have other last bits, so it is given all that it can be.
    taken = [*[operand for symbol in late for operand in symbol.operands], *constants]
    given = [symbol for symbol in dict.fromkeys(taken) if symbol in early]
    return Pass(
        kernel,
        are_global,
        _in_python(numbers, early, given),
        _in_python([*given, *norms], late, constants),
        _in_cuda(given, norms, late, constants),
    )


_MAY_RAISE: dict[str, Callable[..., float]] = {
    "divide": operator.truediv,
    "sqrt": math.sqrt,
    "power": math.pow,  # `**` makes complex numbers
    "exp": math.exp,
    "log": math.log,
}


def _or_as_numpy(name: str) -> Callable[..., float]:
    """One of these functions, with NumPy's result where it raises: a norm may be 0 or infinite."""

    def compute(*operands: float) -> float:
        try:
            return _MAY_RAISE[name](*operands)
        except (ArithmeticError, ValueError):
            with np.errstate(all="ignore"):
                return float(getattr(np, name)(*map(float, operands)))

    return compute


_LITERALS = {"inf": math.inf, "nan": math.nan}
_FAST: dict[str, Any] = _LITERALS | _MAY_RAISE
"""The names in texts in Python."""
_NEVER_RAISING: dict[str, Any] = _LITERALS | {name: _or_as_numpy(name) for name in _MAY_RAISE}
"""The same names, with functions that are slower."""


def _in_python(
    given: Sequence[Symbol], steps: Sequence[Symbol], wanted: Sequence[Symbol]
) -> Compute:
    """A function of the given numbers that goes through these steps and returns those wanted.

    It is code, as in the example: a loop over a table would take as long as the update of 1,000
    elements.
    """
    texts = {symbol: f"n{i}" for i, symbol in enumerate(given)}
    parameters = ", ".join(texts.values())
    lines = []
    for symbol in steps:
        if symbol.is_computed:
            operands = [texts[operand] for operand in symbol.operands]
            texts[symbol] = f"n{len(texts)}"
            text = str(OPERATIONS[symbol.function].in_python).format(*operands)
            lines.append(f"        {texts[symbol]} = {text}")
        elif symbol.literal is not None:
            texts[symbol] = repr(symbol.literal)
    results = "".join([f"{texts[symbol]}, " for symbol in wanted])
    code = "\n".join(
        [
            f"def compute({parameters}):",
            "    try:",
            *lines,
            f"        return ({results})",
            "    except (ArithmeticError, ValueError):",
            f"        return again({parameters})",
        ]
    )
    slow, fast = _NEVER_RAISING.copy(), _FAST.copy()
    exec(code, slow)  # defines `compute` in `slow`
    fast["again"] = slow["compute"]
    exec(code, fast)
    return fast["compute"]


def _in_cuda(
    given: Sequence[Symbol],
    norms: Sequence[Symbol],
    late: Sequence[Symbol],
    wanted: Sequence[Symbol],
) -> str:
    """The code that computes the numbers wanted; see `Pass`."""
    texts = {symbol: f"given_{i}" for i, symbol in enumerate(given)}
    texts |= {norm: f"norm_{i}" for i, norm in enumerate(norms)}
    lines = statements_in_c(late, texts, "late")
    count = len(wanted)
    lines += [f"numbers[i * {count} + {k}] = {texts[one]};" for k, one in enumerate(wanted)]
    return "\n".join(lines)
