"""Warnings that concern all ranks, and warnings of old names."""

from __future__ import annotations

import sys
import warnings

_OWN = ("hpcstrat", "tqdm")  # packages whose lines are not the program's
_warned: set[str] = set()


def warn_together(message: str, category: type[Warning], is_lead: bool) -> None:
    """Warns on the lead, at the line of the program. Where a filter makes it an error, all ranks that call this raise.

    Raises:
        Warning: `category`, as the filters have it.
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _module(frame.f_globals).partition(".")[0] in _OWN:
        level, frame = level + 1, frame.f_back
    if is_lead:
        warnings.warn(message, category, stacklevel=level)
    elif _is_error(message, category, _module(frame.f_globals), frame.f_lineno):
        raise category(message)


def warn_renamed(old: str, new: str) -> None:
    """Warns that a function has a new name, once a process. Call it directly in the function of the old name."""
    if old not in _warned:
        _warned.add(old)
        warnings.warn(f"{old} is now called {new}; use that", DeprecationWarning, stacklevel=3)


def _module(names: dict[str, object]) -> str:
    return str(names.get("__name__", ""))


def _is_error(message: str, category: type[Warning], module: str, line: int) -> bool:
    """What the filters make of a warning; to give it and to catch it would change what is shown of others."""
    for action, text, kind, of_module, of_line in warnings.filters:
        if (
            (text is None or text.match(message))
            and issubclass(category, kind)
            and (of_module is None or of_module.match(module))
            and of_line in (0, line)
        ):
            return action == "error"
    return False
