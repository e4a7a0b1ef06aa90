"""Saving: all ranks agree on what is saved, and each writes its share of the file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from hpcstrat._calls.records import signature_of
from hpcstrat._communicators.connection import connect
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import Bytes
from hpcstrat._memory.intervals import Interval
from hpcstrat._storage.local import host_parts
from hpcstrat._variable.variable import state_of
from hpcstrat.checkpoint import _background, _safetensors
from hpcstrat.checkpoint._agreement import agree, require_cross_replica
from hpcstrat.checkpoint._atomic_file import explain, explaining
from hpcstrat.checkpoint._names import CheckpointObjects, storage_of
from hpcstrat.checkpoint._new_file import NOT_SAVED, NewFile
from hpcstrat.checkpoint._on_read import all_values
from hpcstrat.checkpoint._pieces import Piece, places_of, share_of

_Result = TypeVar("_Result")


def save_to_file(
    objects: CheckpointObjects,
    path: str,
    keep: int | None,
    blocking: bool = True,
    step: int | None = None,
) -> None:
    """What `Checkpoint.save` and, with the number of a step, `CheckpointManager` do. Collective."""
    finish_background()
    saved = Saved(objects, (path, f"keep={keep}, blocking={bool(blocking)}"), step)
    with contextlib.ExitStack() as ending:  # of the file; an error on any rank abandons it
        file = NewFile(saved.root, path, keep, saved.contents, blocking, ending)
        if blocking:
            _write(saved, file, path, ending)
        else:
            copies = _copy(saved, file)
            _background.start(path, file, copies, ending.pop_all())


def _write(saved: Saved, file: NewFile, path: str, ending: contextlib.ExitStack) -> None:
    def write(pieces: Iterable[Piece], nbytes: int) -> int:
        with explaining(path, NOT_SAVED):
            return file.write(pieces)

    communicator = connect()
    with communicator.raise_together():
        checksums = communicator.all_gather_obj(saved.pass_pieces(file, write) or 0)
    with communicator.raise_together():
        with explaining(path, NOT_SAVED):
            file.publish(checksums)
            ending.close()
        # A full disk is an error on all ranks, and no rank continues before the file exists,
        # because the job may be killed next.
        communicator.exchange(signature_of(f"{current_call()}: written"))


def _copy(saved: Saved, file: NewFile) -> list[Piece]:
    communicator = connect()
    with communicator.raise_together():
        copies = saved.pass_pieces(file, _background.copy_pieces) or []
        # No rank continues, and changes what others may still read.
        communicator.exchange(signature_of(f"{current_call()}: copied"))
    return copies


class Saved:
    """What is saved, after a check that it is the same on all ranks. Collective.

    Args:
        objects: what to save.
        target: where to, in words that must be equal on all ranks.
        step: the program's step, which is saved too.

    Attributes:
        root: the parameter rank, which has everything, and makes the file.
        contents: the file's contents, on the root, part by part; `None` elsewhere.
    """

    def __init__(
        self, objects: CheckpointObjects, target: tuple[str, ...], step: int | None
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
        self._entries = entries
        self.contents: _safetensors.Contents | None = None
        with communicator.raise_together():
            if communicator.rank == self.root:
                self.contents = _safetensors.Contents(entries, metadata, self._parts, step)
            communicator.exchange(signature_of(f"{current_call()}: contents"))

    def pass_pieces(
        self, file: NewFile, use: Callable[[Iterable[Piece], int], _Result]
    ) -> _Result | None:
        """Calls `use` with what this rank writes of a file, and the number of these bytes.

        If a rank cannot see the file, `by_root` does so on the root alone. Collective.
        """
        if file.is_shared:
            return use(self._pieces(file.header), self._count_bytes(file.header))
        return self.by_root(lambda contents: use(contents.pieces(), contents.nbytes))

    def by_root(self, use: Callable[[_safetensors.Contents], _Result]) -> _Result | None:
        """The root calls `use`, while the other ranks send it what it does not have.

        Collective. If `use` raises, all ranks raise, in a block of `raise_together`.
        """
        communicator = self._communicator
        if self.contents is None:
            for name in filter(self._is_split, _safetensors.sizes(self._entries)):
                for _ in self._parts(name):
                    pass
            return None
        try:
            return use(self.contents)
        except Exception as error:
            # The others wait for this rank's next call: the next part of a slot, or the end. If the
            # numbers are equal, all ranks raise the error already.
            calls = communicator.calls
            if calls.shared_error_call != calls.number:
                calls.share_error(error, calls.number)
            raise

    def _is_split(self, name: str) -> bool:
        return name in self._blocks and self._blocks[name][1].cuts is not None

    def _parts(self, name: str) -> Iterator[Bytes]:
        """The bytes of an array.

        If the array is split over the ranks, this is collective, part by part.
        """
        if self._is_split(name):
            v, block = self._blocks[name]
            for part in storage_of(v).all_parts(block):
                self._communicator.work()
                yield part
        else:
            yield from self._own_parts(name, Interval(0, self._entries[name].nbytes))

    def _own_parts(self, name: str, own: Interval) -> Iterator[Bytes]:
        """Bytes of an array that this rank has; of a split array, counted in this rank's part."""
        if name in self._arrays:
            parts = host_parts(self._arrays[name], own.start, own.stop)
        else:
            v, block = self._blocks[name]
            parts = storage_of(v).local.parts(block, own.start, own.stop)
        for part in parts:
            # Other ranks wait for the disk. Every part counts as progress, so that the watchdog
            # sees no stall.
            self._communicator.work()
            yield part

    # ---- shares

    def _pieces(self, header: int) -> Iterator[Piece]:
        """What this rank writes of the file, whose arrays start after `header` bytes."""
        if self.contents is not None:
            yield Piece(0, memoryview(self.contents.header))
        places = places_of(_safetensors.sizes(self._entries), header)
        for name, share in self._share().items():
            start = places[name].start + share.start
            own = share.shift(-share.start) if self._is_split(name) else share
            for part in self._own_parts(name, own):
                yield Piece(start, part.data)
                start += part.size

    def _count_bytes(self, header: int) -> int:
        """Bytes of `_pieces`."""
        own = header if self.contents is not None else 0
        return own + sum(share.size for share in self._share().values())

    def _share(self) -> dict[str, Interval]:
        """The bytes of each array that this rank writes."""
        rank, size = self._communicator.rank, self._communicator.size
        nbytes, own = _safetensors.sizes(self._entries), {}
        for name, (v, block) in self._blocks.items():
            storage = storage_of(v)
            if block.cuts is not None:
                own[name] = Interval(*block.cuts[rank : rank + 2]).scale(v.dtype.itemsize)
            # A variable made outside every scope has one replica: it differs from rank to rank.
            elif not storage.reads_everywhere or storage.communicator.size < size:
                own[name] = Interval(0, nbytes[name] if rank == self.root else 0)
        return share_of(rank, size, nbytes, own)


def finish_background() -> None:
    """Waits for this rank's save in the background, if there is one, and raises its error."""
    path, error = _background.finish()
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
