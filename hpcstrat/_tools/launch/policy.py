"""How a start of the ranks ended, and whether another start would help."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Sequence
from typing import NamedTuple

from hpcstrat._process.job_files import Failure, State

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
_KILLED = {
    base + (number | other)
    for base in (0, 128)
    for number in _SIGNALS
    for other in (0, signal.SIGKILL)
}
_NAMES = {base + number: number.name for base in (0, 128) for number in _SIGNALS}


class Ended(NamedTuple):
    """How one start of the ranks ended.

    Attributes:
        status: their exit status; 1 instead of 0 if `is_incomplete`.
        ranks: their number.
        step: the number of the last known step.
        did_steps: whether any step was done since the start.
        failure: the exception that ended it; `None` if a rank died without an exception.
        dead: the rank that was seen to die first, or that left without telling the others; `None`
            if several did at once, or if it is unknown.
        is_incomplete: whether a rank left while others depended on it, although they ended with
            status 0.
        signal: the signal that the launcher was sent to end the job; 0 if there was none.
        are_seen: whether ranks run on this host, and so note how they end.
    """

    status: int
    ranks: int
    step: int
    did_steps: bool
    failure: Failure | None
    dead: int | None
    is_incomplete: bool = False
    signal: int = 0
    are_seen: bool = True

    @property
    def is_done(self) -> bool:
        """Whether the program ran to its end."""
        return self.status == 0

    @property
    def deliberate(self) -> str | None:
        """Why it was ended on purpose; `None` if it was not."""
        if self.signal:
            return f"the launcher was sent {signal.Signals(self.signal).name}"
        if self.failure is not None and self.failure.state == State.INTERRUPTED:
            return "a rank was interrupted"
        # A preemption saves the checkpoint. Ranks of other hosts note nothing here, so only their
        # status tells.
        is_noted = self.failure is not None and self.failure.state == State.PREEMPTED
        if is_noted or (self.status == os.EX_TEMPFAIL and not self.are_seen):
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
        if self.failure is not None and self.failure.text:
            return (
                f"rank {self.failure.rank} failed after step {self.step} with {self.failure.text}"
            )
        if self.is_incomplete:
            return f"{who} left after step {self.step} without the others, as by os._exit"
        if self.is_killed:
            name = _NAMES.get(self.status, f"a signal (status {self.status})")
            return f"{who} died after step {self.step} of {name}"
        # The watchdog has ended the job, or a rank left by os._exit.
        return f"the ranks ended after step {self.step} with status {self.status}"


class Policy(NamedTuple):
    """What the user allows.

    Attributes:
        ranks: the number of ranks to start with.
        restarts: the largest number of restarts.
        min_ranks: the fewest ranks to continue with.
    """

    ranks: int
    restarts: int
    min_ranks: int


class Decision(NamedTuple):
    """What to do after a start has ended.

    Attributes:
        ranks: how many ranks to start again; 0 if none.
        pause: after how many seconds.
        why: why none are started again; empty if that needs no explanation.
    """

    ranks: int = 0
    pause: int = 0
    why: str = ""


def decide(policy: Policy, ends: Sequence[Ended]) -> Decision:
    """What to do after a job's starts have ended in these ways, the latest last."""
    if ends[-1].is_done or not policy.restarts:
        return Decision()
    why = (
        ends[-1].deliberate
        or _repeated_failure(ends)
        or _no_first_step(policy, ends)
        or _no_further_step(policy, ends)
        or _no_restart_left(policy, ends)
    )
    if why:
        return Decision(why=why)
    pause = _PAUSES_SECONDS[min(_early_ends(ends), len(_PAUSES_SECONDS) - 1)]
    return Decision(_next_ranks(policy, ends), pause)


# These say why the ranks are not started again, or return None.


def _repeated_failure(ends: Sequence[Ended]) -> str | None:
    step, failure = ends[-1].step, ends[-1].failure
    if failure is None:
        return None
    same = [
        end for end in ends if end.failure and (end.step, end.failure.text) == (step, failure.text)
    ]
    # Two exceptions before a first step prove nothing.
    if len(same) > 1 and any(end.did_steps for end in same):
        return "it has failed in the same way at the same step before"
    return None


def _no_first_step(policy: Policy, ends: Sequence[Ended]) -> str | None:
    ended = ends[-1]
    if not ended.is_early or any(end.did_steps for end in ends):
        return None
    if ended.failure is not None:
        return "it failed before it had done a step"
    is_second = len(ends) > 1 and ends[-2].status == ended.status
    if is_second and not _may_shrink(policy, ended):
        return "it has ended twice before it had done a step"
    return None


def _no_further_step(policy: Policy, ends: Sequence[Ended]) -> str | None:
    times = _early_ends(ends)
    if times >= len(_PAUSES_SECONDS) and not _may_shrink(policy, ends[-1]):
        return f"it has ended {times} times in a row before it had done a step"
    return None


def _no_restart_left(policy: Policy, ends: Sequence[Ended]) -> str | None:
    if len(ends) > policy.restarts:
        return f"it has been restarted {policy.restarts} times (--restarts)"
    return None


def _early_ends(ends: Sequence[Ended]) -> int:
    """How many of the latest starts ended early in a row; 0 if no start has ever done a step.

    A GPU, or MPS, whose ranks were killed is not free at once.
    """
    if not any(end.did_steps for end in ends):
        return 0
    return len(list(itertools.takewhile(lambda end: end.is_early, reversed(ends))))


def _may_shrink(policy: Policy, ended: Ended) -> bool:
    """Whether fewer ranks may help: without an exception, a host or a GPU may be at fault."""
    return ended.failure is None and ended.ranks > policy.min_ranks


def _next_ranks(policy: Policy, ends: Sequence[Ended]) -> int:
    ended = ends[-1]
    if ended.did_steps:
        return policy.ranks
    # First as many again: most faults are gone with the process.
    if len(ends) > 1 and _may_shrink(policy, ended):
        return ended.ranks - 1
    return ended.ranks
