"""Each rank's BLAS uses its share of the host's cores."""

from __future__ import annotations

import os
from collections.abc import Sequence, Set

from threadpoolctl import ThreadpoolController

_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


def share_of_cores(cores: Sequence[Set[int]], rank: int) -> int:
    """One rank's share of a host's cores: the ranks that may run on a core divide it.

    Args:
        cores: for each rank of the host, the cores it may run on.
        rank: the rank's index among them.
    """
    shares = (1 / sum(core in others for others in cores) for core in cores[rank])
    # The small addend is for sums such as 1/3 + 1/3 + 1/3.
    return max(1, int(sum(shares) + 1e-9))


def limit(count: int) -> None:
    """Lowers BLAS to `count` threads, unless the environment already sets a number."""
    if any(os.environ.get(name) for name in _VARIABLES):
        return
    for library in ThreadpoolController().lib_controllers:
        # Only lowered: a library that uses fewer threads has its reasons.
        if library.user_api == "blas" and library.num_threads > count:
            library.set_num_threads(count)
    # For libraries that are loaded later: SciPy brings its own BLAS.
    os.environ.update(dict.fromkeys(_VARIABLES, str(count)))
