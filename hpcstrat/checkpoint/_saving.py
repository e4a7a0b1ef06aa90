"""Saving: all ranks agree on what is saved, and each writes its share of the file.

In the background, a thread on each rank writes a copy while the program continues.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, TypeVar

import numpy as np

from hpcstrat._calls.records import signature_of
from hpcstrat._communicators.connection import connect
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import Bytes
from hpcstrat._process import failure
from hpcstrat._storage.local import host_parts
from hpcstrat._variable.variable import state_of
from hpcstrat.checkpoint._atomic_file import explain, explaining
from hpcstrat.checkpoint._format import Extent, Header, extents_of, places_of
from hpcstrat.checkpoint._new_file import NOT_SAVED, NewFile, OnDisk, Piece, Target
from hpcstrat.checkpoint._objects import (
    CheckpointObjects,
    agree,
    all_values,
    require_cross_replica,
    storage_of,
)

_Result = TypeVar("_Result")
_HOUR = 3600.0  # seconds


def save_to_file(
    objects: CheckpointObjects,
    path: str,
    keep: int | None,
    blocking: bool = True,
    step: int | None = None,
) -> None:
    """What `Checkpoint.save` and, with the number of a step, `CheckpointManager` do. Collective."""
    finish_background()
    notes = {} if step is None else {"step": str(step)}
    saved = Saved(objects, (path, f"keep={keep}, blocking={bool(blocking)}"), notes)
    with ExitStack() as ending:  # of the file; an error on any rank abandons it
        file = saved.new_file(path, OnDisk(path, keep), ending, is_marked=not blocking)
        if blocking:
            saved.write(file, path, ending)
        else:
            copies = saved.copy(file, ending)
            _start(path, lambda: file.write_and_complete(copies, saved.stops), ending.pop_all())


class Saved:
    """What is saved, after a check that it is the same on all ranks. Collective.

    Args:
        objects: what to save.
        target: where to, in words that must be equal on all ranks.
        notes: what the file says about itself.

    Attributes:
        root: the parameter rank, which has everything, and makes the file.
        stops: where each extent ends, from the end of the header.
    """

    def __init__(
        self, objects: CheckpointObjects, target: tuple[str, ...], notes: Mapping[str, str]
    ) -> None:
        self._communicator = communicator = connect()
        require_cross_replica(objects)
        slots = objects.slots()
        entries, metadata = objects.entries(slots), objects.metadata()
        # Before any file is touched, all ranks check that they save the same.
        self.root: int = agree(objects, entries, *target)
        # ON_READ variables have a value on each rank, so all ranks gather them before any writes.
        self._arrays = {name: all_values(v) for name, v in objects.on_read.items()}
        self._blocks = {name: (v, state_of(v).block) for name, v in objects.variables.items()}
        self._blocks |= {name: (slot.variable, slot.block) for name, slot in slots.items()}
        self._places = places_of(entries)
        self._extents = list(extents_of(self._places, communicator.size, self._cuts()))
        self.stops: list[int] = [extent.place.stop for extent in self._extents]
        self._header: Header | None = None
        with communicator.raise_together():
            if communicator.rank == self.root:
                self._header = Header(entries, metadata, self.stops, notes)
            communicator.exchange(signature_of(f"{current_call()}: contents"))

    def new_file(
        self,
        path: str,
        target: Target | None,
        ending: ExitStack,
        is_marked: bool = False,
    ) -> NewFile:
        """The file, open on every rank that sees it. Collective."""
        return NewFile(self.root, path, self._header, target, ending, is_marked)

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
            copies = self._pass_pieces(file, lambda pieces: _copy(pieces, self._nbytes(file))) or []
            # No rank continues, and changes what others may still read.
            communicator.exchange(signature_of(f"{current_call()}: copied"))
        return copies

    def _pass_pieces(
        self, file: NewFile, use: Callable[[Iterable[Piece]], _Result]
    ) -> _Result | None:
        """Calls `use` with what this rank writes of the arrays.

        If a rank cannot see the file, the root writes alone, while the others send it what it does
        not have. Collective. If `use` raises, all ranks raise, in a block of `raise_together`.
        """
        communicator = self._communicator
        if file.is_shared:
            return use(self._pieces(file.first))
        if self._header is None:
            for name in filter(self._is_split, self._places):
                for _ in self._all_parts(name):
                    pass
            return None
        try:
            return use(self._all_pieces(file.first))
        except Exception as error:
            # The others wait for this rank's next call: the next part of a slot, or the end. If the
            # numbers are equal, all ranks raise the error already.
            calls = communicator.calls
            if calls.shared_error_call != calls.number:
                calls.share_error(error, calls.number)
            raise

    def _pieces(self, first: int) -> Iterator[Piece]:
        """What this rank writes of the file, whose arrays start at byte `first`."""
        for extent in self._extents:
            if extent.rank == self._communicator.rank:
                yield from _placed(self._own_parts(extent), first + extent.place.start)

    def _all_pieces(self, first: int) -> Iterator[Piece]:
        """All arrays. On the root, while the other ranks call `_all_parts`."""
        for name, extents in itertools.groupby(self._extents, lambda extent: extent.name):
            if self._is_split(name):
                yield from _placed(self._all_parts(name), first + self._places[name].start)
            else:
                for extent in extents:
                    yield from _placed(self._own_parts(extent), first + extent.place.start)

    def _nbytes(self, file: NewFile) -> int:
        """Bytes of the pieces that this rank writes."""
        rank = self._communicator.rank
        return sum(
            extent.own.size for extent in self._extents if extent.rank == rank or not file.is_shared
        )

    def _is_split(self, name: str) -> bool:
        return name in self._blocks and self._blocks[name][1].cuts is not None

    def _all_parts(self, name: str) -> Iterator[Bytes]:
        """The bytes of an array that is split over the ranks. Collective, part by part."""
        v, block = self._blocks[name]
        return self._working(storage_of(v).all_parts(block))

    def _own_parts(self, extent: Extent) -> Iterator[Bytes]:
        """The bytes of an extent, of which this rank has a copy."""
        own, name = extent.own, extent.name
        if name in self._arrays:
            return self._working(host_parts(self._arrays[name], own.start, own.stop))
        v, block = self._blocks[name]
        if self._is_split(name):  # the block is this rank's part
            own = own.shift(-own.start)
        return self._working(storage_of(v).local.parts(block, own.start, own.stop))

    def _working(self, parts: Iterable[Bytes]) -> Iterator[Bytes]:
        for part in parts:
            # Other ranks wait for the disk. Every part counts as progress, so that the watchdog
            # sees no stall.
            self._communicator.work()
            yield part

    def _cuts(self) -> dict[str, list[int]]:
        """The arrays that not every rank has whole, as `extents_of` takes them."""
        size, cuts = self._communicator.size, {}
        for name, (v, block) in self._blocks.items():
            storage = storage_of(v)
            if block.cuts is not None:
                cuts[name] = [cut * v.dtype.itemsize for cut in block.cuts]
            # A variable made outside every scope has one replica: it differs from rank to rank.
            elif not storage.has_all_blocks or storage.communicator.size < size:
                cuts[name] = [0] * (self.root + 1) + [self._places[name].size] * (size - self.root)
        return cuts


def _placed(parts: Iterable[Bytes], start: int) -> Iterator[Piece]:
    for part in parts:
        yield Piece(start, part.data)
        start += part.size


def finish_background() -> None:
    """Waits for this rank's save in the background, if there is one, and raises its error."""
    path, error = _finish()
    if isinstance(error, OSError):
        raise explain(path, error, f"this was in the background; {NOT_SAVED}") from error
    if error is not None:
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


