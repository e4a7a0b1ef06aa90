"""`python -m hpcstrat timeline`: a table, advice and a plot of a timeline."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections import Counter
from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from hpcstrat._core.ranks_in_words import list_by_rank, ranks_in_words
from hpcstrat._tools.timeline_shares import (
    KINDS,
    Rank,
    Timeline,
    move_waiting,
    periods_of,
    read,
    share_out,
    steps_of,
)

_DOMINATES = 0.2
"""The share of a step above which a kind of time gets advice."""
_UNEVEN = 1.5
"""The ratio of the mean step to the median above which the report mentions it."""
# The others wait for ranks that wait for less than this share of their waiting.
_STANDS_OUT = 0.5
_MOST = 16
"""Up to this many ranks are shown one by one; of more, those that wait least."""
_COLORS = {
    "computing": "#4477AA",
    "update": "#228833",
    "communication": "#EE6677",
    "waiting": "#DDCC77",
    "input": "#66CCEE",
    "checkpoint": "#AA3377",
    "other": "#DDDDDD",
}
"""Paul Tol's bright colours, which colour-blind people can distinguish."""


def timeline(path: str, plot: str | None, steps: int, as_json: bool) -> int:
    """Prints what the steps spend their time on; returns the exit status, 1 on failure.

    Args:
        path: the file that `HPCSTRAT_TIMELINE` named.
        plot: the file of a plot to draw, or `None`.
        steps: the number of steps in the plot.
        as_json: whether to print JSON.
    """
    try:
        if steps < 1:
            raise ValueError(f"--steps is {steps}; it must be at least 1")
        moved = move_waiting(read(path))
        if not as_json:
            _show_ends(moved)
        ranks = share_out(moved)
        sentences = advise(ranks, moved)
        if plot is not None:
            _draw(moved, _shown(ranks), plot, steps)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"python -m hpcstrat timeline {path}: {error}", file=sys.stderr)
        return 1
    if as_json:
        found = {"ranks": [rank._asdict() for rank in ranks], "advice": sentences}
        print(json.dumps(found, indent=2))
    else:
        _show(ranks, sentences)
    return 0


def _show_ends(timeline: Timeline) -> None:
    """Prints what each rank was doing when the program was killed."""
    console = Console(markup=False, emoji=False)  # names of spans may hold brackets
    ends = [
        (rank, f"{span.name!r} ({span.category})")
        for rank, tracks in sorted(timeline.tracks.items())
        for spans in tracks.values()
        for span in [span for span in spans if span.is_open][-1:]
    ]
    for line in list_by_rank(ends, "{ranks} ended within {text}"):
        console.print(line, highlight=False)


def _shown(ranks: Sequence[Rank]) -> list[Rank]:
    """The ranks that a table or a plot has room for: of many those that others wait for."""
    least = sorted(ranks, key=lambda rank: rank.shares["waiting"])[:_MOST]
    return sorted(least, key=lambda rank: rank.rank)


def _show(ranks: Sequence[Rank], sentences: Sequence[str]) -> None:
    console = Console(markup=False, emoji=False)
    console.width = max(console.width, 100)  # a narrow terminal would cut the names of the kinds
    kinds = [kind for kind in KINDS if any(rank.shares[kind] >= 0.0005 for rank in ranks)]
    title = "Median step in ms, and the shares of its time in %"
    if len(ranks) > _MOST:
        title += f": the mean of {len(ranks)} ranks, and the {_MOST} that wait least"
    table = Table("rank", "steps", "ms", *kinds, title=title, box=SIMPLE, padding=(0, 1, 0, 0))
    rows = [(str(rank.rank), str(rank.steps), rank.step, rank.shares) for rank in _shown(ranks)]
    if len(ranks) > _MOST:
        rows.insert(0, ("mean", "", statistics.fmean(rank.step for rank in ranks), _mean(ranks)))
    for rank, steps, step, shares in rows:
        table.add_row(
            rank, steps, f"{1e3 * step:.3f}", *(f"{100 * shares[kind]:.1f}" for kind in kinds)
        )
    console.print(table)
    for sentence in sentences:
        console.print(sentence, highlight=False, soft_wrap=True)


# ---- advice


def _mean(ranks: Sequence[Rank]) -> dict[str, float]:
    """The shares of all ranks' time."""
    return {kind: statistics.fmean(rank.shares[kind] for rank in ranks) for kind in KINDS}


def advise(ranks: Sequence[Rank], timeline: Timeline) -> list[str]:
    """A sentence for each kind of time that dominates, the largest first, or that none does.

    Args:
        ranks: what each rank spends its time on.
        timeline: names their hosts and how many cores they had.
    """
    mean = _mean(ranks)
    sent = _in_units(max(rank.nbytes for rank in ranks))
    sentences = {
        "waiting": _advise_on_waiting(ranks, timeline),
        "communication": (
            f"each rank sends {sent} per step. Use larger batches, or accumulate gradients over "
            "several, so that there are fewer steps; optimizer.gradient_buffers saves a copy on "
            "the host"
        ),
        "input": (
            "make batches from arrays (Dataset.from_tensor_slices) or cache() them, do the costly "
            "work before training, or use larger batches; every rank runs the whole of a generator"
        ),
        "update": (
            "the optimizer's work depends on the variables, not on the batch: use larger batches, "
            "or an optimizer with fewer slots"
        ),
        "checkpoint": "save less often",
        "other": (
            "the program's own lines between the steps take that time on every rank: print and "
            "evaluate less often, and do not convert the results of run at every step"
        ),
    }
    kinds = [kind for kind in sentences if mean[kind] >= _DOMINATES]
    advice = [
        f"{kind.capitalize()} takes {mean[kind]:.0%} of a step: {sentences[kind]}."
        for kind in sorted(kinds, key=lambda kind: -mean[kind])
    ] or [f"Nothing dominates: {mean['computing']:.0%} of a step is computing."]
    return advice + _mention_long_steps(ranks)


