"""Makes one rank's error all ranks' error: around a collective call, and in blocks within it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar, cast

from hpcstrat._calls.state import CallState
from hpcstrat._core.call_name import current_call, enter_call, explain_arguments, leave_call

_Function = TypeVar("_Function", bound=Callable[..., Any])


def collective(
    name: str,
    check: Callable[[Any], None] | None = None,
    communicator_of: Callable[[Any], Any] = attrgetter("_group.communicator"),
) -> Callable[[_Function], _Function]:
    """Makes a public method a collective call: names it, and makes the ranks raise together.

    What the method raises on one rank before its first exchange, all ranks raise. A later error may
    be this rank's alone: the next call compares, and ends the job unless all ranks had an error.
    Where one rank may fail between two exchanges, the method uses a block of
    `Communicator.raise_together`.

    It opens no span: communicators and storages do, because they know how many bytes travel.

    Args:
        name: the user's name of the call.
        check: refuses objects in the wrong context, on this rank alone: the other ranks may not be
            in the call there.
        communicator_of: returns the communicator of the method's object.
    """

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def edge(*args: Any, **kwargs: Any) -> Any:
            outer = enter_call(name)
            owner = args[0] if args else None  # a function called with keywords only has none
            try:
                # Not shared: a rank in the wrong context is alone, and would wait for the others.
                if check is not None:
                    check(owner)
                calls: CallState = communicator_of(owner).calls
                if calls.barred:
                    calls.refuse(name)
                # As `raise_together`, without the four calls of its block.
                number = calls.number
                try:
                    return function(*args, **kwargs)
                except BaseException as error:
                    explain_arguments(error)
                    calls.share_error(error, number)
                    raise
            finally:
                leave_call(outer)

        return cast("_Function", edge)

    return decorate


class RaiseTogether:
    """See `Communicator.raise_together`."""

    __slots__ = ("_calls", "_number")

    def __init__(self, calls: CallState) -> None:
        self._calls = calls

    def __enter__(self) -> None:
        calls = self._calls
        if calls.barred:
            calls.refuse(current_call())
        self._number = calls.number

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: Any
    ) -> None:
        if error is not None:
            self._calls.share_error(error, self._number)


class Change(RaiseTogether):
    """See `Communicator.change`."""

    __slots__ = ()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: Any
    ) -> None:
        # Before the first exchange no shared state has changed: `raise_together` is enough.
        if error is not None and self._calls.number != self._number:
            self._calls.mark_interrupted(error)
