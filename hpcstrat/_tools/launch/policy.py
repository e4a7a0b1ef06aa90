"""How a start of the ranks ended, and whether another one would help."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Sequence
from typing import NamedTuple

from hpcstrat._process.job_files import Failure, State

_PAUSES_SECONDS = (
    2,
    4,
    8,
)  # before the restarts after failures before a step, which follow each other
_SIGNALS = (
    signal.SIGKILL,
    signal.SIGSEGV,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
)
# Launchers make a status of a signal's number in two ways. MPICH's combines the bits of all ranks,
# where it has killed the others, so that an abort may look like 15.
_KILLED = {
    base + (one | other) for base in (0, 128) for one in _SIGNALS for other in (0, signal.SIGKILL)
}


class Ended(NamedTuple):
    """How one start of the ranks ended.

    Attributes:
        status: their exit status.
        ranks: how many they were.
        step: the number of the last step that is known of.
        did_steps: whether any was done since the start.
        failure: the exception that ended it; `None` where a rank died without one.
        dead: the rank that was seen to die first, or that left the others without a word; `None`
            where several did at once, or none is known.
        is_incomplete: whether a rank left while others depended on it, though the exit status is 0.
        signal: that the launcher was sent to end the job; 0 where there was none.
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
    def wish(self) -> str | None:
        """Why it ended, where somebody wanted it to; `None` where nobody did."""
        if self.signal:
            return f"the launcher was sent {signal.Signals(self.signal).name}"
        if self.failure is not None and self.failure.state == State.INTERRUPTED:
            return "a rank was interrupted"
        # A preemption saves the checkpoint. Ranks of other hosts note nothing here; their status
        # has to do.
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
        return not (self.did_steps or self.is_killed or self.is_done or self.wish)

    def describe(self) -> str:
        """What happened, in a sentence."""
        who = "a rank" if self.dead is None else f"rank {self.dead}"
        if self.failure is not None and self.failure.text:
            return (
                f"rank {self.failure.rank} failed after step {self.step} with {self.failure.text}"
            )
        if self.is_incomplete:
            return f"{who} left after step {self.step} without the others, as by os._exit"
        if (
            not self.is_killed or self.failure is not None
        ):  # the watch has ended the job, or a rank left by os._exit
            return f"the ranks ended after step {self.step} with status {self.status}"
        unknown = f"a signal (status {self.status})"
        name = next((one.name for one in _SIGNALS if self.status in (one, 128 + one)), unknown)
        return f"{who} died after step {self.step} of {name}"


class Policy:
    """Decides what comes after each start of the ranks.

    Args:
        ranks: how many are wanted.
        restarts: how often they are started again at most.
        min_ranks: how few will do; `None` for no fewer than are wanted.

    Attributes:
        ranks: how many the next start has.
        done: how many restarts there have been, with the next.
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
        """Why the job is not started again; empty where there is nothing to say, `None` where it is.

        Where it is started again, `ranks`, `done` and `pause` say how.
        """
        before, self._ends = self._ends, [*self._ends, ended]
        self.pause = 0
        if ended.is_done or self.restarts == 0:
            return ""
        if ended.wish is not None:
            return ended.wish
        if self._has_failed_so(ended, before):
            return "it has failed in the same way at the same step before"
        if ended.fails_early:
            if any(one.did_steps for one in before):
                # A GPU, or MPS, whose ranks were killed is not free at once.
                times = len(
                    list(itertools.takewhile(lambda one: one.fails_early, reversed(self._ends)))
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
        # All ranks again first: most faults are gone with the process. One that is not is a host's,
        # or a GPU's.
        if ended.did_steps:
            self.ranks = self._wanted
        elif ended.failure is None and before and ended.ranks > self.min_ranks:
            self.ranks = ended.ranks - 1
        return None

    @staticmethod
    def _has_failed_so(ended: Ended, before: Sequence[Ended]) -> bool:
        """Whether an exception came again; not where both came before a step, which prove nothing."""
        return ended.failure is not None and any(
            other.failure is not None
            and (other.failure.text, other.step) == (ended.failure.text, ended.step)
            and (other.did_steps or ended.did_steps)
            for other in before
        )

    def first_failure(self) -> str:
        """How the first start ended, where there were several."""
        return self._ends[0].describe()
