"""Devices, streams and events, and work on streams: done at once or after earlier work."""

import collections
import ctypes
import functools
import gc
import itertools
import os
import sys
import threading
import time
import weakref

from . import _checker, _faults, _graphs

PATIENCE = 0.002
"""Seconds that the host waits for earlier NCCL calls before it leaves new work for later."""

LAUNCHES = int(os.environ.get("SIMULATED_GPU_LAUNCHES", "1024"))
"""Pieces of work that a stream accepts before the first is done; who enqueues one more waits."""

lock = threading.RLock()
_thread = threading.local()
_addresses = itertools.count(0x7E0000000000, 64)


def count():
    """The number of GPUs that this process sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    installed = int(os.environ.get("SIMULATED_GPUS", "4"))
    if visible is None:
        return installed
    return min(installed, len([one for one in visible.split(",") if one.strip()]))


# ---- work


class Queue(_checker.Lane):
    """A stream's work: each item of `later` is called until it returns something but False."""

    def __init__(self, device, name, blocking):
        super().__init__(f"{name} of GPU {device}")
        self.device = device
        self.is_blocking = blocking
        self.address = next(_addresses)
        self.later = collections.deque()

    def start(self):
        """See `Lane`. The null stream and blocking streams are ordered with each other."""
        if self.is_blocking and len(_blocking[self.device]) > 1:
            null = null_queue(self.device)
            for other in _blocking[self.device] if self is null else [null]:
                if other is not self:
                    _checker.join(self.clock, other.clock)
                    self._wait(other.marker())
        super().start()

    def refuse_capture(self, copies=None, status=900):
        """Raises if the stream captures: no waits are allowed then, and no copies from or to hosts.

        CuPy refuses `copies`; the rest CUDA refuses with a status, and spoils the capture.
        """
        if self.captured is not None and copies is not None:
            raise RuntimeError(f"the current stream is capturing, so {copies} are disallowed")
        if self.captured is not None:
            self.captured.is_spoilt = True
            raise _faults.CUDARuntimeError(status)

    def marker(self):
        """An object whose `done` says whether the work enqueued so far is done; None if it is."""
        self.refuse_capture()
        with lock:
            if not self.later:
                return None
            marker = _Marker()
            self._leave(marker.set)
            return marker

    def _wait(self, marker):
        if marker is not None and not marker.done:
            with lock:
                self._leave(lambda: marker.done)

    def wait(self, clock, marker):
        """Makes later work wait for work elsewhere."""
        self.refuse_capture(status=905)
        self.start()
        _checker.join(self.clock, clock)
        self._wait(marker)

    def put(self, work):
        """Calls `work()` after earlier work on the stream. Returns whether it is already done."""
        if self.captured is not None:
            self.captured.require_sound()
            self.captured.append(lambda: self.put(work))
            return False
        if len(self.later) >= LAUNCHES:
            self._wait_for_room()
        with lock:
            if self.later and not self._settles():
                self._leave(work)
                return False
            if work() is not False:
                return True
            self._leave(work)
            return False

    def _wait_for_room(self):
        """Waits in the driver, holding the driver's lock, but not Python's."""
        _launching.add(threading.get_ident())
        while len(self.later) >= LAUNCHES:
            with lock:
                progress()
            time.sleep(1e-3)
        _launching.discard(threading.get_ident())

    def _leave(self, work):
        """Leaves work until earlier work is done: then a thread does it, as a GPU would."""
        self.later.append(work)
        _start_thread()
        _is_work_left.set()

    def is_free(self):
        """Whether new work would be done at once; may wait for a moment to find out."""
        with lock:
            return self.captured is None and (not self.later or self._settles())

    def _settles(self):
        end = time.monotonic() + PATIENCE
        while True:
            progress()
            if not self.later:
                return True
            if time.monotonic() > end:
                return False
            os.sched_yield()

    def synchronize(self):
        """Makes the host wait."""
        clock = dict(self.clock)
        until(self.marker())
        _checker.host().learn(clock)


class _Marker:
    __slots__ = ("at", "done")

    def __init__(self):
        self.done = False

    def set(self):
        self.done, self.at = True, time.perf_counter()


def until(marker):
    """Waits for a marker, and lets streams make progress."""
    _faults.check_context()
    wait_for(marker)


def wait_for(marker):
    """`until`, for waits that are not CUDA calls."""
    pause = 0.0
    while marker is not None and not marker.done:
        with lock:
            progress()
        if marker.done:
            return
        time.sleep(pause)
        pause = min(pause + 2e-5, 1e-3)


