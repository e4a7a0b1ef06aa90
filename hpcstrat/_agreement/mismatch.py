"""Ranks that disagree: their reports, what all raise, or the end of the job."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from hpcstrat._agreement.records import LEAVING, CallDescription
from hpcstrat._core.ranks_in_words import join_by_rank, list_by_rank, ranks_in_words
from hpcstrat._core.types import ReplicaMismatchError
from hpcstrat._core.user_frames import user_frame
from hpcstrat._process import failure, output, reports

# Other ranks raise an error from its class and its text. The exception itself might not be
# picklable, and a class of the user's may not exist on another rank, so only these travel.
_EXCEPTIONS: dict[str, type[Exception]] = {
    cls.__name__: cls
    for cls in (
        TypeError,
        ValueError,
        IndexError,
        KeyError,
        RuntimeError,
        NotImplementedError,
        MemoryError,
        OSError,
        FileNotFoundError,
        PermissionError,
        IsADirectoryError,
        NotADirectoryError,
        AttributeError,
        ZeroDivisionError,
        StopIteration,
        AssertionError,
        ReplicaMismatchError,
    )
}

_MODEL_EACH = (
    "\nTo train a model on each rank, with numbers of its own, make variables and optimizers "
    "outside of every scope, and call apply_gradients outside of Strategy.run"
)
_MANY = 4
"""Up to this many values are shown even where they are equal."""


class RankReport(NamedTuple):
    """One rank's report.

    Attributes:
        words: the call that it makes.
        location: file and line of the program that makes it.
        problem: class, text and `errno`, 0 without one, of the exception that it raises; `None` if
            it raises none.
    """

    words: CallDescription
    location: str
    problem: tuple[str, str, int] | None


def report_of(words: CallDescription, error: Exception | None) -> RankReport:
    """This rank's report, with the error that it raises, if any."""
    return RankReport(words, user_frame(), None if error is None else _problem(error))


def _problem(error: Exception) -> tuple[str, str, int]:
    cls = type(error)
    # The nearest base class that other ranks know, so that the same `except` works on all of them.
    name = next((base.__name__ for base in cls.__mro__ if base in _EXCEPTIONS.values()), "")
    try:
        text = str(error) or repr(error)
    except Exception:  # the user's own class raised it
        text = f"{cls.__name__}()"
    if isinstance(error, OSError) and isinstance(number := error.errno, int):
        return name, text.removeprefix(f"[Errno {number}] "), number
    is_named = name or text.startswith(cls.__name__)
    return name or "RuntimeError", text if is_named else f"{cls.__name__}: {text}", 0


def raise_as(rank: int, other: RankReport) -> NoReturn:
    """Raises the error of another rank."""
    assert other.problem is not None
    name, text, number = other.problem
    text = f"{text} (found by rank {rank})"
    consequence = _EXCEPTIONS[name](number, text) if number else _EXCEPTIONS[name](text)
    failure.mark_as_consequence(consequence)
    raise consequence


def lines(by_rank: Sequence[RankReport]) -> str:
    """One line for the ranks that make the same call in the same place.

    Of many variables, only those that differ are shown. If the ranks differ only in a number, such
    as a learning rate, a further line says how to allow that.
    """
    shown = [report.words for report in by_rank]
    # Among hundreds of variables the two that differ are lost. Different calls are shown whole.
    if len({words.call for words in shown}) == 1:
        passed = _keep_differences([words.passed for words in shown])
        numbers = _keep_differences([words.numbers for words in shown])
        shown = [
            CallDescription(words.call, *parts)
            for words, *parts in zip(shown, passed, numbers, strict=True)
        ]
    said = [f"{words}, at {r.location}" for words, r in zip(shown, by_rank, strict=True)]
    listed = "".join(f"\n  {line}" for line in list_by_rank(enumerate(said)))
    # Ranks that differ only in a learning rate usually train a model each, as searches do.
    same_but_numbers = (
        len({report.words[:2] for report in by_rank}) == 1
        and len({words.numbers for words in shown}) > 1
    )
    return listed + _MODEL_EACH if same_but_numbers else listed


def end_after_leaving(rank: int, statuses: Sequence[int], words: CallDescription) -> NoReturn:
    """Ends the job: some ranks left the program, while others are in a call."""
    gone = [other for other, status in enumerate(statuses) if status == LEAVING]
    if rank in gone and (hidden := output.take_hidden_errors()):  # it may say why it left
        reports.say(hidden)
    # One rank that waits speaks for all.
    speaker = next((other for other, status in enumerate(statuses) if status != LEAVING), 0)
    what = "left the program" if rank in gone else f"waits in {words}, at {user_frame()}"
    failure.end_job(
        f"hpcstrat: rank {rank} {what}; {ranks_in_words(gone)} left the program before the others; "
        "all ranks must make the same calls",
        consequence=rank != speaker,
    )


def end_after_escaped(
    rank: int, numbers: Sequence[int], words: CallDescription, error: BaseException | None
) -> NoReturn:
    """Ends the job: the program caught an exception that not all ranks raised.

    So the ranks no longer make the same calls.

    Args:
        rank: this rank.
        numbers: the number of the call that each rank is in.
        words: the call that this rank is in.
        error: the exception, if this rank raised it.
    """
    where = f"rank {rank} is in {words}, at {user_frame()}"
    # The rank that had the error reports it. The others only say that they follow.
    if error is not None:
        lines = "".join(traceback.format_exception(error))
        failure.end_job(
            f"{lines}hpcstrat: this exception was raised in a call on rank {rank} and was caught, "
            "but other ranks did not raise there; the ranks no longer make the same calls: "
            f"{where}. What not all ranks raise must not be caught"
        )
    if len(set(numbers)) == 1:
        failure.end_job(
            "hpcstrat: an exception left a call on another rank and was caught there, but not on "
            f"this one; the ranks no longer make the same calls: {where}. What not all ranks raise "
            "must not be caught",
            consequence=True,
        )
    made = join_by_rank(enumerate(map(str, numbers)))
    failure.end_job(
        f"hpcstrat: the ranks have made different numbers of calls ({made}); {where}. All ranks "
        "must make the same calls, each to its end",
        consequence=True,
    )


def _keep_differences(by_rank: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Each rank's items; where they are many, a count replaces those that all ranks have."""
    if max(map(len, by_rank)) <= _MANY:
        return list(by_rank)
    common = set.intersection(*map(set, by_rank))
    if not common or all(set(items) == common for items in by_rank):
        return [_shorten(items) for items in by_rank]
    return [
        _shorten(
            tuple(item for item in items if item not in common),
            sum(item in common for item in items),
        )
        for items in by_rank
    ]


def _shorten(items: tuple[str, ...], equal: int = 0) -> tuple[str, ...]:
    more = len(items) - 2 * _MANY
    shown = items if more <= 0 else (*items[: 2 * _MANY], f"{more} more")
    return (*shown, f"{'and ' if shown else ''}{equal} that all have") if equal else shown
