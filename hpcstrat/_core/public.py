"""Makes public names show as programs write them: `hpcstrat.Variable`, not its private file."""

from __future__ import annotations

import inspect
from typing import Any


def set_module(namespace: dict[str, Any]) -> None:
    """Gives what a public module exports the module's name, for `repr`, tracebacks and pickles.

    Args:
        namespace: `globals()` of the module, after its last import.
    """
    for name, value in namespace.items():
        if name.startswith("_") or not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        if value.__module__.startswith("hpcstrat.") and "._" in value.__module__:
            value.__module__ = namespace["__name__"]
            value.__name__ = value.__qualname__ = name


def set_missing(cls: type, names: dict[str, str]) -> None:
    """Makes names that a class lacks raise an AttributeError that says what to write instead."""
    for name, instead in names.items():
        setattr(cls, name, _Missing(f"{cls.__name__}.{name} does not exist: {instead}"))


# Not `__getattr__` of the class, with which every attribute takes longer to read.
class _Missing:
    """A name that a class lacks."""

    def __init__(self, message: str) -> None:
        self._message = message

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError(self._message)
