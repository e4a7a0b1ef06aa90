"""Before the first exchange of a call, all ranks raise what one raises.

Afterwards this rank may be alone with an exception: the next call compares, or ends the job.

`CallState` holds what decides it, `ErrorBlock` applies it to a block, and `collective` to a public
method. The exchange is in `agreement.py`; docs/how_it_works.md has tables of all cases.
"""

from __future__ import annotations

import functools
import os
import threading
import traceback
import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

from hpcstrat._agreement.records import CallSignature
from hpcstrat._core.call_name import current_call, enter_call, leave_call
from hpcstrat._core.user_frames import user_frame, user_frame_in_call
from hpcstrat._process import failure

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Barred(NamedTuple):
    """Why this rank may make no call.

    Attributes:
        call: the call that was interrupted.
        error: the exception that interrupted it, on this rank alone or midway: the ranks' states
            may differ from now on. `None` in a forked process.
    """

    call: str = ""
    error: BaseException | None = None


# A counter and not a list of stacks: the watchdog reads it from its own thread, without a lock and
# at no cost to calls.
class Waiting:
    """A block in which this rank waits for the others.

    Blocks may be nested. The watchdog's thread reads `depth`.
    """

    __slots__ = ("depth",)

    def __init__(self) -> None:
        self.depth: int = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


class CallState:
    """The state that all communicators of a group share.

    Args:
        size: the number of ranks.
        raise_on_others: makes the other ranks raise, in their next call, what this rank raises.

    Attributes:
        number: how many calls were made.
        last_signature: the last call's signature.
        storages: how many storages of variables these ranks have made.
        shared_error_call: the number of the last call from which all ranks raised together.
        thread: the thread that made the last call.
        waiting: the block that this rank is in while it waits for the others.
        barred: why no call may be made; `None` if calls may be made.
        is_capturing: whether the calls' work on the GPU only becomes a graph: an error leaves
            nothing half done.
        escaped_hash: hash of the calls after which this rank raised an exception that other ranks
            may not know of.
        last_escaped: the last such exception.
        last_escaped_call: the number of the call after which it was raised.
    """

    def __init__(self, size: int, raise_on_others: Callable[[Exception], None]) -> None:
        self.size: int = size
        self.raise_on_others: Callable[[Exception], None] = raise_on_others
        self.number: int = 0
        self.last_signature: CallSignature | None = None
        self.shared_error_call: int = 0
        self.storages: int = 0
        self.thread: int = threading.get_ident()
        self.waiting: Waiting = Waiting()
        self.barred: Barred | None = None
        self.is_capturing: bool = False
        self.escaped_hash: int = 0
        self.last_escaped: BaseException | None = None
        self.last_escaped_call: int = 0
        _all.add(self)

    def count(self, signature: CallSignature) -> None:
        """Counts a call that starts.

        Raises:
            RuntimeError: no call may be made now, or by this thread.
        """
        if self.barred:
            self.refuse(signature.call)
        # All ranks must make calls in one order, which two threads of a rank cannot guarantee.
        if self.size > 1 and self.thread != threading.get_ident():
            self.change_thread(signature.call)
        self.number += 1
        self.last_signature = signature

    def count_storage(self) -> int:
        """The number of a new storage of these ranks, which all make storages in one order."""
        self.storages += 1
        return self.storages

    def note_shared_error(self) -> None:
        """Notes that all ranks raise together now, after the last call."""
        self.shared_error_call = self.number

    @property
    def all_raise(self) -> bool:
        """Whether all ranks raised together in the last call, or after it."""
        return self.shared_error_call == self.number

    def mark_interrupted(self, error: BaseException, call: str = "") -> bool:
        """Notes that an exception interrupted this call: the next call ends the job.

        Except if all ranks raised it. A single replica may continue: no other rank waits for it, or
        takes the call for done.

        Returns:
            Whether the call counts as interrupted.
        """
        # All ranks raised this error together, before anything changed.
        if self.all_raise or (self.is_capturing and isinstance(error, Exception)):
            return False
        if self.size > 1:
            # The first exception counts: later ones often follow from it. A child stays one.
            self.barred = self.barred or Barred(call or current_call(), error)
        return True

    def note_escaped(self, error: BaseException) -> None:
        """Notes, once, an exception that leaves `Strategy.run` or a call, unknown to the others.

        The program may catch it and continue only if every rank raised after the same calls; the
        next call compares.
        """
        if error is not self.last_escaped or self.number != self.last_escaped_call:
            # A hash and not a count: ranks with equally many errors, but after different calls,
            # must differ.
            self.escaped_hash = (self.escaped_hash * 1_000_003 + self.number + 1) & 0x7FFF_FFFF_FFFF
            self.last_escaped, self.last_escaped_call = error, self.number

    def require_open(self, call: str = "") -> None:
        """Refuses a method where no call may be made, even if it would not communicate.

        Raises:
            RuntimeError: in a child of the rank.
        """
        if self.barred:
            self.refuse(call or current_call())

    def refuse(self, call: str) -> NoReturn:
        """Raises, or ends the job, for the reason that forbids calls.

        Raises:
            RuntimeError: the call may be made by another process.
        """
        location, barred = user_frame(), self.barred
        assert barred is not None
        if barred.error is None:
            raise RuntimeError(
                f"{call} was called at {location}, in process {os.getpid()}, which the program "
                "forked: it is not a rank and must not communicate. Let it compute, and make the "
                "call in the rank's own process"
            )
        lines = "".join(traceback.format_exception(barred.error))
        # At the end of the program there is no line to name, and the call has that same name.
        where = call if call == location else f"{call}, at {location}"
        failure.end_job(
            f"{lines}hpcstrat: this exception interrupted {barred.call} on this rank and was "
            "caught: the call may be half done, or done on other ranks only. So the job ends, at "
            f"{where}. Leave such an exception uncaught; to save when a signal comes, use "
            "checkpoint.CheckpointManager"
        )

    def change_thread(self, call: str) -> None:
        """Lets this thread make calls, if the thread that made the last call is idle.

        Raises:
            RuntimeError: that thread is in a call. The job ends at the next call: the ranks cannot
                know in which order to make the two.
        """
        # Two threads may come here at once. Without the lock both would find the owner idle.
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
            # To raise is not enough: if the program caught it and continued, ranks could make the
            # two threads' calls in different orders.
            self.barred = self.barred or Barred(call, error)
            raise


