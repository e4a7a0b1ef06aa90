"""An update written once: a function of symbols, traced, from which NumPy's operations and the kernel's text come."""

from __future__ import annotations

import collections
import inspect
import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, final

import numpy as np

from hpcstrat._storage.rule import Apply, Kernel, UpdateRule
from hpcstrat._types import Array

_ELEMENT, _CONDITION, _NUMBER = "element", "condition", "number"

# What gives the same bits in NumPy, in C++ and from processor to processor: IEEE 754 says how these round. NumPy's exp
# or log depend on the processor.
_ON_ELEMENTS: dict[Any, str] = {
    np.add: "{} + {}",
    np.subtract: "{} - {}",
    np.multiply: "{} * {}",
    np.divide: "{} / {}",
    np.negative: "-{}",
    np.sqrt: "sqrt({})",
    np.square: "{0} * {0}",
    np.absolute: "fabs({})",
    np.sign: "{0} > 0 ? 1 : {0} < 0 ? -1 : {0} == 0 ? 0 : {0}",
    np.maximum: "{0} > {1} || {0} != {0} ? {0} : {1}",
    np.minimum: "{0} < {1} || {0} != {0} ? {0} : {1}",
    np.less: "{} < {}",
    np.less_equal: "{} <= {}",
    np.greater: "{} > {}",
    np.greater_equal: "{} >= {}",
    np.where: "{} ? {} : {}",
}
_COMPARISONS = (np.less, np.less_equal, np.greater, np.greater_equal)
# Which zero NumPy's own takes of two with different signs depends on the processor, and on the place in the array.
_AS_OPERATIONS: dict[Any, Callable[..., Any]] = {
    np.maximum: lambda a, b: np.where((a > b) | (a != a), a, b),
    np.minimum: lambda a, b: np.where((a < b) | (a != a), a, b),
}
_WITHOUT_OUT = (*_COMPARISONS, *_AS_OPERATIONS, np.where)
"""What takes no array for its result, or one of `bool`."""
_ON_NUMBERS: dict[Any, Callable[..., Any]] = {
    np.add: operator.add,
    np.subtract: operator.sub,
    np.multiply: operator.mul,
    np.divide: operator.truediv,
    np.negative: operator.neg,
    np.power: operator.pow,
    np.square: lambda x: x * x,
    np.absolute: abs,
    np.maximum: max,
    np.minimum: min,
    np.sqrt: math.sqrt,
    np.exp: math.exp,
    np.log: math.log,
}


def _operator(function: Any) -> Callable[..., Symbol]:
    return lambda *operands: _applied(function, *operands)


def _reflected(function: Any) -> Callable[..., Symbol]:
    return lambda symbol, other: _applied(function, other, symbol)


@final
class Symbol:
    """Stands for an element of an array, or for a number, while a formula is traced.

    Attributes:
        kind: an element, a condition on elements, or a number, which is the same for all of them.
        function: NumPy's; `None` for what the formula is given and for literals.
        operands: its arguments. Of what is given, its name or its value.
    """

    __slots__ = ("function", "kind", "operands")
    __add__, __radd__ = _operator(np.add), _reflected(np.add)
    __sub__, __rsub__ = _operator(np.subtract), _reflected(np.subtract)
    __mul__, __rmul__ = _operator(np.multiply), _reflected(np.multiply)
    __truediv__, __rtruediv__ = _operator(np.divide), _reflected(np.divide)
    __neg__, __abs__ = _operator(np.negative), _operator(np.absolute)
    __lt__, __le__ = _operator(np.less), _operator(np.less_equal)
    __gt__, __ge__ = _operator(np.greater), _operator(np.greater_equal)

    def __init__(self, kind: str, function: Any, *operands: Any) -> None:
        self.kind, self.function, self.operands = kind, function, operands

    def __array_ufunc__(self, ufunc: Any, method: str, *arguments: Any, **options: Any) -> Symbol:
        if method != "__call__" or options:
            _refuse(f"numpy.{ufunc.__name__} with {', '.join(options) or method} has no place in a formula")
        return _applied(ufunc, *arguments)

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Symbol:
        if function is not np.where or options or len(arguments) != 3:
            _refuse(f"numpy.{function.__name__} has no place in a formula, where each element is by itself")
        return _applied(np.where, *arguments)

    def __pow__(self, exponent: Any) -> Symbol:
        if self.kind == _ELEMENT and isinstance(exponent, (int, float)) and exponent in (0.5, 2):
            return _applied(np.square if exponent == 2 else np.sqrt, self)
        return _applied(np.power, self, exponent)

    def __rpow__(self, base: Any) -> Symbol:
        return _applied(np.power, base, self)

    def __bool__(self) -> NoReturn:
        _refuse(f"whether {_article(self)} is true is not known when the formula is compiled; use numpy.where")

    def __float__(self) -> NoReturn:
        _refuse(f"{_article(self)} has no value when the formula is compiled; use NumPy's functions, not math's")

    __int__ = __index__ = __float__

    def __iter__(self) -> NoReturn:
        _refuse(f"{_article(self)} is no sequence")


