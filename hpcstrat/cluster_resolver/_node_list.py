"""Slurm's compressed lists: of nodes, and of the tasks that each of them runs."""

from __future__ import annotations

import itertools
import re

_PIECE = re.compile(r"\[(?P<ranges>[0-9,-]+)\]|(?P<text>[^\[\],\s]+)")
_RANGE = re.compile(r"(?P<first>[0-9]+)(?:-(?P<last>[0-9]+))?")
_TASKS = re.compile(r"(?P<tasks>[0-9]+)(?:\(x(?P<nodes>[0-9]+)\))?")


def expand_nodes(nodes: str) -> list[str]:
    """The names of the nodes, in Slurm's order, as `scontrol show hostnames` gives them.

    A name may have several ranges and text behind them, which TensorFlow refuses. Then the last range varies fastest,
    and of the others the first.

    Args:
        nodes: for instance `"n[1-2],gpu[08-10]-ib0"`.

    Raises:
        ValueError: it is not such a list.

    >>> expand_nodes("n[1-2],p[0,07]x[3-4]y")
    ['n1', 'n2', 'p0x3y', 'p0x4y', 'p07x3y', 'p07x4y']
    """
    found: list[str] = []
    for name in re.findall(r"(?:\[[^\]]*\]|[^,])+", nodes):
        pieces = list(_PIECE.finditer(name))
        if "".join(piece[0] for piece in pieces) != name:
            raise ValueError(f"{nodes!r} is no list of Slurm's nodes: {name!r} is not like n1 or n[1-3,7]")
        choices = [_numbers(nodes, piece["ranges"]) if piece["ranges"] else [piece["text"]] for piece in pieces]
        if len(choices) > 1 and not pieces[-1]["ranges"]:
            [end] = choices.pop()
            choices[-1] = [number + end for number in choices[-1]]
        *others, last = choices
        found += ["".join([*first[::-1], end]) for *first, end in itertools.product(*others[::-1], last)]
    return found


def expand_tasks(tasks: str) -> list[int]:
    """How many tasks each node runs, in the order of the nodes.

    Args:
        tasks: for instance `"2(x3),1"`.

    Raises:
        ValueError: it is not such a list.

    >>> expand_tasks("2(x3),1")
    [2, 2, 2, 1]
    """
    found: list[int] = []
    for part in tasks.split(","):
        match = _TASKS.fullmatch(part)
        if match is None:
            raise ValueError(f"{tasks!r} is no list of numbers of tasks: {part!r} is not like 2 or 2(x3)")
        found += [int(match["tasks"])] * int(match["nodes"] or 1)
    return found


def _numbers(nodes: str, ranges: str) -> list[str]:
    """The numbers of `1-3,07`, each as long as the first of its range."""
    found: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (match["first"], match["last"] or match["first"]) if match else ("1", "0")
        if int(last) < int(first):
            raise ValueError(f"{nodes!r} is no list of Slurm's nodes: {part!r} is not like 7 or 1-3")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found
