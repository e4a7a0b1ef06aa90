"""Symbols for elements and numbers while a formula is traced, and the operations they allow."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, final

import numpy as np

from hpcstrat._core.types import Array

ELEMENT, CONDITION, NUMBER = "element", "condition", "number"


OPERATIONS: dict[Any, tuple[str, Any]] = {
    np.add: ("{} + {}", operator.add),
    np.subtract: ("{} - {}", operator.sub),
    np.multiply: ("{} * {}", operator.mul),
    np.divide: ("{} / {}", operator.truediv),
    np.negative: ("-{}", operator.neg),
    np.sqrt: ("sqrt({})", math.sqrt),
    np.square: ("{0} * {0}", lambda x: x * x),
    np.absolute: ("fabs({})", abs),
    np.sign: ("{0} > 0 ? 1 : {0} < 0 ? -1 : {0} == 0 ? 0 : {0}", None),
    # Unlike Python's `max`, nan if either is.
    np.maximum: ("{0} > {1} || {0} != {0} ? {0} : {1}", lambda a, b: a if a > b or a != a else b),
    np.minimum: ("{0} < {1} || {0} != {0} ? {0} : {1}", lambda a, b: a if a < b or a != a else b),
    np.less: ("{} < {}", operator.lt),
    np.less_equal: ("{} <= {}", operator.le),
    np.greater: ("{} > {}", operator.gt),
    np.greater_equal: ("{} >= {}", operator.ge),
    np.where: ("{} ? {} : {}", lambda condition, a, b: a if condition else b),
    np.power: ("pow({}, {})", math.pow),  # `**` makes complex numbers
    np.exp: ("exp({})", math.exp),
    np.log: ("log({})", math.log),
}
"""NumPy's functions in C, and of Python's numbers, where they may raise; see `as_numpy`."""
# Those with the same bits in NumPy, in C++ and on every processor: IEEE 754 defines their rounding.
# NumPy's exp or log depend on the processor; on a GPU they are of numbers that depend on norms.
_ON_ELEMENTS = OPERATIONS.keys() - {np.power, np.exp, np.log}
_ON_NUMBERS = {function for function, (_, of_numbers) in OPERATIONS.items() if of_numbers}
_COMPARISONS = (np.less, np.less_equal, np.greater, np.greater_equal)


def as_numpy(ufunc: Any) -> Callable[..., float]:
    """The function of Python's numbers, with NumPy's result where Python's raises.

    A norm may be 0 or infinite.
    """
    of_numbers = OPERATIONS[ufunc][1]

    def compute(*operands: float) -> float:
        try:
            return of_numbers(*operands)
        except (ArithmeticError, ValueError):
            with np.errstate(all="ignore"):
                return float(ufunc(*map(float, operands)))

    return compute


def _choose(condition: Array, a: Array, b: Array, out: Array) -> None:
    out[...] = np.where(condition, a, b)


# Of two zeros with different signs, NumPy's own maximum takes one that depends on the processor and
# on the place in the array.
NUMPY: dict[Any, Callable[..., Any]] = {
    np.where: _choose,
    np.maximum: lambda a, b, out: _choose((a > b) | (a != a), a, b, out),
    np.minimum: lambda a, b, out: _choose((a < b) | (a != a), a, b, out),
}
"""What computes operations whose function in NumPy takes no array for the result, or differs."""


def _operator(function: Any) -> Callable[..., Symbol]:
    return lambda *operands: _apply(function, *operands)


def _reflect(function: Any) -> Callable[..., Symbol]:
    return lambda symbol, other: _apply(function, other, symbol)


@final
class Symbol:
    """An element of an array, or a number, while a formula is traced.

    Attributes:
        kind: an element, a condition on elements, or a number, which is the same for all elements.
        function: NumPy's; `None` for the formula's arguments and for literals.
        operands: the function's arguments; of a formula's argument its name, of a literal its
            value.
    """

    __slots__ = ("function", "kind", "operands")
    __add__, __radd__ = _operator(np.add), _reflect(np.add)
    __sub__, __rsub__ = _operator(np.subtract), _reflect(np.subtract)
    __mul__, __rmul__ = _operator(np.multiply), _reflect(np.multiply)
    __truediv__, __rtruediv__ = _operator(np.divide), _reflect(np.divide)
    __neg__, __abs__ = _operator(np.negative), _operator(np.absolute)
    __lt__, __le__ = _operator(np.less), _operator(np.less_equal)
    __gt__, __ge__ = _operator(np.greater), _operator(np.greater_equal)

    def __init__(self, kind: str, function: Any, *operands: Any) -> None:
        self.kind, self.function, self.operands = kind, function, operands

    def __array_ufunc__(self, ufunc: Any, method: str, *arguments: Any, **options: Any) -> Symbol:
        if method != "__call__" or options:
            _refuse(
                f"numpy.{ufunc.__name__} with {', '.join(options) or method} is not allowed in a "
                "formula"
            )
        return _apply(ufunc, *arguments)

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Symbol:
        if function is np.linalg.norm and not options and len(arguments) == 1:
            if self.kind != ELEMENT:
                _refuse("numpy.linalg.norm takes an element")
            return Symbol(NUMBER, np.linalg.norm, self)
        if function is not np.where or options or len(arguments) != 3:
            _refuse(
                f"numpy.{function.__name__} is not allowed in a formula: formulas are elementwise"
            )
        return _apply(np.where, *arguments)

    def inputs(self) -> Iterator[Symbol]:
        """All symbols that this symbol depends on, some several times."""
        if self.function is not None:
            for operand in self.operands:
                yield operand
                yield from operand.inputs()

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


def _apply(function: Any, *arguments: Any) -> Symbol:
    operands = []
    for argument in arguments:
        if isinstance(argument, (int, float, np.integer, np.floating)):
            argument = Symbol(NUMBER, None, float(argument))
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
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    raise TypeError(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}: {why}")
