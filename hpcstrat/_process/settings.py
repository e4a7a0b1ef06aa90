"""The environment variables that change how the library behaves."""

from __future__ import annotations

import math
import os
import warnings

from hpcstrat._process import launchers

_PREFIX = "HPCSTRAT_"
_KNOWN = (
    "HPCSTRAT_CHECK",
    "HPCSTRAT_COMPILE",
    "HPCSTRAT_KEEP_MEMORY",
    "HPCSTRAT_OUTPUT",
    "HPCSTRAT_STALL_SECONDS",
    "HPCSTRAT_STDERR",
    "HPCSTRAT_TEST_GPU",  # used by the tests, as the next two
    "HPCSTRAT_TEST_SLURM",
    "HPCSTRAT_TEST_TENSORFLOW",
    "HPCSTRAT_TIMELINE",
    "HPCSTRAT_TIMEOUT_SECONDS",
)


def seconds(name: str, default: float) -> float:
    """The variable as a number of seconds; `inf` means no limit.

    Raises:
        ValueError: it is set to something other than a positive number.
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
            f"the environment variable {name} is {value!r}; it must be a positive number of "
            "seconds, or inf"
        )
    return number


def is_on(name: str, default: bool = False) -> bool:
    """Whether the variable is set to `1`.

    Raises:
        ValueError: it is set to something other than 0 or 1.
    """
    value = os.environ.get(name, "").strip()
    if value not in ("", "0", "1"):
        raise ValueError(f"the environment variable {name} is {value!r}; it must be 1 or 0")
    return value == "1" if value else default


def compiles() -> bool:
    """Whether updates may be compiled by the host's C compiler; raises as `is_on`."""
    return is_on("HPCSTRAT_COMPILE", default=True)


def timeline() -> str:
    """The file that the timeline is written to; empty if there is none."""
    return os.environ.get("HPCSTRAT_TIMELINE", "").strip()


def unknown() -> dict[str, str]:
    """Environment variables that only look like the library's, each with the nearest real one."""
    # Variables that do nothing are worse than errors: a misspelt time-out shows only when a job
    # hangs.
    names = sorted(name for name in os.environ if name.startswith(_PREFIX) and name not in _KNOWN)
    if not names:
        return {}
    import difflib  # here, because it would add a millisecond to `import hpcstrat`

    # Without the parts that most names share.
    known = {_short(name): name for name in _KNOWN}
    return {name: known[difflib.get_close_matches(_short(name), known, 1, 0)[0]] for name in names}


def _short(name: str) -> str:
    return name.removeprefix(_PREFIX).removesuffix("_SECONDS")


def warn_of_unknown() -> None:
    """Warns on rank 0 of each unknown variable: a misspelt one would silently do nothing."""
    launcher = launchers.find()
    if launcher is not None and launcher.rank > 0:
        return
    for name, nearest in unknown().items():
        warnings.warn(f"unknown environment variable {name}; did you mean {nearest}?", stacklevel=3)
