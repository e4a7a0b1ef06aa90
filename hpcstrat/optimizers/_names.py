"""Names that TensorFlow and other libraries have, and what to write instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_ARGUMENTS = {
    "lr": "write learning_rate",
    "betas": "write beta_1 and beta_2",
    "eps": "write epsilon",
    "params": "apply_gradients(zip(gradients, variables)) takes the variables",
    "decay": "pass a schedule as learning_rate, such as schedules.InverseTimeDecay",
    "maximize": "pass the negative gradients",
    "amsgrad": "write your own Optimizer, whose slots hold the largest v",
    "jit_compile": "leave it out, because updates are compiled in any case",
}
"""Of constructors."""
_SLOTS = "the property `slots` of your own Optimizer has their names and initial values"
_SAVING = "Checkpoint(optimizer=optimizer) saves and restores what it keeps"
_ATTRIBUTES = {
    "step": "apply_gradients(zip(gradients, variables)) is one step",
    "update": "apply_gradients(zip(gradients, variables)) is one step",
    "zero_grad": "leave it out, because each apply_gradients takes new gradients",
    "param_groups": "learning_rate is an attribute; make one optimizer for each group of variables",
    "state_dict": f"hs.checkpoint.{_SAVING}, and get_config() returns its arguments",
    "load_state_dict": f"hs.checkpoint.{_SAVING}",
    "get_weights": f"write [v.numpy() for v in optimizer.variables]; hs.checkpoint.{_SAVING}",
    "weights": "optimizer.variables lists what it keeps",
    "get_slot": "optimizer.variables lists the slots, with names such as Adam/m/w",
    "set_weights": f"hs.checkpoint.{_SAVING}",
    "compute_gradients": "minimize(loss, variables) takes a function that returns the loss and its "
    "gradients, because no tape records them",
    "aggregate_gradients": "apply_gradients sums over the replicas; to see the sums before, write "
    "hs.get_replica_context().all_reduce('SUM', gradients), and then "
    "apply_gradients(..., skip_gradients_aggregation=True)",
    "build": "leave it out, because the first step makes the slots",
    "exclude_from_weight_decay": "make a second optimizer without weight_decay for those variables",
    "add_variable": _SLOTS,
    "add_variable_from_reference": _SLOTS,
    "update_step": "the `formula` of your own Optimizer updates an element",
}
_MODULE = {
    "Adafactor": "its second moments are means over rows and columns, and an update here sees one "
    "element at a time; use Adam, or the step `Factored` of docs/api/optimizers.md",
    "legacy": "hs.optimizers itself has the optimizers",
    "experimental": "hs.optimizers itself has the optimizers",
    "get": "write the class, such as hs.optimizers.Adam()",
    "serialize": "optimizer.get_config() returns the arguments",
    "deserialize": "hs.optimizers.Adam.from_config(config) makes the optimizer",
}


def unknown_arguments(owner: str, unknown: Sequence[str], known: Sequence[str]) -> TypeError:
    """The error for arguments that the class `owner` does not take."""
    if all(name in _ARGUMENTS for name in unknown):
        parts = [f"{name} is not an argument: {_ARGUMENTS[name]}" for name in sorted(unknown)]
        return TypeError(f"{owner}: {'; '.join(parts)}")
    name = min(name for name in unknown if name not in _ARGUMENTS)
    return TypeError(
        f"{owner}: {name} is not an argument{_nearest(name, known)} It takes {', '.join(known)}"
    )


def unknown_attribute(owner: str, name: str, known: Sequence[str]) -> AttributeError:
    """The error for an attribute that is set and that an optimizer of class `owner` has not."""
    return AttributeError(
        f"{owner}: {name} is not an attribute{_nearest(name, known)} It has {', '.join(known)}; "
        "your own class sets others in its __init__"
    )


def attribute(optimizer: object, name: str) -> Any:
    """An attribute that Python does not find: raises, and says what to write instead."""
    if hasattr(type(optimizer), name):  # a property that raised: raise that error again
        return object.__getattribute__(optimizer, name)
    owner = type(optimizer).__name__
    if name in _ATTRIBUTES:
        raise AttributeError(f"{owner}.{name} does not exist: {_ATTRIBUTES[name]}")
    raise AttributeError(f"{owner!r} object has no attribute {name!r}")


def missing_in_module(name: str) -> AttributeError:
    """The error for a name that `hpcstrat.optimizers` does not have."""
    if name in _MODULE:
        return AttributeError(f"hpcstrat.optimizers.{name} does not exist: {_MODULE[name]}")
    return AttributeError(f"module 'hpcstrat.optimizers' has no attribute {name!r}")


def _nearest(name: str, known: Sequence[str]) -> str:
    import difflib  # a millisecond, which `import hpcstrat` need not take

    nearest = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {nearest[0]}?" if nearest else "."
