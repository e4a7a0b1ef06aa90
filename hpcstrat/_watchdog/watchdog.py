"""The thread that detects ranks that wait for each other forever, and its calls for the library.

What it finds, and who ends the job. Rank 0 sees all ranks, every other rank sees rank 0:

    event                       how it shows                         who ends the job, and when
    --------------------------  -----------------------------------  -------------------------------
    ranks wait, none goes on    statuses stay the same               rank 0, at the timeout
    a rank's watchdog stops     its beat stays the same: it is "not  rank 0, at the timeout
                                answering" in the report
    a rank dies                 its connection closes                rank 0, within a second
    rank 0 dies                 the same                             all others, the same
    rank 0's watchdog stops     it sends nothing more                who waits, at the timeout
    NCCL fails                  a function of `add_check`            that rank, at once
    not all ranks start MPI     `waiting_for_all`                    who waits, at the timeout
    the launcher is killed      its process ends                     each rank ends by itself
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator

from hpcstrat._agreement.collective import CallState
from hpcstrat._core.user_frames import user_frame, user_frame_of
from hpcstrat._process import failure, launchers, reports, settings
from hpcstrat._watchdog.channels import SILENT_SECONDS, MemberChannel, RankStatus, RootChannel
from hpcstrat._watchdog.stall_detector import SETTLING_SECONDS, StallDetector

_BEAT_SECONDS = 0.5
_LAUNCHER_SECONDS = 1.0  # between two checks whether the launcher is there
_SHORTEST_BEAT_SECONDS = 0.01
_MOST_OWN_ERRORS = 3  # that the watchdog reports


class Watchdog:
    """Tells the other ranks where this rank is, and ends the job if ranks wait forever.

    It costs the calls nothing: they are counted anyway, and the watchdog's thread looks at the
    stack of the thread that works.

    Args:
        rank: this process's rank.
        calls: the state of the communicators' calls.
        channel: connects the ranks' watchdogs.
    """

    def __init__(self, rank: int, calls: CallState, channel: RootChannel | MemberChannel) -> None:
        self._rank = rank
        self._calls = calls
        self._channel = channel
        self._stall_seconds = settings.seconds("HPCSTRAT_STALL_SECONDS")
        self._timeout_seconds = settings.seconds("HPCSTRAT_TIMEOUT_SECONDS")
        self._detector = StallDetector(self._stall_seconds, self._timeout_seconds)
        self._extensions: list[float] = []  # seconds of each `extend_timeout` this rank is in
        self._progress = 0
        self._gone = False
        self._lost_since: float | None = None  # when the connection to rank 0 was found closed
        self._reported = False  # that rank 0 is silent
        self._beat = 0
        self._checks: list[tuple[Callable[[], str], Callable[[], bool]]] = []  # and what waits
        self._checking = threading.Lock()
        self._lock = threading.Lock()  # for the channel, which `leave` writes to as well
        # A daemon: the program ends when its own threads do; the watchdog must not prevent that.
        self._thread = threading.Thread(target=self._watch, name="hpcstrat-watch", daemon=True)
        self._thread.start()

    def add_check(self, check: Callable[[], str], waits: Callable[[], bool]) -> None:
        """Calls both functions at every beat from now on.

        Args:
            check: returns a text to end the job with, or an empty text.
            waits: returns whether this rank waits for others although its thread is not in a
                collective call.
        """
        self._checks.append((check, waits))

    def remove_check(self, check: Callable[[], str], waits: Callable[[], bool]) -> None:
        """Removes the check and its callback. When this returns, neither is running."""
        with self._checking:
            self._checks.remove((check, waits))

    def work(self) -> None:
        """Tells the others that the library itself is working: to wait for it is not a stall."""
        self._progress += 1

    @contextlib.contextmanager
    def extend_timeout(self, seconds: float) -> Iterator[None]:
        """While this rank is in the block, all ranks report and time out `seconds` later."""
        self._extensions.append(seconds)
        self._tell()  # at once: what follows may hold the interpreter lock
        try:
            yield
        finally:
            self._extensions.remove(seconds)
            self._tell()  # or a rank that loses the others now would wait as long for them

    def leave(self) -> None:
        """Tells the others that this process may end from now on.

        The watchdog continues, for ranks that do not come.
        """
        self._gone = True
        self._tell()  # at once: until the next beat the others would take an end for a crash

    def _tell(self) -> None:
        with contextlib.suppress(Exception), self._lock:
            self._channel.exchange(self._status())

    def _status(self) -> RankStatus:
        calls = self._calls
        waits = calls.waiting.depth > 0  # without a lock: the next status corrects an old status
        location = self._location()
        with self._checking:
            waits = waits or any(pending() for _, pending in self._checks)
        self._beat += 1
        return RankStatus(
            number=calls.number,
            call=str(calls.last_signature or ""),
            location=location,
            waits=waits,
            progress=self._progress,
            extra_seconds=sum(self._extensions),
            gone=self._gone,
            process=os.getpid(),
            beat=self._beat,
        )

    def _location(self) -> str:
        """Where in the program the thread is that waits for others; else the main thread."""
        calls = self._calls
        return user_frame_of(
            calls.thread if calls.waiting.depth else threading.main_thread().ident or 0
        )

    def _watch(self) -> None:
        beat = _beat_of(self._stall_seconds, self._timeout_seconds)
        reported: set[str] = set()
        while True:
            try:
                self._look()
                self._channel.wait(beat)
            except Exception as error:  # the watchdog's own: no reason to end a healthy job
                what = f"{type(error).__name__}: {error}"
                if what not in reported and len(reported) < _MOST_OWN_ERRORS:
                    reported.add(what)
                    reports.say(
                        f"hpcstrat: the watchdog hit an internal error and continues: {what}; "
                        "check whether the program causes it"
                    )
                time.sleep(beat)

    def _look(self) -> None:
        with self._checking:
            # NCCL's errors first: they say why the ranks wait.
            problems = [problem for check, _ in self._checks if (problem := check())]
        if problems:
            failure.end_job(problems[0])
        channel = self._channel
        with self._lock:
            channel.exchange(self._status())
        if isinstance(channel, RootChannel):
            found = self._detector.diagnose(channel.statuses, channel.dead, time.monotonic())
            if found is not None and found.ends:
                failure.end_job(found.text)
            if found is not None:
                reports.say(found.text)
        else:
            self._require_rank_0(channel)

    def _require_rank_0(self, channel: MemberChannel) -> None:
        """Ends the job if rank 0, which alone sees all ranks, has ended or is silent."""
        # If several ranks find this, rank 1 speaks for them.
        end = functools.partial(failure.end_job, consequence=self._rank > 1)
        root, silence = channel.root, channel.root_silence
        if not channel.root_is_dead or root.gone or self._gone:
            self._lost_since = None
        elif self._lost_since is None:
            self._lost_since = time.monotonic()
        # Rank 0's own report, or the launcher's, says more than this rank can: give it time.
        elif time.monotonic() - self._lost_since >= SETTLING_SECONDS:
            end(
                "hpcstrat: the job ends: rank 0 exited without shutting down (os._exit, a signal, "
                "or out of memory), or its host cannot be reached; look at its last output"
            )
        extra = max(sum(self._extensions), root.extra_seconds)
        left = self._timeout_seconds + extra - silence
        if left <= 0:
            end(f"hpcstrat: the job ends: {self._describe(root, silence)}")
        elif silence < self._stall_seconds + extra:
            self._reported = False
        elif not self._reported:
            self._reported = True
            if self._rank == 1:
                reports.say(
                    f"hpcstrat: {self._describe(root, silence)}. The job ends in {left:.0f} s "
                    "(HPCSTRAT_TIMEOUT_SECONDS)"
                )

    def _describe(self, root: RankStatus, silence: float) -> str:
        """Why this rank waits for rank 0, or rank 0 for this rank."""
        if root.gone:
            return (
                f"rank 0 has finished, and has waited {silence:.0f} s for this process, which has "
                f"finished but does not end; it is at {self._location()}"
            )
        return (
            f"rank 0 has been silent for {silence:.0f} s: it is stopped, or in C code that holds "
            f"the interpreter lock, or its host does not answer; it was last in {root.words}; this "
            f"rank waits at {self._location()}"
        )


def _beat_of(*limits: float) -> float:
    """Seconds between two looks: several within the limits, so that limits of a second work too."""
    return max(min(_BEAT_SECONDS, *(limit / 4 for limit in limits)), _SHORTEST_BEAT_SECONDS)


@contextlib.contextmanager
def waiting_for_all(what: str) -> Iterator[None]:
    """A block in which the ranks meet for the first time: there is no channel yet.

    Each rank watches only itself: a thread reports that it waits, and ends the job at the limit.

    Args:
        what: what this rank waits for, in words.
    """
    stall_seconds = settings.seconds("HPCSTRAT_STALL_SECONDS")
    timeout_seconds = settings.seconds("HPCSTRAT_TIMEOUT_SECONDS")
    where = f"at {user_frame()}: not all ranks have come; all must create a strategy"
    is_done = threading.Event()

    def watch() -> None:
        waited, looked, is_reported = 0.0, time.monotonic(), stall_seconds >= timeout_seconds
        while not is_done.wait(_beat_of(stall_seconds, timeout_seconds)):
            now = time.monotonic()
            # A longer pause is this rank's: it was suspended, perhaps with the whole job.
            waited += min(now - looked, SILENT_SECONDS)
            looked = now
            if waited >= timeout_seconds:
                failure.end_job(
                    f"hpcstrat: the job ends: this rank has waited {timeout_seconds:.0f} s for "
                    f"{what} (HPCSTRAT_TIMEOUT_SECONDS), {where}"
                )
            if waited >= stall_seconds and not is_reported:
                is_reported = True
                reports.say(
                    f"hpcstrat: this rank has waited {stall_seconds:.0f} s for {what} "
                    f"(HPCSTRAT_STALL_SECONDS), {where}. The job ends after {timeout_seconds:.0f} "
                    "s (HPCSTRAT_TIMEOUT_SECONDS)"
                )

    threading.Thread(target=watch, name="hpcstrat-start", daemon=True).start()
    try:
        yield
    finally:
        is_done.set()


def end_with_launcher() -> None:
    """Ends this rank, from now on, when the launcher process that started it is gone."""
    launcher, process = launchers.find(), launchers.find_process()
    if launcher is None or process is None:
        return
    text = (
        f"hpcstrat: this rank ends: the process that started it ({launcher.name}, process "
        f"{process}) was killed; check who killed it, and its host's memory"
    )

    def watch() -> None:
        while launchers.is_there(process):
            time.sleep(_LAUNCHER_SECONDS)
        failure.end_rank(text)

    threading.Thread(target=watch, name="hpcstrat-launcher", daemon=True).start()
