"""Standard output and standard error that read like one program's, whatever the number of ranks.

What `install` replaces, in this order, under a launcher that started several ranks; `failure.py`
has the hooks that it finds there.

| event                        | rank 0          | the other ranks                           |
|------------------------------|-----------------|-------------------------------------------|
| `sys.stdout.write`           | shown, by lines | shown in a replica context                |
| `threading.Thread.start`     |                 | counts as in its creator's context        |
| `sys.stderr.write`           | shown           | as above; and if it may tell of a failure |
| a record of logging, `ERROR` | shown           | shown: its write is a report              |
| `os._exit(1)`                |                 | shows what is still hidden, then leaves   |
| Python's exit                |                 | the same, unless the program ended well   |
"""

from __future__ import annotations

import atexit
import contextlib
import dis
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from hpcstrat._process import failure, launchers, reports

_VARIABLE = "HPCSTRAT_OUTPUT"
_ERRORS_VARIABLE = "HPCSTRAT_STDERR"
_LOG_VARIABLE = "_HPCSTRAT_LOG"  # the file of this rank, where a launcher keeps one
_HIDDEN_CHARACTERS = 1 << 14  # the last of the hidden standard error, which are kept
# Seconds that the other ranks wait, so that rank 0 alone shows what all would show.
_LEAD_DELAY = 0.3
_CREATOR = "_hpcstrat_replica_context"

_installed = False
_hides = False
_lead_only = False
_inside_write = threading.local()


def _no_context() -> bool | None:
    return None


replica_context: Callable[[], bool | None] = _no_context
"""Whether this thread is in a replica context; None if it has no context. Set from above."""


def install() -> None:
    """Gates `sys.stdout` and `sys.stderr` if a launcher started several processes; starts no MPI.

    Rank 0 shows everything. The other ranks show what they print in a replica context; with
    `HPCSTRAT_OUTPUT=lead` nothing, with `HPCSTRAT_OUTPUT=all` everything. Lines arrive whole, even
    if the ranks share a pipe. Of standard error they also show whatever may tell of a failure;
    with `HPCSTRAT_STDERR=all` everything.

    Raises:
        ValueError: a variable has another value.
    """
    global _installed, _hides, _lead_only
    launcher = launchers.find()
    if _installed or launcher is None or launcher.alone:
        return
    mode = os.environ.get(_VARIABLE, "")
    if mode not in ("", "all", "lead"):
        raise ValueError(
            f"{_VARIABLE}={mode!r} is not allowed: 'all' shows what every rank prints, 'lead' only "
            "what rank 0 prints. Without it each replica shows inside `strategy.run`, and rank 0 "
            "alone elsewhere."
        )
    errors_mode = os.environ.get(_ERRORS_VARIABLE, "")
    if errors_mode not in ("", "all"):
        raise ValueError(
            f"{_ERRORS_VARIABLE}={errors_mode!r} is not allowed: 'all' shows what every rank "
            f"writes to standard error. Without it the rules of {_VARIABLE} apply, and whatever "
            "tells of a failure is shown."
        )
    _installed = True
    _hides = launcher.rank > 0 and mode != "all"
    _lead_only = mode == "lead"
    # It is None if Python was started without one.
    if sys.stdout is not None:
        _shadow(sys.stdout)
    if _hides:
        _note_creators()
        # A notebook's engine sends its errors where the notebook shows them as that engine's.
        if not errors_mode and sys.stderr is not None and ipython_shell() is None:
            _ErrorGate(sys.stderr)


