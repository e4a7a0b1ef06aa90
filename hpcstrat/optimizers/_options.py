"""The arguments of every optimizer, as in Keras: learning rates, and options of its formula."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypedDict, cast

import numpy as np

from hpcstrat._core.arrays import as_number

EMA = "ema"
"""The slot of `use_ema`: the moving average, which starts as the variable's value."""

LearningRate: TypeAlias = "float | Callable[[], float] | Callable[[int], float]"

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_CLIPPING = ("global_clipnorm", "clipnorm", "clipvalue")
_BY_FORMULA = ("clipvalue", "weight_decay")


class CommonOptions(TypedDict, total=False):
    """Keyword arguments of every optimizer.

    For an `IndexedSlices` they apply to its rows and to no others.

    Attributes:
        clipnorm: the largest norm of each variable's gradient, summed over the replicas; larger
            gradients are scaled down.
        clipvalue: the largest magnitude of an element of a gradient, summed over the replicas.
        weight_decay: each step does `w -= learning_rate * weight_decay * w` first.
        use_ema: keeps a moving average of each variable,
            `average = ema_momentum * average + (1 - ema_momentum) * w` after each step, from its
            value before the first. See `Optimizer.finalize_variable_values`.
        ema_momentum: from 0 to 1; by default 0.99.
        ema_overwrite_frequency: the number of steps between two overwrites of the variables by
            their averages. `None`: never.
        gradient_accumulation_steps: variables are updated once every this many calls of
            `apply_gradients`, by the mean of the gradients since the last update. The other calls
            add up on each replica and do not communicate.
    """

    clipnorm: float | None
    clipvalue: float | None
    weight_decay: float | None
    use_ema: bool
    ema_momentum: float
    ema_overwrite_frequency: int | None
    gradient_accumulation_steps: int | None


class OptimizerOptions(CommonOptions, total=False):
    """Keyword arguments of the optimizers that come with the library.

    Attributes:
        global_clipnorm: the largest norm of all gradients together, summed over the replicas;
            larger gradients are scaled down. Excludes `clipnorm` and `clipvalue`, which exclude
            each other too.
        name: a name; by default the class's.
    """

    global_clipnorm: float | None
    name: str


DEFAULTS: Mapping[str, Any] = {
    "global_clipnorm": None,
    "clipnorm": None,
    "clipvalue": None,
    "weight_decay": None,
    "use_ema": False,
    "ema_momentum": 0.99,
    "ema_overwrite_frequency": None,
    "gradient_accumulation_steps": None,
}
"""Every option except the name."""