def _applied(function: Any, *arguments: Any) -> Symbol:
    operands = []
    for argument in arguments:
        if isinstance(argument, (int, float, np.number)):
            argument = Symbol(_NUMBER, None, float(argument))
        elif not isinstance(argument, Symbol):
            _refuse(f"an operand is of type {type(argument).__name__}; take what the formula is given, and numbers")
        operands.append(argument)
    if all(operand.kind == _NUMBER for operand in operands):
        table, kind = _ON_NUMBERS, _NUMBER
    else:
        table, kind = _ON_ELEMENTS, _CONDITION if function in _COMPARISONS else _ELEMENT
        wanted = [_CONDITION, _ELEMENT, _ELEMENT] if function is np.where else [_ELEMENT] * len(operands)
        for operand, of in zip(operands, wanted, strict=True):
            if (operand.kind == _CONDITION) != (of == _CONDITION):
                _refuse(f"numpy.{function.__name__} takes {of}s, and one operand is {_article(operand)}")
    if function not in table:
        names = ", ".join(sorted(known.__name__ for known in table))
        _refuse(f"numpy.{function.__name__} of {kind}s cannot be compiled to the same bits everywhere; take {names}")
    return Symbol(kind, function, *operands)


def _article(symbol: Symbol) -> str:
    return f"an {symbol.kind}" if symbol.kind == _ELEMENT else f"a {symbol.kind}"


def _refuse(why: str) -> NoReturn:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    raise TypeError(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}: {why}")


# ---- a traced formula

_GRADIENT, _VALUE = 0, 1
"""The first arrays of an operation. Then come the slots, and the arrays to work in."""


