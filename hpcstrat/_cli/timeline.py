"""`python -m hpcstrat timeline`: shares, advice and a picture of a timeline."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from hpcstrat._cli.timeline_shares import KINDS, Rank, Timeline, move_waiting, read, share_out, steps_of, stretches

_DOMINATES = 0.2
"""The share of a step from which a kind of time is worth advice."""
_UNEVEN = 1.5
"""The ratio of the mean step to the median from which it is worth a remark."""
_STANDS_OUT = 0.5  # a rank that waits for less than this share of the others' waiting is the one they wait for
_COLORS = {
    "computing": "#4477AA",
    "update": "#228833",
    "communication": "#EE6677",
    "waiting": "#DDCC77",
    "input": "#66CCEE",
    "checkpoint": "#AA3377",
    "other": "#DDDDDD",
}
"""Paul Tol's bright colours, which colour-blind people can tell apart."""


def timeline(path: str, plot: str | None, steps: int, as_json: bool) -> int:
    """Prints what the steps of a timeline spend their time on; returns the exit status, 1 on failure.

    Args:
        path: the file that `HPCSTRAT_TIMELINE` named.
        plot: the file of a picture to draw, or `None`.
        steps: the number of steps in it.
        as_json: whether to print for programs.
    """
    try:
        found = move_waiting(read(path))
        if not as_json:
            _show_ends(found)
        ranks = share_out(found)
        sentences = advise(ranks, list(found.cores.values()))
        if plot is not None:
            draw(found, ranks, plot, steps)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"python -m hpcstrat timeline: {error}", file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps({"ranks": [rank._asdict() for rank in ranks], "advice": sentences}, indent=2))
    else:
        _show(ranks, sentences)
    return 0


def advise(ranks: Sequence[Rank], cores: Sequence[int]) -> list[str]:
    """A sentence for each kind of time that dominates, the largest first; if none does, one that says so.

    Args:
        ranks: what each rank spends its time on.
        cores: the number of cores that each rank could run on; empty if unknown.
    """
    mean = {kind: sum(rank.shares[kind] for rank in ranks) / len(ranks) for kind in ranks[0].shares}
    sentences = {
        "waiting": lambda: _of_waiting(ranks, cores),
        "communication": lambda: _of_communication(ranks),
        "input": lambda: (
            "make batches from arrays (Dataset.from_tensor_slices) or cache() them, do the costly work before the "
            "training begins, or take larger batches; a generator runs whole on every rank"
        ),
        "update": lambda: (
            "the optimizer's work grows with the variables and not with the batch: take larger batches, or an "
            "optimizer with fewer slots"
        ),
        "checkpoint": lambda: "save less often",
        "other": lambda: (
            "the program's own lines between the steps take it, on every rank: print and evaluate less often, and do "
            "not convert what run returns at every step"
        ),
    }
    found = sorted((kind for kind in sentences if mean[kind] >= _DOMINATES), key=lambda kind: -mean[kind])
    told = [f"{kind.capitalize()} takes {mean[kind]:.0%} of a step: {sentences[kind]()}." for kind in found]
    told = told or [f"Nothing dominates: {mean['computing']:.0%} of a step is computing."]
    if all(rank.mean > _UNEVEN * rank.step for rank in ranks):
        told.append(
            f"Some steps take much longer than most: {1e3 * ranks[0].mean:.3g} ms in the mean, "
            f"{1e3 * ranks[0].step:.3g} in the median. The shares are of all, with what the program does in between, "
            "such as an evaluation."
        )
    return told


def draw(timeline: Timeline, ranks: Sequence[Rank], path: str, steps: int) -> None:
    """Draws some steps of every rank on one axis of time, and each rank's shares beside them.

    Args:
        timeline: the timeline.
        ranks: what each rank spends its time on.
        path: the file, whose suffix is the format.
        steps: the number of steps to draw.

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


def _show_ends(found: Timeline) -> None:
    """Prints what the ranks were doing when the program was killed."""
    console = Console(markup=False, emoji=False)  # names of spans may hold brackets
    for rank, tracks in sorted(found.tracks.items()):
        for spans in tracks.values():
            inner = [span for span in spans if span.is_open][-1:]
            for span in inner:
                console.print(f"rank {rank} ended within {span.name!r} ({span.category})", highlight=False)


def _show(ranks: Sequence[Rank], sentences: Sequence[str]) -> None:
    console = Console(markup=False, emoji=False)
    kinds = [kind for kind in KINDS if any(rank.shares[kind] >= 0.0005 for rank in ranks)]
    table = Table(
        "rank",
        "steps",
        "ms",
        *kinds,
        title="A step in ms, the median, and what it is spent on in %",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
    )
    for rank in ranks:
        shares = [f"{100 * rank.shares[kind]:.1f}" for kind in kinds]
        table.add_row(str(rank.rank), str(rank.steps), f"{1e3 * rank.step:.3f}", *shares)
    console.print(table)
    for sentence in sentences:
        console.print(sentence, highlight=False, soft_wrap=True)


def _of_waiting(ranks: Sequence[Rank], cores: Sequence[int]) -> str:
    waits = {rank.rank: rank.shares["waiting"] for rank in ranks}
    last = min(waits, key=lambda rank: waits[rank])
    others = [share for rank, share in waits.items() if rank != last]
    if others and waits[last] < _STANDS_OUT * min(others):
        return (
            f"the others wait for rank {last}, which itself waits {waits[last]:.0%}. See what it alone does, or which "
            "other program runs on its cores or GPU"
        )
    if cores and max(cores) < len(ranks):
        return (
            f"all ranks wait about alike, and {len(ranks)} ranks share {max(cores)} cores: start fewer, or bind each "
            "to cores of its own"
        )
    return (
        "all ranks wait about alike, so their work differs from step to step, or is too short beside the meeting of "
        "the ranks: take larger batches, and give OMP_NUM_THREADS so many that the ranks do not take each other's cores"
    )


def _of_communication(ranks: Sequence[Rank]) -> str:
    nbytes = max(rank.nbytes for rank in ranks)
    return (
        f"{_in_units(nbytes)} a step travel from each rank. Take larger batches, or accumulate gradients over several, "
        "so that there are fewer steps; optimizer.gradient_buffers saves a copy on the host"
    )


def _in_units(nbytes: float) -> str:
    for unit in ("bytes", "KB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} GB"


def _typical(timeline: Timeline, rank: int, steps: int) -> tuple[float, float]:
    """Begin and end of `steps` consecutive steps that take the median time."""
    begins = steps_of(timeline.tracks[rank])
    count = min(steps, len(begins) - 1)
    spans = sorted(zip(begins, begins[count:], strict=False), key=lambda span: span[1] - span[0])
    return spans[len(spans) // 2]