_all: weakref.WeakSet[CallState] = weakref.WeakSet()
_changing = threading.Lock()


def _forbid_in_child() -> None:
    """Forbids calls in a forked child: it has its parent's slot in shared memory."""
    global _changing
    # A new lock: a thread that the child does not have may hold the parent's.
    _changing = threading.Lock()
    for calls in _all:
        calls.barred = Barred()


os.register_at_fork(after_in_child=_forbid_in_child)


class ErrorBlock:
    """A block of a call, before whose first exchange all ranks raise what one raises.

    Args:
        calls: the ranks' calls.
        is_change: whether the block changes what ranks share: a later exception ends the job at the
            next call, which otherwise compares.
    """

    __slots__ = ("_calls", "_is_change", "_number")

    def __init__(self, calls: CallState, is_change: bool = False) -> None:
        self._calls = calls
        self._is_change = is_change

    def __enter__(self) -> None:
        calls = self._calls
        if calls.barred:
            calls.refuse(current_call())
        self._number = calls.number

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: Any
    ) -> None:
        calls = self._calls
        # Barred: the next call ends the job anyway, or this is a child, which tells no rank.
        if error is None or calls.barred:
            return
        if calls.number == self._number:
            # An exit or an interrupt is not shared: left uncaught, it ends the job by itself.
            if isinstance(error, Exception):
                calls.raise_on_others(error)
        elif self._is_change:
            calls.mark_interrupted(error)
        elif not calls.all_raise:
            calls.note_escaped(error)


def collective(
    check: Callable[[Any], None] | None = None,
    communicator_of: Callable[[Any], Any] = attrgetter("replica_group.communicator"),
) -> Callable[[_Function], _Function]:
    """Makes a public method a collective call: names it, and makes the ranks raise together.

    What the method raises on one rank before its first exchange, all ranks raise. A later error may
    be this rank's alone: the next call compares, and ends the job unless all ranks had an error.
    Where one rank may fail between two exchanges, the method uses a block of
    `Communicator.raise_together`.

    It opens no span: communicators and storages do, because they know how many bytes travel.

    Args:
        check: refuses objects in the wrong context, on this rank alone: the other ranks may not be
            in the call there.
        communicator_of: returns the communicator of the method's object.
    """

    def decorate(function: _Function) -> _Function:
        name: str = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def edge(*args: Any, **kwargs: Any) -> Any:
            outer = enter_call(name)
            owner = args[0] if args else None  # a function called with keywords only has none
            try:
                # Not shared: a rank in the wrong context is alone, and would wait for the others.
                if check is not None:
                    check(owner)
                with ErrorBlock(communicator_of(owner).calls):
                    return function(*args, **kwargs)
            finally:
                leave_call(outer)

        return cast("_Function", edge)

    return decorate
