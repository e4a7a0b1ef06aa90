"""CUDA graphs: work enqueued while a stream captures is recorded, and done at each launch."""

import weakref

from . import _faults, _streams


class Captured(list):
    """The work enqueued on a stream, in order: functions without arguments."""

    __slots__ = ("__weakref__", "is_spoilt")

    def __init__(self):
        super().__init__()
        self.is_spoilt = False

    def require_sound(self):
        """Raises CUDA's error after an error in the capture."""
        if self.is_spoilt:
            raise _faults.CUDARuntimeError(901)


class Graph(_faults.Partial):
    """CuPy's. It uses the memory that it was captured with, even if reused by then."""

    def __init__(self, queue, captured):
        self._queue, self._captured = queue, captured

    def launch(self, stream=None):
        queue = (_streams.get_current_stream() if stream is None else stream).queue
        if queue is not self._queue:
            raise AttributeError(
                "the simulated GPU does not have Graph.launch on another stream than the captured "
                "one"
            )
        for put in self._captured:
            queue.start()
            put()

    def upload(self, stream=None):
        """CuPy's."""


class Holders:
    """The graphs that contain calls of a communicator."""

    def __init__(self):
        self._captured = []

    def add(self, captured):
        """Adds a capture that contains a call of the communicator."""
        if all(one() is not captured for one in self._captured):
            self._captured.append(weakref.ref(captured))

    def __bool__(self):
        return any(one() is not None for one in self._captured)
