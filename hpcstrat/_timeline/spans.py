"""What a rank records of itself: spans of time, on the host and on a GPU, each with a name and a category."""

from __future__ import annotations

import importlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, final

from hpcstrat._core import gpu

LIMIT = 1_000_000
"""Spans that a rank records at most: some 150 MB of the trace."""


@final
class Span:
    """A stretch of a thread's time, and of a GPU's.

    Attributes:
        category: one of the constants of `hpcstrat._core.span`.
        name: what is done.
        nbytes: that travel, of this rank; `None` where none do.
        thread: the number of its thread.
        begin, end: nanoseconds of this process's clock.
        stream: on which it has a part, a `cupy.cuda.Stream`; `None` where it has none.
        events: of that stream at its begin and its end.
        has_range: it is an NVTX range too.
        is_begun: its begin is in the trace already.
    """

    __slots__ = (
        "begin",
        "category",
        "end",
        "events",
        "has_range",
        "is_begun",
        "name",
        "nbytes",
        "stream",
        "thread",
    )

    def __init__(
        self, category: str, name: str, nbytes: int | None, thread: int, begin: int
    ) -> None:
        self.category = category
        self.name = name
        self.nbytes = nbytes
        self.thread = thread
        self.begin = begin
        self.end = 0
        self.stream: Any = None
        self.events: list[Any] = []
        self.has_range = False
        self.is_begun = False


@final
class Spans:
    """The spans of this process that are open, and those that have ended and are not written yet.

    Attributes:
        ended: the latter; one thread takes them out.
        threads: the name of each thread that has had a span, by its number.
        is_full: there were `limit` spans, and no more are recorded.

    Args:
        limit: how many are recorded.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        # A deque's append and popleft are atomic, so the writing thread needs no lock either.
        self.ended: deque[Span] = deque()
        self.threads: list[str] = []
        self.is_full = False
        self._left = limit
        self._stacks: list[list[Span]] = []
        self._local = threading.local()
        self._lock = threading.Lock()

    def begin(
        self, category: str, name: str, nbytes: int | None, anyway: bool = False
    ) -> Span | None:
        """Opens a span of this thread.

        `None`, and nothing, where all is full, or where the span would lie in one of the same
        category, which it is a part of; `anyway` records the latter too.
        """
        try:
            # A stack for each thread, so that opening and closing a span takes no lock.
            stack, thread = self._local.own
        except AttributeError:
            stack, thread = self._local.own = self._new_thread()
        # A reduction is made of exchanges: their own spans would only repeat what the outer one
        # says.
        if stack and stack[-1].category == category and not anyway:
            return None
        if self._left <= 0:
            self.is_full = True
            return None
        self._left -= 1
        span = Span(category, name, nbytes, thread, time.perf_counter_ns())
        stack.append(span)
        return span

    def end(self, span: Span) -> None:
        """Closes the span that this thread opened last."""
        span.end = time.perf_counter_ns()
        self._local.own[0].pop()
        self.ended.append(span)

    def open_since(self, before: int) -> Iterator[Span]:
        """The spans that began before this time and are open, of all threads, outer ones first."""
        for stack in list(self._stacks):
            yield from [span for span in list(stack) if span.begin < before]

    def _new_thread(self) -> tuple[list[Span], int]:
        stack: list[Span] = []
        with self._lock:
            self._stacks.append(stack)
            name = threading.current_thread().name
            self.threads.append("program" if name == "MainThread" else name)
            return stack, len(self.threads) - 1


@final
class GpuSpans:
    """The parts of spans on this rank's GPU, timed by events on its streams; and NVTX ranges, for NVIDIA's profilers.

    The host waits for nothing.

    CUDA tells how much time lies between two events, as a 32-bit number of milliseconds; so events
    are compared with one that is seldom older than a second, whose time on the host's clock is
    known.

    Args:
        ordinal: CUDA's number of the GPU.
    """

    def __init__(self, ordinal: int) -> None:
        self._cuda: Any = gpu.load_cupy("a timeline").cuda
        self._ordinal = ordinal
        self._nvtx: Any = importlib.import_module("cupy.cuda.nvtx")
        self._spare: list[Any] = []
        self.tracks: dict[int, int] = {}
        """The number of the track of each stream, by its address."""
        with self._cuda.Device(ordinal):
            # Of its own, and empty: an event on it is done at once, whatever the program's streams
            # are doing.
            self._stream = self._cuda.Stream(non_blocking=True)
        self.compare_clocks()

    def compare_clocks(self) -> None:
        """Notes an event and its time on the host's clock.

        It waits for a stream on which nothing else is.
        """
        event = self._event()
        with self._cuda.Device(self._ordinal):
            event.record(self._stream)
            event.synchronize()
        self._known = event, time.perf_counter_ns()

    def begin(self, span: Span, stream: Any) -> None:
        """The span is a range, and what is put on this stream, a `cupy.cuda.Stream` or `None`, belongs to it."""
        self._nvtx.RangePush(span.name)
        span.has_range = True
        if stream is not None:
            self.tracks.setdefault(stream.ptr, len(self.tracks))
            span.stream, span.events = stream, [self._record(stream)]

    def end(self, span: Span) -> None:
        """The end of what `begin` began."""
        if span.stream is not None:
            span.events.append(self._record(span.stream))
        self._nvtx.RangePop()

    def wait_for(self, span: Span) -> None:
        """Waits until the GPU has come so far."""
        span.events[1].synchronize()

    def times(self, span: Span) -> tuple[int, int, int]:
        """The span's track and its begin and end, in nanoseconds of the host's clock, once it is done."""
        known, at = self._known
        with self._cuda.Device(self._ordinal):
            begun, ended = (self._cuda.get_elapsed_time(known, event) for event in span.events)
        # Used again: a step needs several, and each would be another call of the driver to make.
        self._spare += span.events
        return self.tracks[span.stream.ptr], at + int(begun * 1e6), at + int(ended * 1e6)

    def _record(self, stream: Any) -> Any:
        event = self._event()
        with self._cuda.Device(self._ordinal):
            event.record(stream)
        return event

    def _event(self) -> Any:
        try:
            return self._spare.pop()
        except IndexError:
            with self._cuda.Device(self._ordinal):
                return self._cuda.Event(block=True)  # whoever waits for it sleeps
