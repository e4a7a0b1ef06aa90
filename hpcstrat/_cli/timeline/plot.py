"""Draws a timeline: ranks as rows."""

from __future__ import annotations

from collections.abc import Sequence

from hpcstrat._cli.timeline.reading import Timeline
from hpcstrat._cli.timeline.shares import KINDS, Rank, steps_of, stretches

_COLORS = {
    "computing": "#4477AA",
    "update": "#228833",
    "communication": "#EE6677",
    "waiting": "#DDCC77",
    "input": "#66CCEE",
    "checkpoint": "#AA3377",
    "other": "#DDDDDD",
}
"""Paul Tol's bright colours, which people see apart who do not see all colours."""


def draw(timeline: Timeline, ranks: Sequence[Rank], path: str, steps: int) -> None:
    """Writes a picture: some steps of every rank on one axis of time, and beside them each rank's shares.

    Args:
        timeline: what is drawn.
        ranks: what each spends.
        path: the file, whose suffix says which format.
        steps: how many are shown.

    Raises:
        RuntimeError: matplotlib is not installed.
        OSError: the file cannot be written.
        ValueError: a suffix that matplotlib does not know.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError("--plot needs matplotlib: `pip install matplotlib`") from error
    figure = Figure(figsize=(12, 1.6 + 0.5 * len(ranks)), layout="constrained")
    rows, bars = figure.subplots(1, 2, width_ratios=(4, 1), sharey=True)
    begin, end = _typical(timeline, ranks[0].rank, steps)
    for place, rank in enumerate(ranks):
        rows.broken_barh([(0, (end - begin) * 1e3)], (place - 0.4, 0.8), color=_COLORS["other"])
        shown = [one for one in stretches(timeline.tracks[rank.rank]) if one.begin < end and one.end > begin]
        for kind in KINDS:
            spans = [
                ((max(one.begin, begin) - begin) * 1e3, (min(one.end, end) - max(one.begin, begin)) * 1e3)
                for one in shown
                if one.kind == kind
            ]
            rows.broken_barh(spans, (place - 0.4, 0.8), color=_COLORS[kind])
        left = 0.0
        for kind in KINDS:
            share = 100 * rank.shares[kind]
            bars.barh(place, share, 0.8, left, color=_COLORS[kind], label=kind if place == 0 else None)
            left += share
    rows.set_yticks(range(len(ranks)), [f"rank {rank.rank}" for rank in ranks])
    rows.invert_yaxis()
    rows.set_xlim(0, (end - begin) * 1e3)
    rows.set_xlabel("ms")
    rows.set_title(f"{min(steps, ranks[0].steps)} of {ranks[0].steps} steps, as long as most")
    bars.set_xlim(0, 100)
    bars.set_xlabel("% of all steps")
    figure.legend(*bars.get_legend_handles_labels(), loc="outside lower center", ncols=len(KINDS), frameon=False)
    figure.savefig(path, dpi=120)


def _typical(timeline: Timeline, rank: int, steps: int) -> tuple[float, float]:
    """Begin and end of `steps` consecutive steps that take the median time."""
    begins = steps_of(timeline.tracks[rank])
    count = min(steps, len(begins) - 1)
    spans = sorted(zip(begins, begins[count:], strict=False), key=lambda span: span[1] - span[0])
    return spans[len(spans) // 2]
