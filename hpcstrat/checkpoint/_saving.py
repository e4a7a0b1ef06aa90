"""Saving: all ranks agree on what is saved, and each writes its share of the file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from hpcstrat._calls.records import CallSignature, Listed, new_signature, signature_of
from hpcstrat._communicators.connection import connect
from hpcstrat._core import gpu
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import Bytes
from hpcstrat._storage.base import host_parts
from hpcstrat._variable.variable import Variable, state_of
from hpcstrat.checkpoint import _background, _safetensors
from hpcstrat.checkpoint._atomic_file import explained
from hpcstrat.checkpoint._new_file import NOT_SAVED, NewFile
from hpcstrat.checkpoint._objects import CheckpointObjects, storage_of
from hpcstrat.checkpoint._pieces import Extent, Piece, share_of

_Result = TypeVar("_Result")


def save_to_file(
    objects: CheckpointObjects,
    path: str,
    keep: int | None,
    blocking: bool = True,
    step: int | None = None,
) -> None:
    """What `Checkpoint.save` does, and `CheckpointManager` with the number of a step.

    Collective.
    """
    finish_background()
    communicator = connect()
    saved = Saved(objects, (path, f"keep={keep}, blocking={bool(blocking)}"), step)
    with NewFile(communicator, saved.root, path, keep, saved.contents, blocking) as file:
        if not blocking:
            with communicator.raise_together():
                if file.is_shared:
                    copies = _background.copied(
                        saved.share(file.header), saved.nbytes_of_share(file.header)
                    )
                else:
                    copies = saved.by_root(
                        lambda contents: _background.copied(contents.pieces(), contents.nbytes)
                    )
                # Nobody goes on, and changes what others may still read.
                communicator.exchange(signature_of(f"{current_call()}: copied"))
            _background.start(path, file.detached(), copies or [])
            return
        with communicator.raise_together():
            if file.is_shared:
                checksum = file.write(saved.share(file.header))
            else:
                checksum = saved.by_root(lambda contents: file.write(contents.pieces()))
            checksums = communicator.all_gather_obj(checksum or 0)
        with communicator.raise_together():
            file.finish(checksums)
            # A full disk is an error on all ranks, and no rank continues before the file exists: it
            # may be killed next.
            communicator.exchange(signature_of(f"{current_call()}: written"))


class Saved:
    """What is saved: all ranks have found that it is the same on all. Collective.

    Args:
        objects: what to save.
        target: where to, in words that must be equal on all ranks.
        step: of the program, to be saved with them.

    Attributes:
        root: the parameter rank, which has everything, and makes the file.
        contents: of the file, on the root, part by part; `None` elsewhere.
    """

    def __init__(
        self, objects: CheckpointObjects, target: tuple[str, ...], step: int | None
    ) -> None:
        # All ranks of the program, and not of one strategy: the objects may belong to several.
        self._communicator = communicator = connect()
        objects.require_cross_replica()
        entries, metadata, self.root = (
            objects.entries(),
            objects.metadata(),
            objects.parameter_rank(),
        )
        # Before any file is touched, all ranks find out whether they save the same.
        communicator.exchange(signature(target, self.root, objects, entries))
        # ON_READ variables have a value on each rank, so all ranks gather them before one begins to
        # write.
        self._arrays = {name: _all_values(v) for name, v in objects.on_read.items()}
        self._blocks = {name: (v, state_of(v).block) for name, v in objects.variables.items()}
        self._blocks |= {
            name: (slot.variable, slot.block) for name, slot in objects.slots().items()
        }
        self._entries = entries
        self.contents: _safetensors.Contents | None = None
        with communicator.raise_together():
            if communicator.rank == self.root:
                self.contents = _safetensors.Contents(entries, metadata, self._parts, step)
            communicator.exchange(signature_of(f"{current_call()}: contents"))

    def by_root(self, use: Callable[[_safetensors.Contents], _Result]) -> _Result | None:
        """Has the root use the contents, while the others wait and send it what it has not.

        Collective.

        What `use` raises, all ranks raise, in a block of `raise_together`.
        """
        communicator = self._communicator
        if self.contents is None:
            for name in _safetensors.sizes(self._entries):
                if self._is_split(name):
                    for _ in self._parts(name):
                        pass
            return None
        try:
            return use(self.contents)
        except Exception as error:
            # The others wait for the next part of a slot, or for the end: for this rank's next call
            # in any case.
            if communicator.calls.settled != communicator.number:  # else all ranks raise it already
                communicator.share_error(error, communicator.number)
            raise

    def _is_split(self, name: str) -> bool:
        return name in self._blocks and self._blocks[name][1].cuts is not None

    def _parts(self, name: str) -> Iterator[Bytes]:
        """The bytes of an array.

        Of one that is split over the ranks this is collective, part by part.
        """
        if self._is_split(name):
            v, block = self._blocks[name]
            for part in storage_of(v).all_parts(block):
                self._communicator.work()
                yield part
        else:
            yield from self._own_parts(name, 0, None)

    def _own_parts(self, name: str, start: int, stop: int | None) -> Iterator[Bytes]:
        """Bytes of an array that this rank has; of one that is split over the ranks they count in its part."""
        if name in self._arrays:
            found = host_parts(self._arrays[name], start, stop)
        else:
            v, block = self._blocks[name]
            found = storage_of(v).parts(block, start, stop)
        for part in found:
            # Other ranks wait for the disk. Every part counts as progress, so that the watchdog
            # sees no stall.
            self._communicator.work()
            yield part

    # ---- shares

    def share(self, header: int) -> Iterator[Piece]:
        """What this rank writes of the file, whose arrays begin behind a header of so many bytes."""
        if self.contents is not None:
            yield Piece(0, memoryview(self.contents.header))
        begins, end = {}, header
        for name, nbytes in _safetensors.sizes(self._entries).items():
            begins[name], end = end, end + nbytes
        for name, start, stop in self._stretches():
            at, skipped = begins[name] + start, start if self._is_split(name) else 0
            for part in self._own_parts(name, start - skipped, stop - skipped):
                yield Piece(at, part.data)
                at += part.size

    def nbytes_of_share(self, header: int) -> int:
        """Bytes of `share`."""
        own = header if self.contents is not None else 0
        return own + sum(stop - start for _, start, stop in self._stretches())

    def _stretches(self) -> Iterator[Extent]:
        communicator, cuts, of_root = self._communicator, {}, []
        for name, (v, block) in self._blocks.items():
            storage = storage_of(v)
            if block.cuts is not None:
                cuts[name] = [cut * v.dtype.itemsize for cut in block.cuts]
            # A variable made outside of every scope is of one replica: each rank has another one.
            elif not storage.reads_everywhere or storage.communicator.size < communicator.size:
                of_root.append(name)
        sizes = _safetensors.sizes(self._entries)
        return share_of(
            communicator.rank, communicator.size, self.root, sizes, cuts, frozenset(of_root)
        )


def _all_values(v: Variable) -> np.ndarray[Any, Any]:
    """All replicas' values of an ON_READ variable, of shape `(replicas, ...)`, in host memory.

    Collective.
    """
    state = state_of(v)
    with state.group.on_stream():
        return gpu.to_host(
            state.group.communicator.all_gather([state.block.view[np.newaxis]], 0)[0]
        )


def finish_background() -> None:
    """Waits for the save in the background, if this rank writes one, and raises what it met."""
    path, error = _background.finish()
    if isinstance(error, OSError):
        raise explained(path, error, f"this was in the background; {NOT_SAVED}") from error
    if error is not None:
        raise error


def checked_path(path: Any) -> str:
    """The path as a text.

    Raises:
        TypeError: it is not the name of a file.
    """
    path = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(path, str) or not os.path.basename(path):
        raise TypeError(f"{current_call()}: path is {path!r}; it must be the name of a file")
    return path


def checked_keep(keep: Any) -> int | None:
    """A number of files.

    Raises:
        ValueError: it is none.
    """
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        raise ValueError(
            f"{current_call()}: keep is {keep!r}; it must be the number of files to keep, from 1 "
            "up, or None"
        )
    return keep


def signature(
    where: tuple[str, ...],
    root: int,
    objects: CheckpointObjects,
    entries: dict[str, _safetensors.Entry],
) -> CallSignature:
    """What must match on all ranks: the file and options, who writes or reads it, the objects and their arrays."""
    arrays = [
        f"{name} ({entry.dtype} of shape {entry.shape})" for name, entry in sorted(entries.items())
    ]
    others = [name for name in objects.names if name not in entries]
    # `new_signature`, because `signature_of` would keep the names of all arrays for a call that
    # seldom comes again.
    return new_signature(current_call(), *where, f"by rank {root}", Listed((*arrays, *others)))
