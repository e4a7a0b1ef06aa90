"""Names that TensorFlow and other libraries have, and what to write instead."""

from __future__ import annotations

from collections.abc import Sequence

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
    """The error for an attribute that is set but that optimizers of class `owner` lack."""
    return AttributeError(
        f"{owner}: {name} is not an attribute{_nearest(name, known)} It has {', '.join(known)}; "
        "your own class sets others in its __init__"
    )


def _nearest(name: str, known: Sequence[str]) -> str:
    import difflib  # a millisecond, which `import hpcstrat` need not take

    nearest = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {nearest[0]}?" if nearest else "."
