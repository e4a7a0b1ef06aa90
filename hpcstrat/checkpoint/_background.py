"""A save in the background: the program goes on with its next step, while a thread writes a copy to the file."""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from hpcstrat._communicators.connection import connect
from hpcstrat._core.types import Bytes
from hpcstrat._process import failure
from hpcstrat.checkpoint._new_file import NewFile
from hpcstrat.checkpoint._pieces import Piece

_HOUR = 3600.0  # seconds

_pending: _Save | None = None
_buffer: Bytes = np.empty(
    0, np.uint8
)  # of the last save: fresh memory costs about as much as the copy into it
_waits_at_exit = False


class _Save:
    """One save, whose thread has started.

    It writes from `_buffer`, so there is one at a time in a process.
    """

    def __init__(self, path: str, write: Callable[[], None]) -> None:
        self.path = path
        self._write = write
        self._error: Exception | None = None
        # A daemon, because Python itself waits for others before any hook runs, when the other
        # ranks know nothing of it. `_finish_at_exit` waits for this one.
        self._thread = threading.Thread(target=self._run, name="hpcstrat-save", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._write()
        except Exception as error:
            self._error = error

    def join(self) -> Exception | None:
        """What it raised, once it has ended.

        Meanwhile the other ranks wait, for as long as the disk takes.
        """
        watchdog = connect().watchdog
        with contextlib.nullcontext() if watchdog is None else watchdog.extend_timeout(_HOUR):
            self._thread.join()
        return self._error


def copied(pieces: Iterable[Piece], nbytes: int) -> list[Piece]:
    """Copies of pieces of a file, of `nbytes` together.

    The save before this one must have finished.

    Raises:
        MemoryError: there is no room for them.
    """
    global _buffer
    if _buffer.size < nbytes:
        _buffer = np.empty(0, np.uint8)  # given back before the larger one is asked for
        _buffer = np.empty(nbytes, np.uint8)
    copies: list[Piece] = []
    end = 0
    for start, data in pieces:
        copy = _buffer[end : end + len(data)]
        copy[...] = data
        copies.append(Piece(start, copy.data))
        end += copy.size
    return copies


def start(path: str, file: NewFile, copies: Sequence[Piece]) -> None:
    """Leaves the writing of copies to a thread, on each rank, and returns."""
    global _pending, _waits_at_exit
    if not _waits_at_exit:
        # Not when this module is imported: then it would run after the hook that ends MPI, with
        # which a failure ends the other ranks.
        atexit.register(_finish_at_exit)
        _waits_at_exit = True

    def write() -> None:
        with file:
            file.write_alone(copies)

    _pending = _Save(path, write)


def finish() -> tuple[str, Exception | None]:
    """Waits for the save that is under way on this rank; returns its path and its error.

    Without one: nothing.
    """
    global _pending
    if _pending is None:
        return "", None
    save = _pending
    error = save.join()
    _pending = None
    return save.path, error


def _finish_at_exit() -> None:
    path, error = finish()
    if error is not None:
        failure.end_job(
            f"Checkpoint.save of {path}, in the background: {error}; the previous file is whole", 1
        )
