"""How a start of the ranks ended, and whether another start would help."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Sequence
from typing import NamedTuple

from hpcstrat._process.job_files import Failure, State

# Before each restart, after failures in a row that came before a step was done.
_PAUSES_SECONDS = (2, 4, 8)
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


class Ended(NamedTuple):
    """How one start of the ranks ended.

    Attributes:
        status: their exit status.
        ranks: their number.
        step: the number of the last known step.
        did_steps: whether any step was done since the start.
        failure: the exception that ended it; `None` if a rank died without an exception.
        dead: the rank that was seen to die first, or that left without telling the others; `None`
            if several did at once, or if it is unknown.
        is_incomplete: whether a rank left while others depended on it, although the exit status
            is 0.
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
        return self.status == 0 and not self.is_incomplete

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
    def fails_early(self) -> bool:
        """Whether it ended by itself before a step was done."""
        return not (self.did_steps or self.is_killed or self.is_done or self.deliberate)

    def describe(self) -> str:
        """What happened, in a sentence."""
        who = "a rank" if self.dead is None else f"rank {self.dead}"
        if self.failure is not None and self.failure.text:
            return (
                f"rank {self.failure.rank} failed after step {self.step} with {self.failure.text}"
            )
        if self.is_incomplete:
            return f"{who} left after step {self.step} without the others, as by os._exit"
        # The watchdog has ended the job, or a rank left by os._exit.
        if not self.is_killed or self.failure is not None:
            return f"the ranks ended after step {self.step} with status {self.status}"
        unknown = f"a signal (status {self.status})"
        names = (number.name for number in _SIGNALS if self.status in (number, 128 + number))
        name = next(names, unknown)
        return f"{who} died after step {self.step} of {name}"


class Policy:
    """Decides what to do after each start of the ranks.

    Args:
        ranks: the number of ranks to start with.
        restarts: the largest number of restarts.
        min_ranks: the fewest ranks to continue with; `None` for `ranks`.

    Attributes:
        ranks: the number of ranks of the next start.
        done: the number of restarts, including the next.
        pause: seconds to wait before the next start.
    """

    def __init__(self, ranks: int, restarts: int, min_ranks: int | None = None) -> None:
        self.ranks = self._wanted = ranks
        self.restarts = restarts
        self.min_ranks: int = ranks if min_ranks is None else min_ranks
        self.done = 0
        self.pause = 0
        self._ends: list[Ended] = []

    def reason_to_end(self, ended: Ended) -> str | None:
        """Why the job is not started again: empty if it is obvious, `None` if it is started again.

        Then `ranks`, `done` and `pause` describe the next start.
        """
        before, self._ends = self._ends, [*self._ends, ended]
        self.pause = 0
        if ended.is_done or self.restarts == 0:
            return ""
        if ended.deliberate is not None:
            return ended.deliberate
        if self._is_repeated(ended, before):
            return "it has failed in the same way at the same step before"
        if ended.fails_early:
            if any(end.did_steps for end in before):
                # A GPU, or MPS, whose ranks were killed is not free at once.
                times = len(
                    list(itertools.takewhile(lambda end: end.fails_early, reversed(self._ends)))
                )
                if times > len(_PAUSES_SECONDS) and (
                    ended.failure is not None or ended.ranks <= self.min_ranks
                ):
                    return f"it has ended {times} times in a row before it had done a step"
                self.pause = _PAUSES_SECONDS[min(times, len(_PAUSES_SECONDS)) - 1]
            elif ended.failure is not None:
                return "it failed before it had done a step"
            elif ended.ranks <= self.min_ranks and before and before[-1].status == ended.status:
                return "it has ended twice before it had done a step"
        if self.done == self.restarts:
            return f"it has been restarted {self.restarts} times (--restarts)"
        self.done += 1
        # First all ranks again: most faults are gone with the process. A fault that is not gone is
        # in a host or a GPU.
        if ended.did_steps:
            self.ranks = self._wanted
        elif ended.failure is None and before and ended.ranks > self.min_ranks:
            self.ranks = ended.ranks - 1
        return None

    @staticmethod
    def _is_repeated(ended: Ended, before: Sequence[Ended]) -> bool:
        """Whether an exception is repeated; two exceptions before a first step prove nothing."""
        return ended.failure is not None and any(
            other.failure is not None
            and (other.failure.text, other.step) == (ended.failure.text, ended.step)
            and (other.did_steps or ended.did_steps)
            for other in before
        )

    def first_failure(self) -> str:
        """How the first of several starts ended."""
        return self._ends[0].describe()
