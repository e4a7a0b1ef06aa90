"""The environment variables by which users set how the library behaves."""

from __future__ import annotations

import math
import os

_PREFIX = "HPCSTRAT_"
_KNOWN = {  # with the value where it is not set
    "HPCSTRAT_CHECK": "0",
    "HPCSTRAT_COMPILE": "1",
    "HPCSTRAT_KEEP_MEMORY": "1",
    "HPCSTRAT_OUTPUT": "",
    "HPCSTRAT_STALL_SECONDS": "60",
    "HPCSTRAT_STDERR": "",
    "HPCSTRAT_TEST_GPU": "",  # used by the tests, as the next two
    "HPCSTRAT_TEST_SLURM": "",
    "HPCSTRAT_TEST_TENSORFLOW": "",
    "HPCSTRAT_TIMELINE": "",
    "HPCSTRAT_TIMEOUT_SECONDS": "600",
}


def seconds(name: str) -> float:
    """The variable as a number of seconds; `inf` means no limit.

    Raises:
        ValueError: it is set to something other than a positive number.
    """
    value = _value(name)
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


def is_on(name: str) -> bool:
    """Whether the variable is `1`.

    Raises:
        ValueError: it is set to something other than 0 or 1.
    """
    value = _value(name)
    if value not in ("0", "1"):
        raise ValueError(f"the environment variable {name} is {value!r}; it must be 1 or 0")
    return value == "1"


def timeline() -> str:
    """The file that the timeline is written to; empty if there is none."""
    return _value("HPCSTRAT_TIMELINE")


def _value(name: str) -> str:
    return os.environ.get(name, "").strip() or _KNOWN[name]


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
