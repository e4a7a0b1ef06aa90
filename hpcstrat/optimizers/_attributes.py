"""The attributes of an optimizer: which may change, and which ones make an equal optimizer."""

from __future__ import annotations

import abc
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from hpcstrat._core.call_name import constructor_signature
from hpcstrat.optimizers import schedules
from hpcstrat.optimizers._options import DEFAULTS

_FIXED = ("use_ema", "ema_overwrite_frequency", "gradient_accumulation_steps")


class OptimizerType(abc.ABCMeta):
    """Marks an optimizer as made when its `__init__`, perhaps of a user's class, has returned."""

    if not TYPE_CHECKING:  # type checkers take the signature from `__init__`

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            made = super().__call__(*args, **kwargs)
            made._is_made = True
            return made

    @property
    def __signature__(cls) -> inspect.Signature:
        """See `constructor_signature`."""
        return constructor_signature(cls)


def set_attribute(
    optimizer: Any, name: str, value: Any, assign: Callable[[str, Any], None]
) -> None:
    """Sets an attribute of an optimizer, and refuses what would have no effect.

    Args:
        optimizer: the optimizer.
        name: the attribute.
        value: its new value.
        assign: sets it without any check.

    Raises:
        AttributeError: there is no such attribute, or it can no longer change; nothing has changed.
    """
    if name.startswith("_"):
        assign(name, value)
        return
    owner, own = type(optimizer).__name__, vars(optimizer)
    if name not in own and not hasattr(type(optimizer), name) and "_is_made" in own:
        import difflib  # a millisecond, which `import hpcstrat` need not take

        known = sorted(["learning_rate", *(key for key in own if not key.startswith("_"))])
        nearest = "".join(
            f"; did you mean {match}?" for match in difflib.get_close_matches(name, known, 1)
        )
        raise AttributeError(
            f"{owner}: {name} is not an attribute{nearest or ';'} It has {', '.join(known)}; your "
            "own class sets others in its __init__"
        )
    if name in _FIXED and "_formulas" in own and value != own[name]:
        raise AttributeError(
            f"{owner}: {name} is {own[name]!r} for good; pass {name}={value!r} to a new optimizer "
            "instead"
        )
    before = list(optimizer.all_slots) if "_state" in own and own["_state"].slots else None
    previous = None if before is None else getattr(optimizer, name)
    assign(name, value)
    if before is not None and before != (after := list(optimizer.all_slots)):
        assign(name, previous)
        raise AttributeError(
            f"{owner}: {name} is {previous!r}, and the slots are made: {before}; with {value!r} "
            f"they would be {after}. Pass {name}={value!r} to a new optimizer instead"
        )


def arguments_of(optimizer: Any) -> dict[str, Any]:
    """The arguments that make such an optimizer: its own, and options that are not the default."""
    own = [
        name for name in inspect.signature(type(optimizer)).parameters if hasattr(optimizer, name)
    ]
    usual = {**DEFAULTS, "name": type(optimizer).__name__}
    options = [name for name, value in usual.items() if getattr(optimizer, name) != value]
    return {name: getattr(optimizer, name) for name in dict.fromkeys([*own, *options])}


def config_of(optimizer: Any) -> dict[str, Any]:
    """The arguments that make such an optimizer, in a form for JSON.

    Raises:
        ValueError: the learning rate is a function.
    """
    rate, kind = optimizer.learning_rate, type(optimizer.learning_rate)
    if not callable(rate):
        rate = float(rate)
    elif getattr(schedules, kind.__name__, None) is kind:
        rate = {"class_name": kind.__name__, "config": dataclasses.asdict(cast("Any", rate))}
    else:
        raise ValueError(
            f"{type(optimizer).__name__}: learning_rate is {rate!r}, which a config cannot hold; "
            "use a number or a schedule of hs.optimizers.schedules"
        )
    return {"name": optimizer.name} | arguments_of(optimizer) | {"learning_rate": rate}


def arguments_in(config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments in what `config_of` returned."""
    arguments, rate = dict(config), config.get("learning_rate")
    if isinstance(rate, Mapping):
        given = cast("Mapping[str, Any]", rate)
        arguments["learning_rate"] = getattr(schedules, given["class_name"])(**given["config"])
    return arguments
