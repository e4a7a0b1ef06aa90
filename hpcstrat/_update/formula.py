"""An update that is written once, as a function, and traced to kernels and numbers."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

from hpcstrat._core.arrays import as_number
from hpcstrat._update.rule import NO_CONSTANTS, Norms, NumbersOfNorms, UpdateRule
from hpcstrat._update.symbols import (
    ELEMENT,
    NUMBER,
    Symbol,
    global_norm,
)
from hpcstrat._update.trace import Traced, compile_pass, getter, layers_of

RuleOf: TypeAlias = Callable[[Sequence[float]], UpdateRule]
"""The rule of a step, from the numbers that change."""
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
        names = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
        self._takes_step = "step" in names
        self._given = [name for name in _CHANGING if name in names]
        # The ranks agree on the rate if they do on the step: then these are the first of them.
        self._changing = _CHANGING if self._takes_step else self._given
        attributes = [name for name in names if name not in (*_CHANGING, *readers)]
        self._names = (*attributes, *readers)
        self._readers = tuple(readers.values())
        self._attributes_of = getter(operator.attrgetter, attributes)
        self._traced: dict[tuple[Any, ...], Callable[[Sequence[float]], RuleOf]] = {}
        # Of the last step: the numbers that stay and the rule with these; what changed, the rule.
        self._bound: tuple[tuple[Any, ...], RuleOf] | None = None
        self._last: tuple[tuple[float, ...], UpdateRule] | None = None

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
        if self._bound is None or self._bound[0] != values:
            self._bound = values, self._bind(values, tuple(optimizer.all_slots))
            self._last = None
        changing = (learning_rate, step if self._takes_step else 0)
        if self._last is None or self._last[0] != changing:
            self._last = changing, self._bound[1]([*map(float, changing)])
        return self._last[1]

    def _bind(self, values: Sequence[Any], slots: tuple[str, ...]) -> RuleOf:
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
        if key not in self._traced:
            self._traced[key] = self._trace(slots, tuple(numbers), options)
        return self._traced[key](tuple(numbers.values()))

    def _trace(
        self, slots: Sequence[str], names: Sequence[str], options: Mapping[str, bool | None]
    ) -> Callable[[Sequence[float]], RuleOf]:
        """The update with these slots and options, as a function of the numbers that stay."""
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
        name = self._call.partition(".")[0].lower()
        changing, stay = [symbols[n] for n in _CHANGING], [symbols[n] for n in names]
        # Norms need all elements of a variable before any can change: passes before the update,
        # which change nothing. A pass may depend on the norms of those before.
        passes: list[tuple[Traced, tuple[bool, ...]]] = []
        norms: list[Symbol] = []
        for layer in reversed(layers_of(results)):
            if new := [norm for norm in layer if norm not in norms]:
                terms = [norm.operands[0] for norm in new]
                first = compile_pass(f"{name}_norms", given, stay, changing, norms, terms, True)
                passes.append((first, tuple([norm.function is global_norm for norm in new])))
                norms += new
        last = compile_pass(name, given, stay, changing, norms, results)
        most = max([len(are_global) for _, are_global in passes], default=0)
        # The ranks must agree on the options, too.
        agreed = {name: float(value) for name, value in options.items() if value is not None}

        def bind_rule(numbers: Sequence[float]) -> RuleOf:
            stay = dict(zip(names, numbers, strict=True)) | agreed
            kernel, values_of = last.kernel, last.bind(numbers)

            def rule(changing: Sequence[float], roots: Sequence[float] = ()) -> UpdateRule:
                values = values_of((*changing, *roots))
                constants = dict(zip(self._changing, changing, strict=False)) | stay
                return UpdateRule(
                    functools.partial(kernel.apply, values), constants, kernel, values
                )

            following = last
            for first, are_global in reversed(passes):
                rule = _after_norms(numbers, most, are_global, first, following, rule)
                following = first
            return rule

        return bind_rule


def _after_norms(
    numbers: Sequence[float],
    most: int,
    are_global: tuple[bool, ...],
    first: Traced,
    following: Traced,
    rule: Callable[..., UpdateRule],
) -> Callable[..., UpdateRule]:
    """The rule that makes a pass for these norms, and goes on with another."""
    kernel, values_of = first.kernel, first.bind(numbers)
    given_of = following.bind_given(numbers)

    def rule_with_norms(changing: Sequence[float], roots: Sequence[float] = ()) -> UpdateRule:
        values = values_of((*changing, *roots))
        first_pass = UpdateRule(
            functools.partial(kernel.apply, values), NO_CONSTANTS, kernel, values
        )

        def rule_with(found: Sequence[float]) -> UpdateRule:
            return rule(changing, (*roots, *found))

        # Of norms these are independent.
        given = functools.partial(given_of, (*changing, *roots, *[1.0] * len(are_global)))
        on_gpu = NumbersOfNorms(following.code, given)
        return Norms(most, are_global, first_pass, rule_with, on_gpu).rule()

    return rule_with_norms
