"""Standard error of a rank that hides output: shown is only what may tell of a failure."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from typing import Any

from hpcstrat._process import output, reports

_VARIABLE = "HPCSTRAT_STDERR"
_HIDDEN_CHARACTERS = 1 << 14  # the last of the hidden text, which are kept
# Seconds that the other ranks wait, so that rank 0 alone shows what all would show.
_LEAD_DELAY = 0.3


class ErrorGate:
    """Hides what this rank writes to standard error, but nothing that may tell of a failure.

    It shows what is written in a replica context, while an exception is handled, by Python as it
    ends, by C code, and what is logged as an error. It keeps the rest, to be shown if this rank
    fails.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._hidden = ""
        self._write: Any = None  # the stream's own
        self._flush: Any = None

    def install(self) -> bool:
        """Gates `sys.stderr` if this rank hides output, and returns whether it did.

        It stays the same object because others may hold it. A stream that takes no attributes is
        not Python's own and stays as it is.

        Raises:
            ValueError: `HPCSTRAT_STDERR` is something other than `all`, which hides nothing.
        """
        mode = os.environ.get(_VARIABLE, "")
        if mode not in ("", "all"):
            raise ValueError(
                f"{_VARIABLE}={mode!r} is not allowed: 'all' shows what every rank writes to "
                "standard error. Without it the rules of HPCSTRAT_OUTPUT apply, and whatever tells "
                "of a failure is shown."
            )
        stream = sys.stderr
        # A notebook's engine sends its errors where the notebook shows them as that engine's.
        if mode or not output.hides or stream is None or output.ipython_shell() is not None:
            return False
        self._write, self._flush = stream.write, stream.flush
        try:
            stream.write = self._show_or_hide
        except AttributeError:
            return False
        _show_logged_errors()
        self._show_before_os_exit()
        return True

    def take(self) -> str:
        """What is hidden so far; from now on it is not."""
        with self._lock:
            text, self._hidden = self._hidden, ""
        # Only the last state of a progress bar.
        return "\n".join(line.rpartition("\r")[2] for line in text.rstrip("\r\n").split("\n"))

    def show(self) -> None:
        """Shows what is hidden so far; nothing in a forked child."""
        if self._hidden and os.getpid() == self._process:
            time.sleep(_LEAD_DELAY)
            with contextlib.suppress(Exception):
                self._write(reports.tag(self.take()))
                self._flush()

    def _show_or_hide(self, text: str) -> int:
        if not isinstance(text, str) or self._shows():
            return self._write(text)
        with self._lock:
            self._hidden = (self._hidden + text)[-_HIDDEN_CHARACTERS:]
        output.log_hidden(text)
        return len(text)

    def _shows(self) -> bool:
        if (
            output.shows()
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

    def _show_before_os_exit(self) -> None:
        leave = os._exit

        def leave_after_showing(status: int) -> Any:
            if status:
                self.show()
            leave(status)

        os._exit = leave_after_showing


def _show_logged_errors() -> None:
    handle = logging.Handler.handle

    def handle_reporting(self: logging.Handler, record: logging.LogRecord) -> Any:
        if record.levelno < logging.ERROR:
            return handle(self, record)
        with reports.reporting():
            return handle(self, record)

    logging.Handler.handle = handle_reporting
