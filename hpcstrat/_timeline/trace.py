"""The file: a JSON array of Chrome's trace events, one per line; all ranks of a host append.

The format: docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, "JSON Array
Format", in which the array's end may be missing. So the file can be opened at any moment, also
after a kill.
"""

from __future__ import annotations

import functools
import glob
import json
import os
import re
from collections.abc import Sequence
from typing import Any, final

from hpcstrat._timeline.spans import Span

GPU_TRACKS = 1000
"""The numbers of the GPU's tracks start here, after those of the threads."""


_START = b"[\n"
# The next bytes of each file: a recorder first writes its rank's name.
_FIRST = b'{"name": "process_name", "ph": "M", "pid": '


def part_name(path: str, host: int) -> str:
    """The file that the ranks of a host write; for the first host it is `path` itself."""
    stem, suffix = os.path.splitext(path)
    return path if host == 0 else f"{stem}.host{host}{suffix}"


def other_parts(path: str) -> list[str]:
    """The other hosts' files that this host sees next to the first host's.

    Files with such names that are not timelines are the user's, and are left out.
    """
    stem, suffix = os.path.splitext(path)
    named = re.compile(rf"{re.escape(stem)}\.host[1-9][0-9]*{re.escape(suffix)}")
    files = glob.glob(f"{glob.escape(stem)}.host[0-9]*{glob.escape(suffix)}")
    return sorted(file for file in files if named.fullmatch(file) and is_timeline(file))


def is_timeline(path: str) -> bool:
    """Whether this file starts as a `TraceFile` does."""
    try:
        with open(path, "rb") as file:
            return file.read(len(_START)) == _START and file.read(len(_FIRST)) in (b"", _FIRST)
    except OSError:  # for example, a folder
        return False


@final
class TraceFile:
    """One host's file, open for appending.

    Whole lines are written in one system call, so the lines of ranks of one host do not mix.

    Args:
        path: the file.
        is_first: whether this rank makes the file; the others open it later.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: str, is_first: bool) -> None:
        self.path = path
        if is_first:
            with open(path, "wb") as file:
                file.write(_START)
        self._file = open(path, "ab", buffering=0)

    def append(self, lines: Sequence[str]) -> None:
        """Writes these events.

        Raises:
            OSError: for example, the disk is full.
        """
        text = memoryview("".join(f"{line},\n" for line in lines).encode())
        while text:
            # One call for whole lines: the system appends them in one piece, whereas buffered
            # writes of several ranks would mix.
            text = text[self._file.write(text) :]

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def join_parts(path: str, parts: Sequence[str]) -> None:
    """Appends the other hosts' files to the first host's, and completes it as JSON.

    A file that this host does not see stays where it is.
    """
    with open(path, "ab") as whole:
        for part in parts:
            try:
                with open(part, "rb") as file:
                    file.readline()  # the start of the array
                    while block := file.read(1 << 24):
                        whole.write(block)
            except FileNotFoundError:
                continue
            os.unlink(part)
        whole.write(
            json.dumps({"name": "end", "ph": "M", "pid": 0, "args": {}}).encode() + b"\n]\n"
        )


class Events:
    """Turns spans into events.

    Args:
        rank: the rank of the spans.
        zero: nanoseconds of this process's clock at which the trace starts.
    """

    def __init__(self, rank: int, zero: int) -> None:
        self._rank = rank
        self._zero = zero

    def label(self, kind: str, track: int, **values: Any) -> str:
        """An event that names this rank (`process_name`) or one of its tracks (`thread_name`)."""
        return json.dumps(
            {"name": kind, "ph": "M", "pid": self._rank, "tid": track, "args": values}
        )

    def whole(self, span: Span, track: int, start: int, end: int) -> str:
        """A span that has ended."""
        # A GPU's start and end are each converted to the host's clock, so rounding may swap them.
        duration = f"{max(end - start, 0) / 1000:.3f}"
        return f'{self._head(span, track, start)}, {_arguments(span)}"ph": "X", "dur": {duration}}}'

    def start(self, span: Span) -> str:
        """The start of a span that is still open."""
        return f'{self._head(span, span.thread, span.start)}, {_arguments(span)}"ph": "B"}}'

    def end(self, span: Span) -> str:
        """The end of a span whose start is written already."""
        return f'{self._head(span, span.thread, span.end)}, "ph": "E"}}'

    def _head(self, span: Span, track: int, time: int) -> str:
        return (
            f'{{"name": {_quote(span.name)}, "cat": "{span.category}", "pid": {self._rank}, '
            f'"tid": {track}, "ts": {(time - self._zero) / 1000:.3f}'
        )


def _arguments(span: Span) -> str:
    return "" if span.nbytes is None else f'"args": {{"bytes": {span.nbytes}}}, '


@functools.lru_cache(4096)
def _quote(name: str) -> str:
    return json.dumps(name)
