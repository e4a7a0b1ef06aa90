"""Standard streams that read like those of one program, however many ranks print.

| what is written              | standard output        | standard error                           |
|------------------------------|------------------------|------------------------------------------|
| at the top level             | of rank 0              | of rank 0; other ranks keep the last     |
|                              |                        | 16 KiB, to be shown if they fail         |
| in a replica context         | of every rank          | of every rank                            |
| by any other thread          | as at the top level    | as at the top level                      |
| while an exception is        | as the place says      | of every rank: it may tell of a failure  |
| handled, a logged error,     |                        |                                          |
| an exception that Python     |                        |                                          |
| ignores, hpcstrat's reports, |                        |                                          |
| what Python says as it ends  |                        |                                          |

`sys.stdout` and `sys.stderr` are replaced by objects that decide, `sys.unraisablehook` by one that
shows an exception in one piece with the rank in front of each line.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from hpcstrat._process import reports
from hpcstrat._process.launchers import Launcher

_HIDDEN_CHARACTERS = 1 << 14  # the last of the hidden text, which are kept

_mode: str | None = None  # HPCSTRAT_OUTPUT, once the streams are replaced
_hides = False  # whether this rank hides what it prints outside a replica context
_errors: _ErrorStream | None = None
_is_replica: Callable[[], bool] = bool  # see `install`


def install(launcher: Launcher, is_replica: Callable[[], bool]) -> None:
    """Replaces the standard streams of one of several ranks; starts no MPI.

    Args:
        launcher: what started this process.
        is_replica: whether the calling thread is in the context of one of several replicas.

    Raises:
        ValueError: a variable has a value that is not allowed.
    """
    global _mode, _hides, _errors, _is_replica
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
    _mode, _hides, _is_replica = output, launcher.rank > 0 and output != "all", is_replica
    # A stream is None if Python was started without it.
    if sys.stdout is not None:
        with contextlib.suppress(AttributeError, ValueError):  # another kind of stream; closed
            sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
        sys.stdout = _Stream(sys.stdout)
    # A notebook's engine sends its errors where the notebook shows them as that engine's.
    if ipython_shell() is not None:
        return
    sys.unraisablehook = functools.partial(_show_unraisable, sys.unraisablehook)
    if _hides and not errors and sys.stderr is not None:
        replaced, sys.stderr = sys.stderr, _ErrorStream(sys.stderr)
        _errors = sys.stderr
        for handler in logging.root.handlers:  # of a `basicConfig` before the import
            if isinstance(handler, logging.StreamHandler) and handler.stream is replaced:
                handler.setStream(_errors)


def _show_unraisable(
    previous: Callable[[sys.UnraisableHookArgs], object], arguments: sys.UnraisableHookArgs
) -> None:
    """Shows an exception that Python ignores, such as one of `__del__`.

    Python writes it in several pieces, between which those of another rank may come.
    """
    text = reports.capture(lambda: previous(arguments), arguments.exc_value)
    if sys.stderr is not None:
        with reports.reporting():
            sys.stderr.write(reports.tag(text))


def ipython_shell() -> Any:
    """The shell of IPython that this program runs in, such as a notebook's; else None."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


def take_hidden_errors() -> str:
    """What this rank has hidden of standard error, which may explain its failure; whole lines."""
    return "" if _errors is None else _errors.take()


def has_hidden_errors() -> bool:
    """Whether this rank has hidden some of standard error."""
    return _errors is not None and _errors.has_hidden()


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
        return not _hides or (_mode != "lead" and _is_replica())

    def _hide(self, text: str) -> None:
        pass


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

    def has_hidden(self) -> bool:
        return bool(self._hidden)

    def _shows(self) -> bool:
        if (
            super()._shows()
            or reports.is_reporting()
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


def _logs_error(frame: FrameType | None) -> bool:
    """Whether a handler of `logging` writes a record of an error here."""
    while frame is not None:
        if frame.f_code.co_name == "emit":
            record = frame.f_locals.get("record")
            if isinstance(record, logging.LogRecord):
                return record.levelno >= logging.ERROR
        frame = frame.f_back
    return False
