"""Formulas: what an update does to one element, traced once to a list of operations.

A formula is a function of the value, the gradient and the slots of one element, and of numbers that
are the same for all elements. It is called once, with symbols, and each operation of theirs is a
step of its `Kernel`. SGD with momentum,

    velocity = momentum * velocity - rate * gradient
    return value + velocity, velocity

becomes these steps in C, and the same as calls of NumPy's functions:

    const auto step_0 = number_1 * slot_0;
    const auto step_1 = number_0 * gradient;
    const auto step_2 = step_0 - step_1;
    const auto step_3 = value + step_2;
    const auto new_value = step_3;
    const auto new_slot_0 = step_2;
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, final

import numpy as np

from hpcstrat._core.types import Array
from hpcstrat._transports.reduction import accumulator

ELEMENT, CONDITION, NUMBER = "element", "condition", "number"

# Those with the same bits in NumPy, in C and CUDA C++, and on every processor: IEEE 754 defines
# their rounding.
_IN_C: dict[Any, str] = {
    np.add: "{} + {}",
    np.subtract: "{} - {}",
    np.multiply: "{} * {}",
    np.divide: "{} / {}",
    np.negative: "-{}",
    np.sqrt: "sqrt({})",
    np.square: "{0} * {0}",
    np.absolute: "fabs({})",
    np.sign: "{0} > 0 ? 1 : {0} < 0 ? -1 : {0} == 0 ? 0 : {0}",
    np.maximum: "{0} > {1} || {0} != {0} ? {0} : {1}",  # nan if either is
    np.minimum: "{0} < {1} || {0} != {0} ? {0} : {1}",
    np.less: "{} < {}",
    np.less_equal: "{} <= {}",
    np.greater: "{} > {}",
    np.greater_equal: "{} >= {}",
    np.equal: "{} == {}",
    np.not_equal: "{} != {}",
    np.where: "{} ? {} : {}",
}
"""The functions of elements that a formula may take, each with a text for its operands."""
_ORDERS = (np.less, np.less_equal, np.greater, np.greater_equal)
_CONDITIONS = (*_ORDERS, np.equal, np.not_equal)
_OF_REALS = {np.absolute, np.sign, np.maximum, np.minimum, *_ORDERS}
# Of two zeros with different signs, NumPy's own take one that depends on the processor and on the
# place in the array.
_IN_NUMPY: dict[Any, Callable[..., Any]] = {
    np.maximum: lambda a, b: np.where((a > b) | (a != a), a, b),
    np.minimum: lambda a, b: np.where((a < b) | (a != a), a, b),
}


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """The steps of a formula. Equal kernels are one object.

    Attributes:
        name: the kernel's name in profilers.
        slots: how many slots there are.
        numbers: how many numbers.
        steps: NumPy's functions, each with its operands: positions among the gradient, the value,
            the slots, the numbers and the results of the steps, in this order.
        results: the positions of the new value and the new slots.
    """

    name: str
    slots: int
    numbers: int
    steps: tuple[tuple[Any, tuple[int, ...]], ...]
    results: tuple[int, ...]

    @property
    def arrays(self) -> tuple[str, ...]:
        """The names in C of what is changed: the value, then each slot."""
        return "value", *[f"slot_{i}" for i in range(self.slots)]

    @property
    def body(self) -> str:
        """The statements in C, of variables of one type; CUDA C++, too."""
        names = ["gradient", *self.arrays, *[f"number_{i}" for i in range(self.numbers)]]
        lines = []
        for i, (function, operands) in enumerate(self.steps):
            text = _IN_C[function].format(*[names[operand] for operand in operands])
            lines.append(f"const auto step_{i} = {text};")
            names.append(f"step_{i}")
        pairs = [*zip(self.arrays, self.results, strict=True)]
        lines += [f"const auto new_{name} = {names[result]};" for name, result in pairs]
        return "\n".join([*lines, *[f"{name} = new_{name};" for name in self.arrays]])

    @property
    def of_reals(self) -> list[str]:
        """The names of its functions that CUDA C++ does not have for complex numbers."""
        return sorted({function.__name__ for function, _ in self.steps if function in _OF_REALS})

    @functools.cached_property
    def _calls(self) -> list[tuple[Callable[..., Any], tuple[int, ...], int | None]]:
        """The steps as calls, each with the operand that its result overwrites, if one can be.

        That is a result which nothing reads any more: new arrays would not be in cache.
        """
        first, calls = 2 + self.slots + self.numbers, []
        last_read = {i: k for k, (_, operands) in enumerate(self.steps) for i in operands}
        last_read |= dict.fromkeys(self.results, len(self.steps))
        for k, (function, operands) in enumerate(self.steps):
            free = [i for i in operands if i >= first and last_read[i] == k]
            takes_out = function not in (*_CONDITIONS, *_IN_NUMPY, np.where)
            out = free[0] if free and takes_out else None
            calls.append((_IN_NUMPY.get(function, function), operands, out))
        return calls

    def run(
        self, numbers: Sequence[float], value: Array, gradient: Array, slots: Sequence[Array]
    ) -> None:
        """Changes flat NumPy arrays, in place; 16-bit floats as on a GPU: rounded once."""
        changed, wide = (value, *slots), accumulator(value.dtype)
        found: list[Any] = [a.astype(wide, copy=False) for a in (gradient, *changed)]
        count = len(found)
        found += [*np.array(numbers, wide)]
        for call, operands, out in self._calls:
            given = [found[i] for i in operands]
            found.append(call(*given) if out is None else call(*given, out=found[out]))
        # A new slot may be another slot's old value, which is about to be overwritten.
        new = [found[i].copy() if i < count else found[i] for i in self.results]
        for array, result in zip(changed, new, strict=True):
            np.copyto(array, result, "unsafe")


_kernels: dict[tuple[Any, ...], Kernel] = {}


def trace(
    call: str, formula: Callable[..., Any], slots: int, numbers: Sequence[str]
) -> tuple[Kernel, tuple[float, ...]]:
    """The kernel of a formula, and its literals, which are the last of the kernel's numbers.

    Args:
        call: the formula's name for messages, such as `Adam.formula`.
        formula: takes the value, the gradient and the slots by position, and numbers by name. It
            returns the new value, or a tuple of the new value and the new slots.
        slots: how many slots there are.
        numbers: their names.

    Raises:
        TypeError: it cannot be traced; the message names the line.
    """
    steps: list[Symbol] = []
    gradient, value, *old = arrays = [Symbol(steps, ELEMENT) for _ in range(2 + slots)]
    given = {name: Symbol(steps, NUMBER) for name in numbers}
    result = formula(value, gradient, *old, **given)
    results = result if isinstance(result, tuple) else (result,)
    kinds = [getattr(symbol, "kind", type(symbol).__name__) for symbol in results]
    if kinds != [ELEMENT] * (1 + slots):
        raise TypeError(
            f"{call} returned {kinds}; it must return the new value and {slots} new slots, in this "
            "order, all of them made of elements"
        )
    operands = [operand for step in steps for operand in step.operands]
    literals = {id(one): one.literal for one in operands if one.literal is not None}
    places: dict[int, int] = {}  # by id, because symbols are neither compared nor hashed
    for place in (*map(id, (*arrays, *given.values())), *literals, *map(id, steps)):
        places[place] = len(places)
    key = (
        call.partition(".")[0].lower(),
        slots,
        len(given) + len(literals),
        tuple([(one.function, tuple([places[id(of)] for of in one.operands])) for one in steps]),
        tuple([places[id(symbol)] for symbol in results]),
    )
    return _kernels.setdefault(key, Kernel(*key)), tuple(literals.values())


# ---- symbols


def _operator(function: Any) -> Callable[..., Any]:
    return lambda symbol, *other: symbol.apply(function, symbol, *other)


def _reflected(function: Any) -> Callable[..., Any]:
    return lambda symbol, other: symbol.apply(function, other, symbol)


def _refused(why: str) -> Callable[..., NoReturn]:
    return lambda *_: _refuse(why)


_NO_OPERATOR = _refused("its operators are + - * / and **, and comparisons")


@final
class Symbol:
    """An element of an array, a condition on elements, or a number, while a formula is traced.

    Attributes:
        kind: which of these it is.
        function: NumPy's, whose result it is; else `None`.
        operands: the function's arguments.
        literal: the value of a number that the formula itself has; else `None`.
    """

    __add__, __radd__ = _operator(np.add), _reflected(np.add)
    __sub__, __rsub__ = _operator(np.subtract), _reflected(np.subtract)
    __mul__, __rmul__ = _operator(np.multiply), _reflected(np.multiply)
    __truediv__, __rtruediv__ = _operator(np.divide), _reflected(np.divide)
    __neg__, __abs__ = _operator(np.negative), _operator(np.absolute)
    __lt__, __le__ = _operator(np.less), _operator(np.less_equal)
    __gt__, __ge__ = _operator(np.greater), _operator(np.greater_equal)
    __eq__, __ne__ = _operator(np.equal), _operator(np.not_equal)
    __rpow__ = _reflected(np.power)
    # Not hashed either: `step in {1, 2}` would be false.
    __bool__ = __hash__ = _refused(
        "whether it is true is not known when a formula is traced; use numpy.where for elements, "
        "and `numbers` for numbers"
    )
    __float__ = __int__ = __index__ = _refused(
        "it has no value when a formula is traced; use NumPy's functions for elements, and "
        "`numbers` for numbers"
    )
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = _refused(
        "conditions are combined by numpy.where in numpy.where"
    )
    __pos__ = __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = _NO_OPERATOR
    __matmul__ = __rmatmul__ = __divmod__ = __rdivmod__ = _NO_OPERATOR
    __iter__ = __len__ = __getitem__ = __format__ = __round__ = _refused("it is one number")

    def __init__(
        self,
        steps: list[Symbol],
        kind: str,
        function: Any = None,
        operands: Sequence[Symbol] = (),
        literal: float | None = None,
    ) -> None:
        self._steps = steps  # of the formula so far
        self.kind, self.function, self.operands = kind, function, operands
        self.literal = literal

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # a protocol that it does not have
            raise AttributeError(name)
        _refuse(f"it has no {name}; take operators, and NumPy's functions of elements")

    def __pow__(self, exponent: Any) -> Symbol:
        if isinstance(exponent, (int, float)) and exponent in (0.5, 2):
            return self.apply(np.square if exponent == 2 else np.sqrt, self)
        return self.apply(np.power, self, exponent)

    def __array_ufunc__(self, ufunc: Any, method: str, *operands: Any, **options: Any) -> Symbol:
        if method != "__call__" or options:
            _refuse(f"numpy.{ufunc.__name__} with {', '.join(options) or method} is not allowed")
        return self.apply(ufunc, *operands)

    def __array_function__(self, function: Any, _: Any, operands: Any, options: Any) -> Symbol:
        if options or len(operands) != 3:
            _refuse(f"numpy.{function.__name__} is not of elements")
        return self.apply(function, *operands)

    def apply(self, function: Any, *operands: Any) -> Symbol:
        """The result of a function, which is one step more.

        Raises:
            TypeError: a formula cannot have it.
        """
        name = f"numpy.{function.__name__}"
        given = [self._operand(name, one) for one in operands]
        kinds = [one.kind for one in given]
        if {*kinds} == {NUMBER}:
            _refuse(f"{name} of numbers alone; compute them in `numbers`, which is plain Python")
        if function not in _IN_C:
            names = ", ".join([one.__name__ for one in _IN_C])
            _refuse(f"{name} is not allowed; take what has the same bits everywhere: {names}")
        wanted = [function is np.where, *[False] * (len(kinds) - 1)]
        if [kind == CONDITION for kind in kinds] != wanted:
            _refuse(
                f"{name} of {', '.join(kinds)}; a condition is the first argument of numpy.where, "
                "and of nothing else"
            )
        kind = CONDITION if function in _CONDITIONS else ELEMENT
        self._steps.append(Symbol(self._steps, kind, function, given))
        return self._steps[-1]

    def _operand(self, name: str, operand: Any) -> Symbol:
        if isinstance(operand, Symbol):
            return operand
        if isinstance(operand, (int, float, np.integer, np.floating)):
            return Symbol(self._steps, NUMBER, literal=float(operand))
        return _refuse(
            f"an operand of {name} is of type {type(operand).__name__}; take what the formula is "
            "given, and numbers"
        )


def _refuse(why: str) -> NoReturn:
    """Raises a `TypeError` that names the line of the formula: the last outside this file."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    raise TypeError(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}: {why}")
