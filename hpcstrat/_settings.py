"""The environment variables that change how the library behaves."""

from __future__ import annotations

import math
import os


def seconds(name: str, default: float) -> float:
    """The variable as a number of seconds; `inf` is for ever.

    Raises:
        ValueError: it is set to something else than a positive number.
    """
    value = os.environ.get(name, "").strip()
    if not value:
        return default
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not number > 0:
        raise ValueError(
            f"the environment variable {name} is {value!r}; it must be a positive number of seconds, or inf"
        )
    return number


def is_on(name: str) -> bool:
    """Whether the variable is set to `1`.

    Raises:
        ValueError: it is set to something else than 0 or 1.
    """
    value = os.environ.get(name, "").strip()
    if value not in ("", "0", "1"):
        raise ValueError(f"the environment variable {name} is {value!r}; it must be 1 or 0")
    return value == "1"
