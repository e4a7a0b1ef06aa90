"""Decides when ranks have waited for each other for too long, and writes the report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from hpcstrat._core.ranks_in_words import list_by_rank, ranks_in_words
from hpcstrat._watchdog.channels import SILENT_SECONDS, UNKNOWN, RankStatus

SETTLING_SECONDS = 0.4
"""After a rank's death: seconds for the launcher, or the rank's own report, to end the job."""


class Diagnosis(NamedTuple):
    """A report, with or without the end of the job.

    Attributes:
        ends: whether the job ends; otherwise this is only a report.
        text: what rank 0 prints.
    """

    ends: bool
    text: str


class StallDetector:
    """Looks at the ranks' statuses at every beat.

    Args:
        stall_seconds: how long without progress until the report.
        timeout_seconds: how long until the end.
    """

    def __init__(self, stall_seconds: float, timeout_seconds: float) -> None:
        self._stall_seconds = stall_seconds
        self._timeout_seconds = timeout_seconds
        self._seen: list[tuple[int, int]] = []
        self._since = 0.0  # when any rank was last seen to make progress
        self._heard: dict[int, tuple[int, float]] = {}  # each rank's last beat, and when it came
        self._looked = math.inf  # when this detector last looked
        self._dead_since: float | None = None
        self._reported = False

    def diagnose(
        self, statuses: Sequence[RankStatus], dead: Sequence[int], now: float
    ) -> Diagnosis | None:
        """A report, if it is time for one.

        Args:
            statuses: each rank's last status.
            dead: ranks whose processes have ended.
            now: seconds of any monotonic clock.
        """
        self._pass_over(now)
        silence = self._silence(statuses, dead, now)
        missing = [rank for rank in dead if not statuses[rank].gone]
        if missing:
            ends, head = True, self._report_deaths(missing, statuses, now)
        else:
            ends, head = self._report_stall(statuses, silence, now)
        if not head:
            return None
        last = max(status.number for status in statuses)
        said = [
            _line(status, last, seconds) for status, seconds in zip(statuses, silence, strict=True)
        ]
        lines = "".join(f"\n  {line}" for line in list_by_rank(enumerate(said)))
        return Diagnosis(ends, f"hpcstrat: {head}{lines}")

    def _report_deaths(
        self, missing: Sequence[int], statuses: Sequence[RankStatus], now: float
    ) -> str:
        """Says that ranks have died; empty until it is time to."""
        if self._dead_since is None:
            self._dead_since = now
        # A rank that reports its own error dies too. Its report, and the launcher's, say more, so
        # they get a head start.
        if now - self._dead_since < SETTLING_SECONDS:
            return ""
        first = statuses[missing[0]]
        is_one = len(missing) == 1 and first is not UNKNOWN
        process = f" (process {first.process})" if is_one else ""
        return (
            f"the job ends: {ranks_in_words(missing)}{process} exited without shutting down "
            "(os._exit, a signal, or out of memory); look at its last output and at its host's "
            "memory"
        )

    def _report_stall(
        self,
        statuses: Sequence[RankStatus],
        silence: Sequence[float],
        now: float,
    ) -> tuple[bool, str]:
        """Whether the job ends, and what to say; empty until it is time to."""
        # Any rank's progress counts: while one still works, the others may rightly wait for it.
        seen = [(status.number, status.progress) for status in statuses]
        if seen != self._seen:
            self._seen, self._since, self._reported = seen, now, False
            return False, ""
        # If all ranks compute there is nothing to report, however long it takes.
        if not _anyone_waits(statuses, silence):
            self._since = now
            return False, ""
        seconds = now - self._since
        quiet = f"the ranks have been waiting for each other for {seconds:.0f} s"
        extra = max(status.extra_seconds for status in statuses)
        left = self._timeout_seconds + extra - seconds
        if left <= 0:
            return True, (
                f"the job ends: {quiet} (HPCSTRAT_TIMEOUT_SECONDS); all ranks must make the same "
                "calls"
            )
        if self._reported or seconds < self._stall_seconds + extra:
            return False, ""
        self._reported = True
        return False, (
            f"{quiet} (HPCSTRAT_STALL_SECONDS). The job ends in {left:.0f} s "
            "(HPCSTRAT_TIMEOUT_SECONDS); `with hs.extend_timeout(seconds):` around it allows a "
            "known long wait"
        )

    def _pass_over(self, now: float) -> None:
        """Counts a pause between two looks as two seconds at most.

        In a longer one this rank, and perhaps the whole job, was suspended. But it may also have
        held the interpreter lock for a moment, again and again, which must not hide a hang.
        """
        pause = max(now - self._looked - SILENT_SECONDS, 0.0)
        self._since += pause
        self._heard = {rank: (beat, since + pause) for rank, (beat, since) in self._heard.items()}
        self._looked = now

    def _silence(
        self, statuses: Sequence[RankStatus], dead: Sequence[int], now: float
    ) -> list[float]:
        """The seconds since each rank's last new status; infinite of a dead rank."""
        for rank, status in enumerate(statuses):
            if rank not in self._heard or self._heard[rank][0] != status.beat:
                self._heard[rank] = (status.beat, now)
        return [
            math.inf if rank in dead else now - self._heard[rank][1]
            for rank in range(len(statuses))
        ]


def _anyone_waits(statuses: Sequence[RankStatus], silence: Sequence[float]) -> bool:
    """Whether a rank that still answers is waiting: statuses of silent ranks may be out of date."""
    # Ranks that have all finished wait for processes that do not end.
    if all(status.gone for status in statuses):
        return max(silence) >= SILENT_SECONDS
    return any(
        status.waits and seconds < SILENT_SECONDS
        for status, seconds in zip(statuses, silence, strict=True)
    )


def _line(status: RankStatus, last: int, silence: float) -> str:
    if status is UNKNOWN:
        return "has never reported"
    if status.gone and not status.waits:
        if silence >= SILENT_SECONDS:
            return "has finished"
        return f"has finished, but its process does not end; now at {status.location}"
    if silence == math.inf:
        return f"last seen in {status.words}"
    if silence >= SILENT_SECONDS:
        why = "stopped, or in C code that holds the interpreter lock"
        return f"not answering for {silence:.0f} s ({why}); last in {status.words}"
    if status.waits:
        return f"waiting in {status.words}"
    if status.number == last:
        return f"completed {status.call_in_words}; now at {status.location}"
    return f"has not arrived; last in {status.call_in_words}; now at {status.location}"