def _mention_long_steps(ranks: Sequence[Rank]) -> list[str]:
    if all(rank.mean > _UNEVEN * rank.step for rank in ranks):
        return [
            f"Some steps take much longer than most: the mean is {1e3 * ranks[0].mean:.3g} ms, the "
            f"median {1e3 * ranks[0].step:.3g} ms. The shares include them, and what the program "
            "does between steps, such as an evaluation."
        ]
    return []


def _advise_on_waiting(ranks: Sequence[Rank], timeline: Timeline) -> str:
    by_wait = sorted(ranks, key=lambda rank: rank.shares["waiting"])
    waits = [rank.shares["waiting"] for rank in by_wait]
    # The others wait for the ranks that wait least: one, or those of a slow host, at most half.
    gaps = [i for i, (a, b) in enumerate(itertools.pairwise(waits), 1) if a < _STANDS_OUT * b]
    if late := max((i for i in gaps if i <= len(ranks) // 2), default=0):
        who = ranks_in_words(sorted(rank.rank for rank in by_wait[:late]))
        which, whose = ("itself waits", "its") if late == 1 else ("themselves wait", "their")
        return (
            f"the others wait for {who}, which {which} {statistics.fmean(waits[:late]):.0%}. Look "
            f"for work that is done only there, or for another program on {whose} cores or GPU"
        )
    # A name is "rank 3 of 8 on n1".
    hosts = Counter(str(name).rpartition(" ")[2] for name in timeline.names.values())
    on_host = max(hosts.values())
    if timeline.cores and (cores := max(timeline.cores.values())) < on_host:
        return (
            f"all ranks wait about equally, and {on_host} ranks share {cores} cores: start "
            "fewer, or bind each to its own cores"
        )
    return (
        "all ranks wait about equally, so their work varies from step to step, or is too short "
        "compared with the barriers: use larger batches, and set OMP_NUM_THREADS so that the ranks "
        "do not compete for cores"
    )


def _in_units(nbytes: float) -> str:
    for unit in ("bytes", "KB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} GB"


# ---- the picture


def _draw(timeline: Timeline, ranks: Sequence[Rank], path: str, steps: int) -> None:
    """Draws some steps of every rank on one time axis, next to each rank's shares.

    Raises:
        RuntimeError: matplotlib is not installed.
        OSError: the file cannot be written.
        ValueError: matplotlib does not know the suffix.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError("--plot needs matplotlib: `pip install matplotlib`") from error
    figure = Figure(figsize=(12, 1.6 + 0.5 * len(ranks)), layout="constrained")
    rows, bars = figure.subplots(1, 2, width_ratios=(4, 1), sharey=True)
    start, end = _find_typical(timeline, ranks[0].rank, steps)
    for row, rank in enumerate(ranks):
        rows.broken_barh([(0, (end - start) * 1e3)], (row - 0.4, 0.8), color=_COLORS["other"])
        shown = [
            (period.category, max(period.start, start), min(period.end, end))
            for period in periods_of(timeline.tracks[rank.rank])
            if period.start < end and period.end > start
        ]
        left = 0.0
        for kind, color in _COLORS.items():
            spans = [((a - start) * 1e3, (b - a) * 1e3) for other, a, b in shown if other == kind]
            rows.broken_barh(spans, (row - 0.4, 0.8), color=color)
            share = 100 * rank.shares[kind]
            bars.barh(row, share, 0.8, left, color=color, label=kind if row == 0 else None)
            left += share
    rows.set_yticks(range(len(ranks)), [f"rank {rank.rank}" for rank in ranks])
    rows.invert_yaxis()
    rows.set_xlim(0, (end - start) * 1e3)
    rows.set_xlabel("ms")
    rows.set_title(f"{min(steps, ranks[0].steps)} of {ranks[0].steps} steps, of typical length")
    bars.set_xlim(0, 100)
    bars.set_xlabel("% of all steps")
    handles, labels = bars.get_legend_handles_labels()
    place = "outside lower center"
    figure.legend(handles, labels, loc=place, ncols=len(KINDS), frameon=False)
    figure.savefig(path, dpi=120)


def _find_typical(timeline: Timeline, rank: int, steps: int) -> tuple[float, float]:
    """The start and end of `steps` consecutive steps that take the median time."""
    starts = steps_of(timeline.tracks[rank])
    count = min(steps, len(starts) - 1)
    spans = sorted(zip(starts, starts[count:], strict=False), key=lambda span: span[1] - span[0])
    return spans[len(spans) // 2]
