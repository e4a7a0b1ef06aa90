"""The parts of spans on a GPU."""

from __future__ import annotations

import importlib
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, final

from hpcstrat._core import gpu
from hpcstrat._timeline.trace import Span


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
        self._nvtx: Any = importlib.import_module("cupy.cuda.nvtx")
        self._ordinal = ordinal
        self._spare: list[Any] = []
        self._tracks: dict[int, int] = {}  # of each stream, by its address
        # Spans that have ended on the host, but perhaps not on the GPU; and those that have there.
        self._ended: deque[Span] = deque()
        self._done: deque[Span] = deque()
        with self._cuda.Device(ordinal):
            # A separate, empty stream: an event on it is done at once, whatever the program's
            # streams are doing.
            self._stream = self._cuda.Stream(non_blocking=True)
        self._compare_clocks()

    def start(self, span: Span, stream: gpu.Stream | None) -> None:
        """Starts the span's range, and its part on the stream, if there is one."""
        self._nvtx.RangePush(span.name)
        span.has_range = True
        if stream is not None:
            self._tracks.setdefault(stream.raw.ptr, len(self._tracks))
            span.stream, span.events = stream.raw, (self._record(stream.raw),)

    def end(self, span: Span) -> None:
        """Ends what `start` started, if it did."""
        if span.stream is not None:
            span.events += (self._record(span.stream),)
            self._ended.append(span)
        if span.has_range:
            self._nvtx.RangePop()

    def wait(self) -> None:
        """Waits until the GPU has done all that has ended on the host."""
        # Not polled: CuPy polls while it holds Python's lock, and if the program waits for room in
        # CUDA's launch queue, the poll does not return.
        for _ in range(len(self._ended)):
            span = self._ended.popleft()
            span.events[1].synchronize()
            self._done.append(span)

    def take_done(self) -> Iterator[tuple[Span, int, int, int]]:
        """Each span that the GPU has done, its track, start and end, by the host's clock in ns."""
        known, at = self._known
        while self._done:
            span = self._done.popleft()
            with self._cuda.Device(self._ordinal):
                times = [self._cuda.get_elapsed_time(known, event) for event in span.events]
            # Reused: a step needs several, and each new event would be another call of the driver.
            self._spare += span.events
            start, end = (at + int(ms * 1e6) for ms in times)
            yield span, self._tracks[span.stream.ptr], start, end
        # Elapsed times lose precision with the distance, so the reference event is renewed.
        self._compare_clocks()

    def _compare_clocks(self) -> None:
        event = self._record(self._stream)
        with self._cuda.Device(self._ordinal):
            event.synchronize()
        self._known = event, time.perf_counter_ns()

    def _record(self, stream: Any) -> Any:
        with self._cuda.Device(self._ordinal):
            try:
                event = self._spare.pop()
            except IndexError:
                event = self._cuda.Event(block=True)  # a thread that waits for it sleeps
            event.record(stream)
        return event
