"""What to do about the time that is not spent on computing."""

from __future__ import annotations

from collections.abc import Sequence

from hpcstrat._cli.timeline.shares import Rank

_DOMINATES = 0.2
"""The share of a step from which it is worth a word."""
_UNEVEN = 1.5
"""How much longer than the median the mean step is where it is worth a word."""
_STANDS_OUT = 0.5  # a rank that waits less than this part of what the others wait, is waited for


def advise(ranks: Sequence[Rank], cores: Sequence[int]) -> list[str]:
    """A sentence for each kind of time that dominates, the largest first; one that all is well where none does.

    Args:
        ranks: what each spends.
        cores: that each could run on; empty where that is not known.
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
