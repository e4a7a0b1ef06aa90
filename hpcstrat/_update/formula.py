"""A formula: an update that is written once, as a function, and traced to passes."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from hpcstrat._core.arrays import as_number
from hpcstrat._update.passes import Compute, Pass, make_pass
from hpcstrat._update.rule import Norms, UpdateRule
from hpcstrat._update.symbols import ELEMENT, NUMBER, Symbol, layers_of


def getter(kind: Callable[..., Any], keys: Sequence[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """A function that gets these attributes or items, of which there may be one or none."""
    if len(keys) > 1:
        return kind(*keys)
    getters = [kind(key) for key in keys]
    return lambda thing: tuple([get(thing) for get in getters])


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
        self._changing = [name for name in _CHANGING if name in names]
        attributes = [name for name in names if name not in (*_CHANGING, *readers)]
        self._names = (*attributes, *readers)
        self._readers = tuple(readers.values())
        self._attributes_of = getter(operator.attrgetter, attributes)
        self._traced: dict[tuple[Any, ...], tuple[Pass, ...]] = {}
        # Of the last step: what it read, and what follows from it; what changed, and the rule.
        self._values: tuple[Any, ...] | None = None
        self._passes: tuple[Pass, ...]
        self._given: list[Compute]
        self._constants: dict[str, float]
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
            self._read(values, tuple(optimizer.all_slots))
            self._values, self._now = values, None
        now = learning_rate, step if self._takes_step else 0
        if now != self._now:
            rate, number = float(learning_rate), float(now[1])
            constants = self._constants.copy()
            constants["learning_rate"] = rate
            if self._takes_step:
                constants["step"] = number
            kernel = self._passes[-1].kernel
            if len(self._passes) == 1:
                numbers = self._given[0](rate, number)
                apply = functools.partial(kernel.apply, numbers)
                self._rule = UpdateRule(apply, constants, kernel, numbers)
            else:
                given = tuple([compute(rate, number) for compute in self._given])
                norms = Norms(self._passes, given)
                self._rule = UpdateRule(norms.apply, constants, kernel, norms=norms)
            self._now = now
        return self._rule

    def _read(self, values: Sequence[Any], slots: tuple[str, ...]) -> None:
        """Notes these values of the attributes, and what follows from them."""
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
        self._passes, now = self._traced[key], numbers.values()
        self._given = [functools.partial(each.given_in, *now) for each in self._passes]
        # The ranks must agree on the options, too, and on the rate of any formula.
        agreed = {name: float(value) for name, value in options.items() if value is not None}
        changing = ("learning_rate", "step") if self._takes_step else ("learning_rate",)
        self._constants = dict.fromkeys(changing, 0.0) | numbers | agreed

    def _trace(
        self, slots: Sequence[str], names: Sequence[str], options: Mapping[str, bool | None]
    ) -> tuple[Pass, ...]:
        """The passes for norms, and then the update, with these slots and options."""
        given = [
            Symbol(ELEMENT, None, name)
            for name in ("gradient", "value", *[f"slot_{name}" for name in slots])
        ]
        numbers = {name: Symbol(NUMBER, None, name) for name in (*names, *_CHANGING)}
        gradient, *state = given
        taken = {name: numbers[name] for name in (*self._changing, *names)}
        result = self._function(state[0], gradient, *state[1:], **taken, **options)
        results = result if isinstance(result, tuple) else (result,)
        kinds = [getattr(symbol, "kind", type(symbol).__name__) for symbol in results]
        if kinds != [ELEMENT] * len(state):
            raise TypeError(
                f"{self._call} returned {kinds}; it must return the new value and {len(slots)} new "
                "slots, in this order, all of them made of elements"
            )
        name, inputs = self._owner.lower(), [*numbers.values()]
        # Norms need all elements of a variable before any can change: passes before the update,
        # which change nothing. A pass may depend on the norms of those before.
        passes: list[Pass] = []
        norms: list[Symbol] = []
        for layer in reversed(layers_of(results)):
            if new := [norm for norm in layer if norm not in norms]:
                passes.append(make_pass(f"{name}_norms", given, inputs, norms, new))
                norms += new
        return *passes, make_pass(name, given, inputs, norms, results)
