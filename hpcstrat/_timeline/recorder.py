"""The recorder of a rank: it takes spans from the program's threads, and a thread of its own writes them."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, final

from hpcstrat._process import failure, worlds
from hpcstrat._timeline.spans import LIMIT, GpuSpans, Span, Spans
from hpcstrat._timeline.trace import GPU_TRACKS, Events, TraceFile

_PERIOD = 0.5
"""Seconds between two writes: what a kill takes away at most."""
_LAST_WRITE_SECONDS = 2.0  # seconds that the end of a job waits for a write that is under way


@final
class TimelineRecorder:
    """Records what this rank does, and writes it twice a second.

    Args:
        rank: this rank.
        size: the number of ranks.
        file: this host's.
        zero: nanoseconds of this process's clock at which the trace begins.
        limit: spans that are recorded at most.
    """

    def __init__(
        self, rank: int, size: int, file: TraceFile, zero: int, limit: int = LIMIT
    ) -> None:
        self._rank = rank
        self._spans = Spans(limit)
        self._file = file
        self._events = Events(rank, zero)
        self._gpu: GpuSpans | None = None
        self._on_gpu: deque[Span] = deque()  # ended for the host, but perhaps not for the GPU
        self._done_on_gpu = 0  # how many of them, the first ones, the GPU is known to have done
        self._named_threads = 0
        self._named_streams = 0
        self._process = os.getpid()
        self._is_open = True
        self._lock = threading.Lock()
        cores = worlds.own_cores().bit_count()
        file.append(
            [
                self._events.named(
                    "process_name", 0, name=f"rank {rank} of {size} on {socket.gethostname()}"
                ),
                self._events.named("process_sort_index", 0, sort_index=rank),
                self._events.named("process_labels", 0, labels=f"hpcstrat; cores: {cores}"),
            ]
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._write_often, name="hpcstrat-timeline", daemon=True
        )
        self._thread.start()

    # ---- the program's threads

    def begin(self, category: str, name: str, nbytes: int | None, stream: Any) -> Span | None:
        """Opens a span of this thread, and of a GPU's stream; `None` where nothing is to be recorded.

        Args:
            category: see `spans`.
            name: what is done.
            nbytes: that travel; `None` where none do.
            stream: a `gpu.Stream`; `None` where the span has no part on a GPU.
        """
        if not self._is_open:
            return None
        span = self._spans.begin(category, name, nbytes, anyway=stream is not None)
        if span is not None:
            # Only now, because a program that never uses a GPU must not load CuPy.
            if self._gpu is None and stream is not None:
                self._gpu = GpuSpans(stream.ordinal)
            if self._gpu is not None:
                self._gpu.begin(span, None if stream is None else stream.raw)
        return span

    def end(self, span: Span) -> None:
        """Closes the span that this thread opened last."""
        if span.has_range and self._gpu is not None:
            self._gpu.end(span)
        self._spans.end(span)

    # ---- the file

    def close(self) -> None:
        """Writes all there is, and records no more. Idempotent."""
        if self._is_open and os.getpid() == self._process:
            self._stop.set()
            self._thread.join()
            with self._lock:
                self._write(is_last=True)
                self._stop_recording()

    def save_before_the_end(self) -> None:
        """Writes what there is, with the spans that are still open, in the middle of whatever ends the job."""
        # A write may be under way on a disk that stands still; the end of the job does not wait for
        # that.
        if os.getpid() == self._process and self._lock.acquire(timeout=_LAST_WRITE_SECONDS):
            try:
                if self._is_open:
                    self._write(is_end=True)
                    self._stop_recording()
            finally:
                self._lock.release()

    def stop_in_a_child(self) -> None:
        """A forked child records nothing: it has no thread that writes, and its parent's file."""
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
            # Waited for, unlocked, and not asked for: CuPy asks with Python's lock, and where the
            # program waits for room among CUDA's launches the answer does not come.
            for span in tuple(self._on_gpu):
                assert self._gpu is not None
                self._gpu.wait_for(span)
                self._done_on_gpu += 1

    def _write(self, is_last: bool = False, is_end: bool = False) -> None:
        """Writes what has ended since the last time, and the begin of what lasts."""
        # What lasts longer than a period has its beginning written, so that the trace of a killed
        # job shows what it was in.
        before = time.perf_counter_ns() - (0 if is_end else int(_PERIOD * 1e9))
        lines = [*self._of_ended(), *([] if is_end else self._of_gpu(is_last))]
        for span in self._spans.open_since(before):
            if not span.is_begun:
                span.is_begun = True
                lines.append(self._events.begin(span))
        lines = [*self._new_names(), *lines]
        if self._spans.is_full and self._rank == 0:
            self._spans.is_full = False
            failure.say(
                f"hpcstrat: the timeline {self._file.path} is full, and what comes now is not "
                "recorded; make one of fewer steps"
            )
        try:
            self._file.append(lines)
        except OSError as error:
            # A full disk must not end the program that it was to describe.
            self._is_open = False
            failure.say(
                f"hpcstrat: the timeline {self._file.path} cannot be written any more, and the "
                f"program goes on: {error}. Name a file on a disk that has room"
            )

    def _of_ended(self) -> Iterator[str]:
        ended = self._spans.ended
        while ended:
            span = ended.popleft()
            if span.is_begun:
                yield self._events.end(span)
            else:
                yield self._events.whole(span, span.thread, span.begin, span.end)
            if span.stream is not None:
                self._on_gpu.append(span)

    def _of_gpu(self, is_last: bool) -> Iterator[str]:
        """What the GPU has done.

        Not where the job ends: it may hang, and this one would wait for it.
        """
        gpu = self._gpu
        if gpu is None:
            return
        for _ in range(len(self._on_gpu) if is_last else self._done_on_gpu):
            span = self._on_gpu.popleft()
            gpu.wait_for(span)
            track, begin, end = gpu.times(span)
            yield self._events.whole(span, GPU_TRACKS + track, begin, end)
        self._done_on_gpu = 0
        # Elapsed times are 32-bit floats, which lose precision with the distance, so the known
        # event is renewed.
        gpu.compare_clocks()

    def _new_names(self) -> Iterator[str]:
        threads = self._spans.threads
        while self._named_threads < len(threads):
            number = self._named_threads
            yield self._events.named("thread_name", number, name=threads[number])
            self._named_threads += 1
        while self._gpu is not None and self._named_streams < len(self._gpu.tracks):
            number = self._named_streams
            yield self._events.named(
                "thread_name", GPU_TRACKS + number, name=f"GPU, stream {number}"
            )
            self._named_streams += 1
