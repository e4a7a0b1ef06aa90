"""What a rank notes of itself: spans of time, each with a name and a category."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, final

LIMIT = 1_000_000
"""Spans that a rank notes at most: some 150 MB of the trace."""


@final
class Span:
    """A stretch of a thread's time, and of a GPU's.

    Attributes:
        category: one of the constants of `hpcstrat._spans`.
        name: what is done.
        nbytes: that travel, of this rank; `None` where none do.
        thread: the number of its thread.
        begin, end: nanoseconds of this process's clock.
        stream: on which it has a part, a `cupy.cuda.Stream`; `None` where it has none.
        events: of that stream at its begin and its end.
        has_range: it is an NVTX range too.
        is_noted: its begin is in the trace already.
    """

    __slots__ = ("begin", "category", "end", "events", "has_range", "is_noted", "name", "nbytes", "stream", "thread")

    def __init__(self, category: str, name: str, nbytes: int | None, thread: int, begin: int) -> None:
        self.category = category
        self.name = name
        self.nbytes = nbytes
        self.thread = thread
        self.begin = begin
        self.end = 0
        self.stream: Any = None
        self.events: list[Any] = []
        self.has_range = False
        self.is_noted = False


@final
class Spans:
    """The spans of this process that are open, and those that have ended and are not written yet.

    Attributes:
        ended: the latter; one thread takes them out.
        threads: the name of each thread that has had a span, by its number.
        is_full: there were `limit` spans, and no more are noted.

    Args:
        limit: how many are noted.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.ended: deque[Span] = deque()
        self.threads: list[str] = []
        self.is_full = False
        self._left = limit
        self._stacks: list[list[Span]] = []
        self._local = threading.local()
        self._lock = threading.Lock()

    def begin(self, category: str, name: str, nbytes: int | None, anyway: bool = False) -> Span | None:
        """Opens a span of this thread.

        `None`, and nothing, where all is full, or where the span would lie in one of the same category, which it is a
        part of; `anyway` notes the latter too.
        """
        try:
            stack, thread = self._local.own
        except AttributeError:
            stack, thread = self._local.own = self._new_thread()
        if stack and stack[-1].category == category and not anyway:
            return None
        if self._left <= 0:
            self.is_full = True
            return None
        self._left -= 1
        span = Span(category, name, nbytes, thread, time.perf_counter_ns())
        stack.append(span)
        return span

    def end(self, span: Span) -> None:
        """Closes the span that this thread opened last."""
        span.end = time.perf_counter_ns()
        self._local.own[0].pop()
        self.ended.append(span)

    def open_since(self, before: int) -> Iterator[Span]:
        """The spans that began before this time and are open, of all threads, outer ones first."""
        for stack in list(self._stacks):
            yield from [span for span in list(stack) if span.begin < before]

    def _new_thread(self) -> tuple[list[Span], int]:
        stack: list[Span] = []
        with self._lock:
            self._stacks.append(stack)
            name = threading.current_thread().name
            self.threads.append("program" if name == "MainThread" else name)
            return stack, len(self.threads) - 1
