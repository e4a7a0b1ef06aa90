"""What the ranks tell each other where they disagree, and the lines that are made of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from hpcstrat import _failure
from hpcstrat._communicators.records import Words
from hpcstrat._communicators.watch import notes
from hpcstrat._errors import ReplicaMismatchError

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


class Told(NamedTuple):
    """What one rank tells.

    Attributes:
        words: the call that it makes.
        place: where that is in the program.
        problem: the class and the text of the exception that it raises; `None` where it raises none.
    """

    words: Words
    place: str
    problem: tuple[str, str] | None


def tell(words: Words, error: Exception | None) -> Told:
    """What this rank tells, which raises `error` if that is one."""
    return Told(words, notes.own_place(), None if error is None else _problem(error))


def _problem(error: Exception) -> tuple[str, str]:
    cls = type(error)
    name = next((one.__name__ for one in cls.__mro__ if one in _EXCEPTIONS.values()), "")
    try:
        text = str(error) or repr(error)
    except Exception:  # of the user's own class
        text = f"{cls.__name__}()"
    return name or "RuntimeError", text if name or text.startswith(cls.__name__) else f"{cls.__name__}: {text}"


def raise_as(rank: int, other: Told) -> NoReturn:
    """Raises what another rank does."""
    assert other.problem is not None
    name, message = other.problem
    consequence = _EXCEPTIONS[name](f"{message} (found by rank {rank})")
    _failure.mark_as_consequence(consequence)
    raise consequence


def lines(everyones: Sequence[Told]) -> str:
    """A line a rank: its call, and where it makes it. Of many variables, those by which the ranks differ.

    Where they differ by a number alone, such as a learning rate, how that would work.
    """
    shown = [told.words for told in everyones]
    if len({words.call for words in shown}) == 1:
        passed = _different([words.passed for words in shown])
        numbers = _different([words.numbers for words in shown])
        shown = [Words(words.call, *parts) for words, *parts in zip(shown, passed, numbers, strict=True)]
    listed = "".join(
        f"\n  rank {rank}: {words}, at {told.place}"
        for rank, (words, told) in enumerate(zip(shown, everyones, strict=True))
    )
    same_but_numbers = len({told.words[:2] for told in everyones}) == 1 and len({words.numbers for words in shown}) > 1
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
