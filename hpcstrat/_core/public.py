"""Makes public names show as programs write them: `hpcstrat.Variable`, not its private file."""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

from hpcstrat._core.other_names import refuse_other_names

_classes: list[type] = []


def set_module(namespace: dict[str, Any]) -> None:
    """Gives what a public module exports the module's name, for `repr`, tracebacks and pickles.

    Args:
        namespace: `globals()` of the module, after its last import.
    """
    for name, value in namespace.items():
        if name.startswith("_") or not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        if _is_private(value):
            value.__module__ = namespace["__name__"]
            value.__name__ = value.__qualname__ = name
            if inspect.isclass(value):
                _classes.append(value)
                refuse_other_names(value)


def set_owners() -> None:
    """Names the methods of private classes as those of public ones, for Python's errors of calls.

    Call it after the last `set_module`: before it, all classes look private.
    """
    heirs: dict[type, list[type]] = {}
    for cls in _classes:
        for base in cls.__mro__[1:]:
            if not _is_private(base):
                break  # what follows is that class's
            heirs.setdefault(base, []).append(cls)
    for base, classes in heirs.items():
        # What several classes inherit is theirs by the name of a class that they have in common.
        common = classes if len(classes) == 1 else [c for c in base.__mro__ if c in _classes]
        for name, method in vars(base).items() if common else ():
            if isinstance(method, classmethod):
                method = method.__func__
            while isinstance(method, FunctionType) and not name.startswith("_"):
                method.__module__ = common[0].__module__
                method.__qualname__ = f"{common[0].__name__}.{name}"
                method = vars(method).get("__wrapped__")


def _is_private(thing: Any) -> bool:
    return thing.__module__.startswith("hpcstrat.") and "._" in thing.__module__
