"""The life of a timeline: it begins when the ranks are connected, and ends with the program."""

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
from hpcstrat._process import failure, worlds
from hpcstrat._timeline.recorder import TimelineRecorder
from hpcstrat._timeline.trace import TraceFile, is_timeline, join_parts, part_name, parts_beside

_ROUNDS = 16  # meetings by which the clocks of several hosts are compared


def start(path: str) -> None:
    """From now on this process records what it does, once the ranks are connected.

    Args:
        path: the file.
    """
    path = os.path.abspath(path)  # the program may change the folder
    when_connected.append(functools.partial(_begin, path))
    when_left.append(functools.partial(_end, path))


@names_call("HPCSTRAT_TIMELINE, the file")
def _begin(path: str, communicator: HostCommunicator) -> None:
    """Makes the file, and begins to record. Collective.

    Raises:
        OSError: the file cannot be written, on any rank.
    """
    rank, hosts = communicator.rank, worlds.start().hosts
    part = part_name(path, hosts[rank])
    is_first = hosts.index(hosts[rank]) == rank
    file = None
    # Rank 0 removes what a run before has left, then the first rank of each host makes a file,
    # which the others find.
    turn = 0 if rank == 0 else 1 if is_first else 2
    for now in range(3):
        with communicator.raise_together():
            if now == turn:
                file = _open(part, is_first)
            communicator.barrier()
    assert file is not None
    recorder = TimelineRecorder(rank, communicator.size, file, zero(communicator, hosts))
    if communicator.size == 1:  # nobody to wait for
        atexit.register(_join, path, 1)
    record_to(recorder)
    atexit.register(recorder.close)  # before what was registered before
    os.register_at_fork(after_in_child=recorder.stop_in_a_child)
    failure.before_the_end.append(recorder.save_before_the_end)


def _open(path: str, is_first: bool) -> TraceFile:
    if is_first and os.path.isfile(path) and os.path.getsize(path) and not is_timeline(path):
        raise FileExistsError(
            f"HPCSTRAT_TIMELINE={path}: that file exists and is not a timeline; name another"
        )
    try:
        if is_first:
            for old in parts_beside(path):
                os.unlink(old)
        return TraceFile(path, is_first)
    except OSError as error:
        raise OSError(
            f"HPCSTRAT_TIMELINE={path}: the file cannot be written: {error}; name one in a folder "
            "that is there"
        ) from error


@names_call("HPCSTRAT_TIMELINE, the end")
def _end(path: str, communicator: HostCommunicator) -> None:
    """Makes one file of all hosts'. Collective: all ranks have written all they had."""
    communicator.barrier()
    if communicator.rank == 0:
        _join(path, max(worlds.start().hosts) + 1)


def _join(path: str, hosts: int) -> None:
    try:
        join_parts(path, [part_name(path, host) for host in range(1, hosts)])
    except OSError as error:  # the ranks still have to end together
        failure.say(
            f"hpcstrat: the timeline {path} cannot be ended: {error}; `python -m hpcstrat "
            "timeline` reads it as it is. Name a file on a disk that has room"
        )


# ---- the clocks of several hosts in one trace


def zero(communicator: Communicator, hosts: Sequence[int]) -> int:
    """Nanoseconds of this process's clock when the trace begins, at the same moment on all ranks.

    Collective.

    Processes of one host share a clock. Those of several meet some times: each leaves only after
    all have come, so of
    two ranks the one's leaving is later than the other's coming, which bounds how far apart their
    clocks are.

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
    """When each rank came to each meeting and left it, in nanoseconds of its own clock.

    Collective.
    """
    met = []
    for _ in range(rounds):
        come = time.perf_counter_ns()
        communicator.barrier()
        met.append((come, time.perf_counter_ns()))
    return communicator.all_gather_obj(met)


def difference(one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """What the other's clock shows more than the one's, in nanoseconds: at least and at most."""
    # Each leaving of one follows each coming of the other in the same meeting. Of many meetings the
    # tightest bounds count.
    least = max(come - left for (_, left), (come, _) in zip(one, other, strict=True))
    most = min(left - come for (come, _), (_, left) in zip(one, other, strict=True))
    return least, most
