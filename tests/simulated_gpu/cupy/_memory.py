"""Device memory: blocks with a history of accesses, and a pool that reuses them at once."""

import bisect
import contextlib
import os
import threading
import weakref

import numpy as np

from . import _checker, _faults, _streams

ALIGNMENT = 512
_POISON = 0xFF  # NaN in every float, -1 or the largest in integers

_starts: "list[int]" = []
_blocks: "list[Block]" = []


class Block:
    """Memory of a GPU, as CUDA allocates it; `is_free` says that it is back in the pool."""

    def __init__(self, size, device):
        whole = np.empty(size + ALIGNMENT, np.uint8)
        start = -whole.ctypes.data % ALIGNMENT
        self.buffer = whole[start : start + size]
        self.ptr = self.buffer.ctypes.data
        self.size = size
        self.device = device
        self.history = _checker.History()
        self.is_free = False
        place = bisect.bisect(_starts, self.ptr)
        _starts.insert(place, self.ptr)
        _blocks.insert(place, self)

    def forget(self):
        """Returns it to CUDA."""
        if bisect is None:  # Python is at its end
            return
        place = bisect.bisect(_starts, self.ptr) - 1
        assert _blocks[place] is self
        del _starts[place], _blocks[place]


def block_at(address):
    """The block that contains an address, or None."""
    place = bisect.bisect(_starts, address) - 1
    if place >= 0 and address < _starts[place] + _blocks[place].size:
        return _blocks[place]
    return None


CAPACITY = int(os.environ.get("SIMULATED_GPU_MEMORY", "4")) << 30
"""Bytes of each GPU."""


def used(device):
    """Bytes of a GPU that are in use or in the pool."""
    return sum(block.size for block in list(_blocks) if block.device == device)


def _allocated(size, device):

    is_full = size > CAPACITY >> 8 and size > CAPACITY - used(device)
    if is_full or _faults.value("out-of-memory", "allocations", lasts=True) is not None:
        raise _faults.CUDARuntimeError(2)
    return Block(size, device)


def span():
    """The range of addresses that contains all blocks."""
    return (_starts[0], _starts[-1] + _blocks[-1].size) if _starts else (0, 0)


class Memory:
    """CuPy's: memory from `cudaMalloc`."""

    def __init__(self, size):
        _faults.counted["allocations"] += 1
        self.size = size
        self.device_id = _streams.state().device
        self.block = _allocated(max(size, 1), self.device_id)
        self.block.buffer.fill(_POISON)

    @property
    def ptr(self):
        return self.block.ptr

    @property
    def device(self):
        return _streams.Device(self.device_id)

    def __del__(self):
        if "block" in self.__dict__:
            self._give_back()

    def _give_back(self):
        self.block.forget()


class PooledMemory(Memory):
    """Memory from a pool: a block from the arena of the stream that was current."""

    def __init__(self, block, pool, arena, size):
        self.block, self._pool, self._arena, self.size = block, weakref.ref(pool), arena, size
        self.device_id = block.device

    def _give_back(self):
        if self._pool() is None:
            self.block.forget()
            return
        self.block.is_free = True
        self._arena.append(self.block)


class UnownedMemory:
    """CuPy's: memory that another object owns."""

    def __init__(self, ptr, size, owner, device_id=-1):
        block = block_at(ptr) if size else _EMPTY
        if block is None or block.is_free:
            raise _checker.report(
                f"the simulated GPU: {size:,} bytes at address {ptr:#x} are "
                f"{'not on a GPU' if block is None else 'free'}, and are used as device memory"
            )
        self.block, self.size, self.owner = block, size, owner
        self.ptr, self.device_id = ptr, block.device


class MemoryPointer(_faults.Partial):
    __slots__ = ("mem", "offset")

    def __init__(self, mem, offset):
        self.mem = mem
        self.offset = offset

    @property
    def ptr(self):
        return self.mem.ptr + self.offset

    @property
    def device_id(self):
        return self.mem.device_id

    @property
    def device(self):
        return _streams.Device(self.mem.device_id)

    def __add__(self, offset):
        return MemoryPointer(self.mem, self.offset + offset)

    def __int__(self):
        return self.ptr


class _EmptyBlock:
    """The block of arrays without elements: in CuPy they have no memory, and address 0."""

    buffer = np.empty(0, np.uint8)
    ptr = size = device = 0
    is_free = False


_EMPTY = _EmptyBlock()


class _EmptyMemory:
    ptr = size = 0

    def __init__(self, device):
        self.block = _EMPTY
        self.device_id = device


class OutOfMemoryError(MemoryError):
    """CuPy's."""


class MemoryPool(_faults.Partial):
    """CuPy's: freed blocks go to the arena of their stream; the last freed is reused first."""

    def __init__(self):
        self._arenas = {}

    def malloc(self, size):
        queue = _streams.current_queue()
        if not size:
            return MemoryPointer(_EmptyMemory(queue.device), 0)
        _faults.counted["allocations"] += 1
        arena = self._arenas.setdefault(queue.number, [])
        need = -(-size // ALIGNMENT) * ALIGNMENT
        block = self._found(arena, need)
        if block is None:
            block = self._made(need, queue.device)
        block.is_free = False
        if not queue.later:  # else earlier work may still use it, as on a GPU
            block.buffer.fill(_POISON)
        return MemoryPointer(PooledMemory(block, self, arena, need), 0)

    def _found(self, arena, need):
        if _faults.value("out-of-memory", "allocations", lasts=True) is not None:
            return None
        for i in range(len(arena) - 1, -1, -1):
            if need <= arena[i].size <= 4 * need + 4096:
                return arena.pop(i)
        return None

    def _made(self, need, device):
        try:
            return _allocated(need, device)
        except _faults.CUDARuntimeError as error:
            raise OutOfMemoryError(
                f"Out of memory allocating {need:,} bytes (allocated so far: unknown)."
            ) from error

    def free_all_blocks(self, stream=None):
        for arena in self._arenas.values():
            while arena:
                arena.pop().forget()

    def __del__(self):
        self.free_all_blocks()


pool = MemoryPool()
_thread = threading.local()


@contextlib.contextmanager
def using_allocator(allocator=None):
    before, _thread.allocator = getattr(_thread, "allocator", None), allocator
    try:
        yield
    finally:
        _thread.allocator = before


def allocate(size):
    return (getattr(_thread, "allocator", None) or pool.malloc)(size)