class Formula:
    """A formula for variables with these slots and options.

    Args:
        call: the name of the formula for messages, such as `Adam.formula`.
        function: takes the value, the gradient and the slots of one element by position, and the numbers and options by
            name. It returns the new value, or a tuple of it and of the new slots.
        slots: the slots' names.
        numbers: the names of the numbers.
        options: by name, what is known when the formula is compiled.

    Raises:
        TypeError: the function does what cannot be compiled; the message names its line.
    """

    def __init__(
        self,
        call: str,
        function: Callable[..., Any],
        slots: Sequence[str],
        numbers: Sequence[str],
        options: Mapping[str, bool],
    ) -> None:
        given = [Symbol(_ELEMENT, None, name) for name in ("gradient", "value", *[f"slot_{name}" for name in slots])]
        symbols = {name: Symbol(_NUMBER, None, name) for name in numbers}
        gradient, *state = given
        result = function(state[0], gradient, *state[1:], **symbols, **options)
        results = result if isinstance(result, tuple) else (result,)
        kinds = [getattr(one, "kind", type(one).__name__) for one in results]
        if kinds != [_ELEMENT] * len(state):
            raise TypeError(
                f"{call} returned {kinds}; it must return the new value and {len(slots)} new slots, in this order, "
                "all of them made of elements"
            )
        self._names = tuple(numbers)
        self._options = {name: float(value) for name, value in options.items()}
        self._numbers: list[Symbol] = []
        order = self._in_order(results)
        self._bind = _operations(self._names, self._numbers, given, order, results)
        texts = {id(symbol): symbol.operands[0] for symbol in given}
        texts |= {id(number): f"number_{i}" for i, number in enumerate(self._numbers)}
        lines = []
        for i, symbol in enumerate(order):
            text = _ON_ELEMENTS[symbol.function].format(*[texts[id(operand)] for operand in symbol.operands])
            lines.append(f"const auto step_{i} = {text};")
            texts[id(symbol)] = f"step_{i}"
        # All are read before any is written: a new slot may be another's old one.
        lines += [f"const auto new_{i} = {texts[id(one)]};" for i, one in enumerate(results)]
        lines += [f"{old.operands[0]} = new_{i};" for i, old in enumerate(state)]
        self.kernel = Kernel(
            call.partition(".")[0].lower(),
            tuple(f"slot_{name}" for name in slots),
            tuple(f"number_{i}" for i in range(len(self._numbers))),
            "\n".join(lines),
        )

    def _in_order(self, results: Sequence[Symbol]) -> list[Symbol]:
        """The operations on elements, each once and after its operands; notes the numbers they take."""
        order: list[Symbol] = []
        seen: set[int] = set()

        def visit(symbol: Symbol) -> None:
            if id(symbol) in seen:
                return
            seen.add(id(symbol))
            if symbol.kind == _NUMBER:
                self._numbers.append(symbol)
            elif symbol.function is not None:
                for operand in symbol.operands:
                    visit(operand)
                order.append(symbol)

        for result in reversed(results):  # a value often takes what its slots are made of
            visit(result)
        return order

    def rule(self, numbers: Sequence[float]) -> UpdateRule:
        """The update with these numbers, in the order of their names."""
        apply, values = self._bind(*numbers)
        constants = dict(zip(self._names, numbers, strict=True)) | self._options  # which the ranks agree on, too
        return UpdateRule(apply, constants, self.kernel, values)


class Formulas:
    """The formulas of one optimizer: one for each choice of its options and slots."""

    def __init__(self, call: str, function: Callable[..., Any]) -> None:
        parameters = inspect.signature(function).parameters.values()
        self._call, self._function = call, function
        names = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
        given = [name for name in ("learning_rate", "step") if name in names]
        self._takes_rate, self._takes_step = "learning_rate" in given, "step" in given
        self._attributes = [name for name in names if name not in given]
        self._names = (*given, *self._attributes)
        self._compiled: dict[tuple[Any, ...], Formula] = {}
        self._last: tuple[list[Any], UpdateRule] | None = None

    def rule(self, optimizer: Any, learning_rate: float, step: int) -> UpdateRule:
        """The update of this step. What the formula takes, but for these two, are the optimizer's attributes.

        Raises:
            AttributeError: the optimizer has no such attribute.
            TypeError: one is no number, or the formula cannot be compiled.
        """
        values: list[Any] = []
        if self._takes_rate:
            values.append(learning_rate)
        if self._takes_step:
            values.append(step)
        for attribute in self._attributes:
            values.append(getattr(optimizer, attribute))
        if self._last is None or self._last[0] != values:
            self._last = values, self._rule(values, tuple(optimizer.slots))
        return self._last[1]

    def _rule(self, values: Sequence[Any], slots: tuple[str, ...]) -> UpdateRule:
        named = dict(zip(self._names, values, strict=True))
        options = {name: value for name, value in named.items() if isinstance(value, bool)}
        numbers = {name: float(value) for name, value in named.items() if name not in options}
        key = (*options.items(), *slots)
        if key not in self._compiled:
            self._compiled[key] = Formula(self._call, self._function, slots, tuple(numbers), options)
        return self._compiled[key].rule(tuple(numbers.values()))