def check_options(owner: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all options except the name, with defaults for the missing.

    Args:
        owner: the optimizer's class, for messages.
        given: the arguments.

    Raises:
        TypeError: an option is unknown, or is not a number.
        ValueError: an option is out of range, or two exclude each other.
    """
    if unknown := given.keys() - DEFAULTS.keys():
        names = ", ".join([*DEFAULTS, "name"])
        raise TypeError(
            f"{owner}: {min(unknown)} is not an argument; besides its own it takes {names}"
        )
    options = {**DEFAULTS, **given}
    clipping = [name for name in _CLIPPING if options[name] is not None]
    for name in clipping:
        if not as_number(owner, name, options[name]) > 0:
            raise ValueError(f"{owner}: {name} is {options[name]!r}; it must be positive or None")
    if len(clipping) > 1:
        raise ValueError(f"{owner}: {' and '.join(clipping)} exclude each other; pass one of them")
    if options["weight_decay"] is not None:
        options["weight_decay"] = not_negative(owner, "weight_decay", options["weight_decay"])
    if not 0 <= as_number(owner, "ema_momentum", options["ema_momentum"]) <= 1:
        raise ValueError(
            f"{owner}: ema_momentum is {options['ema_momentum']!r}; it must be from 0 to 1"
        )
    for name in ("ema_overwrite_frequency", "gradient_accumulation_steps"):
        count = options[name]
        if count is not None and (
            isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 1
        ):
            raise ValueError(
                f"{owner}: {name} is {count!r}; it must be an int of at least 1, or None"
            )
    if options["ema_overwrite_frequency"] is not None and not options["use_ema"]:
        raise ValueError(
            f"{owner}: ema_overwrite_frequency needs moving averages; pass use_ema=True too"
        )
    return options


def check_without_formula(owner: str, given: Mapping[str, Any]) -> None:
    """Checks the options of an optimizer with its own `update_rule`.

    Raises:
        ValueError: an option would change the formula.
    """
    for name in (*_BY_FORMULA, "use_ema"):
        if given.get(name):
            raise ValueError(
                f"{owner}: {name} changes the formula, and update_rule is overridden; leave it out"
            )


def not_negative(owner: str, argument: str, value: Any) -> float:
    """The value of an argument as a float.

    Raises:
        TypeError: it is not a number.
        ValueError: it is negative, infinite or nan.
    """
    allowed = "a number of at least 0" + ", or a callable" * (argument == "learning_rate")
    number = as_number(owner, argument, value, allowed)
    if not 0 <= number < math.inf:
        raise ValueError(f"{owner}: {argument} is {value!r}; it must be {allowed}")
    return number


def with_options(
    call: str, formula: Callable[..., Any], averages: bool, overwrites: bool
) -> Callable[..., Any]:
    """Combines the formulas of an optimizer and of its options: one pass over memory for both.

    An option that is `None` leaves no trace. An option that the formula takes as a parameter is
    left to the formula.

    Args:
        call: the formula's name, for messages.
        formula: the optimizer's formula.
        averages: whether it keeps moving averages, in a last slot.
        overwrites: whether the averages overwrite the variables in steps in which the number
            `ema_overwrites` is 1 and not 0.

    Raises:
        TypeError: the formula takes a number by position.
    """
    parameters = inspect.signature(formula).parameters
    names = {name for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY}
    averaging = ["ema_momentum"] * averages + ["ema_overwrites"] * overwrites
    ours = [name for name in (*_BY_FORMULA, *averaging, "learning_rate") if name not in names]
    for name in (*ours, "step"):
        if name in parameters and name not in names:
            raise TypeError(
                f"{call} takes {name} by position; numbers come after `*`: def formula(value, "
                f"gradient, *, {name})"
            )

    def step_with_options(value: Any, gradient: Any, *slots: Any, **numbers: Any) -> Any:
        of = {name: numbers.pop(name) for name in ours}
        if (most := of.get("clipvalue")) is not None:
            gradient = np.maximum(np.minimum(gradient, most), -most)
        decayed = value
        if (decay := of.get("weight_decay")) is not None:
            decayed = value * (1 - decay * (numbers | of)["learning_rate"])
        if not averages:
            return formula(decayed, gradient, *slots, **numbers)
        *own_slots, average = slots
        result = formula(decayed, gradient, *own_slots, **numbers)
        new, *others = result if isinstance(result, tuple) else (result,)
        average = of["ema_momentum"] * average + (1 - of["ema_momentum"]) * new
        if overwrites:
            new = new + of["ema_overwrites"] * (average - new)
        return new, *others, average

    keywords = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ours]
    kinds = sorted([*parameters.values(), *keywords], key=lambda each: each.kind)
    cast("Any", step_with_options).__signature__ = inspect.Signature(kinds)
    return step_with_options


def take_averages(value: Any, gradient: Any, *slots: Any) -> Any:
    """The formula that overwrites variables by their averages."""
    return slots[-1], *slots


def rate_function(owner: str, rate: LearningRate) -> Callable[[int], float]:
    """A learning rate as a function of the number of steps done.

    Raises:
        ValueError, TypeError: as `not_negative`.
    """
    if not callable(rate):
        constant = not_negative(owner, "learning_rate", rate)
        return lambda _: constant
    # A parameter with a default is the callable's own, such as a factor, and not the step.
    takes_step = any(
        parameter.default is parameter.empty and parameter.kind in _POSITIONAL
        for parameter in inspect.signature(rate).parameters.values()
    )
    function: Any = rate
    what = "what learning_rate returns"
    if takes_step:
        return lambda step: as_number(owner, what, function(step))
    return lambda _: as_number(owner, what, function())
