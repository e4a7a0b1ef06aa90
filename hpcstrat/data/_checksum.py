"""Checksums of elements and arrays, with which ranks detect that their data differ."""

from __future__ import annotations

import math
import mmap
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcstrat._core import nests
from hpcstrat._core.call_name import current_call, join_by_rank
from hpcstrat._core.types import ReplicaMismatchError
from hpcstrat.data import _elements

# A sample must be cheap compared with a first epoch, and yet show a shuffle, a cast or an offset.
_SAMPLE_ROWS = 64, 1024  # minimum and maximum
_SAMPLE_BYTES = 1 << 16  # approximately
_ROW_ELEMENTS = 512  # per row of a sample
_FILE_SAMPLE = 4, 8  # rows, and elements per row, of a file: each may cost a disk read
_CHUNK_BYTES = 1 << 20  # keeps the copy of a non-contiguous array small


class PipelineChecksum:
    """The running checksum of one pass over a pipeline.

    Args:
        is_on: whether elements are added at all.
        every: whether all elements are added, rather than only the first few.

    Attributes:
        value: the checksum so far.
    """

    __slots__ = ("_every", "_is_on", "value")

    def __init__(self, is_on: bool = False, every: bool = False) -> None:
        self._is_on = is_on
        self._every = every
        self.value: int = 0

    def fresh(self) -> PipelineChecksum:
        """A checksum with the same settings to which nothing has been added."""
        return PipelineChecksum(self._is_on, self._every)

    def takes(self, number: int, first: int) -> bool:
        """Whether to add element `number` of a source; always, if on, for the first `first`."""
        return self._is_on and (self._every or number < first)

    def add_text(self, text: str) -> None:
        """Adds a text."""
        self.value = zlib.crc32(text.encode(), self.value)

    def add(self, element: Any) -> None:
        """Adds `element`, a nest of host arrays: its structure, shapes, dtypes and contents."""
        leaves, structure = _elements.flatten(element)
        self.value = zlib.crc32(nests.describe(structure).encode(), self.value)
        for leaf in leaves:
            self.value = of_array(np.asarray(leaf), self.value)


def require_equal_arrays(of_worker: Sequence[tuple[int, list[tuple[str, int]]]]) -> None:
    """Compares the checksums of a worker's ranks, given as pairs of a rank and its arrays'."""
    ranks, contents = zip(*of_worker, strict=True)
    for checksums in zip(*contents, strict=True):
        if len(set(checksums)) > 1:
            seen = join_by_rank(
                (rank, f"{checksum:08x}")
                for rank, (_, checksum) in zip(ranks, checksums, strict=True)
            )
            raise ReplicaMismatchError(
                f"{current_call()}: the ranks have different arrays in {checksums[0][0]}, with "
                f"checksums {seen}. Every rank must have the same data in the same order; each "
                "replica then gets its share. Draw, shuffle and split with a seed that all ranks "
                "share, such as np.random.default_rng(0) or train_test_split(..., random_state=0), "
                "or send rank 0's arrays to all: hs.broadcast_object(arrays)"
            )


def of_array(array: np.ndarray[Any, Any], value: int = 0) -> int:
    """The checksum `value`, continued with the shape, dtype and contents of a host array.

    It compares bytes, so NaNs can be equal. Python objects in the array are skipped: their
    addresses differ between ranks.
    """
    value = zlib.crc32(f"{array.dtype} {array.shape}".encode(), value)
    if array.nbytes <= _CHUNK_BYTES or array.ndim == 0:
        return _of_contents(array, value)
    rows = max(1, _CHUNK_BYTES * len(array) // array.nbytes)
    for start in range(0, len(array), rows):
        value = _of_contents(array[start : start + rows], value)
    return value


def of_arrays(arrays: Sequence[Any], every: bool) -> int:
    """One checksum of several arrays with dimensions.

    It covers samples; if `every`, the whole of each array that is in memory.
    """
    value = 0
    for array in arrays:
        whole = every and isinstance(array, np.ndarray) and not _is_memory_map(array)
        value = of_array(array, value) if whole else of_sample(array, value)
    return value


def of_sample(array: Any, value: int = 0) -> int:
    """As `of_array`, but of rows spread from the first to the last; the array must have dimensions.

    The sample has many rows and a CRC depends on their order, so a reshuffle is noticed even if
    most rows are equal. The sample of a file (a memory map or a `StoredArray`) is small.
    """
    if not isinstance(array, np.ndarray):
        size = math.prod(array.shape[1:])
        rows, columns = map(_spread, (array.shape[0], size), _FILE_SAMPLE)
        sample = array.elements((rows[:, np.newaxis] * size + columns).ravel())
        return of_array(sample, zlib.crc32(str(array.shape).encode(), value))
    if array.size == 0:
        return of_array(array, value)
    shape, row_bytes = array.shape, array.nbytes // len(array)
    rows, elements = (
        min(_SAMPLE_ROWS[1], max(_SAMPLE_ROWS[0], _SAMPLE_BYTES // max(1, row_bytes))),
        _ROW_ELEMENTS,
    )
    if _is_memory_map(array):
        rows, elements = _FILE_SAMPLE
    indices, size = _spread(len(array), rows), math.prod(shape[1:])
    if size <= elements:
        sample = array[indices]
    else:
        sample = array[
            (indices[:, np.newaxis], *np.unravel_index(_spread(size, elements), shape[1:]))
        ]
    return of_array(sample, zlib.crc32(str(shape).encode(), value))


def _spread(size: int, count: int) -> npt.NDArray[np.int64]:
    """Up to `count` distinct, evenly spread indices below `size`, with the first and the last."""
    count = min(size, count)
    return np.arange(count) * (size - 1) // max(1, count - 1)


def _of_contents(array: np.ndarray[Any, Any], value: int) -> int:
    dtype = array.dtype
    if dtype.names is not None:  # padding between the fields is undefined
        for name in dtype.names:
            value = _of_contents(array[name], value)
        return value
    if dtype.kind == "O":
        return value
    # Long double has undefined padding; variable-length strings are stored elsewhere.
    if dtype.char in "gGT":
        return zlib.crc32(repr(array.tolist()).encode(), value)
    return zlib.crc32(array.tobytes(), value)


def _is_memory_map(array: Any) -> bool:
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(array, mmap.mmap)
