"""The fields of optimizers: the values that each takes, which are checked whenever it is set."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any, TypeAlias

from hpcstrat._core.arrays import as_number
from hpcstrat._variable.variable import Variable

LearningRate: TypeAlias = "float | Variable | Callable[[], float] | Callable[[int], float]"

Check: TypeAlias = Callable[[str, str, Any], Any]
"""Takes an optimizer's class name, a field's name and a value; returns the value to store."""

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _number(allowed: str, is_allowed: Callable[[float], bool], kind: str = "a number") -> Check:
    def check(owner: str, name: str, value: Any) -> float:
        number = as_number(owner, name, value, kind)
        if not is_allowed(number):
            raise ValueError(f"{owner}: {name} is {value!r}; it must be {allowed}")
        return number

    return check


def _or_none(check: Check) -> Check:
    return lambda owner, name, value: None if value is None else check(owner, name, value)


def _at_least_0(allowed: str) -> Check:
    return _number(allowed, lambda number: 0 <= number < math.inf, allowed)


FROM_0_TO_1 = _number("from 0 to 1", lambda number: 0 <= number <= 1)
BELOW_1 = _number("at least 0 and less than 1", lambda number: 0 <= number < 1)
ABOVE_0 = _number("above 0 and at most 1", lambda number: 0 < number <= 1)
NOT_NEGATIVE = _at_least_0("a number of at least 0")
NOT_NEGATIVE_OR_NONE = _or_none(NOT_NEGATIVE)
POSITIVE_OR_NONE = _or_none(_number("positive or None", lambda number: number > 0))
_RATE = _at_least_0("a number of at least 0, or a callable")


def name_or_class(owner: str, name: str, value: Any) -> str:
    """A `Check`: a text; the class's name for `None`."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{owner}: {name} is {value!r}; it must be a text")
    return owner if value is None else value


def any_bool(owner: str, name: str, value: Any) -> bool:
    """A `Check`: anything that is true or false."""
    return bool(value)


def checked(default: Any, check: Check, **options: Any) -> Any:
    """A dataclass's field with a check; `options` are those of `dataclasses.field`."""
    return dataclasses.field(default=default, metadata={"check": check}, **options)


def rate_of(owner: str, rate: LearningRate) -> float | Callable[[int], float]:
    """A learning rate as a number, or as a function of the number of steps done.

    Raises:
        ValueError: it is negative or not finite.
        TypeError: it is not a number.
    """
    if not callable(rate):
        number = _RATE(owner, "learning_rate", rate)
        return (lambda _: float(rate)) if isinstance(rate, Variable) else number
    # A parameter with a default is the callable's own, such as a factor, and not the step.
    takes_step = any(
        parameter.default is parameter.empty and parameter.kind in _POSITIONAL
        for parameter in inspect.signature(rate).parameters.values()
    )
    function: Any = rate
    what = "what learning_rate returns"

    def rate_after(step: int) -> float:
        value = function(step) if takes_step else function()
        return value if type(value) is float else as_number(owner, what, value)

    return rate_after
