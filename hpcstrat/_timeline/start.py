"""The life of a timeline: it starts when the ranks are connected, and ends with the program."""

from __future__ import annotations

import atexit
import functools
import os
import time
from collections.abc import Sequence

from hpcstrat._communicators.base import Communicator
from hpcstrat._communicators.connection import when_connected, when_left
from hpcstrat._communicators.host import HostCommunicator
from hpcstrat._core.call_name import names_call
from hpcstrat._core.span import record_to
from hpcstrat._process import job_end, reports, worlds
from hpcstrat._timeline.recorder import TimelineRecorder
from hpcstrat._timeline.trace import TraceFile, is_timeline, join_parts, other_parts, part_name

_ROUNDS = 16  # barriers that compare the clocks of several hosts


def start(path: str) -> None:
    """Makes this process record what it does, once the ranks are connected.

    Args:
        path: the file.
    """
    path = os.path.abspath(path)  # the program may change the folder
    when_connected.append(functools.partial(_start_recording, path))
    when_left.append(functools.partial(_end, path))


@names_call("HPCSTRAT_TIMELINE, the file")
def _start_recording(path: str, communicator: HostCommunicator) -> None:
    """Makes the file, and starts to record. Collective.

    Raises:
        OSError: the file cannot be written, on any rank.
    """
    rank, hosts = communicator.rank, worlds.start().hosts
    part = part_name(path, hosts[rank])
    is_first = hosts.index(hosts[rank]) == rank
    file = None
    # Rank 0 removes the files of a previous run; then the first rank of each host makes a file;
    # then the other ranks open it.
    turn = 0 if rank == 0 else 1 if is_first else 2
    for now in range(3):
        with communicator.raise_together():
            if now == turn:
                file = _open(part, is_first)
            communicator.barrier()
    assert file is not None
    recorder = TimelineRecorder(rank, communicator.size, file, zero(communicator, hosts))
    if communicator.size == 1:  # no rank to wait for
        atexit.register(_join, path, 1)
    record_to(recorder)
    atexit.register(recorder.close)  # before what was registered before
    os.register_at_fork(after_in_child=recorder.stop_in_a_child)
    job_end.before_the_end.append(recorder.save_before_the_end)


def _open(path: str, is_first: bool) -> TraceFile:
    if is_first and os.path.isfile(path) and os.path.getsize(path) and not is_timeline(path):
        raise FileExistsError(
            f"HPCSTRAT_TIMELINE={path}: that file exists and is not a timeline; name another"
        )
    try:
        if is_first:
            for old in other_parts(path):
                os.unlink(old)
        return TraceFile(path, is_first)
    except OSError as error:
        raise OSError(
            f"HPCSTRAT_TIMELINE={path}: the file cannot be written: {error}; "
            "name a file in a folder that exists"
        ) from error


@names_call("HPCSTRAT_TIMELINE, the end")
def _end(path: str, communicator: HostCommunicator) -> None:
    """Merges the files of all hosts, after all ranks have written everything. Collective."""
    communicator.barrier()
    if communicator.rank == 0:
        _join(path, max(worlds.start().hosts) + 1)


def _join(path: str, hosts: int) -> None:
    try:
        join_parts(path, [part_name(path, host) for host in range(1, hosts)])
    except OSError as error:  # the ranks still have to end together
        reports.say(
            f"hpcstrat: the timeline {path} could not be finalized: {error}; "
            "`python -m hpcstrat timeline` reads it as it is. Name a file on a disk that has room"
        )


# ---- the clocks of several hosts in one trace


def zero(communicator: Communicator, hosts: Sequence[int]) -> int:
    """Nanoseconds of this process's clock when the trace starts, at the same moment on all ranks.

    Collective. Processes of one host share a clock. Processes of several hosts pass several
    barriers. A rank leaves a barrier only after all ranks have entered it, so each rank leaves
    later than each other rank enters, which bounds the difference of their clocks.

    Args:
        communicator: of all ranks.
        hosts: for each rank the index of its host.
    """
    by_rank = meet(communicator, _ROUNDS if len(set(hosts)) > 1 else 1)
    moment = by_rank[0][-1][1]
    first = hosts.index(hosts[communicator.rank])
    return moment if first == 0 else moment + sum(difference(by_rank[0], by_rank[first])) // 2


@names_call("HPCSTRAT_TIMELINE, the clocks")
def meet(communicator: Communicator, rounds: int) -> list[list[tuple[int, int]]]:
    """When each rank entered and left each of these barriers, by its own clock, in nanoseconds.

    Collective.
    """
    times = []
    for _ in range(rounds):
        entered = time.perf_counter_ns()
        communicator.barrier()
        times.append((entered, time.perf_counter_ns()))
    return communicator.all_gather_obj(times)


def difference(
    first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    """The second clock's time minus the first's, in nanoseconds: at least and at most."""
    # Each rank leaves a barrier after the other has entered it. The tightest bounds of all barriers
    # count.
    least = max(entered - left for (_, left), (entered, _) in zip(first, second, strict=True))
    most = min(left - entered for (entered, _), (_, left) in zip(first, second, strict=True))
    return least, most
