"""Restoring: a file is checked as a whole and read part by part, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from hpcstrat._calls.records import signature_of
from hpcstrat._communicators.base import Communicator
from hpcstrat._communicators.connection import connect
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import Bytes
from hpcstrat._memory.allocator import Block
from hpcstrat._memory.intervals import Interval
from hpcstrat._replicas.group import UpdatesOn
from hpcstrat._storage.base import Storage
from hpcstrat._storage.local import PART, flat, writer_of
from hpcstrat._variable.variable import Variable, state_of
from hpcstrat._variable.writing import RULES
from hpcstrat.checkpoint._atomic_file import explaining
from hpcstrat.checkpoint._format import CheckpointFile
from hpcstrat.checkpoint._objects import (
    CheckpointObjects,
    Restored,
    Slot,
    agree,
    own_share,
    position_of,
    require_compatible,
    require_cross_replica,
    slot_name,
    storage_of,
)
from hpcstrat.checkpoint._saving import finish_background
from hpcstrat.optimizers._optimizer import state_of_optimizer
from hpcstrat.optimizers._state import copy_block

_Object = TypeVar("_Object")


def restore_from(
    objects: CheckpointObjects,
    source: str,
    open_source: Callable[[], CheckpointFile | None],
    partial: bool = False,
) -> tuple[Restored, int | None]:
    """What `Checkpoint.restore` does; also returns the number of the step. Collective.

    Args:
        objects: what to set.
        source: the file's name, for messages; equal on all ranks.
        open_source: opens it, on the parameter rank.
        partial: as in `Checkpoint.restore`.
    """
    communicator, file = connect(), None
    finish_background()  # it may write this very file
    require_cross_replica(objects)
    root = agree(objects, objects.entries(objects.slots()), source, f"partial={bool(partial)}")
    try:
        with communicator.raise_together():
            if communicator.rank == root:
                file = open_source()
            header = None if file is None else (file.entries, file.metadata, file.step)
            # The header alone tells whether a file fits, so every rank can check its own objects
            # before anything changes.
            saved, metadata, step = communicator.broadcast_obj(header, root)
        with communicator.raise_together():
            common, restored = require_compatible(source, objects, saved, metadata, partial)
        _Restoring(communicator, root, objects, common, metadata, file).run()
    finally:
        if file is not None:
            file.close()
    return restored, step


class _Restoring(NamedTuple):
    """Sets objects, on all ranks, to the contents of a compatible file of the parameter rank."""

    communicator: Communicator
    root: int
    objects: CheckpointObjects
    common: frozenset[str]
    metadata: dict[str, Any]
    file: CheckpointFile | None

    def run(self) -> None:
        """Makes missing slots first, since that may fail for lack of memory; then writes.

        Collective.
        """
        try:
            self._run()
        except BaseException as error:
            # Some variables may be restored and some not, perhaps on one rank only (Ctrl-C). Such a
            # mixture is useless, so reading them raises until they are assigned again.
            for v in self.objects.variables.values():
                storage_of(v).mark_interrupted(error, [state_of(v).block])
            raise

    def _run(self) -> None:
        self._make_slots()
        self._load_arrays()
        for name, optimizer in self._in_both(self.objects.optimizers).items():
            state = state_of_optimizer(optimizer)
            state.iterations = int(self.metadata[name]["iterations"])
            if state.accumulator is not None:
                state.accumulator.clear()
        for name, resumable in self._in_both(self.objects.positions).items():
            resumable._seek(position_of(self.metadata[name]))
        self.communicator.exchange(signature_of(f"{current_call()}: restored"))

    def _in_both(self, objects: Mapping[str, _Object]) -> dict[str, _Object]:
        """Those of the objects that the file has too."""
        return {name: each for name, each in objects.items() if name in self.common}

    def _make_slots(self) -> None:
        # A new optimizer has no slots before its first step, and the file's slots would be lost.
        for name, optimizer in self._in_both(self.objects.optimizers).items():
            slots = optimizer.all_slots
            with_slots = [
                v
                for of, v in self.objects.variables.items()
                if slots and self.common.issuperset(slot_name(name, slot, of) for slot in slots)
            ]
            state_of_optimizer(optimizer).make_slots(with_slots, optimizer.name, slots)

    def _load_arrays(self) -> None:
        objects, slots = self.objects, self.objects.slots()
        variables = self._in_both(objects.variables)
        arrays = objects.blocks(slots)
        for name in sorted(self.common):
            if name in arrays:
                self._load(name, *arrays[name])
            elif name in objects.on_read:
                self._load_on_read(name, objects.on_read[name])
        for name, slot in slots.items():
            if name not in self.common and slot.optimizer in self.common:
                self._reset(slot)
        # Variables only: slots are read by the ranks that have just written them.
        by_storage: dict[Storage, list[Block]] = {}
        for v in variables.values():
            by_storage.setdefault(storage_of(v), []).append(state_of(v).block)
        for storage, blocks in by_storage.items():
            storage.publish(blocks)

    def _load(self, name: str, v: Variable, block: Block) -> None:
        """Reads an array of the file into a block, on the rank that owns it or on every rank.

        It does so part by part, so that a model that fills the memory can be restored. An error in
        reading a part is raised on all ranks.
        """
        # If each rank keeps a copy, each gets every part. One rank writes central storage, which is
        # published at the end.
        is_everywhere = (
            state_of(v).group.updates_on is UpdatesOn.ALL_RANKS and self.communicator.size > 1
        )
        parts = self._parts(name)
        for place in Interval(0, v.size * v.dtype.itemsize).split(PART):
            with self.communicator.raise_together():
                part = next(parts, None)
                if is_everywhere:
                    what = f"{name} from byte {place.start}"
                    part = self._broadcast_part(what, part, place.size)
            if part is not None:
                storage_of(v).local.write_part(block, place.start, part)

    def _parts(self, name: str) -> Iterator[Bytes]:
        """An array of the file, part by part; nothing on ranks without the file."""
        if self.file is not None:
            with explaining(
                self.file.path, "some objects are restored and some are not; restore them again"
            ):
                yield from self.file.parts(name)

    def _broadcast_part(self, what: str, part: Bytes | None, nbytes: int) -> Bytes:
        """Sends the parameter rank's part, of `nbytes` bytes, to all; valid until the next call."""
        own = {} if part is None else {"nbytes": nbytes, "write": writer_of(part)}
        messages = self.communicator.exchange(signature_of(current_call(), what), **own)
        return messages[self.root][:nbytes]

    def _load_on_read(self, name: str, v: Variable) -> None:
        array = None
        with self.communicator.raise_together():
            if self.file is not None:
                array = np.empty(self.file.entries[name].shape, v.dtype)
                start = 0
                for part in self._parts(name):
                    flat(array)[start : start + part.size] = part
                    start += part.size
            array = self.communicator.broadcast_obj(array, self.root)
        state_of(v).storage.local.write(state_of(v).block, own_share(v, array), RULES["assign"])

    def _reset(self, slot: Slot) -> None:
        """Fills a slot that is not in the file because no step had updated its variable."""
        v, storage = slot.variable, storage_of(slot.variable)
        if not state_of(v).group.updates_here:
            return
        if slot.initial is None:
            copy_block(storage, state_of(v).block, slot.block)
            return
        itemsize = v.dtype.itemsize
        # In parts, so that a slot as large as the model needs no second copy of it.
        part = np.full(PART // itemsize, v.dtype.type(slot.initial), v.dtype).view(np.uint8)
        for place in Interval(0, v.size * itemsize).split(part.size):
            storage.local.write_part(slot.block, place.start, part[: place.size])


def open_file(path: str) -> CheckpointFile:
    """Opens the file for reading; its errors name the call."""
    try:
        with explaining(path, "nothing was changed; correct this, and restore again"):
            return CheckpointFile(path, connect().work)
    except ValueError as error:
        raise ValueError(
            f"{current_call()}: {error}. Nothing was changed; pass another file"
        ) from None
