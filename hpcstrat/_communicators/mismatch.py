"""What the ranks tell each other where they disagree, and the lines that are made of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from hpcstrat import _failure
from hpcstrat._communicators.protocol import CallDescription
from hpcstrat._errors import ReplicaMismatchError
from hpcstrat._watchdog.rank_status import user_frame

_EXCEPTIONS: dict[str, type[Exception]] = {
    cls.__name__: cls
    for cls in (
        *(TypeError, ValueError, IndexError, KeyError, RuntimeError, NotImplementedError, MemoryError, OSError),
        *(FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError),
        *(AttributeError, ZeroDivisionError, StopIteration, AssertionError, ReplicaMismatchError),
    )
}

_MODEL_EACH = (
    "\nTo train a model on each rank, with numbers of its own, make variables and optimizers outside of every scope, "
    "and call apply_gradients outside of Strategy.run"
)
_MANY = 4
"""Things passed up to which they are shown although they are equal."""


class RankReport(NamedTuple):
    """What one rank tells.

    Attributes:
        words: the call that it makes.
        place: where that is in the program.
        problem: the class and the text of the exception that it raises; `None` where it raises none.
    """

    words: CallDescription
    place: str
    problem: tuple[str, str] | None


def report_of(words: CallDescription, error: Exception | None) -> RankReport:
    """What this rank tells, which raises `error` if that is one."""
    return RankReport(words, user_frame(), None if error is None else _problem(error))


def _problem(error: Exception) -> tuple[str, str]:
    cls = type(error)
    name = next((one.__name__ for one in cls.__mro__ if one in _EXCEPTIONS.values()), "")
    try:
        text = str(error) or repr(error)
    except Exception:  # of the user's own class
        text = f"{cls.__name__}()"
    return name or "RuntimeError", text if name or text.startswith(cls.__name__) else f"{cls.__name__}: {text}"


def raise_as(rank: int, other: RankReport) -> NoReturn:
    """Raises what another rank does."""
    assert other.problem is not None
    name, message = other.problem
    consequence = _EXCEPTIONS[name](f"{message} (found by rank {rank})")
    _failure.mark_as_consequence(consequence)
    raise consequence


def lines(everyones: Sequence[RankReport]) -> str:
    """A line a rank: its call, and where it makes it. Of many variables, those by which the ranks differ.

    Where they differ by a number alone, such as a learning rate, how that would work.
    """
    shown = [report.words for report in everyones]
    if len({words.call for words in shown}) == 1:
        passed = _different([words.passed for words in shown])
        numbers = _different([words.numbers for words in shown])
        shown = [CallDescription(words.call, *parts) for words, *parts in zip(shown, passed, numbers, strict=True)]
    listed = "".join(
        f"\n  rank {rank}: {words}, at {report.place}"
        for rank, (words, report) in enumerate(zip(shown, everyones, strict=True))
    )
    same_but_numbers = (
        len({report.words[:2] for report in everyones}) == 1 and len({words.numbers for words in shown}) > 1
    )
    return listed + _MODEL_EACH if same_but_numbers else listed


def _different(everyones: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Each rank's, without what all have, where they are many; and in the place of that its number."""
    if max(map(len, everyones)) <= _MANY:
        return list(everyones)
    common = set.intersection(*map(set, everyones))
    if not common or all(set(one) == common for one in everyones):
        return [_short(one) for one in everyones]
    return [
        _short(tuple(item for item in one if item not in common), sum(item in common for item in one))
        for one in everyones
    ]


def _short(items: tuple[str, ...], equal: int = 0) -> tuple[str, ...]:
    more = len(items) - 2 * _MANY
    shown = items if more <= 0 else (*items[: 2 * _MANY], f"{more} more")
    return (*shown, f"{'and ' if shown else ''}{equal} that all have") if equal else shown
