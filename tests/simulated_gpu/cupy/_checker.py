"""Checks the order of accesses with vector clocks of streams and host threads.

The time of a piece of work is its number on its stream. A clock holds, for each stream, the time up
to which its work is done before the clock's owner continues. A stream's clock grows by what the
host knows when it enqueues work, and by events that the stream waits for; a host thread's clock
grows by what the thread waits for.
"""

import itertools
import os
import sys
import threading
from concurrent import futures

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_MOST_ACCESSES = 2000  # of one block, before those known to this thread are dropped


class SimulatedGpuError(AssertionError):
    """An error that a GPU does not report, and that makes results wrong at least sometimes."""


found: list[SimulatedGpuError] = []
"""Every error raised, to check that the program caught none of them."""


def report(text):
    """Returns the error to raise, and adds it to `found`."""
    error = SimulatedGpuError(text)
    found.append(error)
    return error


_overdue: list[SimulatedGpuError] = []


def report_later(text):
    """Records an error that cannot be raised here: the next work on any stream raises it."""
    error = report(text)
    print(error, file=sys.__stderr__)
    _overdue.append(error)


def raise_overdue():
    """Raises an error that was recorded earlier."""
    if _overdue:
        raise _overdue.pop()


def place():
    """(file, line) of the caller outside the simulation."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_FOLDER):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def shown(where):
    """A place as messages print it."""
    file, line = where
    return f"{os.path.relpath(file) if file.startswith(os.getcwd()) else file}:{line}"


def join(clock, other):
    """Adds what `other` knows to `clock`."""
    for stream, time in other.items():
        if clock.get(stream, 0) < time:
            clock[stream] = time
    if len(clock) > _MANY:
        for stream in retired & clock.keys():
            del clock[stream]


retired: "set[int]" = set()
"""Deleted streams whose last work the host has waited for: all later work is ordered after it."""
_dying: "dict[int, int]" = {}
_MANY = 32


def is_known(clock, stream, time):
    """Whether a stream's work at this time precedes the clock's owner."""
    return clock.get(stream, 0) >= time or stream in retired


def retire(lane):
    """The stream is deleted; clocks drop it once the host has waited for its last work."""
    _dying[lane.number] = lane.time


def _bury(clock):
    # A copy, which is made without a new object for each stream: such an object may start a
    # collection of garbage, in which another stream dies.
    dying = _dying.copy()
    for stream in [stream for stream, time in dying.items() if clock.get(stream, 0) >= time]:
        retired.add(stream)
        _dying.pop(stream, None)


# ---- the host's threads


class Host:
    """What one host thread has waited for. `version` grows with each wait."""

    __slots__ = ("__weakref__", "clock", "version")

    def __init__(self, clock):
        self.clock = dict(clock)
        self.version = 0

    def learn(self, clock):
        """Records that the thread has waited for work with this clock."""
        join(self.clock, clock)
        self.version += 1
        if _dying:
            _bury(self.clock)
        for hear in when_learnt:
            hear(self)


when_learnt = []
"""Callbacks, called with a host thread that has waited."""
_threads = threading.local()


def host():
    """The `Host` of this thread."""
    try:
        return _threads.host
    except AttributeError:
        made = _threads.host = Host(getattr(threading.current_thread(), "simulated_clock", {}))
        return made


def _pass_clocks_on():
    """Passes clocks from a thread's starter, a task's submitter, and a result's producer."""
    start, submit = threading.Thread.start, futures.ThreadPoolExecutor.submit
    result, set_result, set_exception = (
        futures.Future.result,
        futures.Future.set_result,
        futures.Future.set_exception,
    )

    def start_with_clock(thread):
        thread.simulated_clock = dict(host().clock)
        start(thread)

    def submit_with_clock(pool, fn, /, *args, **kwargs):
        clock = dict(host().clock)

        def run(*args, **kwargs):
            host().learn(clock)
            return fn(*args, **kwargs)

        return submit(pool, run, *args, **kwargs)

    def set_with_clock(how):
        def set_it(future, value):
            future.simulated_clock = dict(host().clock)
            how(future, value)

        return set_it

    def result_with_clock(future, timeout=None):
        try:
            return result(future, timeout)
        finally:
            if future.done() and (clock := getattr(future, "simulated_clock", None)):
                host().learn(clock)

    # Code that inspects stacks finds Python's own files.
    for wrapper in (start_with_clock, submit_with_clock, result_with_clock):
        wrapper.__code__ = wrapper.__code__.replace(co_filename=futures._base.__file__)
    threading.Thread.start = start_with_clock
    futures.ThreadPoolExecutor.submit = submit_with_clock
    futures.Future.result = result_with_clock
    futures.Future.set_result = set_with_clock(set_result)
    futures.Future.set_exception = set_with_clock(set_exception)


_pass_clocks_on()

# ---- streams

_numbers = itertools.count(1)


class Lane:
    """A stream as the checker sees it: its key in clocks, and the clock of its last work."""

    def __init__(self, name):
        self.captured = None  # the work enqueued since its capture started, while it captures
        self.number = next(_numbers)
        self.name = name
        self.time = 0
        self.clock = {}
        self._heard = None

    def start(self):
        """Starts one more piece of work, enqueued by the calling thread."""
        raise_overdue()
        thread = host()
        if self._heard != (id(thread), thread.version):
            join(self.clock, thread.clock)
            self._heard = (id(thread), thread.version)
        self.time += 1
        self.clock[self.number] = self.time


class History:
    """Which work has read and written one block of memory."""

    __slots__ = ("_accesses", "_latest")

    def __init__(self):
        self._latest = {}  # stream -> time of its last access, of any part
        # (start, stop, whether it writes, stream) -> (time, place, name of the stream)
        self._accesses = {}

    def access(self, lane, start, stop, writes):
        """Records that the work just started on `lane` accesses these bytes.

        It must be ordered with each earlier access if one of the two writes.
        """
        if lane.captured is not None:
            lane.captured.append(lambda: self.access(lane, start, stop, writes))
            return
        clock = lane.clock
        for stream, time in self._latest.items():
            if not is_known(clock, stream, time):
                self._compare(lane, start, stop, writes)
                break
        if len(self._latest) > _MANY:
            self._latest = {one: time for one, time in self._latest.items() if one not in retired}
        self._latest[lane.number] = lane.time
        self._accesses[start, stop, writes, lane.number] = (lane.time, place(), lane.name)
        if len(self._accesses) > _MOST_ACCESSES:
            known = host().clock
            self._accesses = {
                key: one for key, one in self._accesses.items() if known.get(key[3], 0) < one[0]
            }

    def _compare(self, lane, start, stop, writes):
        for (first, last, wrote, stream), (time, where, name) in self._accesses.items():
            if (
                (writes or wrote)
                and first < stop
                and start < last
                and lane.clock.get(stream, 0) < time
                and stream not in retired
            ):
                now, before = ("write" if one else "read" for one in (writes, wrote))
                raise report(
                    f"the simulated GPU: a {now} at {shown(place())} on {lane.name} is not ordered "
                    f"with the {before} at {shown(where)} on {name}, of the same memory (bytes "
                    f"{max(start, first)} to {min(stop, last)} of its block); let the stream wait "
                    "for an event that is recorded after the first of them"
                )
