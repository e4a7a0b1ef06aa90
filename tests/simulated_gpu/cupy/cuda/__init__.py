"""`cupy.cuda` of the simulated GPU."""

import types

from cupy import _graphs, _kernels, _memory, _streams, _transfers
from cupy.cuda import nvtx as nvtx
from cupy.cuda import runtime as runtime

Device = _streams.Device
Stream = _streams.Stream
Event = _streams.Event
get_current_stream = _streams.get_current_stream
get_elapsed_time = _streams.get_elapsed_time
Memory = _memory.Memory
MemoryPointer = _memory.MemoryPointer
MemoryPool = _memory.MemoryPool
alloc = _memory.allocate
using_allocator = _memory.using_allocator
Graph = _graphs.Graph
UnownedMemory = _memory.UnownedMemory
alloc_pinned_memory = _transfers.alloc_pinned_memory
memory = types.SimpleNamespace(OutOfMemoryError=_memory.OutOfMemoryError)
compiler = types.SimpleNamespace(CompileException=_kernels.CompileException)
stream = types.SimpleNamespace(Stream=_streams.Stream, Event=_streams.Event)


def is_available():
    return _streams.count() > 0


def __getattr__(name):
    raise AttributeError(f"the simulated GPU does not have cupy.cuda.{name}")
