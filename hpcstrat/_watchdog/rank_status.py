"""What a rank tells the others of itself, twice a second."""

from __future__ import annotations

import functools
import json
import os
import sys
import sysconfig
import threading
from types import FrameType
from typing import NamedTuple

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_OUTPUT = os.path.join(_PACKAGE, "_output.py")  # whose functions stand in the place of Python's own
_LONGEST = (400, 150, 40, 0)  # characters of a text in a status, the first that fits

LIMIT = 2000
"""Bytes of a packed status at most."""


class RankStatus(NamedTuple):
    """One rank at one moment.

    Attributes:
        number: of its current or last collective call.
        call: this call in words.
        place: file and line of the program that it is at.
        waits: whether it is inside a collective call.
        progress: a number that changes while it does long work of the library's own.
        patience: seconds that it asks the others to wait longer than usual.
        gone: whether it leaves the program, as it should.
        process: its process id.
        beat: a number that changes with every status.
    """

    number: int
    call: str
    place: str
    waits: bool
    progress: int
    patience: float
    gone: bool
    process: int
    beat: int = 0

    def pack(self) -> bytes:
        """As bytes, at most `LIMIT` of them: long texts are cut."""
        message = b""
        for longest in _LONGEST:
            short = self._replace(call=self.call[:longest], place=self.place[max(len(self.place) - longest, 0) :])
            message = json.dumps(short, ensure_ascii=False).encode(errors="replace")
            if len(message) <= LIMIT:
                break
        return message

    @classmethod
    def unpack(cls, message: bytes) -> RankStatus:
        """Of what `pack` gives.

        Raises:
            ValueError: it is no such thing.
        """
        fields = json.loads(message)
        if not isinstance(fields, list) or len(fields) != len(cls._fields):
            raise ValueError(f"{message!r} is no status")
        return cls(*fields)


def user_frame_of(thread: int) -> str:
    """Where another thread is in the user's program; where the main thread is, if that one has ended."""
    frames = sys._current_frames()
    # This function's own would be a cycle, which keeps alive what all threads have in their variables.
    del frames[threading.get_ident()]
    return _place(frames.get(thread) or frames.get(threading.main_thread().ident or 0))


def user_frame() -> str:
    """Where this thread is in the user's program."""
    return _place(sys._getframe())


def user_frame_in_call(thread: int) -> str | None:
    """Where another thread is in the user's program, if it is there in a call of the library; else `None`.

    In a replica function it is not: that is the program's own.
    """
    innermost = frame = sys._current_frames().get(thread)
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if path.startswith(_PACKAGE) and path != _OUTPUT:
            return None if name == "_run" else _place(innermost)
        if not path.startswith((_OUTPUT, *_installed())):
            return None
        frame = frame.f_back  # of a function that the program, or the library, is in
    return None


def _place(frame: FrameType | None) -> str:
    """File, line and function of the program that this stack is in: what is installed is not the program."""
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    innermost = frame
    while frame is not None and frame.f_code.co_filename.startswith((_PACKAGE, *_installed())):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "the end of the program"
    return f"{_near(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


def _near(path: str) -> str:
    try:
        return os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path
    except OSError:  # the working folder is no more
        return path


@functools.cache
def _installed() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return ("<frozen ", *(paths[kind] + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")))
