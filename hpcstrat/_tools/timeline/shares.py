"""Reads a timeline, of a killed program too, and adds up what its steps spend their time on."""

from __future__ import annotations

import bisect
import collections
import itertools
import json
import math
import reprlib
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from hpcstrat._timeline.trace import GPU_TRACKS, parts_beside

PROGRAM = 0
"""The track of a rank's first thread, which calls the library."""

COMPUTING, OTHER = "computing", "other"
KINDS = (COMPUTING, "update", "communication", "waiting", "input", "checkpoint", OTHER)
"""What time is spent on. Computing is the rest of `run`, other the rest of the program."""


class TraceSpan(NamedTuple):
    """A stretch of a track's time.

    Attributes:
        begin, end: seconds since the beginning of the trace.
        category: `run`, `communication`, `waiting`, `update`, `input`, `checkpoint`.
        name: what was done.
        nbytes: bytes sent.
        is_open: whether the trace ended before it did.
    """

    begin: float
    end: float
    category: str
    name: str
    nbytes: int = 0
    is_open: bool = False


class Timeline(NamedTuple):
    """What all ranks did.

    Attributes:
        tracks: the spans of each rank's tracks, by rank and number, outer spans before inner ones.
        names: each rank's name, with its host.
        cores: the number of cores that each rank could run on.
    """

    tracks: dict[int, dict[int, list[TraceSpan]]]
    names: dict[int, str]
    cores: dict[int, int]


class Period(NamedTuple):
    """A stretch of time that one kind takes."""

    begin: float
    end: float
    kind: str


class Rank(NamedTuple):
    """What a rank's steps spend their time on.

    Attributes:
        rank: its index.
        steps: the number of steps.
        step: seconds of a step, the median.
        mean: seconds of a step, the mean.
        shares: the fraction of the time of all steps, for each of `KINDS`; they add up to 1.
        nbytes: bytes sent per step, the mean.
    """

    rank: int
    steps: int
    step: float
    mean: float
    shares: dict[str, float]
    nbytes: float


def read(path: str) -> Timeline:
    """The timeline in a file, with the files of other hosts next to it if the program was killed before it merged them.

    Raises:
        OSError: a file cannot be read.
        ValueError: the file is not a timeline, or an event of it makes no sense.
    """
    events = [event for file in (path, *parts_beside(path)) for event in _events(file)]
    try:
        timeline = _timeline_of(events)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error!r}; record it again") from error
    if not timeline.names:
        raise ValueError(
            f"{path} is not a timeline; pass the file that HPCSTRAT_TIMELINE named when the "
            "program ran"
        )
    return timeline


def _timeline_of(events: Sequence[dict[str, Any]]) -> Timeline:
    timeline = Timeline({}, {}, {})
    begun: dict[tuple[int, int], list[dict[str, Any]]] = {}
    # What a kill left open ends when the trace does.
    last = max((event.get("ts", 0) + event.get("dur", 0) for event in events), default=0) / 1e6
    # Outer events before the inner ones that begin with them.
    for event in sorted(events, key=lambda event: (event.get("ts", 0), -event.get("dur", 0))):
        rank, track, kind = event["pid"], event.get("tid", 0), event["ph"]
        if event["name"] == "process_name" and kind == "M":
            timeline.names[rank] = event["args"]["name"]
        elif event["name"] == "process_labels" and kind == "M":
            timeline.cores[rank] = int(event["args"]["labels"].rpartition(":")[2])
        elif kind == "X":
            _add(timeline, event, (event["ts"] + event["dur"]) / 1e6)
        elif kind == "B":
            begun.setdefault((rank, track), []).append(event)
        elif kind == "E" and begun.get((rank, track)):
            _add(timeline, begun[rank, track].pop(), event["ts"] / 1e6)
    for stack in begun.values():
        for event in stack:
            _add(timeline, event, last, is_open=True)
    for tracks in timeline.tracks.values():
        for spans in tracks.values():
            spans.sort(key=lambda span: (span.begin, -span.end))
    return timeline


def share_out(timeline: Timeline) -> list[Rank]:
    """Each rank's steps.

    A step lasts from one `run` of the function that runs most often to the next. The first step is
    left out: it
    makes slots, plans and kernels that later steps reuse.

    Raises:
        ValueError: the program did not run two steps, or they took no time.
    """
    if not timeline.tracks:
        raise ValueError("nothing is recorded; let the program call Strategy.run")
    return [_of_rank(timeline, rank) for rank in sorted(timeline.tracks)]


def steps_of(tracks: dict[int, list[TraceSpan]]) -> list[float]:
    """When each step of a rank begins, and when the last one ends."""
    runs = [span for span in tracks.get(PROGRAM, []) if span.category == "run" and not span.is_open]
    if not runs:
        return []
    ((name, _),) = collections.Counter(span.name for span in runs).most_common(1)
    begins = [span.begin for span in runs if span.name == name]
    # The first step makes plans, slots and kernels, which no later one does.
    return begins[1:]


