"""How arrays travel in objects: as host arrays; each rank puts what was on a GPU on a device of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcstrat import _gpu, _nest
from hpcstrat._array_protocols import converted, is_foreign
from hpcstrat._values import DistributedValues, refuse


class _FromGpu:
    """Stands for an array that was on a GPU."""

    __slots__ = ("host",)

    def __init__(self, host: np.ndarray[Any, Any]) -> None:
        self.host = host


def to_send(call: str, nest: Any) -> Any:
    """`nest` with host copies of its arrays that are on the GPU, and other libraries' arrays as NumPy's.

    Raises:
        TypeError: an array has no values in memory, such as a sparse tensor, or a leaf is a distributed value.
    """

    def packed(leaf: Any) -> Any:
        if isinstance(leaf, DistributedValues):  # it would come as another replica's
            refuse(call)
        array = converted(call, leaf) if is_foreign(leaf) else leaf
        return _FromGpu(array.get()) if _gpu.is_on_gpu(array) else array

    return _nest.map_leaves(packed, nest)


def received(nest: Any, stream: _gpu.Stream | None) -> Any:
    """What `to_send` was given, with the arrays on this rank's device."""
    if stream is None:
        return _nest.map_leaves(lambda leaf: leaf.host if isinstance(leaf, _FromGpu) else leaf, nest)
    asarray = stream.xp.asarray
    return _nest.map_leaves(lambda leaf: asarray(leaf.host) if isinstance(leaf, _FromGpu) else leaf, nest)
