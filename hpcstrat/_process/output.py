"""Standard output that reads like one program's, and which thread's output shows on this rank."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from hpcstrat._process import launchers, reports

_VARIABLE = "HPCSTRAT_OUTPUT"
_LOG_VARIABLE = "_HPCSTRAT_LOG"  # the file of this rank, where a launcher keeps one
_CREATOR = "_hpcstrat_replica_context"

_installed = False
hides = False
"""Whether this rank hides what it prints outside a replica context."""
_lead_only = False


def _no_context() -> bool | None:
    return None


replica_context: Callable[[], bool | None] = _no_context
"""Whether this thread is in a replica context; None if it has no context. Set from above."""


def install() -> None:
    """Gates `sys.stdout` if a launcher started several processes; starts no MPI.

    Rank 0 shows everything. The other ranks show what they print in a replica context; with
    `HPCSTRAT_OUTPUT=lead` nothing, with `HPCSTRAT_OUTPUT=all` everything. Lines arrive whole, even
    if the ranks share a pipe.

    Raises:
        ValueError: a variable has another value.
    """
    global _installed, hides, _lead_only
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
    _installed = True
    hides = launcher.rank > 0 and mode != "all"
    _lead_only = mode == "lead"
    # It is None if Python was started without one.
    if sys.stdout is not None:
        _OutputGate(sys.stdout)
    if hides:
        _give_threads_their_creators_context()


def ipython_shell() -> Any:
    """The shell of IPython that this program runs in, such as a notebook's; else None."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


def shows() -> bool:
    """Whether what this thread prints now is shown."""
    return not hides or (not _lead_only and _in_replica_context())


def _in_replica_context() -> bool:
    context = replica_context()
    # The program's own threads, such as a progress bar's, have no context: their creator's counts.
    if context is None:
        context = getattr(threading.current_thread(), _CREATOR, False)
    return context


def _give_threads_their_creators_context() -> None:
    """From now on a new thread counts as in its creator's context, until it enters its own."""
    start = threading.Thread.start

    def start_in_context(self: threading.Thread) -> None:
        setattr(self, _CREATOR, _in_replica_context())
        start(self)

    threading.Thread.start = start_in_context


class _OutputGate:
    """Replaces `write` of a stream and its buffer: hides what does not show, and joins lines.

    The stream stays the same object, because others may hold it; `print` and `writelines` use the
    attribute. A stream that takes no attributes is not Python's own and stays as it is.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._write: Callable[[str], int] = stream.write
        self._flush: Callable[[], None] = stream.flush
        self._replacement: Callable[[str], int] | None = None
        # By thread, what it wrote of a line so far: `print(a, b)` writes in four pieces.
        self._parts: dict[int, str] = {}
        self._passing = threading.local()  # on while a thread is in what was replaced
        buffer = getattr(stream, "buffer", None)
        with contextlib.suppress(AttributeError):
            self._replace_write()
            stream.flush = self._pass_parts
            if (shell := ipython_shell()) is not None:
                # For each cell IPython puts its own `write` there, and then the former one, which
                # may not be ours.
                shell.events.register("pre_execute", self._replace_write)
        if buffer is not None:
            self._replace_write_of(buffer)

    def _replace_write(self) -> None:
        if self._stream.write is self._replacement:
            return
        replaced = self._write = self._stream.write

        def write(text: str) -> int:
            if not isinstance(text, str) or self._is_passing():
                return replaced(text)  # which raises, or is an older one of ours
            if shows():
                self._write_lines(text)
            else:
                log_hidden(text)
            return len(text)

        self._stream.write = self._replacement = write

    def _replace_write_of(self, buffer: Any) -> None:
        # The stream passes on its text at once, so never in another context.
        with contextlib.suppress(Exception):
            self._stream.reconfigure(line_buffering=True, write_through=True)
        replaced = buffer.write

        def write(data: Any) -> int:
            if self._is_passing() or shows():
                return replaced(data)
            return memoryview(data).nbytes

        with contextlib.suppress(AttributeError):
            buffer.write = write

    def _write_lines(self, text: str) -> None:
        thread = threading.get_ident()
        text = self._parts.pop(thread, "") + text
        stop = text.rfind("\n") + 1
        if "\r" in text[stop:]:  # a progress bar shows each of its states
            stop = len(text)
        if stop:
            self._pass_on(text[:stop])
        if stop < len(text):
            # Kept until the line is whole: pieces of several ranks would mix in a shared pipe.
            self._parts[thread] = text[stop:]

    def _pass_parts(self) -> None:
        for thread in list(self._parts):
            self._pass_on(self._parts.pop(thread, ""))
        self._flush()

    def _pass_on(self, text: str) -> None:
        self._passing.is_on = True
        try:
            self._write(text)
        finally:
            self._passing.is_on = False

    def _is_passing(self) -> bool:
        return getattr(self._passing, "is_on", False)


def log_hidden(text: str) -> None:
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
