"""Variables' blocks, and what allocates them: ranges of a segment, or slabs of memory."""

from __future__ import annotations

import bisect
import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hpcstrat._core import gpu
from hpcstrat._core.types import Array, Bytes
from hpcstrat._memory.intervals import Interval, round_up
from hpcstrat._memory.segment import Segment, make_private_segment


class VariableId(NamedTuple):
    """A variable in the signature of a call; see `Block`."""

    name: str
    number: int
    storage: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class Block:
    """The memory of one variable, or of one slot of an optimizer.

    Attributes:
        array: the data; only storage writes it.
        view: the same data for readers; read-only if the array library can mark it so.
        memory: its bytes in its memory.
        number: creation index in its storage, from 1; equal on all ranks, as are the next two.
        storage: creation index of its storage, from 1.
        name: of the variable, in quotes, or of an optimizer's slot.
        copy: the block that `view` is from, where a rank reads a copy on its GPU; else `None`.
        checksum: of `array` after the last change that the storage knows of, where it checks;
            else `None`.
        interrupted_by: the call that an exception interrupted while it changed `array`, which is
            then deleted; else empty.
    """

    __slots__ = (
        "__weakref__",
        "array",
        "checksum",
        "copy",
        "interrupted_by",
        "memory",
        "name",
        "number",
        "storage",
        "view",
    )

    def __init__(self, array: Array, view: Array, memory: Interval) -> None:
        self.array: Array = array
        self.view: Array = view
        self.memory: Interval = memory
        self.number: int = 0
        self.storage: int = 0
        self.name: str = ""
        self.copy: Block | None = None
        self.checksum: int | None = None
        self.interrupted_by: str = ""

    def identity(self) -> VariableId:
        """What must be equal on all ranks for this to be the same variable."""
        return VariableId(self.name, self.number, self.storage, self.array.dtype, self.array.shape)

    # The attributes are deleted rather than set to None, so that every read raises and no reader
    # has to check a flag.
    def mark_interrupted(self, call: str) -> None:
        """Forbids reading the elements, which an exception in `call` left changed in part."""
        if not self.interrupted_by:
            self.interrupted_by = call
            del self.array, self.view

    def __getattr__(self, name: str) -> Any:
        # Called only for a missing attribute, so normal reads cost nothing.
        if name in ("array", "view") and self.interrupted_by:
            raise RuntimeError(
                f"Variable: an exception interrupted {self.interrupted_by}, which was changing it, "
                "so its value may be partly old and partly new; make it again, and restore a "
                "checkpoint. To save when a signal comes, use checkpoint.PreemptionHandler"
            )
        raise AttributeError(f"a block has no {name}")


