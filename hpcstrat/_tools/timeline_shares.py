"""Reads a timeline, even of a killed program, and adds up what its steps spend their time on."""

from __future__ import annotations

import bisect
import collections
import itertools
import json
import math
import reprlib
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hpcstrat._timeline.trace import GPU_TRACKS, other_parts

PROGRAM = 0
"""The track of a rank's first thread, which calls the library."""

COMPUTING, OTHER = "computing", "other"
KINDS = (COMPUTING, "update", "communication", "waiting", "input", "checkpoint", OTHER)
"""What time is spent on: `computing` is the rest of `run`, `other` the rest of the program."""


class TraceSpan(NamedTuple):
    """A period of a track's time, in seconds since the start of the trace."""

    start: float
    end: float
    category: str  # `run`, or one of `KINDS`
    name: str = ""
    nbytes: int = 0  # sent
    is_open: bool = False  # whether the trace ended before the span


class Timeline(NamedTuple):
    """What all ranks did."""

    tracks: dict[int, dict[int, list[TraceSpan]]]  # by rank and number, outer spans before inner
    names: dict[int, str]  # of each rank, with its host
    cores: dict[int, int]  # how many each rank could run on


class Rank(NamedTuple):
    """What a rank's steps spend their time on."""

    rank: int
    steps: int
    step: float  # the median time of a step, in seconds
    mean: float  # the mean time of a step, in seconds
    shares: dict[str, float]  # of the time of all steps, for each of `KINDS`; they add up to 1
    nbytes: float  # sent per step, on average


def read(path: str) -> Timeline:
    """Reads the timeline in a file.

    Files of other hosts next to it, which a killed program did not merge, are read too.

    Raises:
        OSError: a file cannot be read.
        ValueError: the file is not a timeline, or one of its events makes no sense.
    """
    events = [event for file in (path, *other_parts(path)) for event in _events(file)]
    try:
        timeline = _build_timeline(events)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error!r}; record it again") from error
    if not timeline.names:
        raise ValueError(
            f"{path} is not a timeline; pass the file that HPCSTRAT_TIMELINE named when the "
            "program ran"
        )
    return timeline


