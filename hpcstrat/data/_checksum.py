"""Checksums of elements and arrays, by which ranks find out that they do not have the same ones."""

from __future__ import annotations

import math
import mmap
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcstrat import _nest

_ROWS = 64, 1024  # of a sample, the fewest and the most
_BYTES = 1 << 16  # of a sample, about
_ROW = 512  # elements of each row in a sample
_OF_FILE = 4, 8  # rows and elements of each, where each may be a read from a disk
_PIECE = 1 << 20


class Checksum:
    """The checksum of one pass over a pipeline, which goes on from element to element.

    Args:
        is_on: whether anything is added.
        every: whether all elements are, and not only the first ones.

    Attributes:
        value: so far.
    """

    __slots__ = ("_every", "_is_on", "value")

    def __init__(self, is_on: bool = False, every: bool = False) -> None:
        self._is_on = is_on
        self._every = every
        self.value: int = 0

    def takes(self, number: int, first: int) -> bool:
        """Whether element `number` of a source is to be added, of which the `first` ones always are."""
        return self._is_on and (self._every or number < first)

    def add(self, element: Any) -> None:
        """Goes on with `element`, a nest of host arrays: its structure, shapes, dtypes and numbers."""
        leaves, structure = _nest.flatten(element)
        self.value = zlib.crc32(_nest.describe(structure).encode(), self.value)
        for leaf in leaves:
            self.value = of_array(np.asarray(leaf), self.value)


def of_array(array: np.ndarray[Any, Any], value: int = 0) -> int:
    """The checksum `value` gone on with the shape, dtype and numbers of an array in host memory.

    Equal bytes are equal, NaNs too. Python objects in the array do not count: other ranks have others.
    """
    value = zlib.crc32(f"{array.dtype} {array.shape}".encode(), value)
    if array.nbytes <= _PIECE or array.ndim == 0:
        return _of_contents(array, value)
    rows = max(1, _PIECE * len(array) // array.nbytes)
    for start in range(0, len(array), rows):
        value = _of_contents(array[start : start + rows], value)
    return value


def of_arrays(arrays: Sequence[np.ndarray[Any, Any]], every: bool) -> int:
    """One checksum of several arrays with dimensions: of samples, or where `every` of all of those in memory."""
    value = 0
    for array in arrays:
        value = of_array(array, value) if every and not _is_in_file(array) else of_sample(array, value)
    return value


def of_sample(array: np.ndarray[Any, Any], value: int = 0) -> int:
    """As `of_array` of an array with dimensions, but of some rows only: the first, the last and those between.

    They are as many, and told apart by position, so that another order of the rows is found even where most of them
    are the same. Of an array that lies in a file they are few.
    """
    if array.size == 0:
        return of_array(array, value)
    shape, row_bytes = array.shape, array.nbytes // len(array)
    rows, elements = min(_ROWS[1], max(_ROWS[0], _BYTES // max(1, row_bytes))), _ROW
    if _is_in_file(array):
        rows, elements = _OF_FILE
    places, size = _spread(len(array), rows), math.prod(shape[1:])
    if size <= elements:
        sample = array[places]
    else:
        sample = array[(places[:, np.newaxis], *np.unravel_index(_spread(size, elements), shape[1:]))]
    return of_array(sample, zlib.crc32(str(shape).encode(), value))


def _spread(size: int, count: int) -> npt.NDArray[np.int64]:
    """Up to `count` different indices of `size`, the first and the last among them."""
    count = min(size, count)
    return np.arange(count) * (size - 1) // max(1, count - 1)


def _of_contents(array: np.ndarray[Any, Any], value: int) -> int:
    dtype = array.dtype
    if dtype.names is not None:  # the bytes between the fields are anything
        for name in dtype.names:
            value = _of_contents(array[name], value)
        return value
    if dtype.kind == "O":
        return value
    if dtype.char in "gGT":  # long double, whose last bytes are anything, and NumPy's strings, which are elsewhere
        return zlib.crc32(repr(array.tolist()).encode(), value)
    return zlib.crc32(array.tobytes(), value)


def _is_in_file(array: Any) -> bool:
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(array, mmap.mmap)
