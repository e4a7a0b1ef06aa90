"""How many arrays lie in one flat message: grouped by dtype, back to back."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_ALIGNMENT = 16


class Group(NamedTuple):
    """All elements of one dtype in a message.

    Attributes:
        dtype: their dtype.
        start: the byte where they begin.
        elements: how many they are.
        members: the indices of the arrays that they are of.
    """

    dtype: np.dtype[Any]
    start: int
    elements: int
    members: tuple[int, ...]

    def of(self, message: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """These elements of a message, a flat view."""
        return message[self.start : self.start + self.elements * self.dtype.itemsize].view(self.dtype)


class Layout:
    """Where each of some arrays lies in a message. Equal arguments give the same object: use `layout`.

    Args:
        shapes: of the arrays.
        dtypes: likewise.
        alignment: bytes to whose multiples each starts. Groups start at multiples of 16, or of this if it is more.

    Attributes:
        nbytes: bytes of the message.
        groups: the message by dtype, in order of first appearance.
        starts: for each array, the byte where it begins.
        sizes: for each array, its number of elements.
    """

    def __init__(
        self, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[np.dtype[Any], ...], alignment: int = 1
    ) -> None:
        self._entries: list[tuple[int, int, tuple[int, ...], np.dtype[Any]]] = [(0, 0, (), np.dtype(bool))] * len(
            shapes
        )
        self.groups: list[Group] = []
        end = 0
        for dtype in dict.fromkeys(dtypes):
            start = end = _up(end, max(alignment, _ALIGNMENT))
            members = tuple([i for i, other in enumerate(dtypes) if other == dtype])
            for i in members:
                begin = _up(end, alignment)
                end = begin + int(np.prod(shapes[i], dtype=np.int64)) * dtype.itemsize
                self._entries[i] = (begin, end, shapes[i], dtype)
            self.groups.append(Group(dtype, start, (end - start) // dtype.itemsize, members))
        self.nbytes = end
        self.starts: list[int] = [entry[0] for entry in self._entries]
        self.sizes: list[int] = [(b - a) // dtype.itemsize for a, b, _, dtype in self._entries]

    def views(self, message: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        """The arrays of a message of bytes, as views of it."""
        return [message[a:b].view(dtype).reshape(shape) for a, b, shape, dtype in self._entries]

    def write(self, message: np.ndarray[Any, Any], arrays: Sequence[np.ndarray[Any, Any]]) -> None:
        """Copies the arrays into a message."""
        for view, array in zip(self.views(message), arrays, strict=True):
            view[...] = array


@functools.lru_cache(maxsize=1024)
def layout(shapes: tuple[tuple[int, ...], ...], dtypes: tuple[np.dtype[Any], ...], alignment: int = 1) -> Layout:
    """The layout of arrays of these shapes and dtypes, each at a multiple of `alignment` bytes."""
    return Layout(shapes, dtypes, alignment)


def _up(place: int, alignment: int) -> int:
    return -(-place // alignment) * alignment