def progress():
    """Does all waiting work that can be done now. The lock must be held."""
    if not any(queue.later for queue in queues()):
        return
    # An object that Python's collector finalizes here, such as a generator, might wait for the GPU.
    collects = gc.isenabled()
    gc.disable()
    try:
        again = True
        while again:
            again = False
            for queue in queues():
                while queue.later and queue.later[0]() is not False:
                    queue.later.popleft()
                    again = True
    finally:
        if collects:
            gc.enable()


_is_work_left = threading.Event()


@functools.cache
def _start_thread():
    threading.Thread(target=_get_on, name="simulated-gpu", daemon=True).start()


def _get_on():
    while True:
        _is_work_left.wait()
        with lock:
            progress()
            if not any(queue.later for queue in queues()):
                _is_work_left.clear()
        time.sleep(1e-3)


_launching: "set[int]" = set()
"""The threads that wait because a stream has too many launches."""
_libc = ctypes.PyDLL(None)  # its functions keep Python's lock


def take_driver(call):
    """Takes the driver's lock with Python's lock held, as some CuPy calls do; may never return."""
    if _launching - {threading.get_ident()}:
        print(
            f"the simulated GPU: {call} at {_checker.shown(_checker.place())} waits with Python's "
            "lock for the driver, in which another thread waits for room for a launch: nothing "
            "runs in this process any more",
            file=sys.__stderr__,
            flush=True,
        )
        while True:
            _libc.sleep(3600)


_queues = {}
_blocking = collections.defaultdict(list)
_nulls = {}


def queues():
    """All streams' work, as a copy: other threads create and delete streams meanwhile."""
    return list(_queues.values())


def null_queue(device):
    """The null stream's work on a device."""
    if device not in _nulls:
        queue = _nulls[device] = Queue(device, "the null stream", blocking=True)
        queue.address = 0
        _blocking[device].append(queue)
        _queues[id(queue)] = queue
    return _nulls[device]


# ---- the current device and stream


class _State:
    """One thread's state. `current` and the stacks are CuPy's: `with` pushes, `use` does not."""

    def __init__(self):
        self.device = 0
        self.current = collections.defaultdict(lambda: Stream.null)
        self.stacks = collections.defaultdict(lambda: [Stream.null])
        self.pushed = []
        self.devices = []

    def make_current(self, stream):
        """Makes a stream current on its GPU, or the null stream on the current GPU."""
        self.current[self.device if stream.device_id == -1 else stream.device_id] = stream


def state():
    """The state of this thread."""
    try:
        return _thread.state
    except AttributeError:
        made = _thread.state = _State()
        return made


def get_current_stream(device_id=-1):
    own = state()
    return own.current[own.device if device_id == -1 else device_id]


def current_queue():
    """The work of the current stream of the current device."""
    own = state()
    return own.current[own.device].queue


class Device(_faults.Partial):
    def __init__(self, device=None):
        self.id = state().device if device is None else int(device)
        if not 0 <= self.id < max(count(), 1):
            raise _faults.CUDARuntimeError(101)

    def use(self):
        state().device = self.id

    def __enter__(self):
        state().devices.append(state().device)
        self.use()
        return self

    def __exit__(self, *_):
        own = state()
        own.device = own.devices.pop()

    def __int__(self):
        return self.id

    def __eq__(self, other):
        return isinstance(other, Device) and other.id == self.id

    def __hash__(self):
        return hash(self.id)

    def synchronize(self):
        for queue in queues():
            if queue.device == self.id:
                queue.synchronize()


