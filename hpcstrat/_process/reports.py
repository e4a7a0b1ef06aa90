"""What a rank reports on standard error: an error's text, in one piece, tagged with the rank."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator

_PRINT_SECONDS = 3.0  # that the launcher gets to take what is printed
_HAS_NOTES = sys.version_info >= (3, 11)

explanations: list[Callable[[BaseException], None]] = []
"""Functions that add notes to exceptions of other libraries, if the program does not catch them."""

_tag = ""  # in front of each line, under several ranks
_reporting = threading.local()


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
    before = is_reporting()
    _reporting.is_on = True
    try:
        yield
    finally:
        _reporting.is_on = before


def is_reporting() -> bool:
    """Whether this thread reports a failure."""
    return getattr(_reporting, "is_on", False)


# ---- the text of an error


def summarize(error: BaseException) -> str:
    """The error's type, message and place."""
    frames = traceback.extract_tb(error.__traceback__)
    own = os.path.dirname(__file__)
    frame = next((frame for frame in reversed(frames) if not frame.filename.startswith(own)), None)
    text = "".join(traceback.format_exception_only(error)).strip()
    if frame is None:
        return text
    return f"{text}, at {os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}"


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
    if not _HAS_NOTES:  # though the package exceptiongroup makes Python 3.10 show them too
        notes = [f"{note}\n" for note in getattr(error, "__notes__", ())]
        shown += "".join(note for note in notes if note not in shown)
    return shown


def add_note(error: BaseException, note: str) -> None:
    """`BaseException.add_note`, once; Python 3.10 lacks it, so `capture` shows the note there."""
    if note in getattr(error, "__notes__", ()):
        return
    if _HAS_NOTES:
        error.add_note(note)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        vars(error).setdefault("__notes__", []).append(note)
