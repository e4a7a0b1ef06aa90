"""The parts of spans on a GPU, timed by events on its streams; and NVTX ranges, for NVIDIA's own profilers."""

from __future__ import annotations

import importlib
import time
from typing import Any, final

from hpcstrat import _gpu
from hpcstrat._timeline.spans import Span


@final
class GpuSpans:
    """Times what is put on streams of this rank's GPU. The host waits for nothing.

    CUDA tells how much time lies between two events, as a 32-bit number of milliseconds; so events are compared with
    one that is seldom older than a second, whose time on the host's clock is known.

    Args:
        ordinal: CUDA's number of the GPU.
    """

    def __init__(self, ordinal: int) -> None:
        self._cuda: Any = _gpu.load_cupy("a timeline").cuda
        self._ordinal = ordinal
        self._nvtx: Any = importlib.import_module("cupy.cuda.nvtx")
        self._spare: list[Any] = []
        self.tracks: dict[int, int] = {}
        """The number of the track of each stream, by its address."""
        with self._cuda.Device(ordinal):
            self._stream = self._cuda.Stream(non_blocking=True)
        self.compare_clocks()

    def compare_clocks(self) -> None:
        """Notes an event and its time on the host's clock. It waits for a stream on which nothing else is."""
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

    def is_done(self, span: Span) -> bool:
        """Whether the GPU has come so far."""
        return span.events[1].done

    def wait_for(self, span: Span) -> None:
        """Waits until the GPU has come so far."""
        span.events[1].synchronize()

    def times(self, span: Span) -> tuple[int, int, int]:
        """The span's track and its begin and end, in nanoseconds of the host's clock, once it is done."""
        known, at = self._known
        with self._cuda.Device(self._ordinal):
            begun, ended = (self._cuda.get_elapsed_time(known, event) for event in span.events)
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
                return self._cuda.Event()