class Stream(_faults.Partial):
    null: "Stream"

    def __init__(self, null=False, non_blocking=False, ptds=False, priority=None):
        if ptds or priority is not None:
            raise AttributeError("the simulated GPU does not have streams with ptds or priority")
        self._queue = None
        self.device_id = -1
        self.ptr = 0
        if not null:
            self.device_id = state().device
            kind = "a non-blocking stream" if non_blocking else "a blocking stream"
            self._queue = Queue(
                self.device_id,
                f"{kind} made at {_checker.shown(_checker.place())}",
                not non_blocking,
            )
            self.ptr = self._queue.address
            with lock:
                _queues[id(self._queue)] = self._queue
                if not non_blocking:
                    _blocking[self.device_id].append(self._queue)

    def __del__(self):
        queue = getattr(self, "_queue", None)
        is_python_alive = _checker is not None
        if queue is not None and is_python_alive and not queue.later:
            _queues.pop(id(queue), None)
            _checker.retire(queue)
            if queue.is_blocking:
                _blocking[self.device_id].remove(queue)

    @property
    def queue(self):
        """The stream's work. Not in CuPy."""
        return null_queue(state().device) if self._queue is None else self._queue

    def _checked_device(self):
        device = state().device
        if self.device_id not in (-1, device):
            raise RuntimeError(
                f"The device that the stream is created on ({self.device_id}) does not match with "
                f"the current device ({device})"
            )
        return device

    def __enter__(self):
        own, device = state(), self._checked_device()
        own.stacks[device].append(self)
        own.pushed.append(device)
        own.make_current(self)
        return self

    def __exit__(self, *_):
        own = state()
        device = own.pushed.pop()
        own.stacks[device].pop()
        own.make_current(own.stacks[device][-1])

    def use(self):
        """CuPy's, which since 15 refuses it inside `with stream:`, whose end would undo it."""
        own, device = state(), self._checked_device()
        if len(own.stacks[device]) > 1:
            raise _checker.report(
                f"the simulated GPU: Stream.use() at {_checker.shown(_checker.place())} inside "
                "`with stream:`, whose end makes yet another stream the current one; write `with "
                "stream:`"
            )
        own.make_current(self)
        return self

    @property
    def done(self):
        take_driver("cudaStreamQuery")
        self.queue.refuse_capture()
        with lock:
            progress()
        return not self.queue.later

    def synchronize(self):
        self.queue.synchronize()

    def begin_capture(self, mode=None):
        if self.queue.is_blocking:
            raise AttributeError(
                "the simulated GPU does not have captures of the null stream or of blocking ones"
            )
        self.queue.captured = _graphs.Captured()

    def end_capture(self):
        queue, captured = self.queue, self.queue.captured
        queue.captured = None
        captured.require_sound()
        return _graphs.Graph(queue, captured)

    def is_capturing(self):
        return self.queue.captured is not None

    def wait_event(self, event):
        event.let_wait(self.queue)

    def record(self, event=None):
        event = Event(disable_timing=True) if event is None else event
        event.record(self)
        return event

    def __eq__(self, other):
        return isinstance(other, Stream) and other.ptr == self.ptr

    def __hash__(self):
        return self.ptr


Stream.null = Stream(null=True)


class Event(_faults.Partial):
    def __init__(self, block=False, disable_timing=False, interprocess=False):
        if interprocess:
            raise AttributeError("the simulated GPU does not have events of several processes")
        self._capture = None
        self._clock = {}
        self._marker = None
        self._device = state().device
        self._query = None

    @property
    def ptr(self):
        """CuPy's: what the simulated driver takes. Like an H100's it answers at once, always."""
        if self._query is None:
            self._query = ctypes.CFUNCTYPE(ctypes.c_int)(self._status)
        return ctypes.cast(self._query, ctypes.c_void_p).value

    def record(self, stream=None):
        queue = (get_current_stream() if stream is None else stream).queue
        if queue.device != self._device:
            raise _faults.CUDARuntimeError(400)
        captured = queue.captured  # if it is one, the event is a part of the graph
        self._capture = None if captured is None else weakref.ref(captured)
        if captured is not None:
            return
        queue.start()
        self._clock = dict(queue.clock)
        self._marker, self._at = queue.marker(), time.perf_counter()

    def let_wait(self, queue):
        """Not in CuPy: makes later work on the queue wait for the event."""
        self._refuse_captured()
        queue.wait(self._clock, self._marker)

    @property
    def done(self):
        """CuPy's. If done, the host knows that the work is done."""
        take_driver("cudaEventQuery")
        return self._is_done()

    def _status(self):
        if _faults.is_context_lost:
            return 700
        if self._capture is not None:
            return 907
        return 0 if self._is_done() else 600

    def _refuse_captured(self):
        if self._capture is not None:
            if (captured := self._capture()) is not None:
                captured.is_spoilt = True
            raise _faults.CUDARuntimeError(907)

    def _is_done(self):
        self._check_device()
        self._refuse_captured()
        if self._marker is not None and not self._marker.done:
            with lock:
                progress()
        if self._marker is not None and not self._marker.done:
            return False
        _checker.host().learn(self._clock)
        return True

    def synchronize(self):
        self._check_device()
        self._refuse_captured()
        until(self._marker)
        _checker.host().learn(self._clock)

    def _check_device(self):
        if state().device != self._device:
            raise _checker.report(
                f"the simulated GPU: {_checker.shown(_checker.place())} asks for an event of GPU "
                f"{self._device} while GPU {state().device} is current in its thread, on which CUDA "
                "may then open a context; make the event's GPU current"
            )


def get_elapsed_time(*events):
    """CuPy's: milliseconds between two events that are done."""
    begin, end = (one._at if one._marker is None else one._marker.at for one in events)
    return 1e3 * (end - begin)
