"""Restoring: a file is checked as a whole and read part by part, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from hpcstrat._calls.records import signature_of
from hpcstrat._communicators.base import Communicator
from hpcstrat._communicators.connection import connect
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import Bytes
from hpcstrat._memory.blocks import Block
from hpcstrat._replicas.group import UpdatesOn
from hpcstrat._storage.local import PART, flat
from hpcstrat._variable.variable import Variable, state_of
from hpcstrat._variable.writing import RULES
from hpcstrat.checkpoint._atomic_file import explain
from hpcstrat.checkpoint._checkpoint_file import CheckpointFile
from hpcstrat.checkpoint._objects import (
    CheckpointObjects,
    Compatibility,
    list_names,
    own_share,
    position_of,
    storage_of,
)
from hpcstrat.checkpoint._safetensors import Entry
from hpcstrat.checkpoint._saving import finish_background, signature
from hpcstrat.optimizers._optimizer import state_of_optimizer
from hpcstrat.optimizers._state import copy_block


class Restored(NamedTuple):
    """What `Checkpoint.restore` did not restore; both are empty unless `partial=True`.

    Attributes:
        missing: the names of objects that are not in the file and so are unchanged.
        left_over: the names in the file that are not among the objects.
    """

    missing: tuple[str, ...]
    left_over: tuple[str, ...]


def restore_from(
    objects: CheckpointObjects,
    source: str,
    open_source: Callable[[Callable[[], None]], CheckpointFile],
    partial: bool = False,
) -> tuple[Restored, int | None]:
    """What `Checkpoint.restore` does; also returns the number of the step. Collective.

    Args:
        objects: what to set.
        source: the file's name, for messages; equal on all ranks.
        open_source: opens it on the parameter rank; its argument is called repeatedly, to show
            progress.
        partial: as in `Checkpoint.restore`.
    """
    communicator = connect()
    finish_background()  # it may write this very file
    objects.require_cross_replica()
    entries, root = objects.entries(), objects.parameter_rank()
    communicator.exchange(signature((source, f"partial={bool(partial)}"), root, objects, entries))
    file = None
    try:
        with communicator.raise_together():
            if communicator.rank == root:
                file = open_source(communicator.work)
            header = None if file is None else (file.entries, file.metadata, file.step)
            # The header alone tells whether a file fits, so every rank can check its own objects
            # before anything changes.
            saved, metadata, step = communicator.broadcast_obj(header, root)
        with communicator.raise_together():
            compatibility = _require_compatible(source, objects, saved, metadata, partial)
        _Restoring(communicator, root, objects, compatibility, metadata, file).run()
    finally:
        if file is not None:
            file.close()
    return Restored(compatibility.missing, compatibility.left_over), step


class _Restoring:
    """Sets objects, on all ranks, to the contents of a compatible file of the parameter rank."""

    def __init__(
        self,
        communicator: Communicator,
        root: int,
        objects: CheckpointObjects,
        compatibility: Compatibility,
        metadata: dict[str, Any],
        file: CheckpointFile | None,
    ) -> None:
        self._communicator = communicator
        self._root = root
        self._objects = objects
        self._compatibility = compatibility
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
        objects, names = self._objects, sorted(self._compatibility.common)
        for name in names:
            if (optimizer := objects.optimizers.get(name)) is not None:
                with_slots = [v for of, v in objects.variables.items() if self._has_slots(name, of)]
                # A new optimizer has no slots before its first step, and the file's slots would be
                # lost.
                state_of_optimizer(optimizer).make_slots(
                    with_slots, optimizer.name, optimizer.all_slots
                )
        slots = objects.slots()
        for name in names:
            if name in objects.variables:
                v = objects.variables[name]
                self._load(name, v, state_of(v).block)
            elif name in slots:
                self._load(name, slots[name].variable, slots[name].block)
            elif name in objects.on_read:
                self._load_on_read(name, objects.on_read[name])
        for name, slot in slots.items():
            if name not in self._compatibility.common and self._is_of_restored_optimizer(name):
                self._reset(slot.variable, slot.block, slot.initial)
        # Variables only: slots are read by the ranks that have just written them.
        self._publish([objects.variables[name] for name in names if name in objects.variables])
        for name in names:
            if name in objects.optimizers:
                state = state_of_optimizer(objects.optimizers[name])
                state.iterations = int(self._metadata[name]["iterations"])
                if state.accumulator is not None:
                    state.accumulator.clear()
            elif name in objects.positions:
                objects.positions[name]._seek(position_of(self._metadata[name]))
        self._communicator.exchange(signature_of(f"{current_call()}: restored"))

    def _has_slots(self, optimizer: str, variable: str) -> bool:
        slots = self._objects.optimizers[optimizer].all_slots
        return bool(slots) and all(
            f"{optimizer}/{slot}/{variable}" in self._compatibility.common for slot in slots
        )

    def _is_of_restored_optimizer(self, slot: str) -> bool:
        return any(
            slot.startswith(f"{name}/")
            for name in self._objects.optimizers
            if name in self._compatibility.common
        )

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
        nbytes = v.size * v.dtype.itemsize
        parts = self._parts(name)
        for start in range(0, nbytes, PART):
            with communicator.raise_together():
                part = next(parts, None)
                if is_everywhere:
                    part = self._broadcast_part(
                        f"{name} from byte {start}", part, min(PART, nbytes - start)
                    )
            if part is not None and (is_root or is_everywhere):
                storage_of(v).write_part(block, start, part)

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

    def _reset(self, v: Variable, block: Block, value: float | None) -> None:
        """Fills a slot that is not in the file because no step had updated its variable."""
        if value is None and state_of(v).group.updates_here:
            copy_block(storage_of(v), state_of(v).block, block)
        elif value is not None and state_of(v).group.updates_here:
            itemsize = v.dtype.itemsize
            # In parts, so that a slot as large as the model needs no second copy of it.
            part = np.full(PART // itemsize, v.dtype.type(value), v.dtype).view(np.uint8)
            for start in range(0, v.size * itemsize, part.size):
                storage_of(v).write_part(block, start, part[: v.size * itemsize - start])

    def _publish(self, variables: list[Variable]) -> None:
        for storage in dict.fromkeys(map(storage_of, variables)):
            storage.publish([state_of(v).block for v in variables if storage_of(v) is storage])


def open_file(path: str, work: Callable[[], None]) -> CheckpointFile:
    """Opens the file for reading; its errors name the call."""
    try:
        return CheckpointFile(path, work)
    except OSError as error:
        raise explain(
            path, error, "nothing was changed; correct this, and restore again"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"{current_call()}: {error}. Nothing was changed; pass another file"
        ) from error


def _require_compatible(
    path: str,
    objects: CheckpointObjects,
    entries: dict[str, Entry],
    metadata: dict[str, Any],
    partial: bool,
) -> Compatibility:
    try:
        compatibility = objects.compatibility(entries, metadata)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{current_call()}: the description of the objects in {path} makes no sense: "
            f"{error!r}; pass another file"
        ) from error
    problems = list(compatibility.problems)
    if not partial:
        if compatibility.missing:
            problems.append(f"missing in the file: {list_names(compatibility.missing)}")
        if compatibility.left_over:
            problems.append(f"left over in the file: {list_names(compatibility.left_over)}")
    if problems:
        lines = "".join(f"\n  {problem}" for problem in problems[:12])
        more = f"\n  and {len(problems) - 12} more" if len(problems) > 12 else ""
        hint = (
            ""
            if compatibility.problems
            else "\nrestore(path, partial=True) restores what both have."
        )
        raise ValueError(
            f"{current_call()}: {path} does not fit the objects. Nothing was changed; pass objects "
            f"like those that were saved.{lines}{more}{hint}"
        )
    return compatibility
