"""The calls that a group's ranks have made, as this rank counts them, and what forbids further ones."""

from __future__ import annotations

import os
import threading
import traceback
import weakref
from typing import NamedTuple, NoReturn

from hpcstrat._calls.records import CallSignature
from hpcstrat._calls.status import user_frame, user_frame_in_call
from hpcstrat._process import failure


class Interruption(NamedTuple):
    """A call that an exception interrupted midway, after which the ranks' states can no longer be trusted.

    Attributes:
        call: the user's name of the method.
        error: the exception.
    """

    call: str
    error: BaseException


# A counter, and no list of stacks: the watchdog reads it from its own thread, without a lock and at
# no cost to calls.
class Waiting:
    """A block in which this rank waits for the others.

    Such blocks nest; the watchdog's thread reads `depth`.
    """

    __slots__ = ("depth",)

    def __init__(self) -> None:
        self.depth: int = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


class CallState:
    """What the communicators of one group share.

    Attributes:
        number: how many calls were made.
        last_signature: the last call's.
        storages: how many storages of variables these ranks have made.
        settled: the number of the last call from which all ranks raised together.
        thread: the thread that made the last call.
        waiting: the block that this rank is in while it waits for the others.
        barred: whether no call may be made, for one of the next three reasons.
        paused: the call that not all ranks are in, during which none may be made.
        interruption: the call that an exception interrupted, on this rank alone or midway.
        forked: whether this process is a child of the rank.
        faults: hash of the calls after which this rank had exceptions that other ranks may not know
            of.
        fault: the last such exception.
        faulty: the number of the call after which it was raised.
    """

    __slots__ = (
        *("__weakref__", "barred", "fault", "faults", "faulty", "forked", "interruption"),
        *("last_signature", "number", "paused", "settled", "storages", "thread", "waiting"),
    )

    def __init__(self) -> None:
        self.number: int = 0
        self.last_signature: CallSignature | None = None
        self.settled: int = 0
        self.storages: int = 0
        self.thread: int = threading.get_ident()
        self.waiting: Waiting = Waiting()
        # One flag for every reason, since each call tests it; `refuse` finds out which it was.
        self.barred: bool = False
        self.paused: str | None = None
        self.interruption: Interruption | None = None
        self.forked: bool = False
        self.faults: int = 0
        self.fault: BaseException | None = None
        self.faulty: int = 0
        _all.add(self)

    def pause(self, call: str | None) -> None:
        """From now on no call may be made, because not all ranks are in `call`; with `None` they may again."""
        self.paused = call
        self.barred = self.forked or self.interruption is not None or call is not None

    def mark_interrupted(self, call: str, error: BaseException) -> None:
        """Notes that an exception interrupted `call`: the next call ends the job."""
        # The first one counts: later ones often follow from it.
        if self.interruption is None:
            self.interruption = Interruption(call, error)
        self.barred = True

    def note_fault(self, error: BaseException) -> None:
        """Notes an exception that this rank may have alone, once: the next call compares."""
        if error is not self.fault or self.number != self.faulty:
            # A hash and not a count: ranks that had as many errors, but after different calls, must
            # differ.
            self.faults = (self.faults * 1_000_003 + self.number + 1) & 0x7FFF_FFFF_FFFF
            self.fault, self.faulty = error, self.number

    def refuse(self, call: str) -> NoReturn:
        """Raises, or ends the job, for the reason why no call may be made.

        Raises:
            RuntimeError: it may be made later, or by another process.
        """
        location = user_frame()
        if self.forked:
            raise RuntimeError(
                f"{call} was called at {location}, in process {os.getpid()}, which the program "
                "forked: it is not a rank and must not communicate. Let it compute, and make the "
                "call in the rank's own process"
            )
        if self.interruption is not None:
            lines = "".join(traceback.format_exception(self.interruption.error))
            # At the end of the program there is no line to name, and the call has the same name.
            where = call if call == location else f"{call}, at {location}"
            failure.end_job(
                f"{lines}hpcstrat: this exception interrupted {self.interruption.call} on this "
                "rank and was caught: the call may be half done, or done on other ranks only. So "
                f"the job ends, at {where}. Leave such an exception uncaught; to save when a "
                "signal comes, use checkpoint.PreemptionHandler"
            )
        raise RuntimeError(
            f"{call} was called inside the function of {self.paused}, an update, which one rank "
            "runs: nothing may communicate there; call it before or after"
        )

    def change_thread(self, call: str) -> None:
        """Lets this thread make calls, if the one that did is in none.

        Raises:
            RuntimeError: it is. The job ends at the next call: the ranks cannot know in which order
                to make the two.
        """
        # Two threads may come here at once; without the lock both would find the owner idle.
        with _changing:
            theirs = user_frame_in_call(self.thread)
            if theirs is None:
                self.thread = threading.get_ident()
                return
        own, name = user_frame(), threading.current_thread().name
        try:
            raise RuntimeError(
                f"{call} was called in the thread {name!r}, at {own}, while another is in "
                f"{self.last_signature.call if self.last_signature else 'a call'}, at {theirs}: "
                "one thread at a time may be in a collective call, because their order must be the "
                "same on all ranks; make them in one thread"
            )
        except RuntimeError as error:
            # Not raised only: if the program caught it and went on, ranks could make the two
            # threads' calls in different orders.
            self.mark_interrupted(call, error)
            raise


_all: weakref.WeakSet[CallState] = weakref.WeakSet()
_changing = threading.Lock()


def _forbid_in_child() -> None:
    """A forked child has its parent's slot in shared memory, and would be taken for it."""
    global _changing
    _changing = (
        threading.Lock()
    )  # the parent's may be held by a thread that the child does not have
    for calls in _all:
        calls.forked = calls.barred = True


os.register_at_fork(after_in_child=_forbid_in_child)
