"""Memory that a step frees stays with the process, for the next step's arrays."""

from __future__ import annotations

import ctypes
import functools
import os
import platform

from hpcstrat._process import settings

# From glibc's malloc.h; the threshold for mmap is the largest that glibc takes.
_TRIM_THRESHOLD, _KEPT = -1, 1 << 30
_MMAP_THRESHOLD, _LARGEST_IN_HEAP = -3, 32 << 20


def keep_freed_memory() -> None:
    """Lets glibc keep up to 1 GiB of freed memory; leaves other allocators and settings alone.

    Raises:
        ValueError: `HPCSTRAT_KEEP_MEMORY` is neither 0 nor 1.
    """
    # Otherwise glibc returns large arrays to the system at once, and the next step pays for their
    # pages again, which costs up to a third of a step.
    if settings.is_on("HPCSTRAT_KEEP_MEMORY", default=True):
        _set_thresholds()


@functools.cache  # once a process: what the program sets later stays
def _set_thresholds() -> None:
    if platform.libc_ver()[0] != "glibc" or _user_decides():
        return
    mallopt = ctypes.CDLL(None).mallopt
    # The first stops glibc from adapting both. One that it refuses changes nothing.
    mallopt(_MMAP_THRESHOLD, _LARGEST_IN_HEAP)
    mallopt(_TRIM_THRESHOLD, _KEPT)


def _user_decides() -> bool:
    """Whether the environment already sets something of glibc's allocator."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return "glibc.malloc." in tunables or any(name.startswith("MALLOC_") for name in os.environ)
