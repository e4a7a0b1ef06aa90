"""The arguments and attributes of every optimizer: which are allowed, and which may change."""

from __future__ import annotations

import abc
import copy
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

import numpy as np

from hpcstrat._core.arrays import as_number
from hpcstrat._variable.variable import Variable
from hpcstrat.optimizers._steps import BY_OPTION, NORM_CLIPPING, UpdateStep, numbers_of, overrides

LearningRate: TypeAlias = "float | Variable | Callable[[], float] | Callable[[int], float]"

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_CLIPPING = ("global_clipnorm", "clipnorm", "clipvalue")
_FIXED = ("steps", "use_ema", "ema_overwrite_frequency", "gradient_accumulation_steps")


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
        steps: steps of your own, which come before these options.

    Examples:
        What the clipping options leave of gradients of norms 5 and 12, by one step of SGD:

        >>> def one_step(**options):
        ...     v, w = hs.Variable(np.zeros(2)), hs.Variable(np.zeros(1))
        ...     optimizer = hs.optimizers.SGD(1.0, **options)
        ...     optimizer.apply_gradients([(np.array([-3.0, -4.0]), v), (np.array([-12.0]), w)])
        ...     return v.numpy(), w.numpy()
        >>> one_step()
        (array([3., 4.]), array([12.]))
        >>> one_step(clipnorm=10.0)  # each variable by itself
        (array([3., 4.]), array([10.]))
        >>> one_step(clipvalue=3.5)  # each element by itself
        (array([3. , 3.5]), array([3.5]))

        Weight decay, of the value before the step:

        >>> v = hs.Variable(np.array([8.0]))
        >>> optimizer = hs.optimizers.SGD(0.5, weight_decay=0.25)
        >>> optimizer.apply_gradients([(np.array([2.0]), v)])
        >>> v.numpy()  # 8 - 0.5 * 0.25 * 8 - 0.5 * 2
        array([6.])

        The average starts at 8 and goes halfway to 4, then to 0. In the second case the second
        step overwrites the variable by it:

        >>> def two_steps(**options):
        ...     v = hs.Variable(np.array([8.0]))
        ...     optimizer = hs.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5, **options)
        ...     for _ in range(2):
        ...         optimizer.apply_gradients([(np.array([4.0]), v)])
        ...     return v.numpy(), optimizer.variables[-1].numpy()
        >>> two_steps()
        (array([0.]), array([3.]))
        >>> two_steps(ema_overwrite_frequency=2)
        (array([3.]), array([3.]))

        Three calls make one step, by the mean of three gradients:

        >>> v = hs.Variable(np.zeros(1))
        >>> optimizer = hs.optimizers.SGD(1.0, gradient_accumulation_steps=3)
        >>> for gradient in 1.0, 2.0, 6.0:
        ...     optimizer.apply_gradients([(np.array([gradient]), v)])
        ...     print(optimizer.iterations, v.numpy())
        0 [0.]
        0 [0.]
        1 [-3.]

        A step of your own sees the gradients before they are clipped:

        >>> class Double(hs.optimizers.UpdateStep):
        ...     def transform(self, grads_and_vars, optimizer):
        ...         return [(2 * gradient, v) for gradient, v in grads_and_vars]
        >>> one_step(steps=[Double()], clipvalue=7.0)
        (array([6., 7.]), array([7.]))
    """

    clipnorm: float | None
    clipvalue: float | None
    weight_decay: float | None
    use_ema: bool
    ema_momentum: float
    ema_overwrite_frequency: int | None
    gradient_accumulation_steps: int | None
    steps: Sequence[UpdateStep]


class OptimizerOptions(CommonOptions, total=False):
    """Keyword arguments of the optimizers that come with the library.

    Attributes:
        global_clipnorm: the largest norm of all gradients together, summed over the replicas;
            larger gradients are scaled down. Excludes `clipnorm` and `clipvalue`, which exclude
            each other too.
        name: a name; by default the class's.

    Examples:
        Gradients of norms 5 and 12 have a norm of 13 together, and both are halved:

        >>> v, w = hs.Variable(np.zeros(2)), hs.Variable(np.zeros(1))
        >>> optimizer = hs.optimizers.SGD(1.0, global_clipnorm=6.5, name="halved")
        >>> optimizer.apply_gradients([(np.array([-3.0, -4.0]), v), (np.array([-12.0]), w)])
        >>> v.numpy(), w.numpy()
        (array([1.5, 2. ]), array([6.]))
        >>> optimizer.variables[0].name
        'halved/iterations'
    """

    global_clipnorm: float | None
    name: str


Check: TypeAlias = Callable[[str, str, Any], Any]
"""Takes an optimizer's class name, an attribute's name and value; returns the value to store."""


def _number(allowed: str, is_allowed: Callable[[float], bool], kind: str = "a number") -> Check:
    def check(owner: str, name: str, value: Any) -> float:
        number = as_number(owner, name, value, kind)
        if not is_allowed(number):
            raise ValueError(f"{owner}: {name} is {value!r}; it must be {allowed}")
        return number

    return check


def _at_least_0(allowed: str) -> Check:
    return _number(allowed, lambda number: 0 <= number < math.inf, allowed)


FROM_0_TO_1 = _number("from 0 to 1", lambda number: 0 <= number <= 1)
BELOW_1 = _number("at least 0 and less than 1", lambda number: 0 <= number < 1)
ABOVE_0 = _number("above 0 and at most 1", lambda number: 0 < number <= 1)
NOT_NEGATIVE = _at_least_0("a number of at least 0")
_RATE = _at_least_0("a number of at least 0, or a callable")
_POSITIVE = _number("positive or None", lambda number: number > 0)


def any_bool(owner: str, name: str, value: Any) -> bool:
    """A `Check`: anything that is true or false."""
    return bool(value)


def _count(owner: str, name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{owner}: {name} is {value!r}; it must be an int of at least 1, or None")
    return value


def _steps(owner: str, name: str, value: Any) -> tuple[UpdateStep, ...]:
    steps = tuple(value)
    for step in steps:
        if not isinstance(step, UpdateStep):
            raise TypeError(
                f"{owner}: {name} has {step!r}; each must be an instance of a subclass of "
                "UpdateStep"
            )
    return steps


def _or_none(check: Check) -> Check:
    return lambda owner, name, value: None if value is None else check(owner, name, value)


_OPTIONS: Mapping[str, tuple[Any, Check]] = {
    "global_clipnorm": (None, _or_none(_POSITIVE)),
    "clipnorm": (None, _or_none(_POSITIVE)),
    "clipvalue": (None, _or_none(_POSITIVE)),
    "weight_decay": (None, _or_none(NOT_NEGATIVE)),
    "use_ema": (False, any_bool),
    "ema_momentum": (0.99, FROM_0_TO_1),
    "ema_overwrite_frequency": (None, _or_none(_count)),
    "gradient_accumulation_steps": (None, _or_none(_count)),
    "steps": ((), _steps),
}
"""Every option except the name, with its default and its check."""


def check_options(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """All options except the name, of an optimizer class, with defaults for the missing."""
    owner = kind.__name__
    if unknown := given.keys() - _OPTIONS.keys():
        parameters = inspect.signature(kind).parameters.values()
        own = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
        known = [*dict.fromkeys([*own, *_OPTIONS, "name"])]
        raise _unknown_argument(owner, min(unknown), known)
    options = {
        name: check(owner, name, given.get(name, default))
        for name, (default, check) in _OPTIONS.items()
    }
    _check_clipping(owner, options)
    if options["ema_overwrite_frequency"] is not None and not options["use_ema"]:
        raise ValueError(
            f"{owner}: ema_overwrite_frequency needs moving averages; pass use_ema=True too"
        )
    return options


def _check_clipping(owner: str, options: Mapping[str, Any]) -> None:
    clipping = [name for name in _CLIPPING if options[name] is not None]
    if len(clipping) > 1:
        raise ValueError(f"{owner}: {' and '.join(clipping)} exclude each other; pass one of them")


def check_without_formula(owner: str, given: Mapping[str, Any]) -> None:
    """Checks the options of an optimizer with its own `update_rule`."""
    steps = {name: step for name, step in BY_OPTION.items() if given.get(name)}
    steps |= {type(step).__name__: step for step in given.get("steps", ())}
    for name, step in steps.items():
        if _needs_formula(step):
            raise ValueError(
                f"{owner}: {name} changes the formula, and update_rule is overridden; leave it out"
            )


def _needs_formula(step: UpdateStep) -> bool:
    return overrides(step, "formula") and step not in NORM_CLIPPING


def rate_of(owner: str, rate: LearningRate) -> float | Callable[[int], float]:
    """A learning rate as a number, or as a function of the number of steps done."""
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


# ---- attributes


class OptimizerType(abc.ABCMeta):
    """Marks an optimizer as made when its `__init__`, perhaps of a user's class, has returned."""

    if not TYPE_CHECKING:  # type checkers take the signature from `__init__`

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            made = super().__call__(*args, **kwargs)
            made._is_made = True
            return made

    @property
    def __signature__(cls) -> inspect.Signature:
        """The arguments of `__init__`; `inspect` would take those of `__call__` above."""
        return inspect.signature(functools.partial(cls.__init__, None))


