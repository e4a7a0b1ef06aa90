"""Blocks of a segment, each of which holds the numbers of one variable."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hpcstrat._memory.segment import Segment
from hpcstrat._types import Array, Bytes


class VariableId(NamedTuple):
    """A variable among the facts of a call.

    Attributes:
        name: in quotes, as the user gave it.
        number: how many its storage had made, with it.
        storage: how many storages the ranks had made, with its own.
        dtype: its dtype.
        shape: its shape.
    """

    name: str
    number: int
    storage: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class Block:
    """The numbers of one variable, in place.

    Attributes:
        array: they, to be written by storage only.
        view: the same data for readers; read-only if the array library can mark it so.
        start: their first byte in the memory that they are in.
        stop: the byte after their last one.
        number: how many its storage had made, with it; equal on all ranks.
        storage: how many storages the ranks had made, with its own; likewise.
        name: of the variable, in quotes, or of an optimizer's slot.
        copy: the block of which `view` is, where a rank reads a copy on its GPU; else `None`.
        checksum: of `array` after the last change that the storage knows of, where it compares; else `None`.
        torn: the update that was broken off while it changed them; they are gone then. Empty as long as all is well.
    """

    __slots__ = (
        *("__weakref__", "array", "checksum", "copy", "name", "number"),
        *("start", "stop", "storage", "torn", "view"),
    )

    def __init__(self, array: Array, view: Array, start: int, stop: int, number: int) -> None:
        self.array: Array = array
        self.view: Array = view
        self.start: int = start
        self.stop: int = stop
        self.number: int = number
        self.copy: Block | None = None
        self.checksum: int | None = None
        self.torn: str = ""
        self.storage: int = 0
        self.name: str = ""

    def held(self) -> VariableId:
        """The variable as the ranks compare it."""
        return VariableId(self.name, self.number, self.storage, self.array.dtype, self.array.shape)

    def tear(self, call: str) -> None:
        """Takes the numbers away, which an exception in `call` left changed in part, so that nobody reads them."""
        if not self.torn:
            self.torn = call
            del self.array, self.view

    def __getattr__(self, name: str) -> Any:
        # Only for what is not there, so it costs a read nothing.
        if name in ("array", "view") and self.torn:
            raise RuntimeError(
                f"Variable: {self.torn}, which changed it, was broken off by an exception, and so its numbers may be "
                "partly old and partly new; make it again, and restore a checkpoint. To save when a signal comes, use "
                "checkpoint.PreemptionHandler"
            )
        raise AttributeError(f"a block has no {name}")


def block_of(segment: Segment, start: int, shape: tuple[int, ...], dtype: np.dtype[Any], number: int) -> Block:
    """The block at this byte of a segment."""
    stop = start + size_of(shape, dtype)
    part = segment.part(start, stop)
    array = part.view(dtype).reshape(shape)
    return Block(array, read_only(part).view(dtype).reshape(shape), start, stop, number)


def read_only(part: Bytes) -> Bytes:
    """An array over the same bytes that NumPy does not let anyone make writable again."""
    return np.asarray(part.data.toreadonly())


def size_of(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Bytes of an array."""
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
