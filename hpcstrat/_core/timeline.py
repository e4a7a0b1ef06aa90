"""`HPCSTRAT_TIMELINE=trace.json`: what every rank does and when, in one trace.

Each rank keeps its spans in a list, and rank 0 writes those of all ranks at the end of the program:
the "JSON Array Format" of docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU,
one event per line. Where CuPy is loaded, spans are NVTX ranges too, which `nsys` shows.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from hpcstrat._core.call_name import names_call
from hpcstrat._process import reports, settings, worlds

RUN, COMMUNICATION, WAITING, UPDATE = "run", "communication", "waiting", "update"
INPUT, CHECKPOINT = "input", "checkpoint"

_LIMIT = 1_000_000  # spans that a rank keeps: about 230 MB
_PART = 20_000  # events that all ranks together send at once
_START = b'\n{"name": "process_name", "ph": "M", "pid": '  # of a trace, after its bracket

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Thread(threading.local):
    def __init__(self) -> None:
        self.category = ""  # of the innermost span that is open
        self.number = next(_numbers)
        _names[self.number] = threading.current_thread().name


_path = settings.timeline() and os.path.abspath(settings.timeline())
_numbers, _names = itertools.count(), dict[int, str]()  # of threads
_thread = _Thread()
# Name, category, bytes, number of the thread, start and end in nanoseconds of this host's clock.
_spans: list[tuple[str, str, int | None, int, int, int]] = []
_zero = 0  # when the trace starts, by this host's clock
_process = 0  # this rank's


def span(
    category: str, details: str | Callable[..., tuple[str, int | None]]
) -> Callable[[_Function], _Function]:
    """Makes every call of a function a span if `HPCSTRAT_TIMELINE` is set at the library's import.

    Except within a span of the same category: a reduction consists of exchanges, which would only
    repeat what its own span says.

    Args:
        category: a constant of this module, such as `RUN`.
        details: the span's name; or a function of the call's arguments that returns the name, and
            the number of bytes that this rank sends, or `None`.
    """
    describe = details if callable(details) else lambda *_, **__: (details, None)

    def decorate(function: _Function) -> _Function:
        # Decided once, at import, so that without a timeline no call pays for it.
        if not _path:
            return function

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            outer = _thread.category
            if outer == category:
                return function(*args, **kwargs)
            try:
                name, nbytes = describe(*args, **kwargs)
            except (TypeError, AttributeError):  # the function itself complains about them
                return function(*args, **kwargs)
            nvtx = _nvtx()
            if nvtx is not None:
                nvtx.RangePush(name)
            _thread.category = category
            start = time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                end = time.perf_counter_ns()
                _thread.category = outer
                if nvtx is not None:
                    nvtx.RangePop()
                if len(_spans) < _LIMIT:
                    _spans.append((name, category, nbytes, _thread.number, start, end))

        return cast("_Function", call)

    return decorate


def _nvtx() -> Any:
    cupy = sys.modules.get("cupy")
    return cupy.cuda.nvtx if cupy is not None and cupy.cuda.nvtx.available else None


@names_call("HPCSTRAT_TIMELINE")
def start(communicator: Any) -> None:
    """Makes an empty file, and agrees on when the trace starts. Collective.

    Args:
        communicator: the `HostCommunicator` of all ranks, whose layer is above this one.

    Raises:
        OSError: the file cannot be written, or is something other than a trace; on all ranks.
    """
    global _zero, _process
    if not _path:
        return
    with communicator.raise_together():
        if communicator.rank == 0:
            _make_file()
        communicator.barrier()
    # Ranks of one host share a clock. The one that left the barrier first is nearest to the moment
    # at which all had come.
    clocks = communicator.all_gather_obj(time.perf_counter_ns())
    hosts = worlds.start().hosts
    own = hosts[communicator.rank]
    _zero = min(clock for clock, host in zip(clocks, hosts, strict=True) if host == own)
    _process = os.getpid()
    if communicator.size == 1:  # otherwise the ranks write as they leave together
        atexit.register(write, communicator)


def _make_file() -> None:
    try:
        with open(_path, "a+b") as file:
            file.seek(0)
            head = file.read(1 + len(_START))
            is_another = head != b"" and head[1:] != _START
            if not is_another:
                file.truncate(0)  # a job that is killed leaves nothing that looks like its trace
    except OSError as error:
        raise OSError(
            f"HPCSTRAT_TIMELINE={_path}: the file cannot be written: {error.strerror}; name a "
            "file in a folder that exists"
        ) from error
    if is_another:
        raise FileExistsError(
            f"HPCSTRAT_TIMELINE={_path}: that file exists and is not a timeline; name another"
        )


@names_call("HPCSTRAT_TIMELINE")
def write(communicator: Any) -> None:
    """Writes the spans of all ranks. Collective. A full disk costs the trace and nothing else."""
    if os.getpid() != _process:  # there is no timeline, or this is a forked child
        return
    is_full = max(communicator.all_gather_obj(len(_spans))) >= _LIMIT
    parts = _gather(communicator)
    try:
        if communicator.rank == 0:
            with open(_path, "w", encoding="ascii") as file:
                file.writelines(parts)
                file.write("\n]\n")
                # In place of the first comma, and last: until then the file is no JSON.
                file.seek(0)
                file.write("[")
            if is_full:
                reports.say(
                    f"hpcstrat: the timeline {_path} is full: it has the first {_LIMIT:,} spans "
                    "of each rank; record fewer steps"
                )
    except OSError as error:
        reports.say(
            f"hpcstrat: the timeline {_path} could not be written: {error.strerror}; see whether "
            "its folder is there and its disk has room"
        )
    finally:
        for _ in parts:  # the other ranks take part, and so does rank 0 whatever its disk does
            pass


def _gather(communicator: Any) -> Iterator[str]:
    """The events of all ranks, in parts: as a whole they may not fit. Collective."""
    events = _events(communicator.rank, communicator.size)
    count = max(1, _PART // communicator.size)
    while any(
        parts := communicator.all_gather_obj(
            "".join(f",\n{json.dumps(event)}" for event in itertools.islice(events, count))
        )
    ):
        yield "".join(parts)


def _events(rank: int, size: int) -> Iterator[dict[str, Any]]:
    spans = _spans.copy()  # the exchange of events adds spans
    names = {"process_name": {0: f"rank {rank} of {size} on {socket.gethostname()}"}}
    names["thread_name"] = _names.copy()
    for kind, by_thread in names.items():
        for thread, name in by_thread.items():
            label = {"name": kind, "ph": "M", "pid": rank, "tid": thread}
            yield label | {"args": {"name": name}}
    for name, category, nbytes, thread, start, end in spans:
        if start >= _zero:
            event = {"name": name, "cat": category, "ph": "X", "pid": rank, "tid": thread}
            event |= {"ts": (start - _zero) / 1000, "dur": (end - start) / 1000}
            yield event if nbytes is None else event | {"args": {"bytes": nbytes}}
