"""Starts the ranks, and starts them again when a rank has died, as long as the policy allows."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

from hpcstrat._memory.segment import physical_memory, reservable
from hpcstrat._process import guard, job_files
from hpcstrat._process.job_files import JobMemory, State
from hpcstrat._tools.launch import leftovers
from hpcstrat._tools.launch.mpiexec import LaunchError
from hpcstrat._tools.launch.policy import Ended, Policy
from hpcstrat.checkpoint._snapshot import newest_step

_LOOK_SECONDS = 0.02
_START_SECONDS = 60.0  # ranks that are not seen by then are on other hosts
_SEEN_SECONDS = 0.5  # the longest until a death is noticed
_LEFT_SECONDS = 3.0  # for mpiexec to end after all ranks have ended


class Starter(Protocol):
    """What starts the ranks.

    Attributes:
        signal: the last signal that the launcher was sent to end the job; 0 if there was none.
        processes: returns the processes of the ranks, as far as they are known.
    """

    signal: int
    processes: Callable[[], Iterable[int]]

    def start(self, ranks: int, environment: dict[str, str]) -> int:
        """Starts the ranks with these variables; returns their exit status when all have ended."""
        ...


def run(starter: Starter, policy: Policy, variables: Callable[[int], Mapping[str, str]]) -> int:
    """Starts the ranks, again if the policy says so; returns the exit status of the last start.

    If a rank has left without telling the others, and the status is 0 nevertheless, it returns 1.

    Args:
        starter: starts the ranks.
        policy: decides about restarts, and the number of ranks.
        variables: returns the variables for a number of ranks.

    Raises:
        LaunchError: restarts are wanted, but there is no memory that outlives the ranks.
        OSError: the launcher cannot be started.
    """
    start = time.time()
    try:
        memory = job_files.create(
            policy.ranks, reservable(physical_memory())[0] if policy.restarts else 0
        )
    except OSError as error:
        if policy.restarts:
            raise LaunchError(
                f"--restarts: there is no memory that outlives the ranks: {error}"
            ) from None
        return starter.start(policy.ranks, dict(variables(policy.ranks)))
    while True:
        ended = _start(starter, policy, memory, variables(policy.ranks))
        reason = policy.reason_to_end(ended)
        if reason is None:
            leftovers.end_all(memory, start)
            step = newest_step(memory)
            snapshot = "" if step is None else f"; the newest snapshot is of step {step}"
            when = f" in {policy.pause} s" if policy.pause else ""
            _say(
                f"{ended.describe()}; restart {policy.done} of {policy.restarts}{when}, on "
                f"{policy.ranks} rank{'s' if policy.ranks > 1 else ''}{snapshot}"
            )
            _pause(starter, policy.pause)
            if not starter.signal:
                continue
            reason = ended._replace(signal=starter.signal).deliberate
        elif not ended.is_done and policy.restarts:
            leftovers.end_all(memory, start)
        elif not ended.is_done:
            guard.unlink_orphans(start)
        if reason:
            first = f"; first, {policy.first_failure()}" if policy.done else ""
            _say(f"{ended.describe()}; no restart: {reason}{first}")
        elif ended.is_incomplete:
            _say(f"{ended.describe()}; the status is 1")
        return ended.status


def _pause(starter: Starter, seconds: float) -> None:
    """Waits, at most until a signal comes."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not starter.signal:
        time.sleep(_LOOK_SECONDS)


def _start(
    starter: Starter, policy: Policy, memory: JobMemory, environment: Mapping[str, str]
) -> Ended:
    ranks = policy.ranks
    memory.forget_ranks()
    # Another process that has taken a dead rank's number does not have the job's variable.
    starter.processes = lambda: {
        note.process for note in memory.notes(ranks).values()
    }.intersection(leftovers.processes_of(memory))
    with _watching(memory, ranks) if policy.restarts else contextlib.nullcontext({}) as deaths:
        status = starter.start(ranks, {**environment, **memory.environment})
    step, done = memory.steps()
    failure = memory.first_failure(ranks)
    first_seen = min([death.seen for death in deaths.values()], default=0.0)
    first = [rank for rank, death in deaths.items() if death.alive < first_seen]
    # After the death of a rank, others may fail with errors that are only a consequence.
    if failure is not None and first and failure.rank not in first and first_seen < failure.time:
        failure = None
    notes = memory.notes(ranks)
    is_incomplete = status == 0 and any(note.state == State.CONNECTED for note in notes.values())
    return Ended(
        status=status or int(is_incomplete),
        ranks=ranks,
        step=step,
        did_steps=done > 0,
        failure=failure,
        dead=first[0] if len(first) == 1 else None,
        is_incomplete=is_incomplete,
        signal=starter.signal,
        are_seen=bool(notes),
    )


class _Death(NamedTuple):
    """The death of a process, between two looks, by `time.monotonic`.

    Attributes:
        alive: when it was last seen alive; 0 if never.
        seen: when it was seen to have ended.
    """

    alive: float
    seen: float


@contextlib.contextmanager
def _watching(memory: JobMemory, ranks: int) -> Iterator[dict[int, _Death]]:
    """A block during which the deaths of this host's ranks are recorded."""
    deaths: dict[int, _Death] = {}
    is_over = threading.Event()
    start = time.monotonic()

    def watch() -> None:
        files: dict[int, tuple[int, int]] = {}  # pidfds, each with its rank and process
        poll = select.poll()
        seen: set[int] = set()
        alive: dict[int, float] = {}
        while not is_over.is_set():
            is_starting = len(seen) < ranks and time.monotonic() - start < _START_SECONDS
            if len(seen) < ranks:
                for rank, note in memory.notes(ranks).items():
                    if rank not in seen:
                        seen.add(rank)
                        try:
                            file = os.pidfd_open(note.process)
                        except ProcessLookupError:  # the process has ended already
                            deaths[rank] = _Death(0.0, time.monotonic())
                            continue
                        except OSError:  # this system has no such files
                            return
                        files[file] = (rank, note.process)
                        poll.register(file, select.POLLIN)
            ended = poll.poll(1000 * (_LOOK_SECONDS if is_starting else _SEEN_SECONDS))
            now = time.monotonic()
            for file, _ in ended:
                rank, _ = files.pop(file)
                deaths[rank] = _Death(alive.get(rank, 0.0), now)
                poll.unregister(file)
                os.close(file)
            # A dying process closes its connections, which ends the others, a little before it is
            # gone.
            alive |= {
                rank: now
                for rank, process in files.values()
                if not (ended and _has_closed_files(process))
            }
            if seen and not files and not is_starting:
                break
        for file in files:
            os.close(file)
        # Processes that the ranks have started may hold their standard output, and mpiexec waits
        # for its end.
        is_in_order = all(note.state == State.LEFT for note in memory.notes(ranks).values())
        if not is_in_order and not is_over.wait(_LEFT_SECONDS):
            leftovers.end_what_ranks_started(memory)

    thread = threading.Thread(target=watch, name="hpcstrat-restarts", daemon=True)
    thread.start()
    try:
        yield deaths
    finally:
        is_over.set()
        thread.join()


def _has_closed_files(process: int) -> bool:
    """Whether a process that is ending has closed its files, or is gone."""
    try:
        with open(f"/proc/{process}/status", "rb") as file:
            return b"\nFDSize:\t0\n" in file.read()
    except OSError:
        return True


def _say(text: str) -> None:
    print(f"hpcstrat run: {text}", file=sys.stderr, flush=True)
