"""Where a thread is in the user's program: for reports of ranks that wait or disagree, warnings."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import sysconfig
import threading
import warnings
from collections.abc import Iterator
from types import FrameType

from hpcstrat._process.output import ipython_shell

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STREAMS = _PACKAGE + "_process/output.py"  # stands in for Python's own


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """A block in which the stacks of other threads may be read.

    Before Python 3.12 an allocation may collect garbage, and a destructor let another thread run
    while Python lists the threads' frames: a deadlock (python/cpython#106883).
    """
    was_enabled = sys.version_info < (3, 12) and gc.isenabled()
    if was_enabled:
        gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_no_collection()
def user_frame_of(thread: int) -> str:
    """Where a thread is in the user's program; if it has ended, where the main thread is."""
    if thread == threading.get_ident():
        return user_frame()
    frames = sys._current_frames()
    # This function's own frame would make a cycle, which keeps all threads' local variables alive.
    del frames[threading.get_ident()]
    return _location_of(frames.get(thread) or frames.get(threading.main_thread().ident or 0))


def user_frame() -> str:
    """Where this thread is in the user's program."""
    return _location_of(sys._getframe())


@_no_collection()
def user_frame_in_call(thread: int) -> str | None:
    """Where in the user's program a thread is in a call of the library; `None` if it is in none.

    A replica function does not count as such a call: it is the program's own code.
    """
    innermost = frame = sys._current_frames().get(thread)
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if path.startswith(_PACKAGE) and path != _STREAMS:
            return None if name == "_run" else _location_of(innermost)
        # The program's own code is innermost: the thread computes, and is in no call.
        if not path.startswith((_STREAMS, *_installed_paths())):
            return None
        frame = frame.f_back  # a function that the program, or the library, has called
    return None


def warn(message: str, category: type[Warning]) -> None:
    """Warns at the line of the program that called the library."""
    # Python 3.10 has no `skip_file_prefixes`. The program may be an installed package itself.
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _is_between(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _is_between(frame: FrameType) -> bool:
    """Whether this is a line of the library, or of a library that calls it for the program."""
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    return package in ("hpcstrat", "tqdm", "importlib")


def _location_of(frame: FrameType | None) -> str:
    """File, line and function of the program that this stack is in; not of installed packages."""
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    innermost = frame
    while frame is not None and frame.f_code.co_filename.startswith(
        (_PACKAGE, *_installed_paths())
    ):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "the end of the program"
    return f"{_near(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


def _near(path: str) -> str:
    shell = ipython_shell()
    if shell is not None and (cell := shell.compile.format_code_name(path)):
        return cell[1]  # In[3]; the file's own name says nothing
    try:
        return os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path
    except OSError:  # the working folder no longer exists
        return path


@functools.cache
def _installed_paths() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return (
        "<frozen ",
        *(paths[kind] + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
    )
