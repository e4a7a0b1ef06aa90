"""A timeline starts when the ranks are connected; a thread of each rank writes what it records."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, final

from hpcstrat._communicators.base import Communicator
from hpcstrat._communicators.connection import when_connected, when_left
from hpcstrat._communicators.host import HostCommunicator
from hpcstrat._core import gpu
from hpcstrat._core.call_name import names_call, record_to
from hpcstrat._process import reports, worlds
from hpcstrat._timeline.trace import GPU_TRACKS, Span, TraceFile, join_parts, part_name

LIMIT = 1_000_000
"""The largest number of spans that a rank records: about 150 MB of the trace."""
_PERIOD = 0.5
"""Seconds between two writes: a kill loses at most this much."""
_LAST_WRITE_SECONDS = 2.0  # the longest that the end of a job waits for a write in progress
_ROUNDS = 16  # barriers that compare the clocks of several hosts


def start(path: str) -> None:
    """Makes this process record what it does in this file, once the ranks are connected."""
    path = os.path.abspath(path)  # the program may change the folder
    when_connected.append(functools.partial(_start_recording, path))
    when_left.append(functools.partial(_end, path))


@names_call("HPCSTRAT_TIMELINE, the file")
def _start_recording(path: str, communicator: HostCommunicator) -> None:
    """Makes the file, and starts to record. Collective.

    Raises:
        OSError: the file cannot be written, on any rank.
    """
    rank, hosts = communicator.rank, worlds.start().hosts
    moment = zero(communicator, hosts)
    is_first = hosts.index(hosts[rank]) == rank
    file = None
    # Rank 0 removes the files of a previous run; then the first rank of each host makes a file;
    # then the other ranks open it.
    turn = 0 if rank == 0 else 1 if is_first else 2
    for now in range(3):
        with communicator.raise_together():
            if now == turn:
                part = part_name(path, hosts[rank])
                file = TraceFile(part, rank, communicator.size, moment, is_first)
            communicator.barrier()
    assert file is not None
    recorder = TimelineRecorder(file)
    if communicator.size == 1:  # no rank to wait for
        atexit.register(join_parts, path, 1)
    record_to(recorder)
    atexit.register(recorder.close)  # before what was registered before
    os.register_at_fork(after_in_child=recorder.stop)


@names_call("HPCSTRAT_TIMELINE, the end")
def _end(path: str, communicator: HostCommunicator) -> None:
    """Merges the files of all hosts, after all ranks have written everything. Collective."""
    communicator.barrier()
    if communicator.rank == 0:
        join_parts(path, max(worlds.start().hosts) + 1)


# ---- the clocks of several hosts in one trace


@names_call("HPCSTRAT_TIMELINE, the clocks")
def zero(communicator: Communicator, hosts: Sequence[int]) -> int:
    """Nanoseconds of this process's clock when the trace starts, at the same moment on all ranks.

    Collective. Processes of one host share a clock. Processes of several hosts pass several
    barriers. A rank leaves a barrier only after all ranks have entered it, so each rank leaves
    later than each other rank enters, which bounds the difference of their clocks.

    Args:
        communicator: of all ranks.
        hosts: for each rank the index of its host.
    """
    times = []
    for _ in range(_ROUNDS if len(set(hosts)) > 1 else 1):
        entered = time.perf_counter_ns()
        communicator.barrier()
        times.append((entered, time.perf_counter_ns()))
    by_rank = communicator.all_gather_obj(times)
    first = hosts.index(hosts[communicator.rank])
    return by_rank[0][-1][1] + sum(difference(by_rank[0], by_rank[first])) // 2


def difference(
    first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    """The second clock's time minus the first's, in nanoseconds: at least and at most."""
    # Each rank leaves a barrier after the other has entered it; these are the times of both. The
    # tightest bounds of all barriers count.
    least = max(entered - left for (_, left), (entered, _) in zip(first, second, strict=True))
    most = min(left - entered for (entered, _), (_, left) in zip(first, second, strict=True))
    return least, most


@final
class TimelineRecorder:
    """Records what this rank does, and writes it twice a second.

    Args:
        file: this host's file.
        limit: the largest number of spans to record.
    """

    def __init__(self, file: TraceFile, limit: int = LIMIT) -> None:
        self._file = file
        self._left = limit
        # A deque's append and popleft are atomic, so no thread needs a lock to add spans.
        self._ended: deque[Span] = deque()
        self._stacks: list[list[Span]] = []  # each thread's open spans
        self._own = threading.local()
        self._gpu: GpuSpans | None = None
        self._tracks = itertools.count()
        self._labels: deque[str] = deque()  # of threads, not yet written
        self._named_streams: set[int] = set()
        self._is_open = True
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._write_often, name="hpcstrat-timeline", daemon=True
        )
        self._thread.start()

    # ---- the program's threads

    def start(self, category: str, name: str, nbytes: int | None, stream: Any) -> Span | None:
        """Opens a span of this thread, and of a GPU's stream; `None` if it is not recorded.

        The arguments are those of `hpcstrat._core.call_name`: a category, and `Details`.
        """
        if not self._is_open:
            return None
        try:
            # A stack for each thread, so that opening and closing a span takes no lock.
            stack, track = self._own.spans
        except AttributeError:
            stack, track = self._own.spans = [], next(self._tracks)
            self._stacks.append(stack)
            thread = threading.current_thread().name
            label = {"name": "program" if thread == "MainThread" else thread}
            self._labels.append(self._file.label("thread_name", track, label))
        # A reduction consists of exchanges, whose spans would only repeat what the outer span says.
        is_part = bool(stack) and stack[-1].category == category and stream is None
        if is_part or self._left <= 0:
            return None
        self._left -= 1
        if not self._left and self._file.rank == 0:
            reports.say(
                f"hpcstrat: the timeline {self._file.path} is full, and what comes now is not "
                "recorded; record fewer steps"
            )
        span = Span(category, name, nbytes, track, time.perf_counter_ns())
        stack.append(span)
        # Only now, because a program that never uses a GPU must not load CuPy.
        if self._gpu is None and stream is not None:
            self._gpu = GpuSpans(stream.ordinal)
        if self._gpu is not None:
            self._gpu.start(span, stream)
        return span

    def end(self, span: Span) -> None:
        """Closes the span that this thread opened last."""
        if self._gpu is not None:
            self._gpu.end(span)
        span.end = time.perf_counter_ns()
        self._own.spans[0].pop()
        self._ended.append(span)

    # ---- the file

    def close(self, is_failing: bool = False) -> None:
        """Writes everything, and stops recording. Idempotent.

        Args:
            is_failing: whether the job is being ended. Open spans are written too, and neither a
                GPU nor a write in progress is waited for, as a GPU or a disk may hang.
        """
        if not self._is_open:
            return
        if not is_failing:
            self._stop.set()
            self._thread.join()
            if self._gpu is not None:
                self._gpu.wait()
        if self._lock.acquire(timeout=_LAST_WRITE_SECONDS if is_failing else -1):
            try:
                if self._is_open:
                    self._write(is_failing)
                    self.stop()
                    with contextlib.suppress(OSError):
                        self._file.close()
            finally:
                self._lock.release()

    def stop(self) -> None:
        """Stops recording: a forked child has no writing thread, and its parent's file."""
        self._is_open = False

    def _write_often(self) -> None:
        while not self._stop.wait(_PERIOD):
            with self._lock:
                if not self._is_open:
                    return
                self._write()
            if self._gpu is not None:
                self._gpu.wait()

    def _write(self, is_failing: bool = False) -> None:
        """Writes the spans that have ended since the last call, and the start of long open ones."""
        file, lines = self._file, []
        while self._labels:
            lines.append(self._labels.popleft())
        while self._ended:
            span = self._ended.popleft()
            if span.is_start_written:
                lines.append(file.event("E", span, span.track, span.end))
            else:
                lines.append(file.event("X", span, span.track, span.start, span.end))
        if self._gpu is not None and not is_failing:
            for span, stream, start, end in self._gpu.take_done():
                if stream not in self._named_streams:
                    self._named_streams.add(stream)
                    name = f"GPU, stream {stream}"
                    lines.append(file.label("thread_name", GPU_TRACKS + stream, {"name": name}))
                lines.append(file.event("X", span, GPU_TRACKS + stream, start, end))
        # The start of a span that lasts longer than a period is written, so that the trace of a
        # killed job shows what the job was doing.
        before = time.perf_counter_ns() - (0 if is_failing else int(_PERIOD * 1e9))
        for span in itertools.chain.from_iterable(map(list, list(self._stacks))):
            if span.start < before and not span.is_start_written:
                span.is_start_written = True
                lines.append(file.event("B", span, span.track, span.start))
        try:
            file.append(lines)
        except OSError as error:
            # A full disk must not end the program that the timeline describes.
            self._is_open = False
            reports.say(
                f"hpcstrat: the timeline {file.path} cannot be written any more, and the "
                f"program continues: {error}. Name a file on a disk that has room"
            )


# ---- the GPU's part


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
        with self._cuda.Device(self._ordinal):
            for _ in range(len(self._ended)):
                span = self._ended.popleft()
                gpu.wait_for(span.events[1])
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
                event = self._cuda.Event()
            event.record(stream)
        return event
