"""How long the memory of another library is kept alive for a CuPy array over it."""

import collections
import contextvars
import gc
import types
import weakref

import numpy as np
from internals import gpu, graph
from on_host import array, cupy

import hpcstrat as hs


class Event:
    """A stream's event; `reached` is the number of recorded events that the GPU has reached."""

    reached = recorded = 0

    def __init__(self, disable_timing):
        assert disable_timing

    def record(self, stream):
        Event.recorded += 1
        self.number = Event.recorded

    @property
    def done(self):
        return self.number <= Event.reached


class Owner:
    """Another library's memory."""

    def __init__(self):
        self.host = np.zeros(3)


def stream():
    """A stream on GPU 0, without CUDA."""
    made = gpu.Stream.__new__(gpu.Stream)
    made.ordinal, made.raw, made.cuda = 0, None, types.SimpleNamespace(Event=Event)
    made.reads = collections.deque()
    return made


def held():
    """A kept-alive array over an owner's memory, and a weak reference to the owner."""
    owner = Owner()
    memory = cupy.cuda.UnownedMemory(owner.host.ctypes.data, owner.host.nbytes, owner, 0)
    array = cupy.ndarray(3, np.float64, cupy.cuda.MemoryPointer(memory, 0))
    gpu.keep_alive(array)
    return array, weakref.ref(owner)


def test_memory_is_kept_until_the_stream_has_read_it():
    """Also in a long run: memory read by earlier steps is freed while later steps are in flight."""
    made = stream()
    owners = []
    for step in range(1, 6):
        array, owner = held()
        owners.append(owner)
        view = array.reshape(3, 1)[1:]
        del array
        before = Event.recorded
        made.let_go()  # as within a call that is still to read the view
        assert Event.recorded == before
        del view
        gc.collect()
        made.let_go()
        Event.reached = step - 2  # the GPU is two steps behind
        made.let_go()
        assert [one() is not None for one in owners] == [n > step - 2 for n in range(1, step + 1)]
    Event.reached = 5
    made.let_go()
    assert not any(one() for one in owners)
    assert not made.reads


class Subclass(cupy.ndarray):
    pass


def test_a_graph_finds_the_memory_of_all_arrays():
    """Where Python's collector does not look, too: in arrays of objects and in contexts."""
    boxed, variable = np.empty(1, object), contextvars.ContextVar("variable")
    boxed[0] = array(3)
    variable.set(array(4)[1:])
    slices = hs.IndexedSlices(array(5).view(Subclass), array(2, np.int64))
    pointer = array(6).data
    found = {id(one) for one in graph._memory_and_code(cupy.cuda)}
    alive = [boxed[0].data, variable.get().data, slices.values.data, slices.indices.data, pointer]
    assert found >= {id(one.mem) for one in alive}


def test_a_graph_keeps_memory_and_not_arrays():
    """The next graph does not find what only the first one keeps."""
    one, owner = held()
    first = graph._memory_and_code(cupy.cuda)
    del one
    stream().let_go()
    second = graph._memory_and_code(cupy.cuda)
    assert owner() is not None and len(second) < len(first)
    del first
    assert owner() is None
