"""A formula: an update that is written once, as a function, and traced to kernels and numbers."""

from __future__ import annotations

import collections
import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hpcstrat._core.arrays import as_number
from hpcstrat._update.rule import Evaluate, Kernel, Norms, UpdateRule
from hpcstrat._update.symbols import (
    CONDITION,
    ELEMENT,
    NORMS,
    NUMBER,
    NUMPY,
    OPERATIONS,
    Symbol,
    as_numpy,
    global_norm,
)

Bind: TypeAlias = Callable[[Sequence[float]], Evaluate]
"""Binds the numbers that stay: what depends on them alone is computed once."""
Place: TypeAlias = tuple[str, int]
"""Where an operand is: its kind, and its index among the arrays or numbers of this kind."""


class Traced(NamedTuple):
    """A traced pass.

    Attributes:
        kernel: its kernel.
        are_global: of a pass for norms; see `Norms`.
        bind: computes the kernel's constants.
        code: computes them from norms on a GPU; see `Norms.codes`.
        bind_given: computes the numbers that `code` is given.
    """

    kernel: Kernel
    are_global: tuple[bool, ...]
    bind: Bind
    code: str
    bind_given: Bind


_Bound: TypeAlias = tuple[Kernel, Evaluate, dict[str, float], Norms | None]
"""An update with the numbers that stay: its kernel, what computes the kernel's constants, the
numbers on which the ranks must agree, and the norms that it takes."""


def _is_computed(symbol: Symbol) -> bool:
    return symbol.function is not None and symbol.function not in NORMS


def layers_of(results: Sequence[Symbol]) -> list[list[Symbol]]:
    """The norms that the results take, those that these take, and so on; some several times."""
    layers: list[list[Symbol]] = []
    while norms := [symbol for symbol in _in_order(results) if symbol.function in NORMS]:
        layers.append(norms)
        results = [norm.operands[0] for norm in norms]
    return layers


def _in_order(results: Sequence[Symbol]) -> list[Symbol]:
    """The results and all that they depend on, each once and after its operands.

    What is in a norm is left out: it belongs to an earlier pass.
    """
    order: dict[int, Symbol] = {}

    def visit(symbol: Symbol) -> None:
        if id(symbol) in order:
            return
        if _is_computed(symbol):
            for operand in symbol.operands:
                visit(operand)
        order[id(symbol)] = symbol

    for result in reversed(results):  # slots first: the new value often depends on them
        visit(result)
    return list(order.values())


def _compile(
    name: str,
    given: Sequence[Symbol],
    stay: Sequence[Symbol],
    changing: Sequence[Symbol],
    norms: Sequence[Symbol],
    results: Sequence[Symbol],
) -> Traced:
    """The kernel of these results, and what computes its constants, in float64.

    Given are the gradient, the value and the slots; the formula's numbers that stay, and those that
    change from step to step; and norms. The results are the new value and slots, or other norms.
    """
    are_global = tuple([one.function is global_norm for one in results if one.function in NORMS])
    has_terms = bool(are_global)
    if has_terms:
        results = [norm.operands[0] for norm in results]
    whole = _in_order(results)
    order = [symbol for symbol in whole if symbol.kind != NUMBER and symbol.function is not None]
    taken = {id(operand) for symbol in order for operand in symbol.operands}
    numbers = [symbol for symbol in whole if symbol.kind == NUMBER and id(symbol) in taken]
    literals = [
        number
        for number in whole
        if number.function is None and isinstance(number.operands[0], float)
    ]
    computed = [symbol for symbol in whole if symbol.kind == NUMBER and _is_computed(symbol)]
    changing = [*changing, *norms]
    # Symbols compare by identity.
    once = [symbol for symbol in computed if not any(one in changing for one in symbol.inputs())]
    often = [symbol for symbol in computed if symbol not in once]
    first = [*stay, *literals]
    constants = [symbol.operands[0] for symbol in literals]
    bound = _evaluator(first, once, [*first, *once])

    def binder(wanted: Sequence[Symbol]) -> Bind:
        evaluate = _evaluator([*first, *once, *changing], often, wanted)
        return lambda numbers: functools.partial(evaluate, *bound(*numbers, *constants))

    kernel = _kernel_of(name, given, order, numbers, results, has_terms)
    late = [symbol for symbol in often if any(one in norms for one in symbol.inputs())]
    code, passed = _numbers_in_c(norms, late, numbers)
    return Traced(kernel, are_global, binder(numbers), code, binder(passed))