def check_attribute(optimizer: Any, checks: Mapping[str, Check], name: str, value: Any) -> Any:
    """The new value of an optimizer's attribute, as it is stored.

    Args:
        optimizer: the optimizer.
        checks: of its class's own attributes.
        name: the attribute.
        value: its new value.

    Raises:
        AttributeError: it would have no effect.
        ValueError: it is out of range, or excludes another.
        TypeError: it is not a number.
    """
    owner, own = type(optimizer).__name__, vars(optimizer)
    is_made, is_composed = "_is_made" in own, "_all_steps" in own
    if name not in own and not hasattr(type(optimizer), name) and is_made:
        known = sorted(["learning_rate", *(key for key in own if not key.startswith("_"))])
        raise _unknown_attribute(owner, name, known)
    if name in checks:
        value = checks[name](owner, name, value)
    if name in _FIXED and is_composed and value != own[name]:
        raise AttributeError(
            f"{owner}: {name} is {own[name]!r} and cannot change; pass {name}={value!r} to a new "
            "optimizer instead"
        )
    # While it is made, `check_options` has checked those that are not its class's own.
    if is_made and name in _OPTIONS and not _is_its_own(optimizer, name):
        value = _OPTIONS[name][1](owner, name, value)
        _check_clipping(owner, {**own, name: value})
        if own["_has_own_rule"]:
            check_without_formula(owner, {name: value})
    if is_composed and own["_state"].slots:
        changed = copy.copy(optimizer)
        object.__setattr__(changed, name, value)
        slots, others = list(optimizer.all_slots), list(changed.all_slots)
        if slots != others:
            raise AttributeError(
                f"{owner}: {name} is {getattr(optimizer, name)!r}, and the slots are made: "
                f"{slots}; with {value!r} they would be {others}. Pass {name}={value!r} to a new "
                "optimizer instead"
            )
    return value


