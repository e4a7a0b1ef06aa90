"""A save in the background: a thread writes a copy to the file while the program continues."""

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
# Kept from the last save: fresh memory costs about as much as the copy into it.
_buffer: Bytes = np.empty(0, np.uint8)
_waits_at_exit = False


class _Save:
    """One save, whose thread has started.

    It writes from `_buffer`, so a process runs one save at a time.
    """

    def __init__(self, path: str, write: Callable[[], None]) -> None:
        self.path = path
        self._write = write
        self._error: Exception | None = None
        # A daemon: Python waits for other threads before it runs any hook, and then the other
        # ranks know nothing of it. `_finish_at_exit` waits for this thread.
        self._thread = threading.Thread(target=self._run, name="hpcstrat-save", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._write()
        except Exception as error:
            self._error = error

    def join(self) -> Exception | None:
        """Waits for its end, and returns what it raised.

        Meanwhile the other ranks wait, for as long as the disk takes.
        """
        watchdog = connect().watchdog
        with contextlib.nullcontext() if watchdog is None else watchdog.extend_timeout(_HOUR):
            self._thread.join()
        return self._error


def copy_pieces(pieces: Iterable[Piece], nbytes: int) -> list[Piece]:
    """Copies pieces of a file, `nbytes` in all.

    The previous save must have finished.

    Raises:
        MemoryError: there is no memory for them.
    """
    global _buffer
    if _buffer.size < nbytes:
        _buffer = np.empty(0, np.uint8)  # freed before the larger one is allocated
        _buffer = np.empty(nbytes, np.uint8)
    copies: list[Piece] = []
    end = 0
    for start, data in pieces:
        copy = _buffer[end : end + len(data)]
        copy[...] = data
        copies.append(Piece(start, copy.data))
        end += copy.size
    return copies


def start(path: str, file: NewFile, copies: Sequence[Piece], ending: contextlib.ExitStack) -> None:
    """Starts a thread on each rank that writes its copies and ends the file, and returns."""
    global _pending, _waits_at_exit
    if not _waits_at_exit:
        # Not when this module is imported: then it would run after the hook that ends MPI, and a
        # failure needs MPI to end the other ranks.
        atexit.register(_finish_at_exit)
        _waits_at_exit = True

    def write() -> None:
        with ending:
            file.write_and_publish(copies)

    _pending = _Save(path, write)


def finish() -> tuple[str, Exception | None]:
    """Waits for this rank's save; returns its path, empty if there is none, and its error."""
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
