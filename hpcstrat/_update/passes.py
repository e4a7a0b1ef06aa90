"""Passes over all elements, which an update is made of, and what computes their kernels' constants.

Numbers change at three times: attributes of the optimizer seldom, the learning rate and the step in
every step, and norms are known in the middle of a step. So a kernel's constants are computed in two
parts. For `learning_rate / max(norm(gradient), beta**step)`:

    def compute(n0, n1, n2):  # beta, the learning rate, the step
        try:
            n3 = power(n0, n2)
            return (n3, n1,)
        except (ArithmeticError, ValueError):
            return again(n0, n1, n2,)

in Python, once per step; and what depends on norms from these numbers, once per variable, as such a
function in Python or, for all variables at once, on a GPU:

    const auto late_0 = norm_0 > given_0 || norm_0 != norm_0 ? norm_0 : given_0;
    const auto late_1 = given_1 / late_0;
    numbers[i * 1 + 0] = late_1;
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from hpcstrat._update.kernel import Kernel, kernel_of
from hpcstrat._update.symbols import (
    NORMS,
    NUMPY_WHERE_PYTHON_RAISES,
    OPERATIONS,
    PYTHON,
    Symbol,
    global_norm,
    in_order,
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
            and `code`: all that does not depend on norms. Without norms it is the constants.
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


def make_pass(
    name: str,
    given: Sequence[Symbol],
    numbers: Sequence[Symbol],
    norms: Sequence[Symbol],
    results: Sequence[Symbol],
) -> Pass:
    """The pass that computes these results.

    Args:
        name: of its kernel.
        given: the gradient, the value and the slots.
        numbers: the formula's.
        norms: of all passes before.
        results: the new value and slots, or other norms.
    """
    are_global = tuple([one.function is global_norm for one in results if one.function in NORMS])
    if are_global:
        results = [norm.operands[0] for norm in results]
    kernel, constants = kernel_of(name, given, results, bool(are_global))
    late = [
        symbol
        for symbol in in_order(constants)
        if symbol.is_computed and any(norm in symbol.inputs() for norm in norms)
    ]
    taken = [*[operand for symbol in late for operand in symbol.operands], *constants]
    # Exponentials on a GPU may have other last bits, so it is given all that it can be.
    passed = [symbol for symbol in dict.fromkeys(taken) if symbol not in (*late, *norms)]
    return Pass(
        kernel,
        are_global,
        _in_python(numbers, passed),
        _in_python([*passed, *norms], constants),
        _in_cuda(passed, norms, late, constants),
    )


def _in_python(given: Sequence[Symbol], wanted: Sequence[Symbol]) -> Compute:
    """A function of the given numbers that returns those wanted.

    It is written in Python: a loop over a table would take as long as the update of 1,000 elements.
    """
    texts = {symbol: f"n{i}" for i, symbol in enumerate(given)}
    parameters = "".join([f"{text}, " for text in texts.values()])
    lines = []
    for symbol in in_order(wanted, known=given):
        if not symbol.is_computed:
            texts[symbol] = repr(symbol.operands[0])  # a literal
            continue
        operands = [texts[operand] for operand in symbol.operands]
        texts[symbol] = f"n{len(texts)}"
        text = str(OPERATIONS[symbol.function].in_python).format(*operands)
        lines.append(f"    {texts[symbol]} = {text}")
    results = "".join([f"{texts[symbol]}, " for symbol in wanted])
    code = "\n".join(
        [
            f"def compute({parameters}):",
            "  try:",
            *lines,
            f"    return ({results})",
            "  except (ArithmeticError, ValueError):",
            f"    return again({parameters})",
        ]
    )
    again: dict[str, Any] = dict(NUMPY_WHERE_PYTHON_RAISES)
    exec(code, again)
    once = PYTHON | {"again": again["compute"]}
    exec(code, once)
    return once["compute"]


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
