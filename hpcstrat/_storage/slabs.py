"""Memory for variables that cannot be reserved in one piece: on a GPU, or pinned on the host."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from hpcstrat import _gpu
from hpcstrat._communicators.base import Array
from hpcstrat._communicators.heap import Heap
from hpcstrat._storage.memory import Block, size_of

ALIGNMENT = 256
"""Bytes to whose multiples every variable starts, as matrix products want it."""
_SLAB = 1 << 24
_APART = 1 << 44  # so that no two slabs touch in the addresses that blocks have


class SlabMemory:
    """Slabs of memory of this process, in which variables made one after another lie in a row.

    A block's address is its slab's number times a constant plus its place in the slab.

    Args:
        allocate: makes a flat array of so many bytes, or raises `MemoryError`.
    """

    def __init__(self, allocate: Callable[[int], Array]) -> None:
        self._allocate = allocate
        self._slabs: list[Array] = []
        self._heaps: list[Heap] = []
        self._dead: deque[tuple[int, int]] = deque()  # a finalizer may run at any moment

    def place(self, shape: tuple[int, ...], dtype: np.dtype, number: int) -> Block:
        """A new block of this number, whose memory returns when it dies.

        Raises:
            MemoryError: there is not enough.
        """
        while self._dead:
            start, nbytes = self._dead.popleft()
            self._heaps[start // _APART].free(start, nbytes)
        nbytes = size_of(shape, dtype)
        start = self._find(nbytes)
        array = self.part(start, start + nbytes).view(dtype).reshape(shape)
        view = array.view()
        if isinstance(view, np.ndarray):
            view.flags.writeable = False  # CuPy has no such flag
        block = Block(array, view, start, start + nbytes, number)
        weakref.finalize(block, self._dead.append, (start, nbytes)).atexit = False
        return block

    def _find(self, nbytes: int) -> int:
        for heap in self._heaps:
            try:
                return heap.allocate(nbytes, ALIGNMENT)
            except MemoryError:  # not in this slab
                continue
        size = max(_SLAB, -(-nbytes // _SLAB) * _SLAB)
        self._slabs.append(self._allocate(size))
        start = len(self._heaps) * _APART
        self._heaps.append(Heap(start, start + size))
        return self._heaps[-1].allocate(nbytes, ALIGNMENT)

    def part(self, start: int, stop: int) -> Array:
        """The bytes between two addresses of one slab, a flat array."""
        base = start // _APART * _APART
        return self._slabs[start // _APART][start - base : stop - base]

    def has(self, array: Array) -> bool:
        """Whether an array, NumPy's or CuPy's, lies in this memory, by whatever way it came from there."""
        if not _gpu.is_on_gpu(array):
            return any(not _gpu.is_on_gpu(slab) and np.may_share_memory(slab, array) for slab in self._slabs)
        place = array.data.ptr
        return any(
            _gpu.is_on_gpu(slab) and slab.data.ptr <= place < slab.data.ptr + slab.nbytes for slab in self._slabs
        )


_by_stream: weakref.WeakKeyDictionary[_gpu.Stream, SlabMemory] = weakref.WeakKeyDictionary()


def gpu_memory(stream: _gpu.Stream) -> SlabMemory:
    """The memory for variables on a stream's GPU, the same for all strategies on this stream."""
    if stream not in _by_stream:
        xp, ordinal = stream.xp, stream.ordinal

        def allocate(nbytes: int) -> Array:
            with xp.cuda.Device(ordinal):
                # Not from CuPy's pool, which gives a block back to its stream at once: variables outlive streams.
                try:
                    memory = xp.cuda.Memory(nbytes)
                except xp.cuda.runtime.CUDARuntimeError:
                    xp.get_default_memory_pool().free_all_blocks()  # what the pool keeps for later is in the way
                    memory = _last_try(xp, nbytes, ordinal)
                slab = xp.ndarray((nbytes,), np.uint8, xp.cuda.MemoryPointer(memory, 0))
                slab.fill(0)
                return slab

        _by_stream[stream] = SlabMemory(allocate)
    return _by_stream[stream]


def _last_try(xp: Any, nbytes: int, ordinal: int) -> Any:
    try:
        return xp.cuda.Memory(nbytes)
    except xp.cuda.runtime.CUDARuntimeError as error:
        raise MemoryError(
            f"{nbytes:,} bytes cannot be had on GPU {ordinal}: {error}; make variables or batches smaller"
        ) from error


def host_memory(is_pinned: bool) -> SlabMemory:
    """Host memory for variables of this process, pinned where a GPU copies from it."""
    return SlabMemory(_gpu.pinned if is_pinned else lambda nbytes: np.empty(nbytes, np.uint8))
