"""Restoring: a file is checked as a whole and read part by part, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hpcstrat._calls.records import signature_of
from hpcstrat._communicators.base import Communicator
from hpcstrat._communicators.connection import connect
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import Bytes
from hpcstrat._memory.allocator import Block
from hpcstrat._memory.intervals import Interval
from hpcstrat._replicas.group import UpdatesOn
from hpcstrat._storage.local import PART, flat
from hpcstrat._variable.variable import Variable, state_of
from hpcstrat._variable.writing import RULES
from hpcstrat.checkpoint._atomic_file import explain
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
    communicator = connect()
    finish_background()  # it may write this very file
    require_cross_replica(objects)
    root = agree(objects, objects.entries(objects.slots()), source, f"partial={bool(partial)}")
    file = None
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


class _Restoring:
    """Sets objects, on all ranks, to the contents of a compatible file of the parameter rank."""

    def __init__(
        self,
        communicator: Communicator,
        root: int,
        objects: CheckpointObjects,
        common: frozenset[str],
        metadata: dict[str, Any],
        file: CheckpointFile | None,
    ) -> None:
        self._communicator = communicator
        self._root = root
        self._objects = objects
        self._common = common
        self._metadata = metadata
        self._file = file

    def run(self) -> None:
        """Makes missing slots first, since that may fail for lack of memory; then writes.

        Collective.
        """
        try:
            self._run()
        except BaseException as error:
            # Some variables may be restored and some not, perhaps on one rank only (Ctrl-C). Such a
            # mixture is useless, so reading them raises until they are assigned again.
            for v in self._objects.variables.values():
                storage_of(v).mark_interrupted(error, [state_of(v).block])
            raise

    def _run(self) -> None:
        self._make_slots()
        self._load_arrays()
        for name, optimizer in self._objects.optimizers.items():
            if name in self._common:
                state = state_of_optimizer(optimizer)
                state.iterations = int(self._metadata[name]["iterations"])
                if state.accumulator is not None:
                    state.accumulator.clear()
        for name, resumable in self._objects.positions.items():
            if name in self._common:
                resumable._seek(position_of(self._metadata[name]))
        self._communicator.exchange(signature_of(f"{current_call()}: restored"))

    def _make_slots(self) -> None:
        # A new optimizer has no slots before its first step, and the file's slots would be lost.
        for name, optimizer in self._objects.optimizers.items():
            if name in self._common:
                with_slots = [
                    v for of, v in self._objects.variables.items() if self._has_slots(name, of)
                ]
                state_of_optimizer(optimizer).make_slots(
                    with_slots, optimizer.name, optimizer.all_slots
                )

    def _has_slots(self, optimizer: str, variable: str) -> bool:
        slots = self._objects.optimizers[optimizer].all_slots
        names = {slot_name(optimizer, slot, variable) for slot in slots}
        return bool(names) and names <= self._common

    def _load_arrays(self) -> None:
        objects, slots = self._objects, self._objects.slots()
        variables = {name: v for name, v in objects.variables.items() if name in self._common}
        arrays = {name: (v, state_of(v).block) for name, v in variables.items()}
        arrays |= {name: (slot.variable, slot.block) for name, slot in slots.items()}
        for name in sorted(self._common):
            if name in arrays:
                self._load(name, *arrays[name])
            elif name in objects.on_read:
                self._load_on_read(name, objects.on_read[name])
        for name, slot in slots.items():
            if name not in self._common and slot.optimizer in self._common:
                self._reset(slot)
        # Variables only: slots are read by the ranks that have just written them.
        self._publish(list(variables.values()))

    def _load(self, name: str, v: Variable, block: Block) -> None:
        """Reads an array of the file into a block, on the rank that owns it or on every rank.

        It does so part by part, so that a model that fills the memory can be restored. An error in
        reading a part is raised on all ranks.
        """
        communicator, is_root = self._communicator, self._file is not None
        # If each rank keeps a copy, each gets every part. One rank writes central storage, which is
        # published at the end.
        is_everywhere = (
            state_of(v).group.updates_on is UpdatesOn.ALL_RANKS and communicator.size > 1
        )
        parts = self._parts(name)
        for place in Interval(0, v.size * v.dtype.itemsize).split(PART):
            with communicator.raise_together():
                part = next(parts, None)
                if is_everywhere:
                    what = f"{name} from byte {place.start}"
                    part = self._broadcast_part(what, part, place.size)
            if part is not None and (is_root or is_everywhere):
                storage_of(v).local.write_part(block, place.start, part)

    def _parts(self, name: str) -> Iterator[Bytes]:
        """An array of the file, part by part; nothing on ranks without the file."""
        if self._file is not None:
            try:
                yield from self._file.parts(name)
            except OSError as error:
                consequence = "some objects are restored and some are not; restore them again"
                raise explain(self._file.path, error, consequence) from error

    def _broadcast_part(self, what: str, part: Bytes | None, nbytes: int) -> Bytes:
        """Sends the parameter rank's part, of `nbytes` bytes, to all; valid until the next call."""

        def write(message: Bytes) -> None:
            assert part is not None
            message[:nbytes] = part

        own = {} if part is None else {"nbytes": nbytes, "write": write}
        messages = self._communicator.exchange(signature_of(current_call(), what), **own)
        return messages[self._root][:nbytes]

    def _load_on_read(self, name: str, v: Variable) -> None:
        communicator, array = self._communicator, None
        with communicator.raise_together():
            if self._file is not None:
                array = np.empty(self._file.entries[name].shape, v.dtype)
                start = 0
                for part in self._parts(name):
                    flat(array)[start : start + part.size] = part
                    start += part.size
            array = communicator.broadcast_obj(array, self._root)
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

    def _publish(self, variables: list[Variable]) -> None:
        for storage in dict.fromkeys(map(storage_of, variables)):
            storage.publish([state_of(v).block for v in variables if storage_of(v) is storage])


def open_file(path: str) -> CheckpointFile:
    """Opens the file for reading; its errors name the call."""
    try:
        return CheckpointFile(path, connect().work)
    except OSError as error:
        raise explain(path, error, "nothing was changed; correct this, and restore again") from None
    except ValueError as error:
        raise ValueError(
            f"{current_call()}: {error}. Nothing was changed; pass another file"
        ) from None
