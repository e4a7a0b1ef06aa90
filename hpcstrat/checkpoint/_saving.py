"""Saving: all ranks agree on what is saved, and each writes its share of the file.

In the background, a thread on each rank writes a copy while the program continues.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any, TypeVar

import numpy as np

from hpcstrat._agreement.records import signature_of
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import Bytes
from hpcstrat._process import failure
from hpcstrat._storage.parts import host_parts
from hpcstrat._transports.connection import connect
from hpcstrat.checkpoint._atomic_file import explaining
from hpcstrat.checkpoint._format import Extent, Header, extents_of, places_of
from hpcstrat.checkpoint._new_file import NOT_SAVED, NewFile, Piece
from hpcstrat.checkpoint._objects import (
    CheckpointObjects,
    agree,
    all_values,
    require_cross_replica,
    storage_of,
)

_Result = TypeVar("_Result")
_HOUR = 3600.0  # seconds


def save_to(
    path: str,
    objects: CheckpointObjects,
    keep: int | None,
    blocking: bool = True,
    step: int | None = None,
) -> None:
    """What `Checkpoint.save` and, with the number of a step, `CheckpointManager` do. Collective."""
    finish_background()
    saved = Saved(objects, (path, f"keep={keep}, blocking={bool(blocking)}"), step)
    with ExitStack() as ending:  # of the file; an error on any rank abandons it
        file = NewFile(saved.root, path, keep, saved.header, ending, is_marked=not blocking)
        if blocking:
            saved.write(file, path, ending)
        else:
            copies = saved.copy(file, ending)
            _start(path, lambda: file.write_and_complete(copies, saved.stops), ending.pop_all())


class Saved:
    """What is saved, after a check that it is the same on all ranks. Collective.

    Args:
        objects: what to save.
        where: file and options, which must be equal on all ranks.
        step: the step of the program; `None` if unknown.

    Attributes:
        root: the parameter rank, which has everything, and makes the file.
        header: the file's header, on the parameter rank.
        stops: where each extent ends, from the end of the header.
    """

    def __init__(
        self, objects: CheckpointObjects, where: tuple[str, ...], step: int | None
    ) -> None:
        self._communicator = communicator = connect()
        require_cross_replica(objects)
        slots = objects.slots()
        entries, metadata = objects.entries(slots), objects.metadata()
        # Before any file is touched, all ranks check that they save the same.
        self.root: int = agree(objects, entries, *where)
        # ON_READ variables have a value on each rank, so all ranks gather them before any writes.
        self._arrays = {name: all_values(v) for name, v in objects.on_read.items()}
        self._blocks = objects.blocks(slots)
        self._places = places_of(entries)
        self._extents = list(
            extents_of(self._places, communicator.size, self.root, self._only_on_root())
        )
        self.stops: list[int] = [extent.place.stop for extent in self._extents]
        self.header: Header | None = None
        with communicator.raise_together():
            if communicator.rank == self.root:
                self.header = Header(entries, metadata, self.stops, step)
            communicator.exchange(signature_of(f"{current_call()}: contents"))

    def write(self, file: NewFile, path: str, ending: ExitStack) -> None:
        """All ranks write the file, which `ending` then puts in its place. Collective."""

        def write(pieces: Iterable[Piece]) -> dict[int, int]:
            with explaining(path, NOT_SAVED):
                return file.write(pieces, self.stops)

        communicator = self._communicator
        with communicator.raise_together():
            checksums = communicator.all_gather_obj(self._pass_pieces(file, write) or {})
        with communicator.raise_together():
            with explaining(path, NOT_SAVED):
                file.complete(checksums)
                ending.close()
            # A full disk is an error on all ranks, and no rank continues before the file exists,
            # because the job may be killed next.
            communicator.exchange(signature_of(f"{current_call()}: written"))

    def copy(self, file: NewFile, ending: ExitStack) -> list[Piece]:
        """Copies what this rank writes. Collective.

        Raises:
            MemoryError: there is no memory for it.
        """
        communicator = self._communicator
        with communicator.raise_together():
            file.open_marks(ending)
            nbytes = sum(extent.own.size for extent in self._extents_in(file))
            copies = self._pass_pieces(file, lambda pieces: _copy(pieces, nbytes)) or []
            # No rank continues, and changes what others may still read.
            communicator.exchange(signature_of(f"{current_call()}: copied"))
        return copies

    def _pass_pieces(
        self, file: NewFile, use: Callable[[Iterable[Piece]], _Result]
    ) -> _Result | None:
        """Calls `use` with what this rank writes of the arrays.

        If a rank cannot see the file, the root writes alone. If `use` raises, all ranks raise, in a
        block of `raise_together`.
        """
        if file.is_shared or self.header is not None:
            return use(self._pieces(file))
        return None

    def _extents_in(self, file: NewFile) -> list[Extent]:
        """What this rank writes: its extents, or all of a file that no other rank sees."""
        rank = self._communicator.rank
        return [one for one in self._extents if one.rank == rank or not file.is_shared]

    def _pieces(self, file: NewFile) -> Iterator[Piece]:
        """The bytes that this rank writes."""
        for extent in self._extents_in(file):
            start = file.first + extent.place.start
            for part in self._parts(extent):
                # Other ranks wait for the disk. Every part counts as progress, so that the watchdog
                # sees no stall.
                self._communicator.work()
                yield start, part.data
                start += part.size

    def _parts(self, extent: Extent) -> Iterator[Bytes]:
        """The bytes of an extent, of which this rank has a copy."""
        own, name = extent.own, extent.name
        if name in self._arrays:
            return host_parts(self._arrays[name], own.start, own.stop)
        v, block = self._blocks[name]
        return storage_of(v).parts(block, own.start, own.stop)

    def _only_on_root(self) -> set[str]:
        """The arrays that only the root has."""
        size = self._communicator.size
        # A variable made outside every scope has one replica: it differs from rank to rank.
        return {
            name
            for name, (v, _) in self._blocks.items()
            if not storage_of(v).has_all_slots or storage_of(v).communicator.size < size
        }


def finish_background() -> None:
    """Waits for this rank's save in the background, if there is one, and raises its error."""
    path, error = _finish()
    if error is not None:
        with explaining(path, f"this was in the background; {NOT_SAVED}"):
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


