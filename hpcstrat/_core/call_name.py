"""The name of the running call, for messages and signatures.

A public method names itself here once. Messages and signatures of everything that it calls ask for
that name, so no layer in between carries it. It is a context variable because each thread may be in
its own call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any, TypeVar, cast, final

_Function = TypeVar("_Function", bound=Callable[..., Any])

_call: ContextVar[str] = ContextVar("hpcstrat_call", default="hpcstrat")

# The variable's own methods, which are C: every step uses them, and a Python function would cost
# several times as much.
current_call: Callable[[], str] = _call.get
"""The user's name of the running call, such as `Strategy.reduce`."""
enter_call: Callable[[str], Token[str]] = _call.set
"""Names the call that starts. Pass the result to `leave_call`, in a `finally`."""
leave_call: Callable[[Token[str]], None] = _call.reset
"""Ends the call: the name of the call around it counts again."""


# A class, because a generator with `contextmanager` would cost several times as much.
@final
class call_named:
    """A block that runs as a call of this name."""

    __slots__ = ("_name", "_token")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._token = enter_call(self._name)

    def __exit__(self, *_: object) -> None:
        leave_call(self._token)


def names_call(name: str | Callable[..., str]) -> Callable[[_Function], _Function]:
    """Names calls of a function that does not communicate, or whose ranks do not raise together.

    Args:
        name: the user's name of the call, or a function of the call's arguments that returns it.
    """

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            outer = enter_call(name if isinstance(name, str) else name(*args, **kwargs))
            try:
                return function(*args, **kwargs)
            finally:
                leave_call(outer)

        return cast("_Function", call)

    return decorate
