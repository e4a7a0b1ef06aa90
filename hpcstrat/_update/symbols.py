"""Symbols for elements and numbers while a formula is traced, and the operations they allow.

A formula is called once, with symbols, and each operation makes another. `value - 2 * gradient` is

    Symbol(ELEMENT, np.subtract, value, Symbol(ELEMENT, np.multiply, two, gradient))

where `value` and `gradient` are `Symbol(ELEMENT)`, and `two` is `Symbol(NUMBER, literal=2.0)`. It
becomes NumPy's calls and C for elements, or Python and C for numbers: see `OPERATIONS`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, final

import numpy as np

from hpcstrat._core.types import Array

ELEMENT, CONDITION, NUMBER = "element", "condition", "number"


def _choose(condition: Array, a: Array, b: Array, out: Array) -> None:
    out[...] = np.where(condition, a, b)


# Of two zeros with different signs, NumPy's own maximum takes one that depends on the processor and
# on the place in the array.
def _maximum(a: Array, b: Array, out: Array) -> None:
    _choose((a > b) | (a != a), a, b, out)


def _minimum(a: Array, b: Array, out: Array) -> None:
    _choose((a < b) | (a != a), a, b, out)


class Operation(NamedTuple):
    """How an operation, which has NumPy's function as its name, is computed.

    Attributes:
        in_c: a text with the operands.
        in_python: a text for numbers, with names of `passes.py`; `None` if only elements have it.
        on_arrays: takes arrays, and last the one for the result; `None`: NumPy's function does.
    """

    in_c: str
    in_python: str | None
    on_arrays: Callable[..., Any] | None = None


OPERATIONS: dict[Any, Operation] = {
    np.add: Operation("{} + {}", "{} + {}"),
    np.subtract: Operation("{} - {}", "{} - {}"),
    np.multiply: Operation("{} * {}", "{} * {}"),
    np.divide: Operation("{} / {}", "divide({}, {})"),
    np.negative: Operation("-{}", "-{}"),
    np.sqrt: Operation("sqrt({})", "sqrt({})"),
    np.square: Operation("{0} * {0}", "{0} * {0}"),
    np.absolute: Operation("fabs({})", "abs({})"),
    np.sign: Operation("{0} > 0 ? 1 : {0} < 0 ? -1 : {0} == 0 ? 0 : {0}", None),
    # Unlike Python's `max`, nan if either is.
    np.maximum: Operation(
        "{0} > {1} || {0} != {0} ? {0} : {1}",
        "{0} if {0} > {1} or {0} != {0} else {1}",
        _maximum,
    ),
    np.minimum: Operation(
        "{0} < {1} || {0} != {0} ? {0} : {1}",
        "{0} if {0} < {1} or {0} != {0} else {1}",
        _minimum,
    ),
    np.less: Operation("{} < {}", "{} < {}"),
    np.less_equal: Operation("{} <= {}", "{} <= {}"),
    np.greater: Operation("{} > {}", "{} > {}"),
    np.greater_equal: Operation("{} >= {}", "{} >= {}"),
    np.where: Operation("{} ? {} : {}", "{1} if {0} else {2}", _choose),
    np.power: Operation("pow({}, {})", "power({}, {})"),
    np.exp: Operation("exp({})", "exp({})"),
    np.log: Operation("log({})", "log({})"),
    np.positive: Operation("{}", None),  # a copy; formulas cannot take it
}
# Those with the same bits in NumPy, in C++ and on every processor: IEEE 754 defines their rounding.
# NumPy's exp or log depend on the processor; on a GPU they are of numbers that depend on norms.
_ON_ELEMENTS = OPERATIONS.keys() - {np.power, np.exp, np.log, np.positive}
_ON_NUMBERS = {function for function, one in OPERATIONS.items() if one.in_python is not None}
_COMPARISONS = (np.less, np.less_equal, np.greater, np.greater_equal)
_OF_REALS = {np.absolute, np.sign, np.maximum, np.minimum, *_COMPARISONS}


def _operator(function: Any) -> Callable[..., Symbol]:
    return lambda *operands: _apply(function, *operands)


def _reflect(function: Any) -> Callable[..., Symbol]:
    return lambda symbol, other: _apply(function, other, symbol)


@final
class Symbol:
    """An element of an array, or a number, while a formula is traced.

    Attributes:
        kind: an element, a condition on elements, or a number, which is the same for all elements.
        function: NumPy's, or `global_norm`; `None` for the formula's arguments and for literals.
        operands: the function's arguments.
        literal: the value of a literal; else `None`.
    """

    __slots__ = ("function", "kind", "literal", "operands")
    __add__, __radd__ = _operator(np.add), _reflect(np.add)
    __sub__, __rsub__ = _operator(np.subtract), _reflect(np.subtract)
    __mul__, __rmul__ = _operator(np.multiply), _reflect(np.multiply)
    __truediv__, __rtruediv__ = _operator(np.divide), _reflect(np.divide)
    __neg__, __abs__ = _operator(np.negative), _operator(np.absolute)
    __lt__, __le__ = _operator(np.less), _operator(np.less_equal)
    __gt__, __ge__ = _operator(np.greater), _operator(np.greater_equal)

    def __init__(
        self,
        kind: str,
        function: Callable[..., Any] | None = None,
        *operands: Symbol,
        literal: float | None = None,
    ) -> None:
        self.kind, self.function, self.operands = kind, function, operands
        self.literal = literal

    def __array_ufunc__(self, ufunc: Any, method: str, *arguments: Any, **options: Any) -> Symbol:
        if method != "__call__" or options:
            _refuse(
                f"numpy.{ufunc.__name__} with {', '.join(options) or method} is not allowed in a "
                "formula"
            )
        return _apply(ufunc, *arguments)

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Symbol:
        if function is np.where and not options and len(arguments) == 3:
            return _apply(np.where, *arguments)
        if function is np.linalg.norm and not options and len(arguments) == 1:
            if self.kind != ELEMENT:
                _refuse("numpy.linalg.norm takes an element")
            return Symbol(NUMBER, np.linalg.norm, self)
        _refuse(f"numpy.{function.__name__} is not allowed in a formula: formulas are elementwise")

    @property
    def is_computed(self) -> bool:
        """Whether a pass computes it, unlike arguments, literals and the norms of other passes."""
        return self.function is not None and self.function not in NORMS

    def __pow__(self, exponent: Any) -> Symbol:
        if self.kind == ELEMENT and isinstance(exponent, (int, float)) and exponent in (0.5, 2):
            return _apply(np.square if exponent == 2 else np.sqrt, self)
        return _apply(np.power, self, exponent)

    def __rpow__(self, base: Any) -> Symbol:
        return _apply(np.power, base, self)

    def __bool__(self) -> NoReturn:
        _refuse(
            f"whether {_article(self)} is true is not known when the formula is compiled; use "
            "numpy.where"
        )

    def __float__(self) -> NoReturn:
        _refuse(
            f"{_article(self)} has no value when the formula is compiled; use NumPy's functions, "
            "not math's"
        )

    __int__ = __index__ = __float__

    def __iter__(self) -> NoReturn:
        _refuse(f"{_article(self)} is not a sequence")


def global_norm(element: Symbol) -> Symbol:
    """The norm of an element over all variables of an update; `numpy.linalg.norm`: over its own."""
    return Symbol(NUMBER, global_norm, element)


NORMS = (np.linalg.norm, global_norm)


def in_order(results: Sequence[Symbol]) -> list[Symbol]:
    """The results and all that they depend on, each once and after its operands.

    What is in a norm is left out: it belongs to an earlier pass.
    """
    order: dict[Symbol, None] = {}

    def visit(symbol: Symbol) -> None:
        if symbol in order:
            return
        if symbol.is_computed:
            for operand in symbol.operands:
                visit(operand)
        order[symbol] = None

    for result in reversed(results):  # slots first: the new value often depends on them
        visit(result)
    return list(order)


def layers_of(results: Sequence[Symbol]) -> list[list[Symbol]]:
    """All norms that the results depend on, each in one layer, which depends on those before only.

    Clipping a gradient by its norm, for example, before an update that divides by the norm of the
    clipped gradient, gives two layers of one norm.
    """
    height: dict[Symbol, int] = {}  # of each norm's layer, seen from the results
    count = 0
    while norms := [symbol for symbol in in_order(results) if symbol.function in NORMS]:
        height |= dict.fromkeys(norms, count)  # again, higher, if another norm depends on it
        results = [norm.operands[0] for norm in norms]
        count += 1
    return [[norm for norm in height if height[norm] == k] for k in reversed(range(count))]


def functions_of_reals(symbols: Sequence[Symbol]) -> tuple[str, ...]:
    """The names of the functions among these that CUDA C++ does not have for complex numbers."""
    functions = {one.function for one in symbols}
    return tuple(sorted(function.__name__ for function in _OF_REALS & functions))


def statements_in_c(symbols: Sequence[Symbol], names: dict[Symbol, str], prefix: str) -> list[str]:
    """Statements that compute these symbols, whose names, of this prefix, are added to `names`."""
    lines = []
    for i, symbol in enumerate(symbols):
        operands = [names[operand] for operand in symbol.operands]
        names[symbol] = f"{prefix}_{i}"
        lines.append(
            f"const auto {names[symbol]} = {OPERATIONS[symbol.function].in_c.format(*operands)};"
        )
    return lines


def _apply(function: Any, *arguments: Any) -> Symbol:
    """The symbol of an operation, or `TypeError` if formulas cannot have it."""
    operands = []
    for argument in arguments:
        if isinstance(argument, (int, float, np.integer, np.floating)):
            argument = Symbol(NUMBER, literal=float(argument))
        elif not isinstance(argument, Symbol):
            _refuse(
                f"an operand is of type {type(argument).__name__}; take what the formula is given, "
                "and numbers"
            )
        operands.append(argument)
    if all(operand.kind == NUMBER for operand in operands):
        known, kind = _ON_NUMBERS, NUMBER
    else:
        known, kind = _ON_ELEMENTS, CONDITION if function in _COMPARISONS else ELEMENT
        wanted = (
            [CONDITION, ELEMENT, ELEMENT] if function is np.where else [ELEMENT] * len(operands)
        )
        for operand, of in zip(operands, wanted, strict=True):
            if (operand.kind == CONDITION) != (of == CONDITION):
                _refuse(
                    f"numpy.{function.__name__} takes {of}s, and one operand is {_article(operand)}"
                )
    if function not in known:
        names = ", ".join(sorted(each.__name__ for each in known))
        _refuse(
            f"numpy.{function.__name__} of {kind}s cannot be compiled to the same bits everywhere; "
            f"take {names}"
        )
    return Symbol(kind, function, *operands)


def _article(symbol: Symbol) -> str:
    return f"an {symbol.kind}" if symbol.kind == ELEMENT else f"a {symbol.kind}"


def _refuse(why: str) -> NoReturn:
    """Raises a `TypeError` that names the line of the formula: the last outside this file."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    raise TypeError(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}: {why}")
