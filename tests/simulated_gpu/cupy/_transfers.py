"""Copies between host and GPU, and the guard of pinned memory while a copy is in flight."""

import bisect
import ctypes
import functools
import hashlib
import mmap
import pathlib
import signal
import weakref

import kernels_on_host
import numpy as np

from . import _checker, _faults, _memory, _streams

_starts: "list[int]" = []
_regions: "list[weakref.ref[PinnedMemoryPointer]]" = []
_under_way: "list[_Transfer]" = []


class PinnedMemoryPointer(mmap.mmap):
    """CuPy's: page-locked host memory."""

    ptr: int

    def size(self):
        return len(self)


def alloc_pinned_memory(size):
    _faults.counted["pinned"] += 1
    if size > _memory.CAPACITY or _faults.value("out-of-pinned", "pinned", lasts=True) is not None:
        raise _faults.CUDARuntimeError(2)
    made = PinnedMemoryPointer(-1, max(size, 1))
    made.ptr = np.frombuffer(made, np.uint8).ctypes.data
    place = bisect.bisect(_starts, made.ptr)
    _starts.insert(place, made.ptr)
    _regions.insert(place, weakref.ref(made, functools.partial(_forget, made.ptr)))
    return made


def _forget(start, gone):
    # By identity: Python unmaps memory before it says so, and another's may be at `start` by now.
    place = next(i for i, region in enumerate(_regions) if region is gone)
    del _starts[place], _regions[place]
    for transfer in [one for one in _under_way if one.start == start and one.memory() is None]:
        _under_way.remove(transfer)
        transfer.end_guard()
        if transfer.is_awaited():
            _checker.report_later(
                "the simulated GPU: pinned memory was given back before the host waited for "
                f"{transfer.describe()}, which uses it; keep it until then"
            )


def _pinned(array):
    """The pinned memory that contains a NumPy array, or None."""
    address = array.ctypes.data
    place = bisect.bisect(_starts, address) - 1
    region = _regions[place]() if place >= 0 else None
    return region if region is not None and address < region.ptr + len(region) else None


def is_pinned(array):
    """Whether a NumPy array has elements in pinned memory."""
    return array.size > 0 and _pinned(array) is not None


def to_device(target, source, queue, is_async, keeps=False):
    """Copies a contiguous NumPy array to an array of the same shape, dtype and order on a GPU.

    If `is_async`, the host continues meanwhile; memory that is not pinned is read first. `keeps`
    says whether pinned memory is kept alive until the host has waited.
    """
    queue.refuse_capture("H2D transfers")
    queue.start()
    target.touch(queue, writes=True)
    memory, view = _pinned(source), target.host
    if not is_async or memory is None:
        source = source if not is_async or queue.is_free() else source.copy()
        queue.put(lambda: np.copyto(view, source))
        if not is_async:
            queue.synchronize()
        return
    queue.put(lambda: np.copyto(view, source))
    kept = source if keeps else None
    _under_way.append(
        _Transfer(queue, memory, source, forbids_reading=False, target=target, kept=kept)
    )


def to_host(source, target, queue, is_async):
    """Copies device memory to a contiguous NumPy array; if it is not pinned, the host waits."""
    queue.refuse_capture("D2H transfers")
    queue.start()
    source.touch(queue, writes=False)
    memory, view = _pinned(target), source.host
    if not is_async or memory is None:
        queue.put(lambda: np.copyto(target, view))
        queue.synchronize()
        return
    arrived = np.empty_like(target)
    queue.put(lambda: np.copyto(arrived, view))
    _under_way.append(_Transfer(queue, memory, target, forbids_reading=True, arrived=arrived))


class _Transfer:
    """A copy that the host has not waited for yet, from or to an array in pinned memory.

    Like CUDA, it does not keep that memory alive. `arrived` is written to it once the host has
    waited; `kept` lives as long as the copy, as the source array of CuPy's `asarray` does.
    """

    def __init__(self, queue, memory, array, forbids_reading, arrived=None, target=None, kept=None):
        self._target = None if target is None else weakref.ref(target)
        self._kept = kept
        self.stream, self.time, self._name = queue.number, queue.time, queue.name
        self.memory, self.start, self._arrived = weakref.ref(memory), memory.ptr, arrived
        self._place = _checker.place()
        address = array.ctypes.data
        self._first = address - memory.ptr
        self._guard = _library().guard_begin(address, address + array.nbytes, int(forbids_reading))
        _guarded[self._guard] = self

    def is_awaited(self):
        """Whether the copy can still be used: its target array is alive."""
        return self._target is None or self._target() is not None

    def end_guard(self):
        """Allows the host to use the memory again."""
        _library().guard_end(self._guard)

    def finish(self):
        """Completes the copy once the host has waited for it."""
        self.end_guard()
        memory = self.memory()
        if self._arrived is not None and memory is not None:
            arrived = self._arrived.reshape(-1, order="A").view(np.uint8)
            np.frombuffer(memory, np.uint8, arrived.size, self._first)[...] = arrived
        self._kept = None

    def describe(self):
        """A description for messages."""
        return f"the copy at {_checker.shown(self._place)} on {self._name}"


_guarded: "dict[int, _Transfer]" = {}
"""The last copy of each guard."""


def _hear(thread):
    if not _under_way:
        return
    with _streams.lock:  # another thread's `finish` is complete before this thread continues
        for transfer in [
            one for one in _under_way if _checker.is_known(thread.clock, one.stream, one.time)
        ]:
            _under_way.remove(transfer)
            transfer.finish()


_checker.when_learnt.append(_hear)


@functools.cache
def _compiled():
    source = pathlib.Path(__file__).with_name("_guard.cpp").read_text()
    path = kernels_on_host.cache() / f"guard-{hash_of(source)}.so"
    if not path.exists():
        kernels_on_host.build(source, path, ("-std=c++17", "-O2", "-fPIC", "-shared"))
    library = ctypes.PyDLL(str(path))  # keeps the GIL: one thread at a time
    library.guard_begin.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    library.guard_install.argtypes = [ctypes.c_void_p, ctypes.c_int]
    signal.signal(signal.SIGURG, _raise)
    return library


def hash_of(source):
    """A name for the library compiled from a source text."""
    return hashlib.sha256(source.encode()).hexdigest()[:32]


def _library():
    library = _compiled()
    tell = ctypes.cast(ctypes.pythonapi.PyErr_SetInterruptEx, ctypes.c_void_p)
    # Again, because a handler installed since may be in its way.
    library.guard_install(tell, signal.SIGURG)
    return library


def _raise(*_):
    library = _compiled()
    violated = library.guard_violated()
    if violated < 0:
        return
    transfer = _guarded.get(violated)
    verb = "writes to" if library.guard_was_write() else "reads"
    raise _checker.report(
        f"the simulated GPU: at {_checker.shown(_checker.place())}, or just before, the host "
        f"{verb} pinned memory, and has not waited for "
        f"{transfer.describe() if transfer else 'a copy'}, of the same memory; wait for the "
        "stream, or for an event that is recorded after the copy"
    )
