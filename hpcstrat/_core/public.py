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
