"""What a rank records: spans of time, on the host and a GPU, with a name and a category."""

from __future__ import annotations

import importlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, final

from hpcstrat._core import gpu

LIMIT = 1_000_000
"""The largest number of spans that a rank records: about 150 MB of the trace."""


@final
class Span:
    """A period of a thread's time, and of a GPU's.

    Attributes:
        category: one of the constants of `hpcstrat._core.span`.
        name: what is done.
        nbytes: bytes that this rank sends; `None` for a span that sends nothing.
        thread: the number of its thread.
        start, end: nanoseconds of this process's clock.
        stream: the `cupy.cuda.Stream` that does its work on a GPU; `None` if it has none.
        events: the events on that stream at its start and its end.
        has_range: whether it is an NVTX range too.
        is_start_written: whether its start is in the trace already.
    """

    __slots__ = (
        "category",
        "end",
        "events",
        "has_range",
        "is_start_written",
        "name",
        "nbytes",
        "start",
        "stream",
        "thread",
    )

    def __init__(
        self, category: str, name: str, nbytes: int | None, thread: int, start: int
    ) -> None:
        self.category = category
        self.name = name
        self.nbytes = nbytes
        self.thread = thread
        self.start = start
        self.end = 0
        self.stream: Any = None
        self.events: list[Any] = []
        self.has_range = False
        self.is_start_written = False


@final
class Spans:
    """The spans of this process that are open, or have ended and are not written yet.

    Attributes:
        ended: the spans that have ended; one thread takes them out.
        threads: the name of each thread that has had a span, by its number.
        is_full: whether there were `limit` spans, and no more are recorded.

    Args:
        limit: the largest number of spans to record.
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

    def start(
        self, category: str, name: str, nbytes: int | None, anyway: bool = False
    ) -> Span | None:
        """Opens a span of this thread.

        Returns `None`, and opens nothing, if the limit is reached, or if the span would be inside
        another of the same category, which includes it; with `anyway` it is recorded even then.
        """
        try:
            # A stack for each thread, so that opening and closing a span takes no lock.
            stack, thread = self._local.own
        except AttributeError:
            stack, thread = self._local.own = self._new_thread()
        # A reduction consists of exchanges, whose spans would only repeat what the outer span says.
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
        """The open spans of all threads that started before this time, outer before inner."""
        for stack in list(self._stacks):
            yield from [span for span in list(stack) if span.start < before]

    def _new_thread(self) -> tuple[list[Span], int]:
        stack: list[Span] = []
        with self._lock:
            self._stacks.append(stack)
            name = threading.current_thread().name
            self.threads.append("program" if name == "MainThread" else name)
            return stack, len(self.threads) - 1


@final
class GpuSpans:
    """The parts of spans on this rank's GPU, timed by events; and NVTX ranges for profilers.

    The program's threads wait for nothing.

    CUDA returns the time between two events as a 32-bit float of milliseconds. So events are
    compared with a reference event, rarely older than a second, whose time on the host's clock is
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
            # A separate, empty stream: an event on it is done at once, whatever the program's
            # streams are doing.
            self._stream = self._cuda.Stream(non_blocking=True)
        self.compare_clocks()

    def compare_clocks(self) -> None:
        """Records a reference event and its time on the host's clock.

        It waits for the event, on a stream that has no other work.
        """
        event = self._event()
        with self._cuda.Device(self._ordinal):
            event.record(self._stream)
            event.synchronize()
        self._known = event, time.perf_counter_ns()

    def start(self, span: Span, stream: Any) -> None:
        """Starts the span's range, and its part on this `cupy.cuda.Stream`, unless it is `None`."""
        self._nvtx.RangePush(span.name)
        span.has_range = True
        if stream is not None:
            self.tracks.setdefault(stream.ptr, len(self.tracks))
            span.stream, span.events = stream, [self._record(stream)]

    def end(self, span: Span) -> None:
        """Ends what `start` started."""
        if span.stream is not None:
            span.events.append(self._record(span.stream))
        self._nvtx.RangePop()

    def wait_for(self, span: Span) -> None:
        """Waits until the GPU has reached the span's end."""
        span.events[1].synchronize()

    def times(self, span: Span) -> tuple[int, int, int]:
        """The track, start and end of a span that is done, in nanoseconds of the host's clock."""
        known, at = self._known
        with self._cuda.Device(self._ordinal):
            start, end = (self._cuda.get_elapsed_time(known, event) for event in span.events)
        # Reused: a step needs several, and each new event would be another call of the driver.
        self._spare += span.events
        return self.tracks[span.stream.ptr], at + int(start * 1e6), at + int(end * 1e6)

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
                return self._cuda.Event(block=True)  # a thread that waits for it sleeps