# ---- in the background

# The save of this process that runs, or that nobody has waited for: its path, its thread, and, once
# this has ended, its error, if any. It writes from `_buffer`, so there is one at a time.
_pending: tuple[str, threading.Thread, list[Exception]] | None = None
# Kept from the last save: fresh memory costs about as much as the copy into it.
_buffer: Bytes = np.empty(0, np.uint8)
_waits_at_exit = False


def _copy(pieces: Iterable[Piece], nbytes: int) -> list[Piece]:
    """Copies pieces of a file, `nbytes` in all. The previous save must have finished.

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
        copies.append((start, copy.data))
        end += copy.size
    return copies


def _start(path: str, write: Callable[[], None], ending: ExitStack) -> None:
    """Starts a thread that writes and then ends the file, and returns."""
    global _pending, _waits_at_exit
    if not _waits_at_exit:
        # Not when this module is imported: then it would run after the hook that ends MPI, and a
        # failure needs MPI to end the other ranks.
        atexit.register(_finish_at_exit)
        _waits_at_exit = True
    errors: list[Exception] = [OSError("it was interrupted before it started")]

    def run() -> None:
        try:
            with ending:
                write()
            errors.clear()
        except Exception as error:
            errors[:] = [error]

    # A daemon: Python waits for other threads before it runs any hook, and then the other ranks
    # know nothing of it. `_finish_at_exit` waits for this thread.
    thread = threading.Thread(target=run, name="hpcstrat-save", daemon=True)
    _pending = path, thread, errors  # before: a signal may raise in `start`, and the thread runs
    thread.start()


def _finish() -> tuple[str, Exception | None]:
    """Waits for this rank's save; returns its path, empty if there is none, and its error."""
    global _pending
    if _pending is None:
        return "", None
    path, thread, errors = _pending
    # Meanwhile the other ranks wait, for as long as the disk takes.
    watchdog = connect().watchdog
    with contextlib.nullcontext() if watchdog is None else watchdog.extend_timeout(_HOUR):
        if thread.ident is not None:
            thread.join()
    _pending = None
    return path, errors[0] if errors else None


def _finish_at_exit() -> None:
    path, error = _finish()
    if error is not None:
        failure.end_job(
            f"Checkpoint.save of {path}, in the background: {error}; the previous file is whole"
        )
