"""Old names of methods, each with one warning a process."""

from __future__ import annotations

import warnings

_warned: set[str] = set()


def warn_renamed(old: str, new: str) -> None:
    """Warns, the first time, that a method has a newer name. For use directly in the method of the old one."""
    if old not in _warned:
        _warned.add(old)
        warnings.warn(f"Strategy.{old} is now called Strategy.{new}; use that", DeprecationWarning, stacklevel=3)
