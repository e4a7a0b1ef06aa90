"""What environment variables decide: how the library behaves, and what glibc and BLAS may take."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import platform
import warnings
from collections.abc import Sequence, Set

from threadpoolctl import ThreadpoolController

from hpcstrat._process import launchers

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
# From glibc's malloc.h; the threshold for mmap is the largest that glibc takes.
_TRIM_THRESHOLD, _KEPT = -1, 1 << 30
_MMAP_THRESHOLD, _LARGEST_IN_HEAP = -3, 32 << 20
_BLAS_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


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


def warn_of_unknown() -> None:
    """Warns on rank 0 of each unknown variable: a misspelt one would silently do nothing."""
    launcher = launchers.find()
    if launcher is not None and launcher.rank > 0:
        return
    for name, nearest in unknown().items():
        warnings.warn(f"unknown environment variable {name}; did you mean {nearest}?", stacklevel=3)


# ---- memory that a step frees


@functools.cache  # once a process: what the program sets later stays
def keep_freed_memory() -> None:
    """Lets glibc keep up to 1 GiB of freed memory; leaves other allocators and settings alone.

    Raises:
        ValueError: `HPCSTRAT_KEEP_MEMORY` is neither 0 nor 1.
    """
    # Otherwise glibc returns large arrays to the system at once, and the next step pays for their
    # pages again, which costs up to a third of a step.
    is_wanted = is_on("HPCSTRAT_KEEP_MEMORY")
    if is_wanted and platform.libc_ver()[0] == "glibc" and not _user_decides():
        mallopt = ctypes.CDLL(None).mallopt
        # The first stops glibc from adapting both. One that it refuses changes nothing.
        mallopt(_MMAP_THRESHOLD, _LARGEST_IN_HEAP)
        mallopt(_TRIM_THRESHOLD, _KEPT)


def _user_decides() -> bool:
    """Whether the environment already sets something of glibc's allocator."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return "glibc.malloc." in tunables or any(name.startswith("MALLOC_") for name in os.environ)


# ---- cores and threads of BLAS


def share_of_cores(cores: Sequence[Set[int]], rank: int) -> int:
    """One rank's share of a host's cores: the ranks that may run on a core divide it.

    Args:
        cores: for each rank of the host, the cores it may run on.
        rank: the rank's index among them.
    """
    shares = (1 / sum(core in others for others in cores) for core in cores[rank])
    # The small addend is for sums such as 1/3 + 1/3 + 1/3.
    return max(1, int(sum(shares) + 1e-9))


def limit_blas_threads(count: int) -> None:
    """Lowers BLAS to `count` threads, unless the environment already sets a number."""
    variables = thread_variables(count)
    if not variables:
        return
    for library in ThreadpoolController().lib_controllers:
        # Only lowered: a library that uses fewer threads has its reasons.
        if library.user_api == "blas" and library.num_threads > count:
            library.set_num_threads(count)
    # For libraries that are loaded later: SciPy brings its own BLAS.
    os.environ.update(variables)


def thread_variables(count: int) -> dict[str, str]:
    """The variables that limit BLAS to `count` threads; none if the environment sets a number."""
    if any(os.environ.get(name) for name in _BLAS_VARIABLES):
        return {}
    return dict.fromkeys(_BLAS_VARIABLES, str(count))
