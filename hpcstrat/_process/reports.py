"""What a rank reports: in one piece, tagged with the rank, on every rank; and notes on errors."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextvars import ContextVar

_PRINT_SECONDS = 3.0  # that the launcher gets to take what is printed

_tag = ""  # in front of each line, under several ranks
_is_reporting: ContextVar[bool] = ContextVar("hpcstrat_is_reporting", default=False)

is_reporting: Callable[[], bool] = _is_reporting.get
"""Whether this thread is in a block of `reporting`."""


def tag_with(rank: int) -> None:
    """From now on every line that is reported names this rank."""
    global _tag
    _tag = f"[rank {rank}] "


def tag(text: str) -> str:
    """The text's lines, each prefixed with the rank if there are several."""
    return "".join(f"{_tag}{line}\n" for line in text.splitlines())


def say(text: str) -> None:
    """Prints the text, tagged, or gives up: a launcher that reads nothing must not block a rank."""
    lines = tag(text)
    printing = threading.Thread(target=_print, args=(lines,), name="hpcstrat-print", daemon=True)
    try:
        printing.start()
    except RuntimeError:  # no more threads, or Python ends
        _print(lines)
    else:
        # A thread that still writes is left behind: the end of the job matters more.
        printing.join(_PRINT_SECONDS)


def _print(lines: str) -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    # The program may have replaced or closed them; rather on standard output than nowhere.
    for stream in (sys.stderr, sys.__stderr__, sys.__stdout__):
        with contextlib.suppress(Exception), reporting():
            stream.write(lines)  # pyright: ignore[reportOptionalMemberAccess]
            stream.flush()  # pyright: ignore[reportOptionalMemberAccess]
            return


@contextlib.contextmanager
def reporting() -> Iterator[None]:
    """A block in which all that this thread writes to standard error is shown, on any rank."""
    outer = _is_reporting.set(True)
    try:
        yield
    finally:
        _is_reporting.reset(outer)


def capture(show: Callable[[], object], error: BaseException | None) -> str:
    """What `show` prints to standard error, or the plain traceback if it prints nothing."""
    text = io.StringIO()
    # Captured, to be printed in one piece with the rank in front of each line: the ranks share one
    # standard error.
    with contextlib.suppress(Exception), contextlib.redirect_stderr(text):
        show()
    shown = text.getvalue()
    if not shown.strip() and error is not None:
        shown = "".join(traceback.format_exception(error))
    # Python 3.10 shows no notes, nor may a hook of the program's.
    notes = [f"{note}\n" for note in getattr(error, "__notes__", ())]
    return shown + "".join(note for note in notes if note not in shown)


def add_note(error: BaseException, note: str) -> None:
    """As `BaseException.add_note`, which Python 3.10 lacks, but once."""
    notes = vars(error).setdefault("__notes__", [])
    if note not in notes:
        notes.append(note)
