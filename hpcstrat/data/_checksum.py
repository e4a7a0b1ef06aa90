"""A checksum of what the user's code yields, by which ranks find out that they do not have the same elements."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from hpcstrat import _nest


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
        form = (_nest.describe(structure), [(np.shape(leaf), leaf.dtype.str) for leaf in leaves])
        self.value = zlib.crc32(repr(form).encode(), self.value)
        for leaf in leaves:
            self.value = zlib.crc32(leaf.tobytes(), self.value)
