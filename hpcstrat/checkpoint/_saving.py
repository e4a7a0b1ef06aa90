"""Saving: all ranks agree on what is saved, and each writes its share of the file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from hpcstrat._calls.records import CallSignature, ManyValues, new_signature, signature_of
from hpcstrat._communicators.connection import connect
from hpcstrat._core import gpu
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import Bytes
from hpcstrat._storage.local import host_parts
from hpcstrat._variable.variable import Variable, state_of
from hpcstrat.checkpoint import _background, _safetensors
from hpcstrat.checkpoint._atomic_file import explain
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
    """What `Checkpoint.save` and, with the number of a step, `CheckpointManager` do. Collective."""
    finish_background()
    communicator = connect()
    saved = Saved(objects, (path, f"keep={keep}, blocking={bool(blocking)}"), step)
    with NewFile(communicator, saved.root, path, keep, saved.contents, blocking) as file:
        if not blocking:
            with communicator.raise_together():
                if file.is_shared:
                    copies = _background.copy_pieces(
                        saved.share(file.header), saved.nbytes_of_share(file.header)
                    )
                else:
                    copies = saved.by_root(
                        lambda contents: _background.copy_pieces(contents.pieces(), contents.nbytes)
                    )
                # No rank continues, and changes what others may still read.
                communicator.exchange(signature_of(f"{current_call()}: copied"))
            _background.start(path, file.detach(), copies or [])
            return
        with communicator.raise_together():
            if file.is_shared:
                checksum = file.write(saved.share(file.header))
            else:
                checksum = saved.by_root(lambda contents: file.write(contents.pieces()))
            checksums = communicator.all_gather_obj(checksum or 0)
        with communicator.raise_together():
            file.finish(checksums)
            # A full disk is an error on all ranks, and no rank continues before the file exists,
            # because the job may be killed next.
            communicator.exchange(signature_of(f"{current_call()}: written"))


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
        # All ranks of the program, not of a strategy: the objects may belong to several strategies.
        self._communicator = communicator = connect()
        objects.require_cross_replica()
        entries, metadata = objects.entries(), objects.metadata()
        self.root = objects.parameter_rank()
        # Before any file is touched, all ranks check that they save the same.
        communicator.exchange(signature(target, self.root, objects, entries))
        # ON_READ variables have a value on each rank, so all ranks gather them before any writes.
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
        """The root calls `use`, while the other ranks send it what it does not have.

        Collective. If `use` raises, all ranks raise, in a block of `raise_together`.
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
            # The others wait for this rank's next call: the next part of a slot, or the end. If the
            # numbers are equal, all ranks raise the error already.
            if communicator.calls.shared_error_call != communicator.number:
                communicator.share_error(error, communicator.number)
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
            yield from self._own_parts(name, 0, None)

    def _own_parts(self, name: str, start: int, stop: int | None) -> Iterator[Bytes]:
        """Bytes of an array that this rank has.

        In an array that is split over the ranks, `start` and `stop` count in this rank's part.
        """
        if name in self._arrays:
            parts = host_parts(self._arrays[name], start, stop)
        else:
            v, block = self._blocks[name]
            parts = storage_of(v).parts(block, start, stop)
        for part in parts:
            # Other ranks wait for the disk. Every part counts as progress, so that the watchdog
            # sees no stall.
            self._communicator.work()
            yield part

    # ---- shares

    def share(self, header: int) -> Iterator[Piece]:
        """What this rank writes of the file, whose arrays start after `header` bytes."""
        if self.contents is not None:
            yield Piece(0, memoryview(self.contents.header))
        starts, end = {}, header
        for name, nbytes in _safetensors.sizes(self._entries).items():
            starts[name], end = end, end + nbytes
        for name, start, stop in self._extents():
            at, skipped = starts[name] + start, start if self._is_split(name) else 0
            for part in self._own_parts(name, start - skipped, stop - skipped):
                yield Piece(at, part.data)
                at += part.size

    def nbytes_of_share(self, header: int) -> int:
        """Bytes of `share`."""
        own = header if self.contents is not None else 0
        return own + sum(stop - start for _, start, stop in self._extents())

    def _extents(self) -> Iterator[Extent]:
        communicator, cuts, of_root = self._communicator, {}, []
        for name, (v, block) in self._blocks.items():
            storage = storage_of(v)
            if block.cuts is not None:
                cuts[name] = [cut * v.dtype.itemsize for cut in block.cuts]
            # A variable made outside every scope has one replica: it differs from rank to rank.
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


def signature(
    where: tuple[str, ...],
    root: int,
    objects: CheckpointObjects,
    entries: dict[str, _safetensors.Entry],
) -> CallSignature:
    """What must match on all ranks: file and options, the rank that has it, objects and arrays."""
    arrays = [
        f"{name} ({entry.dtype} of shape {entry.shape})" for name, entry in sorted(entries.items())
    ]
    others = [name for name in objects.names if name not in entries]
    # `new_signature`, because `signature_of` would keep the names of all arrays for a rare call.
    return new_signature(current_call(), *where, f"by rank {root}", ManyValues((*arrays, *others)))
