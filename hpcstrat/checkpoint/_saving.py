"""Saving: all ranks agree on what is saved, and the parameter rank writes it.

In the background, a thread of the parameter rank writes a copy while the program continues.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from hpcstrat._agreement.records import signature_of
from hpcstrat._core.atomic_file import check_replaceable, explaining, replacing
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import Bytes
from hpcstrat._memory.blocks import Block
from hpcstrat._process import failure
from hpcstrat._program import extend_timeout
from hpcstrat._storage.parts import host_parts
from hpcstrat._transports.connection import connect
from hpcstrat._variable.variable import Variable, state_of
from hpcstrat.checkpoint._format import Header, write_file
from hpcstrat.checkpoint._objects import (
    CheckpointObjects,
    agree,
    all_values,
    require_cross_replica,
)

_NOT_SAVED = "nothing was saved, and the previous file is whole. Correct this, and save again"
_HOUR = 3600.0  # seconds


def save_to(
    path: str,
    objects: CheckpointObjects,
    keep: int | None,
    blocking: bool,
    step: int | None = None,
) -> None:
    """What `Checkpoint.save` and, with the number of a step, `CheckpointManager` do. Collective."""
    finish_background()
    communicator = connect()
    require_cross_replica(objects)
    slots = objects.slots()
    # Collective, too: workers with pipelines of their own gather their positions.
    entries, metadata = objects.entries(slots), objects.metadata()
    # Before any file is touched, all ranks check that they save the same.
    root = agree(objects, entries, path, f"keep={keep}, blocking={bool(blocking)}")
    # Of ON_READ variables each rank has a value of its own.
    on_read = {name: all_values(v) for name, v in objects.on_read.items()}

    with communicator.raise_together():
        if communicator.rank == root:
            header = Header(entries, metadata, step)
            parts = _parts(header.names, objects.blocks(slots), on_read)
            with explaining(path, _NOT_SAVED):
                if blocking:
                    with _waiting_for_disk(), replacing(path, keep) as file:
                        write_file(file.fileno(), header, parts)
                else:
                    check_replaceable(path, keep)  # a wrong path is an error now, not later
                    nbytes = sum(entry.nbytes for entry in entries.values())
                    # The program may change its folder before the thread renames the file.
                    where = os.path.abspath(path)
                    _background.start(where, keep, header, parts, nbytes)
        # A full disk is an error on all ranks. No rank continues before the file exists, because
        # the job may be killed next; nor before the copy, because it would change what is copied.
        communicator.exchange(signature_of(f"{current_call()}: saved"))


def _parts(
    names: Iterable[str],
    blocks: Mapping[str, tuple[Variable, Block]],
    arrays: Mapping[str, np.ndarray[Any, Any]],
) -> Iterator[tuple[str, Bytes]]:
    """The bytes of arrays in blocks or in host memory, in parts; each is valid until the next."""
    communicator = connect()
    for name in names:
        if name in arrays:
            parts = host_parts(arrays[name])
        else:
            v, block = blocks[name]
            parts = state_of(v).storage.parts(block)
        for part in parts:
            # The other ranks wait for the disk. Every part counts as progress, so that the watchdog
            # sees no stall.
            communicator.work()
            yield name, part


def finish_background() -> None:
    """Waits for this rank's save in the background, if there is one, and raises its error."""
    path, error = _background.finish()
    if error is not None:
        with explaining(path, f"this was in the background; {_NOT_SAVED}"):
            raise error


def check_path(path: Any) -> str:
    """The path as text.

    Raises:
        TypeError: it is not the name of a file.
    """
    path = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(path, str) or not os.path.basename(path):
        raise TypeError(f"{current_call()}: path is {path!r}; it must be the name of a file")
    return path


def check_count(name: str, count: Any, of: str = "a number of steps") -> int | None:
    """The value of an option, a number of steps or files, or `None`.

    Raises:
        ValueError: it is not a positive int.
    """
    if count is not None and (not isinstance(count, int) or count < 1):
        raise ValueError(
            f"{current_call()}: {name} is {count!r}; it must be {of}, from 1 up, or None"
        )
    return count


def check_keep(keep: Any) -> int | None:
    """`check_count` of the number of files to keep."""
    return check_count("keep", keep, "the number of files to keep")


@contextlib.contextmanager
def _waiting_for_disk() -> Iterator[None]:
    """A block in which the other ranks wait for the disk, whose `fsync` shows no progress."""
    with extend_timeout(_HOUR):
        try:
            yield
        finally:
            connect().work()  # or the end of the hour would look like a stall


class _Background:
    """This process's save in the background, from its start until `finish`; at most one."""

    def __init__(self) -> None:
        self._path = ""
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        # Kept from save to save: fresh memory costs about as much as the copy into it.
        self._copies: Bytes = np.empty(0, np.uint8)
        self._waits_at_exit = False

    def start(
        self,
        path: str,
        keep: int | None,
        header: Header,
        parts: Iterable[tuple[str, Bytes]],
        nbytes: int,
    ) -> None:
        """Copies the parts, of `nbytes` in all, and starts a thread that writes the file.

        Raises:
            MemoryError: there is no memory for the copy.
            RuntimeError: the system refuses a thread.
        """
        if self._copies.size < nbytes:
            self._copies = np.empty(0, np.uint8)  # freed before the larger one is allocated
            self._copies = np.empty(nbytes, np.uint8)
        copies: list[tuple[str, Bytes]] = []
        end = 0
        for name, part in parts:
            copy = self._copies[end : end + part.size]
            copy[...] = part
            copies.append((name, copy))
            end += copy.size
        if not self._waits_at_exit:
            # Not when this module is imported: then it would run after the hook that ends MPI, and
            # a failure needs MPI to end the other ranks.
            atexit.register(self._finish_at_exit)
            self._waits_at_exit = True

        def write() -> None:
            try:
                with replacing(path, keep) as file:
                    write_file(file.fileno(), header, copies)
                self._error = None
            except Exception as error:
                self._error = error

        # A daemon: Python waits for other threads before it runs any hook, and then the other
        # ranks know nothing of it. `_finish_at_exit` waits for this thread.
        thread = threading.Thread(target=write, name="hpcstrat-save", daemon=True)
        # Before the start: a signal may raise in `start`, and the thread runs.
        self._path, self._thread = path, thread
        self._error = OSError("it was interrupted before it started")
        try:
            thread.start()
        except RuntimeError as error:
            self._thread = None
            raise RuntimeError(
                f"{current_call()} of {path}: {error}; {_NOT_SAVED}, or pass blocking=True"
            ) from None

    def finish(self) -> tuple[str, Exception | None]:
        """Waits for the save; returns its path, and its error, if any."""
        thread = self._thread
        if thread is None:
            return "", None
        with _waiting_for_disk():
            if thread.ident is not None:
                thread.join()
        self._thread = None
        return self._path, self._error

    def _finish_at_exit(self) -> None:
        path, error = self.finish()
        if error is not None:
            failure.end_job(
                f"Checkpoint.save of {path}, in the background: {error}; the previous file is whole"
            )

    def forget(self) -> None:
        """Forgets the save, in a forked child: the thread is the parent's."""
        self._thread = None


_background = _Background()
os.register_at_fork(after_in_child=_background.forget)
