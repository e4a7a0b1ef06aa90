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
_lead_only = False
_inside_write = threading.local()


def _no_context() -> bool | None:
    return None


replica_context: Callable[[], bool | None] = _no_context
"""Whether this thread is in a replica context; None where it has no context of its own. Filled in from above."""


def install() -> None:
    """Gates `sys.stdout` under a launcher that started several processes; starts no MPI.

    Rank 0 shows everything. The other ranks show what they print in a replica context; with `HPCSTRAT_OUTPUT=lead`
    nothing, with `HPCSTRAT_OUTPUT=all` everything.

    Raises:
        ValueError: the variable has another value.
    """
    global _installed, _lead_only
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
    _lead_only = mode == "lead"
    stream = sys.stdout
    with contextlib.suppress(Exception):  # whole lines arrive, also where standard output is a pipe
        stream.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]
    if launcher.rank == 0 or mode == "all":
        return
    if stream is not None:
        _gate(stream)
    _note_creators()


def shows() -> bool:
    """Whether what this thread, of a rank that is not 0, prints now is to be seen."""
    return not _lead_only and _in_replica_context()


def _in_replica_context() -> bool:
    context = replica_context()
    if context is None:
        context = getattr(threading.current_thread(), _CREATOR, False)
    return context


def _gate(stream: Any) -> None:
    """Shadows `write` of the stream, and of its buffer, by one that drops what does not show.

    The object stays the same one, because others may hold it. `print` and `writelines` go through the attribute.
    """
    write = stream.write
    buffer = getattr(stream, "buffer", None)

    def gated_write(text: str) -> int:
        if not isinstance(text, str) or shows():
            _inside_write.value = True
            try:
                return write(text)
            finally:
                _inside_write.value = False
        return len(text)

    with contextlib.suppress(AttributeError):  # of a stream that takes no attributes: it is not Python's own
        stream.write = gated_write
    if buffer is None:
        return
    write_bytes = buffer.write

    def gated_write_bytes(data: Any) -> int:
        # The stream passes on at once what it was given (write_through), so that it never does so in another context.
        if getattr(_inside_write, "value", False) or shows():
            return write_bytes(data)
        return memoryview(data).nbytes

    with contextlib.suppress(AttributeError):
        buffer.write = gated_write_bytes


def _note_creators() -> None:
    """From now on a new thread counts as its creator's context, until it has one of its own."""
    start = threading.Thread.start

    def start_noting_creator(self: threading.Thread) -> None:
        setattr(self, _CREATOR, _in_replica_context())
        start(self)

    threading.Thread.start = start_noting_creator
