"""The bytes of arrays in storage, on a host or a GPU, part by part."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hpcstrat._agreement.agreement import Write
from hpcstrat._core import gpu
from hpcstrat._core.types import Array, Bytes
from hpcstrat._memory.intervals import ByteRange

# A model that fills the memory can still be saved and restored, because at most one part of it is
# in memory twice.
PART = 1 << 22
"""The most bytes of an array that are read or written at once."""


def flat(array: Array) -> Bytes:
    """The bytes of an array in storage, in place."""
    return array.reshape(-1).view(np.uint8)


def host_parts(array: Array) -> Iterator[Bytes]:
    """The bytes of an array in host memory, in parts and without copies."""
    whole = flat(array)
    for here in ByteRange(0, whole.size).split(PART):
        yield whole[here.slice]


def gpu_parts(stream: gpu.Stream, array: Array) -> Iterator[Bytes]:
    """The bytes of an array on a GPU, in host memory; each part is valid until the next."""
    whole: Array = flat(array)
    # From a GPU to ordinary memory, a copy goes through a small staging buffer of the driver.
    pinned = gpu.allocate_pinned(min(PART, whole.size))
    for here in ByteRange(0, whole.size).split(PART):
        with stream.current():
            whole[here.slice].get(out=pinned[: here.size])
        yield pinned[: here.size]


def writer_of(part: Bytes) -> Write:
    """Writes these bytes as a rank's message."""

    def write(message: Bytes) -> None:
        message[: part.size] = part

    return write


def fill(array: Array, value: Array) -> None:
    """Writes `value`, of the same dtype, to an array; each may be on host or GPU."""
    if not gpu.is_on_gpu(array):
        array[...] = gpu.to_host(value)
    elif gpu.is_on_gpu(value):
        array[...] = value
    else:
        array.set(np.ascontiguousarray(value).reshape(array.shape))
