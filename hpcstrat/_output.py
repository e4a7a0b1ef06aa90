"""Standard output that reads as one program's: what this rank prints shows only where it should."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from hpcstrat import _launcher

_VARIABLE = "HPCSTRAT_OUTPUT"
_CREATOR = "_hpcstrat_replica_context"

_installed = False
_hides = False
_lead_only = False
_inside_write = threading.local()


def _no_context() -> bool | None:
    return None


replica_context: Callable[[], bool | None] = _no_context
"""Whether this thread is in a replica context; None where it has no context of its own. Filled in from above."""


def install() -> None:
    """Gates `sys.stdout` under a launcher that started several processes; starts no MPI.

    Rank 0 shows everything. The other ranks show what they print in a replica context; with `HPCSTRAT_OUTPUT=lead`
    nothing, with `HPCSTRAT_OUTPUT=all` everything. Lines arrive whole, also where the ranks share a pipe.

    Raises:
        ValueError: the variable has another value.
    """
    global _installed, _hides, _lead_only
    launcher = _launcher.find()
    if _installed or launcher is None or launcher.alone:
        return
    mode = os.environ.get(_VARIABLE, "")
    if mode not in ("", "all", "lead"):
        raise ValueError(
            f"{_VARIABLE}={mode!r} is not allowed: 'all' shows what every rank prints, 'lead' what rank 0 prints only. "
            "Without it each replica shows inside `strategy.run`, and rank 0 alone elsewhere."
        )
    _installed = True
    _hides = launcher.rank > 0 and mode != "all"
    _lead_only = mode == "lead"
    if sys.stdout is not None:
        _shadow(sys.stdout)
    if _hides:
        _note_creators()


def shows() -> bool:
    """Whether what this thread prints now is to be seen."""
    return not _hides or (not _lead_only and _in_replica_context())


def _in_replica_context() -> bool:
    context = replica_context()
    if context is None:
        context = getattr(threading.current_thread(), _CREATOR, False)
    return context


def _shadow(stream: Any) -> None:
    """Shadows `write` of the stream, and of its buffer, by one that drops what does not show and joins the rest.

    The object stays the same one, because others may hold it; `print` and `writelines` go through the attribute. A
    stream that takes no attributes is not Python's own and stays as it is.
    """
    write, flush = stream.write, stream.flush
    buffer = getattr(stream, "buffer", None)
    parts: dict[int, str] = {}  # by thread, what it wrote of a line so far: `print(a, b)` writes in four pieces

    def write_line(text: str) -> int:
        if not isinstance(text, str):
            return write(text)  # which raises
        if shows():
            thread = threading.get_ident()
            line = parts.pop(thread, "") + text
            if "\n" in text or "\r" in text:
                pass_on(line)
            else:
                parts[thread] = line
        return len(text)

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
        stream.write = write_line
        stream.flush = flush_parts
    if buffer is None:
        return
    # The stream passes on at once what it was given, so that it never does so in another context.
    with contextlib.suppress(Exception):
        stream.reconfigure(line_buffering=True, write_through=True)
    write_bytes = buffer.write

    def write_shown_bytes(data: Any) -> int:
        if getattr(_inside_write, "value", False) or shows():
            return write_bytes(data)
        return memoryview(data).nbytes

    with contextlib.suppress(AttributeError):
        buffer.write = write_shown_bytes


def _note_creators() -> None:
    """From now on a new thread counts as its creator's context, until it has one of its own."""
    start = threading.Thread.start

    def start_noting_creator(self: threading.Thread) -> None:
        setattr(self, _CREATOR, _in_replica_context())
        start(self)

    threading.Thread.start = start_noting_creator