def _evaluator(
    given: Sequence[Symbol], computed: Sequence[Symbol], wanted: Sequence[Symbol]
) -> Evaluate:
    """A function of the given numbers that computes others, and returns those wanted.

    It is written in Python: a loop over a table would take as long as the update of 1,000 elements.
    """
    names = {id(symbol): f"n{i}" for i, symbol in enumerate([*given, *computed])}

    def listed(symbols: Sequence[Symbol]) -> str:
        return "".join([f"{names[id(symbol)]}, " for symbol in symbols])

    lines = [f"def evaluate({listed(given)}):", "  try:"]
    for symbol in computed:
        operands = listed(symbol.operands)
        lines.append(f"    {names[id(symbol)]} = {symbol.function.__name__}({operands})")
    lines += [
        f"    return ({listed(wanted)})",
        "  except (ArithmeticError, ValueError):",
        f"    return by_numpy({listed(given)})",
    ]
    code = compile("\n".join(lines), "<numbers of a formula>", "exec")
    by_python: dict[str, Any] = {
        function.__name__: of_numbers for function, (_, of_numbers) in OPERATIONS.items()
    }
    by_numpy: dict[str, Any] = {function.__name__: as_numpy(function) for function in OPERATIONS}
    for functions in by_numpy, by_python:
        exec(code, functions)
    by_python["by_numpy"] = by_numpy["evaluate"]
    return by_python["evaluate"]


def _numbers_in_c(
    norms: Sequence[Symbol], late: Sequence[Symbol], numbers: Sequence[Symbol]
) -> tuple[str, list[Symbol]]:
    """The code for `Norms.codes`, and the numbers that are given to it.

    These are computed as on a host: exponentials on a GPU may have other last bits.
    """
    texts = {id(norm): f"norm_{i}" for i, norm in enumerate(norms)}
    texts |= {id(symbol): f"late_{i}" for i, symbol in enumerate(late)}
    taken = [*[operand for symbol in late for operand in symbol.operands], *numbers]
    given = [*{id(symbol): symbol for symbol in taken if id(symbol) not in texts}.values()]
    texts |= {id(symbol): f"given_{i}" for i, symbol in enumerate(given)}
    lines = []
    for symbol in late:
        operands = [texts[id(operand)] for operand in symbol.operands]
        computed = OPERATIONS[symbol.function][0].format(*operands)
        lines.append(f"const auto {texts[id(symbol)]} = {computed};")
    count = len(numbers)
    for i, number in enumerate(numbers):
        lines.append(f"numbers[i * {count} + {i}] = {texts[id(number)]};")
    return "\n".join(lines), given


