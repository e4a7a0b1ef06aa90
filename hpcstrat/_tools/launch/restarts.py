"""Starts the ranks, and starts them again when a rank has died, as long as the policy allows."""

from __future__ import annotations

import contextlib
import sys
import time

from hpcstrat._memory.segment import physical_memory, reservable
from hpcstrat._process import job_files
from hpcstrat._process.job_files import JobMemory, State
from hpcstrat._tools.launch import leftovers
from hpcstrat._tools.launch.deaths import DeathWatch
from hpcstrat._tools.launch.job import Job
from hpcstrat._tools.launch.mpiexec import LaunchError
from hpcstrat._tools.launch.policy import Decision, Ended, Policy, decide
from hpcstrat.checkpoint._snapshot import newest_step

_LOOK_SECONDS = 0.02


def run(job: Job, policy: Policy) -> int:
    """Starts the ranks, again if the policy says so; returns the exit status of the last start.

    If a rank has left without telling the others, and the status is 0 nevertheless, it returns 1.

    Args:
        job: starts the ranks.
        policy: how often to restart, and with how many ranks.

    Raises:
        LaunchError: restarts are wanted, but there is no memory that outlives the ranks.
        OSError: the launcher cannot be started.
    """
    since = time.time()
    try:
        memory = job_files.create(
            policy.ranks, reservable(physical_memory())[0] if policy.restarts else 0
        )
    except OSError as error:
        if policy.restarts:
            raise LaunchError(
                f"--restarts: there is no memory that outlives the ranks: {error}"
            ) from None
        return job.start(policy.ranks, {})

    def start(ranks: int) -> Ended:
        ended = _start(job, policy, memory, ranks)
        if not ended.is_done and policy.restarts:
            leftovers.end_processes(memory)
        if not ended.is_done:
            leftovers.unlink_segments(since)
        return ended

    ends = [start(policy.ranks)]
    while (decision := decide(policy, ends)).ranks:
        _announce(policy, ends, decision, newest_step(memory))
        _pause(job, decision.pause)
        if job.signal:  # the next start is called off
            ends.append(ends[-1]._replace(signal=job.signal))
        else:
            ends.append(start(decision.ranks))
    ended = ends[-1]
    if decision.why:
        first = f"; first, {ends[0].describe()}" if len(ends) > 1 else ""
        _say(f"{ended.describe()}; no restart: {decision.why}{first}")
    elif ended.is_incomplete:
        _say(f"{ended.describe()}; the status is 1")
    return ended.status


def _announce(policy: Policy, ends: list[Ended], decision: Decision, step: int | None) -> None:
    when = f" in {decision.pause} s" if decision.pause else ""
    who = f"{decision.ranks} rank{'s' if decision.ranks > 1 else ''}"
    snapshot = "" if step is None else f"; the newest snapshot is of step {step}"
    _say(
        f"{ends[-1].describe()}; restart {len(ends)} of {policy.restarts}{when}, on {who}{snapshot}"
    )


def _pause(job: Job, seconds: float) -> None:
    """Waits, at most until a signal comes."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not job.signal:
        time.sleep(_LOOK_SECONDS)


def _start(job: Job, policy: Policy, memory: JobMemory, ranks: int) -> Ended:
    memory.forget_ranks()
    # Another process that has taken a dead rank's number does not have the job's variable.
    job.processes = lambda: {note.process for note in memory.notes(ranks).values()}.intersection(
        leftovers.processes_of(memory)
    )
    watch = DeathWatch(memory, ranks)
    with watch if policy.restarts else contextlib.nullcontext():
        status = job.start(ranks, memory.environment)
    step, done = memory.steps()
    failure = memory.first_failure(ranks)
    first, first_seen = watch.first_deaths()
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
        signal=job.signal,
        are_seen=bool(notes),
    )


def _say(text: str) -> None:
    print(f"hpcstrat run: {text}", file=sys.stderr, flush=True)
