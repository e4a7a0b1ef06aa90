"""BLAS threads: each rank takes its share of its host's cores."""

from __future__ import annotations

import os
from collections.abc import Sequence

from threadpoolctl import ThreadpoolController

_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


def cores() -> int:
    """The cores that this process may run on, as a bit mask."""
    return sum(1 << core for core in os.sched_getaffinity(0))


def share(masks: Sequence[int], rank: int) -> int:
    """How many of a host's cores are one rank's, where each core is shared by the ranks that may run on it.

    Args:
        masks: for each rank of the host, the cores it may run on.
        rank: the rank among them.
    """
    own = [core for core in range(masks[rank].bit_length()) if masks[rank] >> core & 1]
    # The small addend is for sums such as 1/3 + 1/3 + 1/3.
    return max(1, int(sum(1 / sum(mask >> core & 1 for mask in masks) for core in own) + 1e-9))


def limit_threads(count: int) -> None:
    """Lowers BLAS to `count` threads, unless the user's environment says how many there are to be."""
    if any(os.environ.get(name) for name in _VARIABLES):
        return
    for library in ThreadpoolController().lib_controllers:
        if library.user_api == "blas" and library.num_threads > count:
            library.set_num_threads(count)
    for name in _VARIABLES:  # for libraries that are loaded later: SciPy brings a BLAS of its own
        os.environ[name] = str(count)
