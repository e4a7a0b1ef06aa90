"""What a rank prints: standard streams that read like one program's, and reports of its failure.

| what is written              | standard output        | standard error                           |
|------------------------------|------------------------|------------------------------------------|
| at the top level             | of rank 0              | of rank 0; other ranks keep the last     |
|                              |                        | 16 KiB, to be shown if they fail         |
| in a replica context         | of every rank          | of every rank                            |
| by any other thread          | as at the top level    | as at the top level                      |
| while an exception is        | as the place says      | of every rank: it may tell of a failure  |
| handled, a logged error,     |                        |                                          |
| hpcstrat's own reports, what |                        |                                          |
| Python says as it ends       |                        |                                          |

`sys.stdout` and `sys.stderr` are replaced by objects that decide; nothing else is.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from types import FrameType
from typing import Any

from hpcstrat._process import launchers

_LOG_VARIABLE = "_HPCSTRAT_LOG"  # the file of this rank, where a launcher keeps one
_HIDDEN_CHARACTERS = 1 << 14  # the last of the hidden text, which are kept
_PRINT_SECONDS = 3.0  # that the launcher gets to take what is printed

_mode: str | None = None  # HPCSTRAT_OUTPUT, once the streams are replaced
_hides = False  # whether this rank hides what it prints outside a replica context
_errors: _ErrorStream | None = None
_tag = ""  # in front of each line, under several ranks
_is_reporting: ContextVar[bool] = ContextVar("hpcstrat_is_reporting", default=False)

explanations: list[Callable[[BaseException], None]] = []
"""Functions that add notes to exceptions of other libraries, if the program does not catch them."""

replica_context: Callable[[], bool] = bool  # False, until it is set from above
"""Whether this thread is in the context of one of several replicas."""


def install() -> None:
    """Replaces the standard streams if a launcher started several processes; starts no MPI.

    Raises:
        ValueError: a variable has a value that is not allowed.
    """
    global _mode, _hides, _errors
    launcher = launchers.find()
    if _mode is not None or launcher is None or launcher.alone:
        return
    output, errors = os.environ.get("HPCSTRAT_OUTPUT", ""), os.environ.get("HPCSTRAT_STDERR", "")
    if output not in ("", "all", "lead"):
        raise ValueError(
            f"HPCSTRAT_OUTPUT={output!r} is not allowed: 'all' shows what every rank prints, "
            "'lead' only what rank 0 prints. Without it each replica shows inside `strategy.run`, "
            "and rank 0 alone elsewhere."
        )
    if errors not in ("", "all"):
        raise ValueError(
            f"HPCSTRAT_STDERR={errors!r} is not allowed: 'all' shows what every rank writes to "
            "standard error. Without it the rules of HPCSTRAT_OUTPUT apply, and whatever tells "
            "of a failure is shown."
        )
    _mode, _hides = output, launcher.rank > 0 and output != "all"
    # A stream is None if Python was started without it.
    if sys.stdout is not None:
        with contextlib.suppress(AttributeError, ValueError):  # another kind of stream; closed
            sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
        sys.stdout = _Stream(sys.stdout)
    # A notebook's engine sends its errors where the notebook shows them as that engine's.
    if _hides and not errors and sys.stderr is not None and ipython_shell() is None:
        replaced, sys.stderr = sys.stderr, _ErrorStream(sys.stderr)
        _errors = sys.stderr
        for handler in logging.root.handlers:  # of a `basicConfig` before the import
            if isinstance(handler, logging.StreamHandler) and handler.stream is replaced:
                handler.setStream(_errors)


def ipython_shell() -> Any:
    """The shell of IPython that this program runs in, such as a notebook's; else None."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


def take_hidden_errors() -> str:
    """What this rank has hidden of standard error, which may explain its failure; whole lines."""
    return "" if _errors is None else _errors.take()


class _Stream:
    """Shows in whole lines what shows on this rank; all else is the stream's own."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        # By thread, what it wrote of a line so far: `print(a, b)` writes in four pieces, and pieces
        # of several ranks would mix in a shared pipe.
        self._parts: dict[int, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.close()

    @property
    def buffer(self) -> Any:
        return _Bytes(self._stream.buffer)

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            return self._stream.write(text)  # which raises
        if self._shows():
            self._write_lines(text)
        else:
            self._hide(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        for thread in list(self._parts):
            self._stream.write(self._parts.pop(thread, ""))
        self._stream.flush()

    def _write_lines(self, text: str) -> None:
        thread = threading.get_ident()
        text = self._parts.pop(thread, "") + text
        stop = text.rfind("\n") + 1
        if "\r" in text[stop:]:  # a progress bar shows each of its states
            stop = len(text)
        if stop:
            self._stream.write(text[:stop])
        if stop < len(text):
            self._parts[thread] = text[stop:]

    def _shows(self) -> bool:
        return not _hides or (_mode != "lead" and replica_context())

    def _hide(self, text: str) -> None:
        """Appends hidden text to the file that the launcher keeps for this rank, if any."""
        path = os.environ.get(_LOG_VARIABLE)
        if not path:
            return
        try:
            with open(path, "a", errors="replace") as file:
                file.write(text)
        except OSError as error:
            os.environ.pop(_LOG_VARIABLE, None)  # so this is reported once
            say(
                f"hpcstrat: the log {path} cannot be written any more, and the program continues: "
                f"{error.strerror}. Name a folder on a disk that has room"
            )


class _Bytes(_Stream):
    """The stream below `sys.stdout`."""

    def write(self, text: Any) -> int:
        return self._stream.write(text) if self._shows() else memoryview(text).nbytes


class _ErrorStream(_Stream):
    """Hides nothing that may tell of a failure, and keeps the end of what it hides."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._hidden = ""

    @property
    def buffer(self) -> Any:  # shown: bytes say nothing of what they are
        return self._stream.buffer

    def take(self) -> str:
        with self._lock:
            text, self._hidden = self._hidden.rstrip(), ""
        # Only the last state of a progress bar.
        return "".join(line.rpartition("\r")[2] + "\n" for line in text.split("\n") if text)

    def _shows(self) -> bool:
        if (
            super()._shows()
            or _is_reporting.get()
            or sys.exc_info()[0] is not None
            or os.getpid() != self._process  # a forked child
        ):
            return True
        writer = sys._getframe(1).f_back
        if writer is None:  # no Python code writes, but Python itself: `raise SystemExit("why")`
            self._write_lines(self.take())
            return True
        return _logs_error(writer)

    def _hide(self, text: str) -> None:
        with self._lock:
            self._hidden = (self._hidden + text)[-_HIDDEN_CHARACTERS:]
        super()._hide(text)


def _logs_error(frame: FrameType | None) -> bool:
    """Whether a handler of `logging` writes a record of an error here."""
    while frame is not None:
        if frame.f_code.co_name == "emit":
            record = frame.f_locals.get("record")
            if isinstance(record, logging.LogRecord):
                return record.levelno >= logging.ERROR
        frame = frame.f_back
    return False


# ---- what a rank reports: in one piece, tagged with the rank


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
    # Python 3.10 shows no notes, nor may a hook of the program's.
    notes = [f"{note}\n" for note in getattr(error, "__notes__", ())]
    return shown + "".join(note for note in notes if note not in shown)


def add_note(error: BaseException, note: str) -> None:
    """As `BaseException.add_note`, which Python 3.10 lacks, but once."""
    notes = vars(error).setdefault("__notes__", [])
    if note not in notes:
        notes.append(note)
