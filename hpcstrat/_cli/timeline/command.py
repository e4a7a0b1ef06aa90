"""`python -m hpcstrat timeline`: shares, advice and a picture of a timeline."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from hpcstrat._cli.timeline.advice import advise
from hpcstrat._cli.timeline.reading import Timeline, read
from hpcstrat._cli.timeline.shares import KINDS, Rank, move_waiting, share_out


def timeline(path: str, plot: str | None, steps: int, as_json: bool) -> int:
    """Prints what the steps of a timeline spend their time on; returns the exit status, 1 where it cannot.

    Args:
        path: the file that `HPCSTRAT_TIMELINE` named.
        plot: a picture to draw, or none.
        steps: how many are shown in it.
        as_json: for programs.
    """
    try:
        found = move_waiting(read(path))
        if not as_json:
            _show_ends(found)
        ranks = share_out(found)
        sentences = advise(ranks, list(found.cores.values()))
        if plot is not None:
            from hpcstrat._cli.timeline.plot import draw

            draw(found, ranks, plot, steps)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"python -m hpcstrat timeline: {error}", file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps({"ranks": [rank._asdict() for rank in ranks], "advice": sentences}, indent=2))
    else:
        _show(ranks, sentences)
    return 0


def _show_ends(found: Timeline) -> None:
    """What the ranks were in when the program was killed."""
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