def stretches(tracks: dict[int, list[TraceSpan]]) -> list[Period]:
    """A rank's time as consecutive stretches of one kind; gaps are `OTHER`.

    Of nested spans the innermost counts. While a GPU works, its work counts and not the host's,
    which only enqueues.
    """
    on_gpu = [
        _flat(spans) for track, spans in tracks.items() if track >= GPU_TRACKS and _is_main(spans)
    ]
    on_host = _flat(tracks.get(PROGRAM, []))
    return on_host if not on_gpu else _laid_over(on_host, on_gpu[0])


def move_waiting(timeline: Timeline) -> Timeline:
    """The timeline with separate spans for GPUs that wait for each other.

    An NCCL kernel waits on the GPU until all ranks' kernels have begun. So in the k-th kernel of
    each rank, the time before the last rank begins is waiting. Only streams with equal numbers of
    kernels on all ranks are compared.
    """
    moved = {rank: dict(tracks) for rank, tracks in timeline.tracks.items()}
    numbers = {track for tracks in moved.values() for track in tracks if track >= GPU_TRACKS}
    for number in numbers:
        each = {
            rank: [
                i
                for i, span in enumerate(tracks.get(number, []))
                if span.category == "communication" and span.nbytes
            ]
            for rank, tracks in moved.items()
        }
        # After a kill the ranks may have written different numbers, and the k-th kernels no longer
        # belong together.
        if len({len(indices) for indices in each.values()}) > 1:
            continue
        for indices in zip(*each.values(), strict=True):
            last_begin = max(
                moved[rank][number][i].begin for rank, i in zip(each, indices, strict=True)
            )
            for rank, i in zip(each, indices, strict=True):
                span = moved[rank][number][i]
                wait = TraceSpan(
                    span.begin, min(last_begin, span.end), "waiting", "the other ranks"
                )
                if wait.end > wait.begin:
                    moved[rank][number] = [*moved[rank][number], wait]
    for tracks in moved.values():
        for spans in tracks.values():
            spans.sort(key=lambda span: (span.begin, -span.end, span.category == "waiting"))
    return timeline._replace(tracks=moved)


def _add(timeline: Timeline, event: dict[str, Any], end: float, is_open: bool = False) -> None:
    span = TraceSpan(
        event["ts"] / 1e6,
        end,
        event["cat"],
        event["name"],
        event.get("args", {}).get("bytes", 0),
        is_open,
    )
    numbers = event["pid"], event["tid"], span.nbytes
    has_known_kind = type(span.name) is str and span.category in ("run", *KINDS)
    if not (
        has_known_kind
        and all(type(one) is int for one in numbers)
        and -math.inf < span.begin <= end < math.inf
    ):
        raise ValueError(f"an event is {reprlib.repr(event)}")
    timeline.tracks.setdefault(event["pid"], {}).setdefault(event["tid"], []).append(span)


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


def _of_rank(timeline: Timeline, rank: int) -> Rank:
    tracks = timeline.tracks[rank]
    begins = steps_of(tracks)
    if len(begins) < 2:
        raise ValueError(
            f"rank {rank} ran at most {len(begins) + 1} steps, and three are needed to tell what "
            "they spend their time on; call Strategy.run more often with the same function"
        )
    begin, end = begins[0], begins[-1]
    if begin == end:
        raise ValueError(f"the steps of rank {rank} took no time; record the timeline again")
    spent: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    for stretch in stretches(tracks):
        spent[stretch.kind] += max(0.0, min(stretch.end, end) - max(stretch.begin, begin))
    spent[OTHER] += (end - begin) - sum(spent.values())
    sent = [
        span.nbytes
        for span in tracks[PROGRAM]
        if span.category == "communication" and begin <= span.begin < end
    ]
    return Rank(
        rank,
        len(begins) - 1,
        statistics.median(b - a for a, b in itertools.pairwise(begins)),
        (end - begin) / (len(begins) - 1),
        {kind: seconds / (end - begin) for kind, seconds in spent.items()},
        sum(sent) / (len(begins) - 1),
    )


def _is_main(spans: Iterable[TraceSpan]) -> bool:
    """Whether a GPU's stream is the strategy's, not the one that copies input."""
    return any(span.category == "run" for span in spans)


def _flat(spans: Sequence[TraceSpan]) -> list[Period]:
    """Nested spans as consecutive stretches: the innermost counts."""
    flat: list[Period] = []
    stack: list[TraceSpan] = []
    at = 0.0

    def advance(to: float) -> None:
        nonlocal at
        if stack and to > at:
            category = stack[-1].category
            flat.append(Period(at, to, COMPUTING if category == "run" else category))
        at = max(at, to)

    for span in spans:
        while stack and stack[-1].end <= span.begin:
            advance(stack[-1].end)
            stack.pop()
        advance(span.begin)
        stack.append(span)
    while stack:
        advance(stack[-1].end)
        stack.pop()
    return flat


def _laid_over(below: Sequence[Period], above: Sequence[Period]) -> list[Period]:
    """The stretches of both; where they overlap, those above."""
    begins = [stretch.begin for stretch in above]
    result = list(above)
    for stretch in below:
        at = stretch.begin
        for over in above[max(0, bisect.bisect_right(begins, at) - 1) :]:
            if over.begin >= stretch.end:
                break
            if over.begin > at:
                result.append(Period(at, over.begin, stretch.kind))
            at = max(at, over.end)
        if at < stretch.end:
            result.append(Period(at, stretch.end, stretch.kind))
    return sorted(result)
