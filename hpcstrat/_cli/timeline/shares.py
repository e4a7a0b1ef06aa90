"""What the steps of a timeline spend their time on."""

from __future__ import annotations

import bisect
import collections
import itertools
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hpcstrat._cli.timeline.reading import PROGRAM, Span, Timeline
from hpcstrat._timeline.trace import GPU_TRACKS

COMPUTING, OTHER = "computing", "other"
KINDS = (COMPUTING, "update", "communication", "waiting", "input", "checkpoint", OTHER)
"""What time is spent on. Computing is what is left of `run`, other what is left of the program."""


class Stretch(NamedTuple):
    """A stretch of time that one kind takes."""

    begin: float
    end: float
    kind: str


class Rank(NamedTuple):
    """What a rank's steps spend.

    Attributes:
        rank: which.
        steps: how many there are.
        step: seconds of one, the median.
        mean: the same, the mean.
        shares: of the time of all steps, for each of `KINDS`; they sum up to 1.
        nbytes: that travel in a step, on average.
    """

    rank: int
    steps: int
    step: float
    mean: float
    shares: dict[str, float]
    nbytes: float


def share_out(timeline: Timeline) -> list[Rank]:
    """Each rank's steps.

    A step lasts from one `run` of the function that runs most often to the next; the first is left out, because it
    makes what the others find ready.

    Raises:
        ValueError: the program did not run two steps.
    """
    return [_of_rank(timeline, rank) for rank in sorted(timeline.tracks)]


def steps_of(tracks: dict[int, list[Span]]) -> list[float]:
    """When each step of a rank begins, and, last, when the last one ends."""
    runs = [span for span in tracks.get(PROGRAM, []) if span.category == "run" and not span.is_open]
    if not runs:
        return []
    ((name, _),) = collections.Counter(span.name for span in runs).most_common(1)
    begins = [span.begin for span in runs if span.name == name]
    return begins[1:]


def stretches(tracks: dict[int, list[Span]]) -> list[Stretch]:
    """Each moment of a rank's program, with what it was spent on, in order; gaps are `OTHER`.

    Of spans that lie in each other the innermost counts. Where a GPU is at work, what it does counts: the host, which
    puts work on it ahead, does not.
    """
    on_gpu = [_flat(spans) for track, spans in tracks.items() if track >= GPU_TRACKS and _is_main(spans)]
    on_host = _flat(tracks.get(PROGRAM, []))
    return on_host if not on_gpu else _laid_over(on_host, on_gpu[0])


def move_waiting(timeline: Timeline) -> Timeline:
    """The timeline with the waiting of GPUs for each other as spans of its own.

    A kernel of NCCL waits on the GPU until all ranks' have begun. So of the k-th one on every rank, what lies before
    the latest begin is waiting. Only streams on which all ranks have equally many are compared.
    """
    moved = {rank: dict(tracks) for rank, tracks in timeline.tracks.items()}
    numbers = {track for tracks in moved.values() for track in tracks if track >= GPU_TRACKS}
    for number in numbers:
        each = {
            rank: [
                i for i, span in enumerate(tracks.get(number, [])) if span.category == "communication" and span.nbytes
            ]
            for rank, tracks in moved.items()
        }
        if len({len(places) for places in each.values()}) > 1:
            continue
        for places in zip(*each.values(), strict=True):
            all_there = max(moved[rank][number][i].begin for rank, i in zip(each, places, strict=True))
            for rank, i in zip(each, places, strict=True):
                span = moved[rank][number][i]
                wait = Span(span.begin, min(all_there, span.end), "waiting", "the other ranks")
                if wait.end > wait.begin:
                    moved[rank][number] = [*moved[rank][number], wait]
    for tracks in moved.values():
        for spans in tracks.values():
            spans.sort(key=lambda span: (span.begin, -span.end, span.category == "waiting"))
    return timeline._replace(tracks=moved)


def _of_rank(timeline: Timeline, rank: int) -> Rank:
    tracks = timeline.tracks[rank]
    begins = steps_of(tracks)
    if len(begins) < 2:
        raise ValueError(
            f"rank {rank} ran {len(begins) + 1} steps at most, and three tell what they spend their time on; call "
            "Strategy.run more often with the same function"
        )
    begin, end = begins[0], begins[-1]
    spent: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    for one in stretches(tracks):
        spent[one.kind] += max(0.0, min(one.end, end) - max(one.begin, begin))
    spent[OTHER] += (end - begin) - sum(spent.values())
    sent = [span.nbytes for span in tracks[PROGRAM] if span.category == "communication" and begin <= span.begin < end]
    return Rank(
        rank,
        len(begins) - 1,
        statistics.median(b - a for a, b in itertools.pairwise(begins)),
        (end - begin) / (len(begins) - 1),
        {kind: seconds / (end - begin) for kind, seconds in spent.items()},
        sum(sent) / (len(begins) - 1),
    )


def _is_main(spans: Iterable[Span]) -> bool:
    """Whether a GPU's stream is the strategy's, and not one that brings input."""
    return any(span.category == "run" for span in spans)


def _flat(spans: Sequence[Span]) -> list[Stretch]:
    """Spans that lie in each other, as stretches one behind the other: the innermost counts."""
    flat: list[Stretch] = []
    stack: list[Span] = []
    at = 0.0

    def advance(to: float) -> None:
        nonlocal at
        if stack and to > at:
            category = stack[-1].category
            flat.append(Stretch(at, to, COMPUTING if category == "run" else category))
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


def _laid_over(below: Sequence[Stretch], above: Sequence[Stretch]) -> list[Stretch]:
    """Both, and where both have something, what is above."""
    begins = [one.begin for one in above]
    result = list(above)
    for one in below:
        at = one.begin
        for over in above[max(0, bisect.bisect_right(begins, at) - 1) :]:
            if over.begin >= one.end:
                break
            if over.begin > at:
                result.append(Stretch(at, over.begin, one.kind))
            at = max(at, over.end)
        if at < one.end:
            result.append(Stretch(at, one.end, one.kind))
    return sorted(result)
