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
import shutil
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

from hpcstrat._process import reports

GPU_TRACKS = 1000
"""The numbers of the GPU's tracks start here, after those of the threads."""

_START = b"[\n"
_FIRST = b'{"name": "process_name", "ph": "M", "pid": '  # each rank first writes its name


@dataclass(slots=True, eq=False)
class Span:
    """A period of a thread's time, and of a GPU's, in nanoseconds of this process's clock."""

    category: str  # a constant of `hpcstrat._core.call_name`
    name: str
    nbytes: int | None  # that this rank sends; `None` if it sends nothing
    track: int  # the number of its thread
    start: int
    end: int = 0
    stream: Any = None  # the `cupy.cuda.Stream` that does its work on a GPU, if any
    events: tuple[Any, ...] = ()  # on that stream, at its start and its end
    has_range: bool = False  # whether it is an NVTX range too
    is_start_written: bool = False  # before it ends


@final
class TraceFile:
    """One host's file, open for one rank's events; its first rank makes it, the others open it.

    Raises:
        OSError: it cannot be written, or is not a timeline's.
    """

    def __init__(self, path: str, rank: int, size: int, zero: int, is_first: bool) -> None:
        self.path = path
        self.rank = rank
        self._zero = zero  # nanoseconds of this process's clock at which the trace starts
        if is_first and os.path.isfile(path) and os.path.getsize(path) and not _is_timeline(path):
            raise FileExistsError(
                f"HPCSTRAT_TIMELINE={path}: that file exists and is not a timeline; name another"
            )
        try:
            if is_first:
                for old in other_parts(path):
                    os.unlink(old)
                with open(path, "wb") as file:
                    file.write(_START)
            self._file = open(path, "ab", buffering=0)
            labels = {
                "process_name": {"name": f"rank {rank} of {size} on {socket.gethostname()}"},
                "process_sort_index": {"sort_index": rank},
                "process_labels": {"labels": f"hpcstrat; cores: {len(os.sched_getaffinity(0))}"},
            }
            self.append(self.label(kind, 0, values) for kind, values in labels.items())
        except OSError as error:
            raise OSError(
                f"HPCSTRAT_TIMELINE={path}: the file cannot be written: {error}; "
                "name a file in a folder that exists"
            ) from error

    def append(self, lines: Iterable[str]) -> None:
        """Writes these events, or raises OSError, for example if the disk is full."""
        text = memoryview("".join(f"{line},\n" for line in lines).encode())
        while text:
            # One call for whole lines: the system appends them in one piece, whereas buffered
            # writes of several ranks would mix.
            text = text[self._file.write(text) :]

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def label(self, kind: str, track: int, values: Mapping[str, Any]) -> str:
        """An event that names this rank (`process_name`) or one of its tracks (`thread_name`)."""
        return json.dumps({"name": kind, "ph": "M", "pid": self.rank, "tid": track, "args": values})

    def event(self, phase: str, span: Span, track: int, at: int, end: int | None = None) -> str:
        """The start (phase B), the end (E) or the whole (X, with an end) of a span."""
        sent = "" if span.nbytes is None else f', "args": {{"bytes": {span.nbytes}}}'
        # A GPU's start and end are each converted to the host's clock, so rounding may swap them.
        lasts = "" if end is None else f', "dur": {max(end - at, 0) / 1000:.3f}'
        return (
            f'{{"name": {_quote(span.name)}, "cat": "{span.category}", "ph": "{phase}", "pid": '
            f'{self.rank}, "tid": {track}, "ts": {(at - self._zero) / 1000:.3f}{lasts}{sent}}}'
        )


_quote = functools.lru_cache(4096)(json.dumps)


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
    return sorted(file for file in files if named.fullmatch(file) and _is_timeline(file))


def _is_timeline(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(_START)) == _START and file.read(len(_FIRST)) in (b"", _FIRST)
    except OSError:  # for example, a folder
        return False


def join_parts(path: str, hosts: int) -> None:
    """Appends the other hosts' files to the first host's, and completes it as JSON.

    A file that this host does not see stays where it is.
    """
    try:
        with open(path, "ab") as whole:
            for part in [part_name(path, host) for host in range(1, hosts)]:
                if os.path.exists(part):
                    with open(part, "rb") as file:
                        file.readline()  # the start of the array
                        shutil.copyfileobj(file, whole)
                    os.unlink(part)
            whole.write(b'{"name": "end", "ph": "M", "pid": 0, "args": {}}\n]\n')
    except OSError as error:  # the ranks still have to end together
        reports.say(
            f"hpcstrat: the timeline {path} could not be finalized: {error}; "
            "`python -m hpcstrat timeline` reads it as it is. Name a file on a disk that has room"
        )
