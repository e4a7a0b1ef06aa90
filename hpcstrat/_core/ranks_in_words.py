"""Ranks in words, for messages, however many there are."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

_MOST = 8
"""Items of a list and ranges of a line that are shown; the others are counted."""
# Words with a digit: numbers, checksums, names such as v17. Not the line in train.py:12.
_NUMBERS = re.compile(r"(?<![:\w])\w*\d\w*")


def ranks_in_words(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-255, 257-511` or `ranks 0, 2, 5` of one rank or more."""
    return f"rank{'s' * (len(ranks) > 1)} {ranges_in_words(ranks)}"


def ranges_in_words(numbers: Iterable[int]) -> str:
    """`0-3, 6` of 0, 1, 2, 3 and 6. Of many ranges the first, and how many numbers more."""
    ranges: list[list[int]] = []
    for _, group in itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        found = [number for _, number in group]
        ranges += [found] if len(found) > 2 else [[number] for number in found]
    shown = [f"{a}-{more[-1]}" if more else str(a) for a, *more in ranges[:_MOST]]
    left_out = sum(map(len, ranges[_MOST:]))
    return ", ".join(shown) + (f" and {left_out} more" if left_out else "")


def list_by_rank(said: Iterable[tuple[int, str]], form: str = "{ranks}: {text}") -> list[str]:
    """One item for the ranks that say the same, in the order of the first of them.

    If very many differ, one of each kind comes before others of it, and a last item counts those
    that are left out; kinds differ in more than numbers. So the one rank that makes another call
    is not lost among hundreds that make the same call with numbers of their own.

    Args:
        said: ranks in ascending order, and what each says; one that says nothing is left out.
        form: how an item looks.
    """
    groups: dict[str, list[int]] = {}
    for rank, text in said:
        if text:
            groups.setdefault(text, []).append(rank)
    if len(groups) > _MOST:
        kinds = {_NUMBERS.sub("", text): text for text in reversed(groups)}
        shown = set(list(dict.fromkeys([*reversed(kinds.values()), *groups]))[:_MOST])
        others = [rank for text, ranks in groups.items() if text not in shown for rank in ranks]
        left_out = f"{len(groups) - _MOST} more"
        groups = {text: ranks for text, ranks in groups.items() if text in shown}
        groups[left_out] = others
    return [form.format(ranks=ranks_in_words(ranks), text=text) for text, ranks in groups.items()]


def join_by_rank(said: Iterable[tuple[int, str]]) -> str:
    """The same in a sentence: `(3,) on ranks 0-2; (4,) on rank 3`."""
    return "; ".join(list_by_rank(said, "{text} on {ranks}"))
