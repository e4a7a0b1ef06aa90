"""How arrays of a GPU travel in objects: as host arrays, which each rank puts on a device of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcstrat import _gpu, _nest


class _FromGpu:
    """Stands for an array that was on a GPU."""

    __slots__ = ("host",)

    def __init__(self, host: np.ndarray[Any, Any]) -> None:
        self.host = host


def pack(nest: Any) -> Any:
    """`nest` with host copies of its arrays that are on the GPU."""
    return _nest.map_leaves(lambda leaf: _FromGpu(leaf.get()) if _gpu.is_on_gpu(leaf) else leaf, nest)


def unpack(nest: Any, stream: _gpu.Stream | None) -> Any:
    """What `pack` was given, with the arrays on this rank's device."""
    if stream is None:
        return _nest.map_leaves(lambda leaf: leaf.host if isinstance(leaf, _FromGpu) else leaf, nest)
    asarray = stream.xp.asarray
    return _nest.map_leaves(lambda leaf: asarray(leaf.host) if isinstance(leaf, _FromGpu) else leaf, nest)