def _is_its_own(optimizer: Any, option: str) -> bool:
    """Whether an optimizer's class has given an option a meaning of its own."""
    if option not in BY_OPTION or not vars(optimizer)["_has_own_rule"]:
        return option in numbers_of(optimizer.formula)
    is_taken = option in inspect.signature(type(optimizer)).parameters
    return _needs_formula(BY_OPTION[option]) and (is_taken or bool(getattr(optimizer, option)))


def arguments_of(optimizer: Any) -> dict[str, Any]:
    """The arguments that make such an optimizer: its own, and options that are not the default."""
    own = [
        name for name in inspect.signature(type(optimizer)).parameters if hasattr(optimizer, name)
    ]
    defaults = {name: default for name, (default, _) in _OPTIONS.items()}
    usual = {**defaults, "name": type(optimizer).__name__}
    options = [name for name, value in usual.items() if getattr(optimizer, name) != value]
    return {name: getattr(optimizer, name) for name in dict.fromkeys([*own, *options])}


# ---- unknown names


def _unknown_argument(owner: str, name: str, known: Sequence[str]) -> TypeError:
    """The error for an argument that the class `owner` does not take."""
    return TypeError(
        f"{owner}: {name} is not an argument{_nearest(name, known)} It takes {', '.join(known)}"
    )


def _unknown_attribute(owner: str, name: str, known: Sequence[str]) -> AttributeError:
    """The error for an attribute that is set but that optimizers of class `owner` lack."""
    return AttributeError(
        f"{owner}: {name} is not an attribute{_nearest(name, known)} It has {', '.join(known)}; "
        "your own class sets others in its __init__"
    )


def _nearest(name: str, known: Sequence[str]) -> str:
    import difflib  # a millisecond, which `import hpcstrat` need not take

    nearest = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {nearest[0]}?" if nearest else "."