def check_keep(keep: Any) -> int | None:
    """The number of files to keep, or `None`.

    Raises:
        ValueError: it is not a positive int.
    """
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        raise ValueError(
            f"{current_call()}: keep is {keep!r}; it must be the number of files to keep, "
            "from 1 up, or None"
        )
    return keep


# ---- in the background

_pending: _Save | None = None
# Kept from the last save: fresh memory costs about as much as the copy into it.
_buffer: Bytes = np.empty(0, np.uint8)
_waits_at_exit = False


class _Save:
    """One save, whose thread has started; it ends with the error, if any.

    It writes from `_buffer`, so a process runs one save at a time.
    """

    def __init__(self, path: str, write: Callable[[], None], ending: ExitStack) -> None:
        self.path = path
        self.error: Exception | None = None
        # A daemon: Python waits for other threads before it runs any hook, and then the other
        # ranks know nothing of it. `_finish_at_exit` waits for this thread.
        self.thread = threading.Thread(
            target=self._run, args=(write, ending), name="hpcstrat-save", daemon=True
        )
        self.thread.start()

    def _run(self, write: Callable[[], None], ending: ExitStack) -> None:
        try:
            with ending:
                write()
        except Exception as error:
            self.error = error


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
        copies.append(Piece(start, copy.data))
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
    _pending = _Save(path, write, ending)


def _finish() -> tuple[str, Exception | None]:
    """Waits for this rank's save; returns its path, empty if there is none, and its error."""
    global _pending
    if _pending is None:
        return "", None
    # Meanwhile the other ranks wait, for as long as the disk takes.
    watchdog = connect().watchdog
    with contextlib.nullcontext() if watchdog is None else watchdog.extend_timeout(_HOUR):
        _pending.thread.join()
    save, _pending = _pending, None
    return save.path, save.error


def _finish_at_exit() -> None:
    path, error = _finish()
    if error is not None:
        failure.end_job(
            f"Checkpoint.save of {path}, in the background: {error}; the previous file is whole", 1
        )
