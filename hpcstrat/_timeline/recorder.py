"""The recorder of a rank: it takes spans from the program's threads; its own thread writes them."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, final

from hpcstrat._process import reports, worlds
from hpcstrat._timeline.spans import LIMIT, GpuSpans, Span, Spans
from hpcstrat._timeline.trace import GPU_TRACKS, Events, TraceFile

_PERIOD = 0.5
"""Seconds between two writes: a kill loses at most this much."""
_LAST_WRITE_SECONDS = 2.0  # the longest that the end of a job waits for a write in progress


@final
class TimelineRecorder:
    """Records what this rank does, and writes it twice a second.

    Args:
        rank: this rank.
        size: the number of ranks.
        file: this host's file.
        zero: nanoseconds of this process's clock at which the trace starts.
        limit: the largest number of spans to record.
    """

    def __init__(
        self, rank: int, size: int, file: TraceFile, zero: int, limit: int = LIMIT
    ) -> None:
        self._rank = rank
        self._spans = Spans(limit)
        self._file = file
        self._events = Events(rank, zero)
        self._gpu: GpuSpans | None = None
        self._on_gpu: deque[Span] = deque()  # ended on the host, but perhaps not on the GPU
        self._done_on_gpu = 0  # how many of them, from the left, the GPU is known to have done
        self._named_threads = 0
        self._named_streams = 0
        self._process = os.getpid()
        self._is_open = True
        self._lock = threading.Lock()
        cores = worlds.own_cores().bit_count()
        file.append(
            [
                self._events.label(
                    "process_name", 0, name=f"rank {rank} of {size} on {socket.gethostname()}"
                ),
                self._events.label("process_sort_index", 0, sort_index=rank),
                self._events.label("process_labels", 0, labels=f"hpcstrat; cores: {cores}"),
            ]
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._write_often, name="hpcstrat-timeline", daemon=True
        )
        self._thread.start()

    # ---- the program's threads

    def start(self, category: str, name: str, nbytes: int | None, stream: Any) -> Span | None:
        """Opens a span of this thread, and of a GPU's stream; `None` if it is not recorded.

        Args:
            category: see `spans`.
            name: what is done.
            nbytes: bytes that this rank sends; `None` for a span that sends nothing.
            stream: a `gpu.Stream`; `None` if the span has no part on a GPU.
        """
        if not self._is_open:
            return None
        span = self._spans.start(category, name, nbytes, anyway=stream is not None)
        if span is not None:
            # Only now, because a program that never uses a GPU must not load CuPy.
            if self._gpu is None and stream is not None:
                self._gpu = GpuSpans(stream.ordinal)
            if self._gpu is not None:
                self._gpu.start(span, None if stream is None else stream.raw)
        return span

    def end(self, span: Span) -> None:
        """Closes the span that this thread opened last."""
        if span.has_range and self._gpu is not None:
            self._gpu.end(span)
        self._spans.end(span)

    # ---- the file

    def close(self) -> None:
        """Writes everything, and stops recording. Idempotent."""
        if self._is_open and os.getpid() == self._process:
            self._stop.set()
            self._thread.join()
            with self._lock:
                self._write(is_last=True)
                self._stop_recording()

    def save_before_the_end(self) -> None:
        """Writes everything, including open spans, while the job is being ended."""
        # A write in progress may hang on a dead disk; the end of the job does not wait for that.
        if os.getpid() == self._process and self._lock.acquire(timeout=_LAST_WRITE_SECONDS):
            try:
                if self._is_open:
                    self._write(is_end=True)
                    self._stop_recording()
            finally:
                self._lock.release()

    def stop_in_a_child(self) -> None:
        """Stops recording in a forked child: it has no writing thread, and its parent's file."""
        self._is_open = False

    def _stop_recording(self) -> None:
        self._is_open = False
        with contextlib.suppress(OSError):
            self._file.close()

    def _write_often(self) -> None:
        while not self._stop.wait(_PERIOD):
            with self._lock:
                if not self._is_open:
                    return
                self._write()
            # Waited for, unlocked, not polled: CuPy polls while it holds Python's lock, and if the
            # program waits for room in CUDA's launch queue, the poll does not return.
            for span in tuple(self._on_gpu):
                assert self._gpu is not None
                self._gpu.wait_for(span)
                self._done_on_gpu += 1

    def _write(self, is_last: bool = False, is_end: bool = False) -> None:
        """Writes the spans that have ended since the last call, and the start of long open ones."""
        # The start of a span that lasts longer than a period is written, so that the trace of a
        # killed job shows what the job was doing.
        before = time.perf_counter_ns() - (0 if is_end else int(_PERIOD * 1e9))
        lines = [*self._take_ended(), *([] if is_end else self._take_done_on_gpu(is_last))]
        for span in self._spans.open_since(before):
            if not span.is_start_written:
                span.is_start_written = True
                lines.append(self._events.start(span))
        lines = [*self._new_names(), *lines]
        if self._spans.is_full and self._rank == 0:
            self._spans.is_full = False
            reports.say(
                f"hpcstrat: the timeline {self._file.path} is full, and what comes now is not "
                "recorded; record fewer steps"
            )
        try:
            self._file.append(lines)
        except OSError as error:
            # A full disk must not end the program that the timeline describes.
            self._is_open = False
            reports.say(
                f"hpcstrat: the timeline {self._file.path} cannot be written any more, and the "
                f"program continues: {error}. Name a file on a disk that has room"
            )

    def _take_ended(self) -> Iterator[str]:
        ended = self._spans.ended
        while ended:
            span = ended.popleft()
            if span.is_start_written:
                yield self._events.end(span)
            else:
                yield self._events.whole(span, span.thread, span.start, span.end)
            if span.stream is not None:
                self._on_gpu.append(span)

    def _take_done_on_gpu(self, is_last: bool) -> Iterator[str]:
        """The spans that the GPU has done.

        Not called at the end of a failing job: the GPU may hang, and this would wait for it.
        """
        gpu = self._gpu
        if gpu is None:
            return
        for _ in range(len(self._on_gpu) if is_last else self._done_on_gpu):
            span = self._on_gpu.popleft()
            gpu.wait_for(span)
            track, start, end = gpu.times(span)
            yield self._events.whole(span, GPU_TRACKS + track, start, end)
        self._done_on_gpu = 0
        # Elapsed times are 32-bit floats, which lose precision with the distance, so the reference
        # event is renewed.
        gpu.compare_clocks()

    def _new_names(self) -> Iterator[str]:
        threads = self._spans.threads
        while self._named_threads < len(threads):
            number = self._named_threads
            yield self._events.label("thread_name", number, name=threads[number])
            self._named_threads += 1
        while self._gpu is not None and self._named_streams < len(self._gpu.tracks):
            number = self._named_streams
            yield self._events.label(
                "thread_name", GPU_TRACKS + number, name=f"GPU, stream {number}"
            )
            self._named_streams += 1
