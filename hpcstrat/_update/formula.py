"""A formula: an update that is written once, as a function, and traced to passes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from hpcstrat._core.arrays import as_number
from hpcstrat._update.passes import Compute, Pass, passes_of
from hpcstrat._update.rule import Norms, UpdateRule
from hpcstrat._update.symbols import ELEMENT, NUMBER, Symbol

_CHANGING = ("learning_rate", "step")
"""The numbers of a formula that may change in every step; all others seldom do."""
_LASTING = (int, float, np.generic, type(None))
"""Attributes whose value stays that of the object."""


class Formula:
    """The formula of an optimizer.

    A step does again only what follows from what has changed since the last:

        options, slots          the function is traced to passes, once for each choice
        other attributes        `_prepare` binds them to the passes
        learning rate, step     the kernels' constants are computed, and a rule is made
        nothing                 it is the same rule

    Args:
        call: its name for messages, such as `Adam.formula`.
        function: takes the value, the gradient and the slots of one element by position, and the
            numbers and options by name. It returns the new value, or a tuple of the new value and
            the new slots. An option is `None` or a `bool`, known when the formula is traced.
        names: of its numbers and options: `learning_rate`, `step`, and what seldom changes, which
            are attributes of the optimizer, and others.
        readers: read the others.
    """

    def __init__(
        self,
        call: str,
        function: Callable[..., Any],
        names: Sequence[str] = (),
        readers: Mapping[str, Callable[[], Any]] = MappingProxyType({}),
    ) -> None:
        self._call, self._function, self._takes = call, function, names
        self._owner = call.partition(".")[0]
        self._takes_step = "step" in names
        attributes = [name for name in names if name not in (*_CHANGING, *readers)]
        self._lasting = (*attributes, *readers)
        self._read_attributes = _reader_of(attributes)
        self._readers = tuple(readers.values())
        self._traced: dict[tuple[Any, ...], tuple[Pass, ...]] = {}
        # Of the last step: what it read, and what `_prepare` made of it; its rate and number, and
        # its rule.
        self._values: tuple[Any, ...] | None = None
        self._prepared: tuple[tuple[Pass, ...], list[Compute], dict[str, float], Callable[..., Any]]
        self._now: tuple[float, float] | None = None
        self._rule: UpdateRule

    def rule(self, optimizer: Any, learning_rate: float, step: int) -> UpdateRule:
        """The update of this step.

        Raises:
            AttributeError: the optimizer has no attribute of some name.
            TypeError: an attribute is not a number, or the formula cannot be compiled; the message
                names the line.
        """
        values = self._read_attributes(optimizer)
        if self._readers:
            values += tuple([read() for read in self._readers])
        try:
            is_new = values != self._values
        except ValueError:  # of an array, which may be unequal in some elements
            is_new = True
        if is_new:
            self._prepared = self._prepare(values, tuple(optimizer.all_slots))
            # What can change in place, such as a variable, is read again in each step.
            lasts = all(isinstance(value, _LASTING) for value in values)
            self._values, self._now = values if lasts else None, None
        now = learning_rate, step if self._takes_step else 0
        if now == self._now:
            return self._rule
        passes, given_in, agreed, apply_last = self._prepared
        rate, number = float(learning_rate), float(step)
        constants = agreed.copy()
        constants["learning_rate"] = rate
        if self._takes_step:
            constants["step"] = number
        kernel = passes[-1].kernel
        if len(passes) == 1:
            numbers = given_in[0](rate, number)
            apply = functools.partial(apply_last, numbers)
            self._rule = UpdateRule(apply, constants, kernel, numbers)
        else:
            norms = Norms(passes, tuple([given(rate, number) for given in given_in]))
            self._rule = UpdateRule(norms.apply, constants, kernel, norms=norms)
        self._now = now
        return self._rule

    def forget(self) -> None:
        """Makes the next step bind the attributes anew: `True` takes another trace than 1.0."""
        self._values = None

    def _prepare(
        self, values: Sequence[Any], slots: tuple[str, ...]
    ) -> tuple[tuple[Pass, ...], list[Compute], dict[str, float], Callable[..., Any]]:
        """What these values of attributes give.

        Returns:
            The passes; of each what its kernel is given, as a function of the learning rate and
            the step; what the ranks must agree on, by name, with a place for these two; and
            `Kernel.apply` of the last pass.
        """
        named = dict(zip(self._lasting, values, strict=True))
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
        # The ranks must agree on the options, too, and on the rate of any formula.
        flags = {name: float(value) for name, value in options.items() if value is not None}
        changing = _CHANGING if self._takes_step else _CHANGING[:1]
        agreed = dict.fromkeys(changing, 0.0) | numbers | flags
        passes = self._traced[key]
        given_in = [functools.partial(each.given_in, *numbers.values()) for each in passes]
        return passes, given_in, agreed, passes[-1].kernel.apply

    def _trace(
        self, slots: Sequence[str], numbers: Sequence[str], options: Mapping[str, bool | None]
    ) -> tuple[Pass, ...]:
        """The passes for norms, and then the update, with these slots, numbers and options."""
        texts = ("gradient", "value", *[f"slot_{slot}" for slot in slots])
        elements = {text: Symbol(ELEMENT) for text in texts}
        symbols = {name: Symbol(NUMBER) for name in (*numbers, *_CHANGING)}
        gradient, value, *old = elements.values()
        taken = {name: symbol for name, symbol in symbols.items() if name in self._takes}
        result = self._function(value, gradient, *old, **taken, **options)
        results = result if isinstance(result, tuple) else (result,)
        kinds = [getattr(symbol, "kind", type(symbol).__name__) for symbol in results]
        if kinds != [ELEMENT] * (1 + len(slots)):
            raise TypeError(
                f"{self._call} returned {kinds}; it must return the new value and {len(slots)} new "
                "slots, in this order, all of them made of elements"
            )
        changed = dict(zip(texts[1:], results, strict=True))
        return passes_of(self._owner.lower(), elements, [*symbols.values()], changed)


def _reader_of(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Returns the attributes of these names, in one call where there are several."""
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda thing: tuple([getattr(thing, name) for name in names])
