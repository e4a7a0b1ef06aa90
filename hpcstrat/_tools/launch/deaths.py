"""Watches the ranks of this host: which of them dies first, and when all have ended."""

from __future__ import annotations

import errno
import os
import selectors
import sys
import threading
import time

from hpcstrat._process.job_files import JobMemory, State
from hpcstrat._tools.launch import leftovers

_LOOK_SECONDS = 0.02  # while ranks start
_SEEN_SECONDS = 0.5  # when they run: a death is seen at once
_START_SECONDS = 60.0  # ranks that are not seen by then are on other hosts
_LEFT_SECONDS = 3.0  # for mpiexec to end after all ranks have ended


class DeathWatch:
    """A block during which a thread watches the processes of the ranks.

    It sees which rank dies first. mpiexec does not tell, and the others end as well, some with
    errors that are only a consequence. A rank that was still alive when a death was first seen did
    not die first.

    When all ranks have ended, it ends what they have started. Such processes may hold the ranks'
    standard output, and mpiexec waits for its end.

    Args:
        memory: where the ranks note their processes.
        ranks: the number of ranks, on all hosts.
    """

    def __init__(self, memory: JobMemory, ranks: int) -> None:
        self._memory = memory
        self._ranks = ranks
        self._alive: dict[int, float] = {}  # when each known rank was last seen alive; 0 if never
        self._ended: dict[int, float] = {}  # when a rank was seen to have ended
        self._running = selectors.PollSelector()  # pidfds, each with its rank and process
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hpcstrat-restarts", daemon=True)

    def __enter__(self) -> DeathWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        for key in self._running.get_map().values():
            os.close(key.fd)

    def first_deaths(self) -> tuple[list[int], float]:
        """The ranks that may have died first, and when the first death was seen; 0 if none was."""
        first_seen = min(self._ended.values(), default=0.0)
        return [rank for rank in self._ended if self._alive[rank] < first_seen], first_seen

    def _watch(self) -> None:
        if not hasattr(os, "pidfd_open"):  # such as a Python that was built for an old C library
            return
        try:
            self._wait_for_all()
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EPERM):  # an old system, or a container's
                print(f"hpcstrat run: who dies first is not seen: {error}", file=sys.stderr)
            return
        notes = self._memory.notes(self._ranks).values()
        is_in_order = all(note.state == State.LEFT for note in notes)
        if not is_in_order and not self._is_over.wait(_LEFT_SECONDS):
            leftovers.end_what_ranks_started(self._memory)

    def _wait_for_all(self) -> None:
        """Waits until all ranks of this host have ended, or the block has."""
        start = time.monotonic()
        while not self._is_over.is_set():
            are_missing = len(self._alive) < self._ranks
            is_starting = are_missing and time.monotonic() - start < _START_SECONDS
            if are_missing:
                self._add_new_ranks()
            self._look(_LOOK_SECONDS if is_starting else _SEEN_SECONDS)
            if self._alive and not self._running.get_map() and not is_starting:
                break

    def _add_new_ranks(self) -> None:
        for rank, note in self._memory.notes(self._ranks).items():
            if rank in self._alive:
                continue
            try:
                file = os.pidfd_open(note.process)
                self._running.register(file, selectors.EVENT_READ, (rank, note.process))
            except ProcessLookupError:
                self._ended[rank] = time.monotonic()
            self._alive[rank] = 0.0

    def _look(self, seconds: float) -> None:
        """Waits for deaths, and sees who is alive."""
        ended = self._running.select(seconds)
        now = time.monotonic()
        for key, _ in ended:
            rank, _ = key.data
            self._ended[rank] = now
            self._running.unregister(key.fd)
            os.close(key.fd)
        for key in self._running.get_map().values():
            rank, process = key.data
            if not (ended and _has_closed_files(process)):
                self._alive[rank] = now


def _has_closed_files(process: int) -> bool:
    """Whether a process that is ending has closed its files, or is gone.

    A process that dies closes its files, connections included, a little before its pidfd tells. In
    between, the others already end because of it. /proc shows this state: the process has no table
    of files, so the line FDSize, the size of that table, says 0.
    """
    try:
        with open(f"/proc/{process}/status", "rb") as file:
            return b"\nFDSize:\t0\n" in file.read()
    except OSError:
        return True