def _events(path: str) -> Iterator[dict[str, Any]]:
    """The events of a file, one per line. A kill may have truncated the last line."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                event = json.loads(line.rstrip().rstrip(","))
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict) and {"name", "ph", "pid"} <= event.keys():
                yield event


def _build_timeline(events: Sequence[dict[str, Any]]) -> Timeline:
    timeline = Timeline({}, {}, {})
    opened: dict[tuple[int, int], list[dict[str, Any]]] = {}
    # Spans that a kill left open end when the trace ends.
    last = max((event.get("ts", 0) + event.get("dur", 0) for event in events), default=0) / 1e6
    # Outer events before the inner events that start at the same time.
    for event in sorted(events, key=lambda event: (event.get("ts", 0), -event.get("dur", 0))):
        rank, track, kind = event["pid"], event.get("tid", 0), event["ph"]
        if event["name"] == "process_name" and kind == "M":
            timeline.names[rank] = event["args"]["name"]
        elif event["name"] == "process_labels" and kind == "M":
            timeline.cores[rank] = int(event["args"]["labels"].rpartition(":")[2])
        elif kind == "X":
            _add(timeline, event, (event["ts"] + event["dur"]) / 1e6)
        elif kind == "B":
            opened.setdefault((rank, track), []).append(event)
        elif kind == "E" and opened.get((rank, track)):
            _add(timeline, opened[rank, track].pop(), event["ts"] / 1e6)
    for event in itertools.chain.from_iterable(opened.values()):
        _add(timeline, event, last, is_open=True)
    _sort(timeline)
    return timeline


def _add(timeline: Timeline, event: dict[str, Any], end: float, is_open: bool = False) -> None:
    name, category, nbytes = event["name"], event["cat"], event.get("args", {}).get("bytes", 0)
    span = TraceSpan(event["ts"] / 1e6, end, category, name, nbytes, is_open)
    rank, track = event["pid"], event["tid"]
    if not (
        type(name) is str
        and category in ("run", *KINDS)
        and all(type(number) is int for number in (rank, track, nbytes))
        and -math.inf < span.start <= end < math.inf
    ):
        raise ValueError(f"an event is {reprlib.repr(event)}")
    timeline.tracks.setdefault(rank, {}).setdefault(track, []).append(span)


def _sort(timeline: Timeline) -> None:
    """Sorts the spans of each track: outer spans before inner, and waiting within its span."""
    for tracks in timeline.tracks.values():
        for spans in tracks.values():
            spans.sort(key=lambda span: (span.start, -span.end, span.category == "waiting"))


def move_waiting(timeline: Timeline) -> Timeline:
    """The timeline with separate spans for GPUs that wait for each other.

    An NCCL kernel waits on the GPU until all ranks' kernels have started. So in the k-th kernel of
    each rank, the time before the last rank starts is waiting. Only streams with equal numbers of
    kernels on all ranks are compared: after a kill, the k-th kernels may not belong together.
    """
    moved = {
        rank: {track: list(spans) for track, spans in tracks.items()}
        for rank, tracks in timeline.tracks.items()
    }
    for number in {track for tracks in moved.values() for track in tracks if track >= GPU_TRACKS}:
        kernels = [
            [s for s in tracks.get(number, []) if s.category == "communication" and s.nbytes]
            for tracks in moved.values()
        ]
        if len(set(map(len, kernels))) > 1:
            continue
        for spans in zip(*kernels, strict=True):
            last_start = max(span.start for span in spans)
            for span, tracks in zip(spans, moved.values(), strict=True):
                end = min(last_start, span.end)
                if end > span.start:
                    wait = TraceSpan(span.start, end, "waiting", "the other ranks")
                    tracks[number].append(wait)
    timeline = timeline._replace(tracks=moved)
    _sort(timeline)
    return timeline


def share_out(timeline: Timeline) -> list[Rank]:
    """What each rank's steps spend their time on.

    A step lasts from one `run` of the function that runs most often to the next. The first step is
    left out: it makes slots, plans and kernels that later steps reuse.

    Raises:
        ValueError: the program did not run two steps, or they took no time.
    """
    if not timeline.tracks:
        raise ValueError("nothing is recorded; let the program call Strategy.run")
    return [_share_out_rank(rank, timeline.tracks[rank]) for rank in sorted(timeline.tracks)]


def _share_out_rank(rank: int, tracks: dict[int, list[TraceSpan]]) -> Rank:
    starts = steps_of(tracks)
    if len(starts) < 2:
        raise ValueError(
            f"rank {rank} ran at most {len(starts) + 1} steps, and three are needed to tell what "
            "they spend their time on; call Strategy.run more often with the same function"
        )
    start, end, steps = starts[0], starts[-1], len(starts) - 1
    if start == end:
        raise ValueError(f"the steps of rank {rank} took no time; record the timeline again")
    spent: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    for period in periods_of(tracks):
        spent[period.category] += max(0.0, min(period.end, end) - max(period.start, start))
    spent[OTHER] += (end - start) - sum(spent.values())
    sent = sum(
        span.nbytes
        for span in tracks[PROGRAM]
        if span.category == "communication" and start <= span.start < end
    )
    median = statistics.median(b - a for a, b in itertools.pairwise(starts))
    shares = {kind: seconds / (end - start) for kind, seconds in spent.items()}
    return Rank(rank, steps, median, (end - start) / steps, shares, sent / steps)


def steps_of(tracks: dict[int, list[TraceSpan]]) -> list[float]:
    """When each step of a rank but the first starts, and when the last step ends."""
    runs = [span for span in tracks.get(PROGRAM, []) if span.category == "run" and not span.is_open]
    names = collections.Counter(span.name for span in runs).most_common(1)
    return [span.start for span in runs if span.name == names[0][0]][1:]


def periods_of(tracks: dict[int, list[TraceSpan]]) -> list[TraceSpan]:
    """A rank's time as consecutive periods of one kind; gaps are `OTHER`.

    Of nested spans the innermost counts. While a GPU works, its work counts, not the host's, which
    only enqueues.
    """
    on_host = _flatten(tracks.get(PROGRAM, []))
    for track, spans in tracks.items():
        # The strategy's stream, not the stream that copies input.
        if track >= GPU_TRACKS and any(span.category == "run" for span in spans):
            return _overlay(on_host, _flatten(spans))
    return on_host


def _flatten(spans: Sequence[TraceSpan]) -> list[TraceSpan]:
    """Nested spans as consecutive periods: the innermost counts."""
    flat: list[TraceSpan] = []
    stack: list[TraceSpan] = []
    at = 0.0

    def advance(to: float) -> None:
        nonlocal at
        if stack and to > at:
            category = stack[-1].category
            flat.append(TraceSpan(at, to, COMPUTING if category == "run" else category))
        at = max(at, to)

    for span in (*spans, TraceSpan(math.inf, math.inf, OTHER, "the end")):
        while stack and stack[-1].end <= span.start:
            advance(stack[-1].end)
            stack.pop()
        advance(span.start)
        stack.append(span)
    return flat


def _overlay(below: Sequence[TraceSpan], above: Sequence[TraceSpan]) -> list[TraceSpan]:
    """The periods of both; where they overlap, `above` counts."""
    starts = [period.start for period in above]
    result = list(above)
    for period in below:
        at = period.start
        for over in above[max(0, bisect.bisect_right(starts, at) - 1) :]:
            if over.start >= period.end:
                break
            if over.start > at:
                result.append(TraceSpan(at, over.start, period.category))
            at = max(at, over.end)
        if at < period.end:
            result.append(TraceSpan(at, period.end, period.category))
    return sorted(result)
