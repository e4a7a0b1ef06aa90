"""CUDA graphs: what a stream is given while it captures is kept instead of done, and done at each launch."""

import weakref

from . import _streams


class Captured(list):
    """What a stream was given, in order: functions of no arguments.

    Unlike a list it has weak references.
    """

    __slots__ = ("__weakref__",)


class Graph:
    """CuPy's. It uses the memory that it was captured with, whoever has that by then."""

    def __init__(self, queue, captured):
        self._queue, self._captured = queue, captured

    def launch(self, stream=None):
        """CuPy's."""
        queue = (_streams.get_current_stream() if stream is None else stream).queue
        if queue is not self._queue:
            raise AttributeError(
                "the simulated GPU does not have Graph.launch on another stream than the captured "
                "one"
            )
        for put in self._captured:
            queue.begin()
            put()

    def upload(self, stream=None):
        """CuPy's."""

    def __getattr__(self, name):
        raise AttributeError(f"the simulated GPU does not have Graph.{name}")


class Holders:
    """The graphs that hold calls of a communicator."""

    def __init__(self):
        self._captured = []

    def add(self, captured):
        """What a stream captures has a call of it."""
        if all(one() is not captured for one in self._captured):
            self._captured.append(weakref.ref(captured))

    def __bool__(self):
        return any(one() is not None for one in self._captured)
