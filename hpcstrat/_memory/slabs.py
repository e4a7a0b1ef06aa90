"""Slabs: large pieces of memory in which blocks lie one after another.

Memory only grows: a slab is filled from its start, and nothing in it is used again. It is freed as
a whole, with the last block and the last view of it. So the same blocks in the same order have the
same places on all ranks, whenever their garbage is collected, and blocks that are made together are
contiguous: an update goes through them as one run.

The address of a byte is its slab's number times a constant, plus its place in the slab.
"""

from __future__ import annotations

import itertools
import mmap
import threading
import weakref
from collections.abc import Callable
from typing import Any, final

import numpy as np

from hpcstrat._core import gpu
from hpcstrat._core.types import Array, Bytes
from hpcstrat._memory.blocks import Block, size_of
from hpcstrat._memory.host_limits import check_available
from hpcstrat._memory.intervals import ByteRange, round_up

GPU_ALIGNMENT = 256
"""On a GPU every block starts at a multiple of this many bytes, which suits matrix products."""
_STRIDE = 1 << 44  # no two slabs are adjacent in addresses
_UNIT = 1 << 16  # a slab's size is a multiple of this

_numbers = itertools.count()
_alive: weakref.WeakValueDictionary[int, Slab] = weakref.WeakValueDictionary()


@final
class Slab:
    """A piece of memory.

    Args:
        array: its bytes.
        commit: backs some of them with memory, where this is done block by block, or raises
            `MemoryError`.
    """

    def __init__(self, array: Array, commit: Callable[[int, int], None] | None = None) -> None:
        self.array: Array = array
        self.commit: Callable[[int, int], None] | None = commit
        self.address: int = next(_numbers) * _STRIDE
        _alive[self.address] = self


def part(start: int, stop: int, /) -> Array:
    """The bytes between two addresses of one slab, as a flat array."""
    base = start // _STRIDE * _STRIDE
    return _alive[base].array[start - base : stop - base]


def holds(array: Array) -> bool:
    """Whether a NumPy or CuPy array is in the memory of blocks, also as another library's view."""
    # By address: views, reshaped arrays and those of other libraries over the same memory have no
    # reference to a slab.
    is_here = gpu.is_on_gpu(array)
    # A list at once: another thread may make a slab meanwhile.
    alive = [slab for found in _alive.valuerefs() if (slab := found()) is not None]
    slabs = [slab.array for slab in alive if gpu.is_on_gpu(slab.array) is is_here]
    if not is_here:
        return any(np.may_share_memory(slab, array) for slab in slabs)
    address = array.data.ptr
    return any(slab.data.ptr <= address < slab.data.ptr + slab.nbytes for slab in slabs)


@final
class Slabs:
    """Makes blocks.

    Each new slab is as large as all others that are there, or as a share of these, within limits,
    and has room for two blocks like its first, so that a network needs few. A block of more than
    half the limit has a slab of its own.

    Args:
        allocate: makes a slab; given the bytes that it must have, and those that it should have,
            which may differ between ranks. Raises `MemoryError` if it cannot.
        smallest: bytes of the first slab.
        largest: bytes of a slab of several blocks.
        share: the share is one part in so many.
        alignment: every block starts at a multiple of this many bytes.
    """

    def __init__(
        self,
        allocate: Callable[[int, int], Slab],
        smallest: int = 1 << 20,
        largest: int = 1 << 30,
        share: int = 1,
        alignment: int = 1,
    ) -> None:
        self._allocate = allocate
        self._smallest, self._largest, self._share = smallest, largest, share
        self._alignment = alignment
        self._slab: Slab | None = None  # the only one that is not full
        self._end = 0
        self._made: weakref.WeakSet[Slab] = weakref.WeakSet()
        self._lock = threading.Lock()  # several threads make variables outside every scope

    def new_block(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Block:
        """A new block, whose bytes may be anything, or `MemoryError`."""
        nbytes = size_of(shape, dtype)
        with self._lock:
            slab, start = self._place(nbytes, max(self._alignment, dtype.itemsize))
        if slab.commit is not None:
            slab.commit(start, start + nbytes)
        here = ByteRange(start, start + nbytes)
        return Block(slab.array[here.slice], here.shift(slab.address), slab, shape, dtype)

    def _place(self, nbytes: int, alignment: int) -> tuple[Slab, int]:
        """The slab of a block, and the byte at which it starts there."""
        start = round_up(self._end, alignment)
        if self._slab is None or start + nbytes > self._slab.array.size:
            least = max(round_up(nbytes, _UNIT), _UNIT)
            if 2 * least > self._largest:
                return self._allocate(least, least), 0
            # Only what is there: a loop that drops what it makes gets no larger ones.
            total = sum(slab.array.size for slab in self._made)
            wanted = max(total // self._share, self._smallest, 2 * least)
            wanted = round_up(min(wanted, self._largest), _UNIT)
            self._slab, start = self._allocate(least, wanted), 0
            self._made.add(self._slab)
        self._end = start + nbytes
        return self._slab, start


def allocate_private(least: int, wanted: int) -> Slab:
    """A slab of this process's memory, which gets pages as it is written."""
    check_available(least)
    try:
        array = _array_of_pages(wanted)
    except MemoryError:  # of addresses, which `ulimit -v` limits
        array = _array_of_pages(least)
    return Slab(array, lambda start, stop: check_available(stop - start))


def _array_of_pages(nbytes: int) -> Bytes:
    # NumPy's own arrays start 16 bytes into a cache line, which costs matrix products time.
    array = np.empty(nbytes + mmap.PAGESIZE, np.uint8)
    start = -array.ctypes.data % mmap.PAGESIZE
    return array[start : start + nbytes]


def allocate_on_gpu(stream: gpu.Stream, least: int, wanted: int) -> Slab:
    """A slab on a stream's GPU."""
    try:
        return Slab(_array_on_gpu(stream, wanted))
    except MemoryError:
        if wanted == least:
            raise
    return Slab(_array_on_gpu(stream, least))


def _array_on_gpu(stream: gpu.Stream, nbytes: int) -> Bytes:
    xp, ordinal = stream.xp, stream.ordinal
    with xp.cuda.Device(ordinal):
        array = xp.ndarray((nbytes,), np.uint8, _memory_on_gpu(xp, ordinal, nbytes))
        array.fill(0)
        return array


def _memory_on_gpu(xp: Any, ordinal: int, nbytes: int) -> Any:
    failure = xp.cuda.runtime.CUDARuntimeError
    for _ in range(2):
        # Not from CuPy's pool, which returns a block to its stream at once: variables outlive
        # streams.
        try:
            return xp.cuda.MemoryPointer(xp.cuda.Memory(nbytes), 0)
        except failure:
            xp.get_default_memory_pool().free_all_blocks()  # it may keep the memory for later
    # The program's allocator, such as a pool of RMM's, may have taken the whole GPU. It reuses
    # memory in the order of the stream that is current now, the storage's, just as a slab does.
    try:
        return xp.cuda.alloc(nbytes)
    except (MemoryError, failure) as error:
        raise MemoryError(
            f"cannot allocate {nbytes:,} bytes on GPU {ordinal}: {error}; make variables or "
            "batches smaller, or free what other libraries keep there: set "
            "XLA_PYTHON_CLIENT_PREALLOCATE=false for JAX, call torch.cuda.empty_cache() for "
            "PyTorch, make the pool of RMM smaller"
        ) from error
