"""Saving: all ranks agree on what is saved, and the parameter rank writes it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hpcstrat import _gpu
from hpcstrat._communicators.connection import connect
from hpcstrat._communicators.protocol import CallSignature, Listed, new_signature, signature_of
from hpcstrat._edge import current_call
from hpcstrat._storage.base import host_parts
from hpcstrat._types import Bytes
from hpcstrat._variables import Variable, state_of
from hpcstrat.checkpoint import _background, _safetensors
from hpcstrat.checkpoint._objects import CheckpointObjects, storage_of


def save_to_file(
    objects: CheckpointObjects, path: str, keep: int | None, blocking: bool = True, step: int | None = None
) -> None:
    """What `Checkpoint.save` does, and `CheckpointManager` with the number of a step. Collective."""

    def write(contents: _safetensors.Contents) -> None:
        try:
            if blocking:
                _safetensors.write(path, contents, keep)
            else:
                _background.start(path, contents, keep)
        except OSError as error:
            raise explained(path, error, _NOT_SAVED) from error

    finish_background()
    save_to(objects, (path, f"keep={keep}, blocking={bool(blocking)}"), write, step)


def save_to(
    objects: CheckpointObjects,
    target: tuple[str, ...],
    write: Callable[[_safetensors.Contents], None],
    step: int | None,
) -> None:
    """Has the parameter rank write the objects, while the others wait. Collective.

    Args:
        objects: what to save.
        target: where to, in words that must be equal on all ranks.
        write: writes the contents, on the parameter rank; what it raises, all ranks raise.
        step: of the program, to be saved with them.
    """
    # All ranks of the program, and not of one strategy: the objects may belong to several.
    communicator = connect()
    objects.require_cross_replica()
    entries, metadata, root = objects.entries(), objects.metadata(), objects.parameter_rank()
    # Before any file is touched, all ranks find out whether they save the same.
    communicator.exchange(signature(target, root, objects, entries))
    # ON_READ variables have a value on each rank, so all ranks gather them before one begins to write.
    arrays = {name: _all_values(v) for name, v in objects.on_read.items()}
    blocks = {name: (v, state_of(v).block) for name, v in objects.variables.items()}
    blocks |= {name: (slot.variable, slot.block) for name, slot in objects.slots().items()}

    def parts(name: str) -> Iterator[Bytes]:
        if name in arrays:
            found = host_parts(arrays[name])
        else:
            v, block = blocks[name]
            storage = storage_of(v)
            found = storage.parts(block) if block.cuts is None else storage.all_parts(block)
        for part in found:
            # The other ranks wait for the disk. Every part counts as progress, so that the watchdog sees no stall.
            communicator.work()
            yield part

    def parts_of_slots(name: str) -> Iterator[Bytes]:
        """Those that are split over the ranks, which come to the writing one part by part."""
        if name in blocks and blocks[name][1].cuts is not None:
            yield from parts(name)

    with communicator.raise_together():
        if communicator.rank == root:
            contents = _safetensors.Contents(entries, metadata, parts, step)
            try:
                write(contents)
            except Exception as error:
                # The others wait for the next part of a slot, or for the end: for this rank's next call in any case.
                if communicator.calls.settled != communicator.number:  # else all ranks raise it already
                    communicator.share_error(error, communicator.number)
                raise
        else:
            for _ in _safetensors.Contents(entries, metadata, parts_of_slots, step).views():
                pass
        # A full disk is an error on all ranks, and no rank continues before the file exists: it may be killed next.
        communicator.exchange(signature_of(f"{current_call()}: written"))


def _all_values(v: Variable) -> np.ndarray[Any, Any]:
    """All replicas' values of an ON_READ variable, of shape `(replicas, ...)`, in host memory. Collective."""
    state = state_of(v)
    with state.group.on_stream():
        return _gpu.to_host(state.group.communicator.all_gather([state.block.view[np.newaxis]], 0)[0])


_NOT_SAVED = "nothing was saved, and the previous file is whole. Correct this, and save again"


def finish_background() -> None:
    """Waits for the save in the background, if this rank writes one, and raises what it met."""
    path, error = _background.finish()
    if isinstance(error, OSError):
        raise explained(path, error, f"this was in the background; {_NOT_SAVED}") from error
    if error is not None:
        raise error


def explained(path: str, error: OSError, consequence: str) -> OSError:
    """The error with the call and the consequence, of the same class: OSError picks the subclass by `errno`."""
    text = f"{current_call()} of {path}: {error.strerror or error}; {consequence}"
    return OSError(error.errno, text) if error.errno is not None else OSError(text)


def checked_path(path: Any) -> str:
    """The path as a text.

    Raises:
        TypeError: it is not the name of a file.
    """
    path = os.fspath(path)
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
            f"{current_call()}: keep is {keep!r}; it must be the number of files to keep, from 1 up, or None"
        )
    return keep


def signature(
    where: tuple[str, ...], root: int, objects: CheckpointObjects, entries: dict[str, _safetensors.Entry]
) -> CallSignature:
    """What must match on all ranks: the file and options, who writes or reads it, the objects and their arrays."""
    arrays = [f"{name} ({entry.dtype} of shape {entry.shape})" for name, entry in sorted(entries.items())]
    others = [name for name in objects.names if name not in entries]
    # `new_signature`, because `signature_of` would keep the names of all arrays for a call that seldom comes again.
    return new_signature(current_call(), *where, f"by rank {root}", Listed((*arrays, *others)))
