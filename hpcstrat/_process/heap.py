"""Lets glibc keep the memory that a step frees, for the next step."""

from __future__ import annotations

import ctypes
import functools
import os
import platform

from hpcstrat._process import settings

# From glibc's malloc.h; the threshold for mmap is the largest that glibc takes.
_TRIM_THRESHOLD, _KEPT = -1, 1 << 30
_MMAP_THRESHOLD, _LARGEST_IN_HEAP = -3, 32 << 20


@functools.cache  # once a process: what the program sets later stays
def keep_freed_memory() -> None:
    """Lets glibc keep up to 1 GiB of freed memory; leaves other allocators and settings alone.

    Raises:
        ValueError: `HPCSTRAT_KEEP_MEMORY` is neither 0 nor 1.
    """
    # Otherwise glibc returns large arrays to the system at once, and the next step pays for their
    # pages again, which costs up to a third of a step.
    is_wanted = settings.is_on("HPCSTRAT_KEEP_MEMORY")
    if is_wanted and platform.libc_ver()[0] == "glibc" and not _user_decides():
        mallopt = ctypes.CDLL(None).mallopt
        # The first stops glibc from adapting both. One that it refuses changes nothing.
        mallopt(_MMAP_THRESHOLD, _LARGEST_IN_HEAP)
        mallopt(_TRIM_THRESHOLD, _KEPT)


def _user_decides() -> bool:
    """Whether the environment already sets something of glibc's allocator."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return "glibc.malloc." in tunables or any(name.startswith("MALLOC_") for name in os.environ)
