"""Reads a timeline, also one whose program was killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from hpcstrat._timeline.trace import parts_beside

PROGRAM = 0
"""The track of a rank's first thread, which calls the library."""


class Span(NamedTuple):
    """A stretch of a track's time.

    Attributes:
        begin, end: seconds from the begin of the trace.
        category: `run`, `communication`, `waiting`, `update`, `input`, `checkpoint`.
        name: what was done.
        nbytes: that travelled; 0 where none did.
        is_open: it had not ended when the trace did.
    """

    begin: float
    end: float
    category: str
    name: str
    nbytes: int = 0
    is_open: bool = False


class Timeline(NamedTuple):
    """What all ranks did.

    Attributes:
        tracks: the spans of each rank's tracks, by rank and number, outer ones before inner ones.
        names: each rank's, with its host.
        cores: that each rank could run on.
    """

    tracks: dict[int, dict[int, list[Span]]]
    names: dict[int, str]
    cores: dict[int, int]


def read(path: str) -> Timeline:
    """The timeline in a file, with what other hosts wrote beside it where the program did not live to join them.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no timeline.
    """
    events = [event for part in (path, *parts_beside(path)) for event in _events(part)]
    timeline = Timeline({}, {}, {})
    begun: dict[tuple[int, int], list[dict[str, Any]]] = {}
    last = max((event.get("ts", 0) + event.get("dur", 0) for event in events), default=0) / 1e6
    # An event that another begins with, or lies in, comes after it.
    for event in sorted(events, key=lambda event: (event.get("ts", 0), -event.get("dur", 0))):
        rank, track, kind = event["pid"], event.get("tid", 0), event["ph"]
        if event["name"] == "process_name" and kind == "M":
            timeline.names[rank] = event["args"]["name"]
        elif event["name"] == "process_labels" and kind == "M":
            timeline.cores[rank] = int(event["args"]["labels"].rpartition(":")[2])
        elif kind == "X":
            _add(timeline, event, (event["ts"] + event["dur"]) / 1e6)
        elif kind == "B":
            begun.setdefault((rank, track), []).append(event)
        elif kind == "E" and begun.get((rank, track)):
            _add(timeline, begun[rank, track].pop(), event["ts"] / 1e6)
    for stack in begun.values():
        for event in stack:
            _add(timeline, event, last, is_open=True)
    if not timeline.names:
        raise ValueError(f"{path} is no timeline; name the file that HPCSTRAT_TIMELINE named when the program ran")
    for tracks in timeline.tracks.values():
        for spans in tracks.values():
            spans.sort(key=lambda span: (span.begin, -span.end))
    return timeline


def _add(timeline: Timeline, event: dict[str, Any], end: float, is_open: bool = False) -> None:
    span = Span(event["ts"] / 1e6, end, event["cat"], event["name"], event.get("args", {}).get("bytes", 0), is_open)
    timeline.tracks.setdefault(event["pid"], {}).setdefault(event["tid"], []).append(span)


def _events(path: str) -> Iterator[dict[str, Any]]:
    """The events of one file, a line each. The last may be cut short."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                event = json.loads(line.rstrip().rstrip(","))
            except ValueError:
                continue
            if isinstance(event, dict) and {"name", "ph", "pid"} <= event.keys():
                yield event
