"""Blocks of a segment, each of which holds the numbers of one variable."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np

from hpcstrat._communicators.base import Array, Bytes
from hpcstrat._communicators.heap import Heap
from hpcstrat._communicators.records import Held
from hpcstrat._communicators.segment import Segment, private_segment


class Block:
    """The numbers of one variable, in place.

    Attributes:
        array: they, to be written by storage only.
        view: they, for everyone else: read-only where NumPy can say so.
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

    def held(self) -> Held:
        """The variable as the ranks compare it."""
        return Held(self.name, self.number, self.storage, self.array.dtype, self.array.shape)

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


class PrivateMemory:
    """Memory of this process alone."""

    def __init__(self) -> None:
        self.segment = private_segment()
        self._heap = Heap(0, self.segment.size)
        self._dead: deque[tuple[int, int]] = deque()  # a finalizer may run at any moment, also inside this class
        self._lock = threading.Lock()

    def place(self, shape: tuple[int, ...], dtype: np.dtype[Any], number: int) -> Block:
        """A new block of this number, whose memory returns when it dies.

        Raises:
            MemoryError: there is not enough.
        """
        with self._lock:
            while self._dead:
                start, stop = self._dead.popleft()
                self.segment.release(*self._heap.free(start, stop - start))
            nbytes = size_of(shape, dtype)
            start = self._heap.allocate(nbytes, dtype.itemsize)
            try:
                self.segment.commit(start, start + nbytes)
            except MemoryError:
                self._heap.free(start, nbytes)
                raise
        block = block_of(self.segment, start, shape, dtype, number)
        weakref.finalize(block, self._dead.append, (block.start, block.stop)).atexit = False
        return block


@functools.cache
def private_memory() -> PrivateMemory:
    """The private memory of this process."""
    return PrivateMemory()


def size_of(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Bytes of an array."""
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
