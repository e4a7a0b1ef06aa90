"""Many arrays in one flat message, grouped by dtype."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcstrat._core.types import Array
from hpcstrat._memory.intervals import ByteRange, ElementRange, round_up

GROUP_ALIGNMENT = 16
"""Groups and sections start at multiples of this many bytes, so that any dtype is aligned."""


class DtypeGroup(NamedTuple):
    """All elements of one dtype in a message."""

    dtype: np.dtype[Any]
    start: int  # the byte at which they start
    elements: int  # how many there are, with the gaps between arrays
    members: tuple[int, ...]  # the indices of the arrays of this dtype

    def of(self, message: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """These elements of a message, a flat view."""
        return _view(message, (self.elements,), self.dtype, self.start)


class Layout:
    """The place of each array in a message.

    Use `layout_of`, which returns the same object for equal arguments.

    Args:
        shapes: of the arrays.
        dtypes: of the arrays.
        alignment: each array starts at a multiple of this many bytes. Groups start at multiples of
            16, or of this if it is more.

    Attributes:
        nbytes: bytes of the message.
        groups: the message by dtype, in order of first appearance.
        starts: for each array, the byte at which it starts.
        sizes: for each array, its number of elements.
        alignment: as above.
    """

    def __init__(
        self,
        shapes: tuple[tuple[int, ...], ...],
        dtypes: tuple[np.dtype[Any], ...],
        alignment: int = 1,
    ) -> None:
        self.starts: list[int] = [0] * len(shapes)
        self.sizes: list[int] = [math.prod(shape) for shape in shapes]
        self.groups: list[DtypeGroup] = []
        end = 0
        # Grouped by dtype, so that one call reduces all arrays of a dtype.
        for dtype in dict.fromkeys(dtypes):
            start = end = round_up(end, max(alignment, GROUP_ALIGNMENT))
            members = tuple([i for i, other in enumerate(dtypes) if other == dtype])
            for i in members:
                # A group ends where its last element does: arrays without elements are in no gap.
                self.starts[i] = round_up(end, alignment) if self.sizes[i] else end
                end = self.starts[i] + self.sizes[i] * dtype.itemsize
            self.groups.append(DtypeGroup(dtype, start, (end - start) // dtype.itemsize, members))
        self.nbytes = end
        self.alignment = alignment
        self._entries = [*zip(shapes, dtypes, self.starts, strict=True)]  # see `_view`

    def bytes_of(self, i: int) -> ByteRange:
        """The bytes of an array in a message."""
        _, dtype, start = self._entries[i]
        return ElementRange(0, self.sizes[i]).bytes(dtype.itemsize).shift(start)

    def views(self, message: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        """The arrays of a message, as views of it."""
        return [_view(message, *entry) for entry in self._entries]

    def write(self, message: np.ndarray[Any, Any], arrays: Sequence[np.ndarray[Any, Any]]) -> None:
        """Copies the arrays into a message."""
        for entry, array in zip(self._entries, arrays, strict=True):
            _view(message, *entry)[...] = array


@functools.lru_cache(maxsize=1024)
def layout_of(
    shapes: tuple[tuple[int, ...], ...], dtypes: tuple[np.dtype[Any], ...], alignment: int = 1
) -> Layout:
    """The layout of arrays of these shapes and dtypes, each at a multiple of `alignment` bytes."""
    return Layout(shapes, dtypes, alignment)


def layout_of_arrays(arrays: Iterable[Array], alignment: int = 1) -> Layout:
    """The layout of arrays like these."""
    arrays = list(arrays)
    shapes, dtypes = [array.shape for array in arrays], [array.dtype for array in arrays]
    return layout_of(tuple(shapes), tuple(dtypes), alignment)


def _view(message: Any, shape: tuple[int, ...], dtype: np.dtype[Any], start: int) -> Any:
    """An array in a message of bytes, from byte `start` on."""
    # One call, at a third of the cost of slicing, viewing and reshaping.
    if type(message) is np.ndarray:
        return np.ndarray(shape, dtype, message, start)  # pyright: ignore[reportArgumentType]
    return message[start : start + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def layout_of_sections(sizes: Sequence[int]) -> Layout:
    """The layout of a message that consists of sections of these sizes, in bytes."""
    return layout_of(
        tuple([(size,) for size in sizes]), (np.dtype(np.uint8),) * len(sizes), GROUP_ALIGNMENT
    )
