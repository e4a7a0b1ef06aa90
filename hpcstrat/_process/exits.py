"""How the program ends, which Python does not tell the functions that it calls at its exit."""

from __future__ import annotations

import builtins
import dis
import functools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn


class ExitWatch:
    """Notes calls of `sys.exit`, for which Python calls no hook, and whether they end the program.

    Attributes:
        status: the last status of any thread; before the first call `()`.
        failure_status: the last one of the main thread that is not a success.
    """

    def __init__(self) -> None:
        self.status: object = ()
        self.failure_status: object = None
        self._program = _outermost_frame()
        # At the last failure: the outermost frame, which at a prompt is another, and where it was.
        self._frame = self._program
        self._instruction: int | None = None

    def watch(self, call: Callable[[], None]) -> None:
        """From now on notes each exit, and calls this if the main thread's status is a failure."""

        def watched(leave: Callable[[Any], NoReturn]) -> Callable[..., NoReturn]:
            def exit(code: Any = None) -> NoReturn:  # named as the site's are
                self.status = code
                is_main = threading.current_thread() is threading.main_thread()
                if is_main and code is not None and code != 0:
                    self.failure_status = code
                    self._frame = _outermost_frame()
                    self._instruction = self._frame.f_lasti
                    call()
                leave(code)

            return functools.update_wrapper(exit, leave)

        sys.exit = watched(sys.exit)
        for name in {"exit", "quit"} & vars(builtins).keys():  # the site's
            setattr(builtins, name, watched(getattr(builtins, name)))

    def is_failing(self) -> bool:
        """Whether the last failure ends the program: it has not caught SystemExit."""
        # Otherwise the outermost frame would have continued, to another instruction.
        return self._frame.f_lasti == self._instruction

    def ended_well(self) -> bool:
        """Whether the program has ended, and well: its outermost frame returned, or by status 0."""
        code, last = self._program.f_code.co_code, self._program.f_lasti
        return dis.opname[code[last]].startswith("RETURN") or self.status in (0, None)


def _outermost_frame() -> FrameType:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    return frame