def getter(kind: Callable[..., Any], keys: Sequence[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """A function that gets these attributes or items, of which there may be one or none."""
    if len(keys) > 1:
        return kind(*keys)
    getters = [kind(key) for key in keys]
    return lambda thing: tuple([get(thing) for get in getters])


_kernels: dict[tuple[Any, ...], Kernel] = {}


def _kernel_of(
    name: str,
    given: Sequence[Symbol],
    order: Sequence[Symbol],
    numbers: Sequence[Symbol],
    results: Sequence[Symbol],
    has_terms: bool,
) -> Kernel:
    """The kernel of these operations on elements, which take these numbers."""
    texts = {id(symbol): symbol.operands[0] for symbol in given}
    texts |= {id(number): f"number_{i}" for i, number in enumerate(numbers)}
    lines = []
    for i, symbol in enumerate(order):
        operands = [texts[id(operand)] for operand in symbol.operands]
        lines.append(f"const auto step_{i} = {OPERATIONS[symbol.function][0].format(*operands)};")
        texts[id(symbol)] = f"step_{i}"
    if has_terms:
        lines += [f"term_{i} = {texts[id(term)]};" for i, term in enumerate(results)]
    else:
        # All are read before any is written: a new slot may be another slot's old value.
        lines += [f"const auto new_{i} = {texts[id(new)]};" for i, new in enumerate(results)]
        lines += [f"{old.operands[0]} = new_{i};" for i, old in enumerate(given[1:])]
    key = (
        name,
        tuple(slot.operands[0] for slot in given[2:]),
        tuple(f"number_{i}" for i in range(len(numbers))),
        "\n".join(lines),
    )
    if key not in _kernels:
        _kernels[key] = Kernel(*key, *_steps(given, order, numbers, results, has_terms))
    return _kernels[key]


def _steps(
    given: Sequence[Symbol],
    order: Sequence[Symbol],
    numbers: Sequence[Symbol],
    results: Sequence[Symbol],
    has_terms: bool,
) -> tuple[list[tuple[Any, ...]], dict[str, int], list[int]]:
    """The steps of a kernel, its numbers of arrays, and its terms.

    There are as few arrays as possible: together they should fit in cache. The gradient is
    overwritten, and a new value or slot goes to its place in storage, its home, as soon as the old
    content is no longer needed. For norms, nothing that was given changes.
    """
    uses = collections.Counter(id(operand) for symbol in order for operand in symbol.operands)
    uses.update(map(id, results))  # needed to the end
    if has_terms:
        uses.update(map(id, given))
    places: dict[int, Place] = {id(symbol): (ELEMENT, i) for i, symbol in enumerate(given)}
    places |= {id(number): (NUMBER, i) for i, number in enumerate(numbers)}
    homes = {} if has_terms else {id(new): i for i, new in enumerate(results, 1)}
    in_storage = [(ELEMENT, i) for i in range(1, len(given))]
    arrays = {ELEMENT: len(given), CONDITION: 0}
    free: list[Place] = [] if uses[id(given[0])] else [(ELEMENT, 0)]
    steps: list[tuple[Any, ...]] = []

    def new_place(kind: str) -> Place:
        arrays[kind] += 1
        return kind, arrays[kind] - 1

    for symbol in order:
        taken = [places[id(operand)] for operand in symbol.operands]
        for operand, place in zip(symbol.operands, taken, strict=True):
            uses[id(operand)] -= 1
            if not uses[id(operand)] and place[0] != NUMBER and place not in in_storage:
                free.append(place)
        home = homes.get(id(symbol))
        reusable = [place for place in free if place[0] == symbol.kind]
        if home is not None and not uses[id(given[home])]:
            out = (ELEMENT, home)
        elif reusable:
            out = reusable[-1]
            free.remove(out)
        else:
            out = new_place(symbol.kind)
        places[id(symbol)] = out
        steps.append((NUMPY.get(symbol.function, symbol.function), *taken, out))
    found = [places[id(result)] for result in results]
    if has_terms:
        return steps, arrays, [i for _, i in found]
    moved = [(place, home) for place, home in zip(found, in_storage, strict=True) if place != home]
    for i, (place, home) in enumerate(moved):
        if place in in_storage:  # another's home, which its new content might overwrite first
            moved[i] = new_place(ELEMENT), home
            steps.append((np.positive, place, moved[i][0]))
    return [*steps, *[(np.positive, place, home) for place, home in moved]], arrays, []


_CHANGING = ("learning_rate", "step")
"""The numbers of a formula that may change in every step; all others stay for a while."""


class Formula:
    """The formula of an optimizer, traced for each choice of its options and slots.

    Args:
        call: its name for messages, such as `Adam.formula`.
        function: takes the value, the gradient and the slots of one element by position, and the
            numbers and options by name. It returns the new value, or a tuple of the new value and
            the new slots. An option is `None` or a `bool`, known when the formula is traced.
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
        self._owner = call.partition(".")[0]
        names = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
        self._takes_step = "step" in names
        self._given = [name for name in _CHANGING if name in names]
        attributes = [name for name in names if name not in (*_CHANGING, *readers)]
        self._names = (*attributes, *readers)
        self._readers = tuple(readers.values())
        self._attributes_of = getter(operator.attrgetter, attributes)
        self._traced: dict[tuple[Any, ...], list[Traced]] = {}
        # Of the last step: numbers that stay, and what is bound to them; what changed, the rule.
        self._values: tuple[Any, ...] | None = None
        self._bound: _Bound
        self._now: tuple[float, int] | None = None
        self._rule: UpdateRule

    def rule(self, optimizer: Any, learning_rate: float, step: int) -> UpdateRule:
        """The update of this step.

        The formula's other arguments are the optimizer's attributes of those names.

        Raises:
            AttributeError: the optimizer has no such attribute.
            TypeError: an attribute is not a number, or the formula cannot be compiled; the message
                names the line.
        """
        values = self._attributes_of(optimizer)
        if self._readers:
            values += tuple([read() for read in self._readers])
        if values != self._values:
            self._bound = self._bind(values, tuple(optimizer.all_slots))
            self._values, self._now = values, None
        now = learning_rate, step if self._takes_step else 0
        if now != self._now:
            rate, number = float(learning_rate), float(now[1])
            kernel, evaluate, stay, norms = self._bound
            # The ranks agree on the rate of any formula.
            constants = (
                {"learning_rate": rate, "step": number, **stay}
                if self._takes_step
                else {"learning_rate": rate, **stay}
            )
            if norms is None:
                numbers = evaluate(rate, number)
                apply = functools.partial(kernel.apply, numbers)
                self._rule = UpdateRule(apply, constants, kernel, numbers)
            else:
                norms = norms.in_step((rate, number))
                self._rule = UpdateRule(norms.apply, constants, kernel, norms=norms)
            self._now = now
        return self._rule

    def _bind(self, values: Sequence[Any], slots: tuple[str, ...]) -> _Bound:
        """What the numbers of a step are taken from, with these that stay."""
        named = dict(zip(self._names, values, strict=True))
        options = {
            name: value for name, value in named.items() if value is None or isinstance(value, bool)
        }
        numbers = {
            name: as_number(self._owner, name, value)
            for name, value in named.items()
            if name not in options
        }
        key = (*options.items(), *slots)
        if key not in self._traced:
            self._traced[key] = self._trace(slots, tuple(numbers), options)
        *passes, last = self._traced[key]
        given = tuple(numbers.values())
        kernel, evaluate, norms = last.kernel, last.bind(given), None
        if passes:
            norms = Norms(
                (*[each.kernel for each in passes], kernel),
                tuple([each.are_global for each in passes]),
                tuple([each.code for each in (*passes[1:], last)]),
                (*[each.bind(given) for each in passes], evaluate),
                tuple([each.bind_given(given) for each in (*passes[1:], last)]),
            )
        # The ranks must agree on the options, too.
        agreed = {name: float(value) for name, value in options.items() if value is not None}
        return kernel, evaluate, numbers | agreed, norms

    def _trace(
        self, slots: Sequence[str], names: Sequence[str], options: Mapping[str, bool | None]
    ) -> list[Traced]:
        """The passes for norms, and then the update, with these slots and options."""
        given = [
            Symbol(ELEMENT, None, name)
            for name in ("gradient", "value", *[f"slot_{name}" for name in slots])
        ]
        symbols = {name: Symbol(NUMBER, None, name) for name in (*_CHANGING, *names)}
        gradient, *state = given
        taken = {name: symbols[name] for name in (*self._given, *names)}
        result = self._function(state[0], gradient, *state[1:], **taken, **options)
        results = result if isinstance(result, tuple) else (result,)
        kinds = [getattr(symbol, "kind", type(symbol).__name__) for symbol in results]
        if kinds != [ELEMENT] * len(state):
            raise TypeError(
                f"{self._call} returned {kinds}; it must return the new value and {len(slots)} new "
                "slots, in this order, all of them made of elements"
            )
        name = self._owner.lower()
        changing, stay = [symbols[n] for n in _CHANGING], [symbols[n] for n in names]
        # Norms need all elements of a variable before any can change: passes before the update,
        # which change nothing. A pass may depend on the norms of those before.
        passes: list[Traced] = []
        norms: list[Symbol] = []
        for layer in reversed(layers_of(results)):
            if new := [norm for norm in layer if norm not in norms]:
                passes.append(_compile(f"{name}_norms", given, stay, changing, norms, new))
                norms += new
        return [*passes, _compile(name, given, stay, changing, norms, results)]