def _operations(
    names: Sequence[str],
    numbers: Sequence[Symbol],
    given: Sequence[Symbol],
    order: Sequence[Symbol],
    results: Sequence[Symbol],
) -> Callable[..., tuple[Apply, tuple[float, ...]]]:
    """NumPy's operations, as a function of the formula's numbers.

    It gives the operations, and the numbers that these take, computed in float64. It is made from text, as the kernel
    is: a loop over a table of operations takes twice as long on small variables.
    """
    functions: dict[str, Any] = {"wide": _wide, "empty_like": np.empty_like}
    arrays, steps = _arranged(given, order, results)
    converted = {id(number): f"n{i}" for i, number in enumerate(numbers)}

    def computed(number: Symbol) -> str:
        if number.function is None:
            operand = number.operands[0]
            return repr(operand) if isinstance(operand, float) else f"given_{operand}"
        name = f"of_{number.function.__name__}"
        functions[name] = _ON_NUMBERS[number.function]
        return f"{name}({', '.join(map(computed, number.operands))})"

    def called(function: Any, operands: Sequence[Symbol | int], out: int) -> str:
        functions[function.__name__] = _AS_OPERATIONS.get(function, function)
        taken = ", ".join([f"a{o}" if isinstance(o, int) else converted[id(o)] for o in operands])
        if function in _WITHOUT_OUT:
            return f"a{out} = {function.__name__}({taken})"
        return f"{function.__name__}({taken}, out=a{out})"

    slots = len(given) - 2
    lines = [
        f"def bind({', '.join(f'given_{name}' for name in names)}):",
        f"    numbers = ({''.join(f'{computed(number)}, ' for number in numbers)})",
        f"    def apply(a{_VALUE}, a{_GRADIENT}, slots, a{slots + 2}):",
        f"        dtype = a{_VALUE}.dtype",
        f"        if dtype.itemsize == 2: return wide(apply, a{_VALUE}, a{_GRADIENT}, slots)",
        f"        {''.join(f'a{i + 2}, ' for i in range(slots))}= slots" if slots else "",
        "        number = dtype.type",
        *[f"        n{i} = number(numbers[{i}])" for i in range(len(numbers))],
        *[f"        a{i} = empty_like(a{_VALUE})" for i in range(slots + 3, arrays)],
        *[f"        {called(*step)}" for step in steps],
        "    return apply, numbers",
    ]
    exec("\n".join(lines), functions)  # of names and numbers, and of the functions in our tables
    return functions["bind"]


def _arranged(
    given: Sequence[Symbol], order: Sequence[Symbol], results: Sequence[Symbol]
) -> tuple[int, list[tuple[Any, list[Symbol | int], int]]]:
    """How many arrays there are, and for each operation its operands, numbers or arrays, and the array for its result.

    That is the result's place in storage, if nobody needs any more what is there.
    """
    uses = collections.Counter(id(operand) for symbol in order for operand in symbol.operands)
    uses.update(map(id, results))  # which are needed to the end
    place = {id(symbol): i for i, symbol in enumerate(given)}
    homes = {id(result): i for i, result in enumerate(results, _VALUE)}
    first = arrays = len(given)
    free = [] if uses[id(given[_GRADIENT])] else [_GRADIENT]
    steps: list[tuple[Any, list[Symbol | int], int]] = []
    for symbol in order:
        operands = [operand if operand.kind == _NUMBER else place[id(operand)] for operand in symbol.operands]
        for operand in symbol.operands:
            uses[id(operand)] -= 1
            at = place.get(id(operand), _VALUE)
            if not uses[id(operand)] and (at == _GRADIENT or at >= first) and operand.kind == _ELEMENT:
                free.append(at)
        is_new = symbol.function in _WITHOUT_OUT
        home = homes.get(id(symbol))
        if home is not None and not uses[id(given[home])] and not is_new:
            out = home
        elif free and not is_new:
            out = free.pop()
        else:
            out, arrays = arrays, arrays + 1
        place[id(symbol)] = out
        steps.append((symbol.function, operands, out))
    moved = [(place[id(result)], home) for home, result in enumerate(results, _VALUE) if place[id(result)] != home]
    for i, (at, home) in enumerate(moved):
        if at < first:  # the place of another slot, which might be written first
            steps.append((np.positive, [at], arrays))
            moved[i], arrays = (arrays, home), arrays + 1
    return arrays, steps + [(np.positive, [at], home) for at, home in moved]


def _wide(apply: Apply, value: Array, gradient: Array, slots: Sequence[Array]) -> None:
    """Numbers of 16 bits as on a GPU: in float32, and rounded once."""
    arrays = [array.astype(np.float32) for array in (value, gradient, *slots)]
    apply(arrays[0], arrays[1], arrays[2:], np.empty_like(arrays[0]))
    for array, new in zip((value, *slots), (arrays[0], *arrays[2:]), strict=True):
        array[...] = new