def ipython_shell() -> Any:
    """The shell of IPython that this program runs in, such as a notebook's; else None."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


def shows() -> bool:
    """Whether what this thread prints now is shown."""
    return not _hides or (not _lead_only and _in_replica_context())


def _in_replica_context() -> bool:
    context = replica_context()
    # The program's own threads, such as a progress bar's, have no context: their creator's counts.
    if context is None:
        context = getattr(threading.current_thread(), _CREATOR, False)
    return context


def _shadow(stream: Any) -> None:
    """Shadows `write` of the stream and its buffer: hides what does not show, and joins lines.

    The object stays the same, because others may hold it; `print` and `writelines` use the
    attribute. A stream that takes no attributes is not Python's own and stays as it is.
    """
    flush = stream.flush
    buffer = getattr(stream, "buffer", None)
    # By thread, what it wrote of a line so far: `print(a, b)` writes in four pieces.
    parts: dict[int, str] = {}

    write: Callable[[str], int] = stream.write
    shadow: Callable[[str], int] | None = None

    def shadow_write() -> None:
        nonlocal write, shadow
        if stream.write is shadow:
            return
        shadowed = write = stream.write

        def write_line(text: str) -> int:
            if not isinstance(text, str) or getattr(_inside_write, "value", False):
                return shadowed(text)  # which raises, or is an older shadow's
            if shows():
                thread = threading.get_ident()
                line = parts.pop(thread, "") + text
                if "\n" in text or "\r" in text:
                    pass_on(line)
                else:
                    # Kept until the line is whole: pieces of several ranks would mix in a shared
                    # pipe.
                    parts[thread] = line
            else:
                _log(text)
            return len(text)

        stream.write = shadow = write_line

    def flush_parts() -> None:
        for thread in list(parts):
            pass_on(parts.pop(thread, ""))
        flush()

    def pass_on(text: str) -> None:
        _inside_write.value = True
        try:
            write(text)
        finally:
            _inside_write.value = False

    with contextlib.suppress(AttributeError):
        shadow_write()
        stream.flush = flush_parts
        if (shell := ipython_shell()) is not None:
            # For each cell IPython puts its own `write` there, and then the former one, which may
            # not be ours.
            shell.events.register("pre_execute", shadow_write)
    if buffer is None:
        return
    # The stream passes on its text at once, so never in another context.
    with contextlib.suppress(Exception):
        stream.reconfigure(line_buffering=True, write_through=True)
    write_bytes = buffer.write

    def write_shown_bytes(data: Any) -> int:
        if getattr(_inside_write, "value", False) or shows():
            return write_bytes(data)
        return memoryview(data).nbytes

    with contextlib.suppress(AttributeError):
        buffer.write = write_shown_bytes


class _ErrorGate:
    """Hides what this rank writes to standard error, but nothing that may tell of a failure.

    It shows what is written in a replica context, while an exception is handled, by Python as it
    ends, by C code, and what is logged as an error. It keeps the rest, and shows it if this rank
    fails.
    """

    def __init__(self, stream: Any) -> None:
        """Gates the stream, which stays the same object because others may hold it."""
        self._write = stream.write
        self._flush = stream.flush
        self._hidden = ""
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._program = sys._getframe()
        while self._program.f_back is not None:
            self._program: FrameType = self._program.f_back
        with contextlib.suppress(AttributeError):  # it takes no attributes: not Python's own
            stream.write = self.write
            failure.hidden_errors = self.take
            _show_logged_errors()
            _call_before_exit(self._show_if_failed)
            failure.show_hidden_errors = self._show_at_exit
            atexit.register(self._show_at_exit)

    def write(self, text: str) -> int:
        """The stream's `write`."""
        if not isinstance(text, str) or self._shows():
            return self._write(text)
        with self._lock:
            self._hidden = (self._hidden + text)[-_HIDDEN_CHARACTERS:]
        _log(text)
        return len(text)

    def take(self) -> str:
        """What is hidden so far; from now on it is not."""
        with self._lock:
            text, self._hidden = self._hidden, ""
        # Only the last state of a progress bar.
        return "\n".join(line.rpartition("\r")[2] for line in text.rstrip("\r\n").split("\n"))

    def _shows(self) -> bool:
        if (
            shows()
            or reports.is_reporting()
            or sys.exc_info()[0] is not None
            or os.getpid() != self._process
        ):
            return True
        try:
            sys._getframe(2)
        except ValueError:  # no Python code writes, but Python itself, at its end
            return True
        return False

    def _show_at_exit(self) -> None:
        if failure.leaves_early():  # its report will have it
            return
        # The program ended well if its outermost frame returned, or with status 0.
        code, last = self._program.f_code.co_code, self._program.f_lasti
        if not dis.opname[code[last]].startswith("RETURN") and failure.exit_status not in (0, None):
            self._show_if_failed(1)

    def _show_if_failed(self, status: int) -> None:
        if status and self._hidden and os.getpid() == self._process:
            time.sleep(_LEAD_DELAY)
            with contextlib.suppress(Exception):
                self._write(reports.tag(self.take()))
                self._flush()


def _show_logged_errors() -> None:
    """From now on every rank shows what it logs as an error, or worse."""
    handle = logging.Handler.handle

    def handle_reporting(self: logging.Handler, record: logging.LogRecord) -> Any:
        if record.levelno < logging.ERROR:
            return handle(self, record)
        with reports.reporting():
            return handle(self, record)

    logging.Handler.handle = handle_reporting


def _call_before_exit(call: Callable[[int], None]) -> None:
    """From now on `os._exit` calls this first."""
    leave = os._exit

    def leave_after_call(status: int) -> Any:
        call(status)
        leave(status)

    os._exit = leave_after_call


def _log(text: str) -> None:
    """Appends hidden text to the file that the launcher keeps for this rank."""
    path = os.environ.get(_LOG_VARIABLE)
    if not path:
        return
    try:
        with open(path, "a", errors="replace") as file:
            file.write(text)
    except OSError as error:
        os.environ.pop(_LOG_VARIABLE, None)  # so this is reported once
        reports.say(
            f"hpcstrat: the log {path} cannot be written any more, and the program continues: "
            f"{error.strerror}. Name a folder on a disk that has room"
        )


def _note_creators() -> None:
    """From now on a new thread counts as in its creator's context, until it enters its own."""
    start = threading.Thread.start

    def start_noting_creator(self: threading.Thread) -> None:
        setattr(self, _CREATOR, _in_replica_context())
        start(self)

    threading.Thread.start = start_noting_creator
