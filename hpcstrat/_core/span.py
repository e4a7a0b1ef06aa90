"""A decorator that makes calls spans of the timeline; without a timeline it changes nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

from hpcstrat._process import settings

RUN, COMMUNICATION, WAITING, UPDATE = "run", "communication", "waiting", "update"
INPUT, CHECKPOINT = "input", "checkpoint"

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Details(NamedTuple):
    """Describes the call of a span.

    Attributes:
        name: the span's name.
        nbytes: bytes that this rank sends; `None` if nothing travels.
        stream: the `gpu.Stream` on which the call puts work; `None` if it puts none.
    """

    name: str
    nbytes: int | None = None
    stream: Any = None


_recorder: Any = None  # a `TimelineRecorder`, whose layer is above this one


def record_to(recorder: Any) -> None:
    """From now on this `TimelineRecorder` records the spans."""
    global _recorder
    _recorder = recorder


def span(category: str, details: str | Callable[..., Details]) -> Callable[[_Function], _Function]:
    """Makes every call of a function a span if `HPCSTRAT_TIMELINE` is set at the library's import.

    Args:
        category: a constant of this module, such as `RUN`.
        details: the span's name, or a function of the call's arguments.
    """
    describe = details if callable(details) else lambda *_, **__: Details(details)

    def decorate(function: _Function) -> _Function:
        # Decided once, at import, so that without a timeline no call pays for it.
        if not settings.timeline():
            return function

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            recorder = _recorder
            if recorder is None:
                return function(*args, **kwargs)
            try:
                description = describe(*args, **kwargs)
            except (TypeError, AttributeError):  # the function itself complains about them
                return function(*args, **kwargs)
            opened = recorder.start(category, *description)
            if opened is None:
                return function(*args, **kwargs)
            try:
                return function(*args, **kwargs)
            finally:
                recorder.end(opened)

        return cast("_Function", call)

    return decorate
