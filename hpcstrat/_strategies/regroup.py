"""What replica functions return, on its way out of `run`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hpcstrat import _gpu, _nest
from hpcstrat._array_protocols import converted, copy_of, is_foreign
from hpcstrat._values import DistributedValues, PerReplica
from hpcstrat._variables import Variable

if TYPE_CHECKING:
    from hpcstrat._strategies.base import Strategy


def regroup(strategy: Strategy, result: Any) -> Any:
    """Each leaf of a replica's result as a distributed value, of which this process has its component.

    What lies in memory of variables, which changes, is copied.
    """
    if result is None:
        return None
    rank, size = strategy._communicator.rank, strategy._communicator.size
    leaves, structure = _nest.flatten(result)
    for i, leaf in enumerate(leaves):
        if leaf is None or isinstance(leaf, (Variable, DistributedValues)):
            continue
        if isinstance(leaf, np.ndarray) and not leaf.flags.writeable and leaf.base is not None:
            leaf = leaf.copy()  # it may be a variable's storage
        elif strategy._stream is not None and _gpu.is_on_gpu(leaf) and strategy._storage.has(leaf):
            leaf = leaf.copy()
        elif is_foreign(leaf) and _is_over_variables(strategy, leaf):
            leaf = copy_of(leaf)
        leaves[i] = leaf if size == 1 else PerReplica(leaf, rank, size)
    return structure.unflatten(leaves)


def _is_over_variables(strategy: Strategy, leaf: Any) -> bool:
    """Whether an array of another library lies in memory of variables."""
    try:
        array = converted("Strategy.run", leaf)
    except TypeError:  # it has no values in memory
        return False
    return strategy._storage.has(array) or strategy._replica_storage.has(array)
