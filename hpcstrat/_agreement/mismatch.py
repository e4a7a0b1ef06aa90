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

_MODEL_EACH = (
    "\nTo train a model on each rank, with numbers of its own, make variables and optimizers "
    "outside of every scope, and call apply_gradients outside of Strategy.run"
)
_LONGEST = 50_000
"""Characters of a line that are shown: some 700 variables."""


class RankReport(NamedTuple):
    """One rank's report.

    Attributes:
        words: the call that it makes.
        location: file and line of the program that makes it.
        problem: class, text and `errno`, 0 without one, of the exception that other ranks raise;
            `None` if it raises none.
    """

    words: CallDescription
    location: str
    problem: tuple[type[Exception], str, int] | None


def report_of(words: CallDescription, error: Exception | None) -> RankReport:
    """This rank's report, with the error that it raises, if any."""
    return RankReport(words, user_frame(), None if error is None else _problem(error))


# Only a class that all ranks have and a text travel: the exception might not be picklable.
def _problem(error: Exception) -> tuple[type[Exception], str, int]:
    cls = type(error)
    # The nearest base class, so that the same `except` works on all ranks.
    known: type[Exception] = next(filter(_is_known, cls.__mro__), RuntimeError)
    try:
        text = str(error) or repr(error)
    except Exception:  # the user's own class raised it
        text = f"{cls.__name__}()"
    if isinstance(error, OSError) and isinstance(number := error.errno, int):
        return known, text.removeprefix(f"[Errno {number}] "), number
    if not isinstance(error, known) and not text.startswith(cls.__name__):
        text = f"{cls.__name__}: {text}"
    return known, text, 0


def _is_known(cls: type) -> bool:
    """Whether all ranks have this class of exceptions, and can make one from a text."""
    if not issubclass(cls, Exception) or cls is Exception:
        return False
    if cls.__module__ != "builtins":
        return cls is ReplicaMismatchError
    try:
        cls("")
    except TypeError:  # `UnicodeDecodeError` and `ExceptionGroup` take more
        return False
    return True


def raise_as(rank: int, other: RankReport) -> NoReturn:
    """Raises the error of another rank."""
    assert other.problem is not None
    cls, text, number = other.problem
    text = f"{text} (found by rank {rank})"
    consequence = cls(number, text) if number else cls(text)
    failure.mark_as_consequence(consequence)
    raise consequence


def lines(by_rank: Sequence[RankReport]) -> str:
    """One line for the ranks that make the same call in the same place.

    If the ranks differ only in a number, such as a learning rate, a further line says how to allow
    that.
    """
    said = list_by_rank(enumerate(f"{report.words}, at {report.location}" for report in by_rank))
    listed = "".join(f"\n  {_shorten(line)}" for line in said)
    # Ranks that differ only in a learning rate usually train a model each, as searches do.
    same_but_numbers = (
        len({report.words[:2] for report in by_rank}) == 1
        and len({report.words.numbers for report in by_rank}) > 1
    )
    return listed + _MODEL_EACH if same_but_numbers else listed


def _shorten(line: str) -> str:
    half = _LONGEST // 2  # the end says where it is
    return line if len(line) <= _LONGEST else f"{line[:half]} ... {line[-half:]}"


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
