"""How a start of the ranks ended, and whether another start would help."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Sequence
from typing import NamedTuple

from hpcstrat._process.job_files import Note, State

# Before a restart, by the number of early ends in a row.
_PAUSES_SECONDS = (0, 2, 4, 8)
_SIGNALS = (
    signal.SIGKILL,
    signal.SIGSEGV,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
)
# Launchers turn a signal's number into a status in two ways. MPICH's combines the bits of all
# ranks, and kills those that are left, so an abort may look like 15.
_NAMES = {base + number: number.name for base in (0, 128) for number in _SIGNALS}
_KILLED = {status | other for status in _NAMES for other in (0, signal.SIGKILL)}


class Ended(NamedTuple):
    """How one start of the ranks ended."""

    status: int  # 1 instead of 0 if `is_incomplete`
    ranks: int  # how many there were
    step: int  # the number of the last known step
    did_steps: bool  # since the start
    failure: Note | None  # the exception that ended it; `None` if a rank died without one
    dead: int | None  # the rank that died first, or left without the others, if it is just one
    is_incomplete: bool = False  # a rank left while others depended on it, but the status was 0
    signal: int = 0  # which the launcher was sent to end the job
    are_seen: bool = True  # ranks run on this host, and so note how they end

    @property
    def why_deliberate(self) -> str | None:
        """Why it was ended on purpose; `None` if it was not."""
        if self.signal:
            return f"the launcher was sent {signal.Signals(self.signal).name}"
        state = None if self.failure is None else self.failure.state
        if state == State.INTERRUPTED:
            return "a rank was interrupted"
        # A preemption saves the checkpoint. Ranks of other hosts note nothing here, so only their
        # status tells.
        if state == State.PREEMPTED or (self.status == os.EX_TEMPFAIL and not self.are_seen):
            return "the ranks were asked to end, and have saved"
        return None

    @property
    def is_killed(self) -> bool:
        """Whether a signal ended a rank, by the exit status."""
        return self.failure is None and self.status in _KILLED

    @property
    def is_early(self) -> bool:
        """Whether it ended before a step was done, and not by a signal."""
        return not (self.did_steps or self.is_killed)

    def describe(self) -> str:
        """What happened, in a sentence."""
        who = "a rank" if self.dead is None else f"rank {self.dead}"
        when = f"after step {self.step}"
        if self.failure is not None and self.failure.text:
            return f"rank {self.failure.rank} failed {when} with {self.failure.text}"
        if self.is_incomplete:
            return f"{who} left {when} without the others, as by os._exit"
        if self.is_killed:
            name = _NAMES.get(self.status, f"a signal (status {self.status})")
            return f"{who} died {when} of {name}"
        # The watchdog has ended the job, or a rank left by os._exit.
        return f"the ranks ended {when} with status {self.status}"


class Policy(NamedTuple):
    """What the user allows."""

    ranks: int  # to start with
    restarts: int  # at most
    min_ranks: int  # to continue with


class Decision(NamedTuple):
    """What to do after a start has ended."""

    ranks: int = 0  # how many to start again
    pause: int = 0  # after how many seconds
    why: str = ""  # why none are started again; empty if that needs no explanation


def decide(policy: Policy, ends: Sequence[Ended]) -> Decision:
    """What to do after a job's starts have ended in these ways, the latest last."""
    ended = ends[-1]
    if ended.status == 0 or not policy.restarts:
        return Decision()
    # Without an exception, a host or a GPU may be at fault, and fewer ranks may help.
    may_shrink = ended.failure is None and ended.ranks > policy.min_ranks
    why = ended.why_deliberate or _pointless(ends, may_shrink)
    if why is None and len(ends) > policy.restarts:
        why = f"it has been restarted {policy.restarts} times (--restarts)"
    if why is not None:
        return Decision(why=why)
    pause = _PAUSES_SECONDS[min(_early_ends(ends), len(_PAUSES_SECONDS) - 1)]
    if ended.did_steps:
        return Decision(policy.ranks, pause)
    # First as many again: most faults are gone with the process.
    return Decision(ended.ranks - int(may_shrink and len(ends) > 1), pause)


def _pointless(ends: Sequence[Ended], may_shrink: bool) -> str | None:
    """Why another start would end in the same way; `None` if it may help."""
    ended, failure = ends[-1], ends[-1].failure
    if failure is not None:
        what = ended.step, failure.text
        same = [end for end in ends if end.failure and (end.step, end.failure.text) == what]
        # Two exceptions before a first step prove nothing once a start has done a step: the GPU of
        # ranks that were killed may not be free yet.
        if len(same) > 1 and any(end.did_steps for end in same):
            return "it has failed in the same way at the same step before"
    if ended.is_early and not any(end.did_steps for end in ends):
        if failure is not None:
            return "it failed before it had done a step"
        if len(ends) > 1 and ends[-2].status == ended.status and not may_shrink:
            return "it has ended twice before it had done a step"
    times = _early_ends(ends)
    if times >= len(_PAUSES_SECONDS) and not may_shrink:
        return f"it has ended {times} times in a row before it had done a step"
    return None


def _early_ends(ends: Sequence[Ended]) -> int:
    """How many of the latest starts ended early in a row; 0 if no start has ever done a step."""
    if not any(end.did_steps for end in ends):
        return 0
    return len(list(itertools.takewhile(lambda end: end.is_early, reversed(ends))))
