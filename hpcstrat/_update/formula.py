"""An update that is written once, as a function, and traced to NumPy operations and kernel code."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from hpcstrat._core.arrays import as_number
from hpcstrat._update.operations import norm_terms, operations
from hpcstrat._update.rule import Kernel, Norms, UpdateRule
from hpcstrat._update.symbols import ELEMENT, NUMBER, ON_ELEMENTS, Symbol


class Formula:
    """A formula for variables with these slots and options.

    Args:
        call: the name of the formula for messages, such as `Adam.formula`.
        function: takes the value, the gradient and the slots of one element by position, and the
            numbers and options by name. It returns the new value, or a tuple of the new value and
            the new slots.
        slots: the slots' names.
        numbers: the names of the numbers.
        options: by name, the values that are known when the formula is compiled.

    Raises:
        TypeError: the function cannot be compiled; the message names the line.
    """

    def __init__(
        self,
        call: str,
        function: Callable[..., Any],
        slots: Sequence[str],
        numbers: Sequence[str],
        options: Mapping[str, bool | None],
    ) -> None:
        given = [
            Symbol(ELEMENT, None, name)
            for name in ("gradient", "value", *[f"slot_{name}" for name in slots])
        ]
        symbols = {name: Symbol(NUMBER, None, name) for name in numbers}
        gradient, *state = given
        result = function(state[0], gradient, *state[1:], **symbols, **options)
        results = result if isinstance(result, tuple) else (result,)
        kinds = [getattr(symbol, "kind", type(symbol).__name__) for symbol in results]
        if kinds != [ELEMENT] * len(state):
            raise TypeError(
                f"{call} returned {kinds}; it must return the new value and {len(slots)} new "
                "slots, in this order, all of them made of elements"
            )
        self._names = tuple(numbers)
        self._options = {name: float(value) for name, value in options.items() if value is not None}
        name = call.partition(".")[0].lower()
        order, taken = _in_order(results)
        norms = _norms_in(taken)
        self._bind = operations(self._names, norms, taken, given, order, results)
        lines, texts = _statements(given, order, taken)
        # All are read before any is written: a new slot may be another slot's old value.
        lines += [f"const auto new_{i} = {texts[id(new)]};" for i, new in enumerate(results)]
        lines += [f"{old.operands[0]} = new_{i};" for i, old in enumerate(state)]
        self._kernel = _kernel(name, slots, taken, lines)
        self._norms: tuple[int, Kernel, Callable[..., Any]] | None = None
        if norms:
            # A norm needs all elements of a variable before any can change: a first pass, which
            # changes nothing.
            wanted = [norm.operands[0] for norm in norms]
            order, taken = _in_order(wanted)
            lines, texts = _statements(given, order, taken)
            lines += [f"term_{i} = {texts[id(term)]};" for i, term in enumerate(wanted)]
            bind = norm_terms(self._names, taken, given, order, wanted)
            self._norms = len(norms), _kernel(f"{name}_norms", slots, taken, lines), bind

    def rule(self, numbers: Sequence[float]) -> UpdateRule:
        """The update with these numbers, in the order of their names."""
        # The ranks must agree on the options, too.
        constants = dict(zip(self._names, numbers, strict=True)) | self._options
        if self._norms is None:
            apply, values = self._bind(*numbers)
            return UpdateRule(apply, constants, self._kernel, values)

        def rule_with(norms: Sequence[float]) -> UpdateRule:
            apply, values = self._bind(*numbers, *norms)
            return UpdateRule(apply, constants, self._kernel, values)

        size, kernel, bind = self._norms
        terms, values = bind(*numbers)
        return Norms(size, kernel, terms, values, rule_with).rule()


def _in_order(results: Sequence[Symbol]) -> tuple[list[Symbol], list[Symbol]]:
    """The operations on elements, each once and after its operands, and the numbers they take."""
    order: list[Symbol] = []
    numbers: list[Symbol] = []
    seen: set[int] = set()

    def visit(symbol: Symbol) -> None:
        if id(symbol) in seen:
            return
        seen.add(id(symbol))
        if symbol.kind == NUMBER:
            numbers.append(symbol)
        elif symbol.function is not None:
            for operand in symbol.operands:
                visit(operand)
            order.append(symbol)

    for result in reversed(results):  # slots first: the new value often depends on them
        visit(result)
    return order, numbers


def _norms_in(numbers: Sequence[Symbol]) -> list[Symbol]:
    """The norms that these numbers depend on, each once."""
    norms: dict[int, Symbol] = {}

    def visit(number: Symbol) -> None:
        if number.function is np.linalg.norm:
            norms[id(number)] = number
        elif number.function is not None:
            for operand in number.operands:
                visit(operand)

    for number in numbers:
        visit(number)
    return list(norms.values())


def _statements(
    given: Sequence[Symbol], order: Sequence[Symbol], numbers: Sequence[Symbol]
) -> tuple[list[str], dict[int, str]]:
    """The operations as statements of a kernel, and the text of each symbol by its id."""
    texts = {id(symbol): symbol.operands[0] for symbol in given}
    texts |= {id(number): f"number_{i}" for i, number in enumerate(numbers)}
    lines = []
    for i, symbol in enumerate(order):
        text = ON_ELEMENTS[symbol.function].format(
            *[texts[id(operand)] for operand in symbol.operands]
        )
        lines.append(f"const auto step_{i} = {text};")
        texts[id(symbol)] = f"step_{i}"
    return lines, texts


def _kernel(
    name: str, slots: Sequence[str], numbers: Sequence[Symbol], lines: Sequence[str]
) -> Kernel:
    return Kernel(
        name,
        tuple(f"slot_{slot}" for slot in slots),
        tuple(f"number_{i}" for i in range(len(numbers))),
        "\n".join(lines),
    )


def _reader_of(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """A function that reads these attributes of an object."""
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda thing: tuple(getattr(thing, name) for name in names)


class Formulas:
    """The formulas of an optimizer, one per choice of its options and slots.

    Args:
        call: the formula's name for messages, such as `Adam.formula`.
        function: see `Formula`.
        readers: read those of its numbers that are no attributes of the optimizer.
    """

    def __init__(
        self,
        call: str,
        function: Callable[..., Any],
        readers: Mapping[str, Callable[[], Any]] = MappingProxyType({}),
    ) -> None:
        parameters = inspect.signature(function).parameters.values()
        self._call, self._function = call, function
        names = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
        given = [name for name in ("learning_rate", "step") if name in names]
        self._takes_rate, self._takes_step = "learning_rate" in given, "step" in given
        attributes = [name for name in names if name not in given and name not in readers]
        self._names = (*given, *attributes, *readers)
        self._readers = tuple(readers.values())
        self._attributes_of = _reader_of(attributes)
        self._compiled: dict[tuple[Any, ...], Formula] = {}
        self._last: tuple[tuple[Any, ...], UpdateRule] | None = None

    def rule(self, optimizer: Any, learning_rate: float, step: int) -> UpdateRule:
        """The update of this step.

        The formula's other arguments are the optimizer's attributes of those names.

        Raises:
            AttributeError: the optimizer has no such attribute.
            TypeError: an attribute is not a number, or the formula cannot be compiled.
        """
        values = self._attributes_of(optimizer)
        if self._readers:
            values += tuple([read() for read in self._readers])
        if self._takes_step:
            values = (step, *values)
        if self._takes_rate:
            values = (learning_rate, *values)
        if self._last is None or self._last[0] != values:
            self._last = values, self._rule(values, tuple(optimizer.all_slots))
        return self._last[1]

    def _rule(self, values: Sequence[Any], slots: tuple[str, ...]) -> UpdateRule:
        named = dict(zip(self._names, values, strict=True))
        options = {
            name: value for name, value in named.items() if value is None or isinstance(value, bool)
        }
        owner = self._call.partition(".")[0]
        numbers = {
            name: as_number(owner, name, value)
            for name, value in named.items()
            if name not in options
        }
        key = (*options.items(), *slots)
        if key not in self._compiled:
            self._compiled[key] = Formula(
                self._call, self._function, slots, tuple(numbers), options
            )
        return self._compiled[key].rule(tuple(numbers.values()))