def block_of(part: Array, start: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Block:
    """A block over some bytes, which are from `start` on in their memory."""
    # A program must not write to a variable behind the library's back. On the host NumPy forbids
    # it; CuPy has no such flag.
    readable = part if gpu.is_on_gpu(part) else read_only(part)
    # Two arrays over the same bytes: storage writes through one, and programs get the other.
    array, view = [memory.view(dtype).reshape(shape) for memory in (part, readable)]
    return Block(array, view, Interval(start, start + part.size))


def read_only(part: Bytes) -> Bytes:
    """An array over the same bytes that NumPy lets no program make writable again."""
    # Over a read-only buffer: `setflags(write=True)` could undo a flag.
    return np.asarray(part.data.toreadonly())


def size_of(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Bytes of an array."""
    # In 64 bits, whatever NumPy's default integer is.
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


ALIGNMENT = 256
"""Every variable starts at a multiple of this many bytes, which suits matrix products."""
_SMALLEST, _LARGEST = 1 << 26, 1 << 30  # of a slab; a single larger variable gets a larger one
_UNIT = 1 << 21  # a slab's size is a multiple of this
SLAB_ADDRESS_STRIDE = 1 << 44  # no two slabs are adjacent in the addresses of blocks


class RangeAllocator:
    """Hands out ranges of bytes.

    The same calls in the same order return the same ranges, so ranks need not communicate.

    A range follows the previous one where there is room; holes are filled once the end is reached.
    Variables that are made together are therefore contiguous, and are updated as one range.

    Args:
        start: the first byte to hand out.
        stop: the byte after the last.
        hint: the end of the error message when memory runs out.
    """

    def __init__(self, start: int, stop: int, hint: str = "") -> None:
        self._hint = hint
        self._free: list[tuple[int, int]] = [(start, stop)]
        self._last = start  # the end of the latest range

    def allocate(self, nbytes: int, alignment: int) -> int:
        """The first byte of a free range of this size, or `MemoryError`."""
        # Next fit: it continues after the latest range. A first fit would scatter variables that
        # are made together over old holes, each of them a separate range in every later update.
        first = bisect.bisect(self._free, (self._last, 0))
        if first and self._free[first - 1][1] > self._last:  # that range was freed
            first -= 1
        for i in (*range(first, len(self._free)), *range(first)):
            start, stop = self._free[i]
            aligned = round_up(start, alignment)
            if aligned + nbytes <= stop:
                # What alignment skips stays free: a smaller block may fit.
                rest = [(start, aligned), (aligned + nbytes, stop)]
                self._free[i : i + 1] = [(a, b) for a, b in rest if a < b]
                self._last = aligned + nbytes
                return aligned
        raise MemoryError(
            f"cannot allocate {nbytes:,} contiguous bytes: the memory that was reserved for "
            "variables is full or fragmented; make variables smaller, or start fewer ranks per "
            f"host{self._hint}"
        )

    def free(self, start: int, nbytes: int) -> tuple[int, int]:
        """Frees a range; returns the whole free range that it is now part of."""
        stop = start + nbytes
        # Neighbours are merged at once, so that free memory does not fall into useless pieces.
        i = bisect.bisect(self._free, (start, stop))
        if i < len(self._free) and self._free[i][0] == stop:
            stop = self._free.pop(i)[1]
        if i > 0 and self._free[i - 1][1] == start:
            start = self._free.pop(i - 1)[0]
            i -= 1
        if start < stop:
            self._free.insert(i, (start, stop))
        return start, stop


class PrivateMemory:
    """Memory of this process only."""

    def __init__(self) -> None:
        self.segment: Segment = make_private_segment()
        self.part: Callable[[int, int], Bytes] = self.segment.part
        self.has: Callable[[Array], bool] = self.segment.has
        self._heap = RangeAllocator(0, self.segment.size, self.segment.hint)
        # Filled by finalizers, which may run at any moment, also inside this class.
        self._dead: deque[Interval] = deque()
        self._lock = threading.Lock()

    def new_block(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Block:
        """A new block, whose memory is freed when it dies, or `MemoryError`."""
        with self._lock:
            # Finalizers only leave a note, as they may run at any line; memory is freed here, under
            # the lock.
            while self._dead:
                dead = self._dead.popleft()
                self.segment.release(*self._heap.free(dead.start, dead.size))
            nbytes = size_of(shape, dtype)
            start = self._heap.allocate(nbytes, dtype.itemsize)
            try:
                self.segment.commit(start, start + nbytes)
            except MemoryError:
                self._heap.free(start, nbytes)
                raise
        block = block_of(self.part(start, start + nbytes), start, shape, dtype)
        _note_death(block, self._dead)
        return block


def _note_death(block: Block, dead: deque[Interval]) -> None:
    # At exit nothing is freed: the system takes the process's memory as a whole, and other threads
    # may still read it.
    weakref.finalize(block, dead.append, block.memory).atexit = False


@functools.cache
def private_memory() -> PrivateMemory:
    """The private memory of this process."""
    return PrivateMemory()


@dataclass(slots=True)
class _Slab:
    array: Array
    heap: RangeAllocator
    blocks: int = 0  # how many are in it


class SlabAllocator:
    """Slabs of memory of this process, in which variables made one after another are contiguous.

    Each slab is as large as all earlier ones together, within limits, and has room for two
    variables like its first, so that a network needs few. A block's address is its slab's number
    times a constant plus its offset in the slab.

    Args:
        allocate: makes a flat array of at least this many bytes, or raises `MemoryError`.
    """

    def __init__(self, allocate: Callable[[int], Array]) -> None:
        self._allocate = allocate
        self._slabs: dict[int, _Slab] = {}
        self._made = 0
        self._dead: deque[Interval] = deque()  # filled by finalizers, at any moment

    def new_block(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Block:
        """A new block, whose memory is freed when it dies, or `MemoryError`."""
        while self._dead:
            dead = self._dead.popleft()
            slab = self._slabs[dead.start // SLAB_ADDRESS_STRIDE]
            slab.heap.free(dead.start, dead.size)
            slab.blocks -= 1
        nbytes = size_of(shape, dtype)
        start = self._find(nbytes)
        self._slabs[start // SLAB_ADDRESS_STRIDE].blocks += 1
        block = block_of(self.part(start, start + nbytes), start, shape, dtype)
        _note_death(block, self._dead)
        return block

    def _find(self, nbytes: int) -> int:
        # Newest first: in an older slab's hole a block would be contiguous with nothing.
        for slab in reversed(self._slabs.values()):
            try:
                return slab.heap.allocate(nbytes, ALIGNMENT)
            except MemoryError:  # not in this slab
                continue
        # Unused slabs are freed before another is allocated.
        self._slabs = {number: slab for number, slab in self._slabs.items() if slab.blocks}
        array, start = self._new_slab(nbytes), self._made * SLAB_ADDRESS_STRIDE
        slab = _Slab(array, RangeAllocator(start, start + array.size))
        self._slabs[self._made] = slab
        self._made += 1
        return slab.heap.allocate(nbytes, ALIGNMENT)

    def _new_slab(self, nbytes: int) -> Array:
        least = max(round_up(nbytes, _UNIT), _UNIT)
        total = sum(slab.array.size for slab in self._slabs.values())
        size = min(max(total, _SMALLEST, 2 * least), _LARGEST)
        # Room for further variables is optional; this variable must fit.
        if size > least:
            try:
                return self._allocate(size)
            except MemoryError:  # then without that room
                pass
        return self._allocate(least)

    def part(self, start: int, stop: int, /) -> Array:
        """The bytes between two addresses of one slab, as a flat array."""
        base = start // SLAB_ADDRESS_STRIDE * SLAB_ADDRESS_STRIDE
        return self._slabs[start // SLAB_ADDRESS_STRIDE].array[start - base : stop - base]

    def has(self, array: Array) -> bool:
        """Whether a NumPy or CuPy array is in this memory, also as a view or another library's."""
        # By address: views, reshaped arrays and those of other libraries over the same memory have
        # no reference to a slab.
        is_here = gpu.is_on_gpu(array)
        slabs = [s.array for s in self._slabs.values() if gpu.is_on_gpu(s.array) is is_here]
        if not is_here:
            return any(np.may_share_memory(slab, array) for slab in slabs)
        address = array.data.ptr
        return any(slab.data.ptr <= address < slab.data.ptr + slab.nbytes for slab in slabs)


# Strategies on one stream share slabs, so that a second strategy does not need another slab of the
# smallest size. Weak, so that the memory is freed with the stream.
_by_stream: weakref.WeakKeyDictionary[gpu.Stream, SlabAllocator] = weakref.WeakKeyDictionary()


def gpu_memory(stream: gpu.Stream) -> SlabAllocator:
    """The memory for variables on a stream's GPU, the same for all strategies on this stream."""
    if stream not in _by_stream:
        allocate = functools.partial(_allocate_on_gpu, stream.xp, stream.ordinal)
        _by_stream[stream] = SlabAllocator(allocate)
    return _by_stream[stream]


def _allocate_on_gpu(xp: Any, ordinal: int, nbytes: int) -> Array:
    with xp.cuda.Device(ordinal):
        slab = xp.ndarray((nbytes,), np.uint8, _memory_on_gpu(xp, ordinal, nbytes))
        slab.fill(0)
        return slab


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


def host_memory() -> SlabAllocator:
    """Pinned host memory for variables of this process, from which a GPU copies."""
    # CuPy allocates powers of two only; the slab takes all of it, or the rest would be lost.
    return SlabAllocator(lambda nbytes: gpu.allocate_pinned(1 << (nbytes - 1).bit_length()))
