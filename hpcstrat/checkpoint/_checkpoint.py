"""Checkpoint: objects that are saved to a file and restored from it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar, final

import numpy as np

from hpcstrat._agreement.collective import collective
from hpcstrat._agreement.records import signature_of
from hpcstrat._core.call_name import current_call, names_call
from hpcstrat._core.timeline import CHECKPOINT, span
from hpcstrat._core.types import Bytes
from hpcstrat._memory.blocks import Block
from hpcstrat._memory.intervals import ByteRange
from hpcstrat._storage.base import Storage
from hpcstrat._storage.parts import PART, flat, writer_of
from hpcstrat._transports.connection import connect
from hpcstrat._transports.verbs import Communicator
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
from hpcstrat.checkpoint._saving import check_keep, check_path, finish_background, save_to
from hpcstrat.optimizers._state import state_of_optimizer


@final
class Checkpoint:
    """Objects that are saved to a file and restored from it.

    `Checkpoint(model=[w, b], optimizer=optimizer)` holds the values of variables; an optimizer's
    number of steps, and the slots of its variables, which must be among the objects too; the totals
    of a metric; and the position of a dataset or an iterator: which elements come next, in which
    order. A dataset's position is that of the current iteration: after `restore`, the next
    `for batch in dataset:` yields the rest. Arguments of constructors, such as a learning rate, are
    not saved.

    Args:
        **objects: variables, optimizers, metrics, datasets, distributed datasets, their iterators,
            and nests of them. Their names and their paths in nests are the names in the file, so
            restore with the same names.
    """

    @names_call("Checkpoint")
    def __init__(self, **objects: Any) -> None:
        self._objects = objects
        CheckpointObjects(objects)

    @span(CHECKPOINT, "save")
    @collective(communicator_of=lambda _: connect())
    def save(
        self, path: str | os.PathLike[str], keep: int | None = None, blocking: bool = True
    ) -> str:
        """Writes the objects to a file and replaces the previous file.

        Collective: all ranks call this.

        All ranks write their shares of one file at the same time; if a rank does not see the
        parameter rank's file, because it is on another host, the parameter rank writes alone. The
        file is written next to `path` and then renamed, so a kill at any moment leaves the previous
        file whole; when this returns, the new file is on disk. Permissions stay. Arrays are not
        copied in memory. Variables made outside every scope may differ between ranks; those of the
        parameter rank are saved.

        With `blocking=False` this returns as soon as each rank has copied its share; threads write
        the file while the program continues. The copies take the same memory again, which is kept
        for the next save. The next `save`, `restore` or `sync` of any checkpoint waits for the
        file, and raises the error of its writing; so does the end of the program, with a non-zero
        status.

        Args:
            path: the file; symbolic links are followed, and missing folders are made, as in
                TensorFlow.
            keep: the number of files to keep: `path`, always the newest, and the previous files,
                `path.1`, `path.2` ...; older files are removed. `None` keeps no previous file, and
                removes none.
            blocking: whether to wait until the file is on disk.

        Returns:
            `path`, as text.

        Raises:
            OSError: the file system refuses on any rank, or `path` is a folder, a device or a FIFO;
                all ranks raise. The previous file is whole. Or it refused the previous save, in the
                background; this save has not started.
            MemoryError: there is no memory for the copy that `blocking=False` makes.
            RuntimeError: called inside a replica function, or in the scope of another strategy.
            TypeError: an object cannot be saved, or `path` is not a path.
            ValueError: an optimizer's variable is not among the objects, or `keep` is not positive.
            ReplicaMismatchError: the ranks save different things.

        Examples:
            >>> import os, tempfile
            >>> step = hs.Variable(0)
            >>> checkpoint = hs.checkpoint.Checkpoint(step=step)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     for number in 1, 2, 3:
            ...         _ = step.assign(number)
            ...         path = checkpoint.save(f"{folder}/model", keep=2)
            ...     print(sorted(os.listdir(folder)))  # of steps 3 and 2
            ['model', 'model.1']
        """
        path = check_path(path)
        save_to(path, objects_of(self), check_keep(keep), blocking)
        return path

    @collective(communicator_of=lambda _: connect())
    def sync(self) -> None:
        """Waits until the file of `save(blocking=False)` is on disk.

        Collective: all ranks call this.

        Raises:
            OSError: the file system refused; all ranks raise. The previous file is whole.

        Examples:
            >>> import os, tempfile
            >>> w = hs.Variable(1.0)
            >>> checkpoint = hs.checkpoint.Checkpoint(w=w)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = checkpoint.save(f"{folder}/model", blocking=False)
            ...     _ = w.assign(2.0)  # the file holds 1.0
            ...     checkpoint.sync()
            ...     restored = checkpoint.restore(path)
            >>> print(w.numpy())
            1.0
        """
        communicator = connect()
        finish_background()
        communicator.exchange(signature_of(current_call()))

    @span(CHECKPOINT, "restore")
    @collective(communicator_of=lambda _: connect())
    def restore(self, path: str | os.PathLike[str], partial: bool = False) -> Restored:
        """Sets the objects to the contents of a file. Collective: all ranks call this.

        Only the parameter rank reads. Before anything changes, it checks the whole file, and all
        ranks check that the file fits the objects. The number of ranks, the strategy and the
        devices may differ from those of the program that saved. Optimizers without slots get them.

        Args:
            path: the file.
            partial: whether to skip objects that are not in the file, and contents of the file
                without an object.

        Returns:
            The names of whatever was skipped.

        Raises:
            FileNotFoundError: there is no such file; the message names older files.
            OSError: the file cannot be read.
            ValueError: the file is not a checkpoint, or truncated, damaged, or does not fit the
                objects; the message says where.
            MemoryError: there is not enough memory for slots.
            RuntimeError: called inside a replica function, or in the scope of another strategy.
            TypeError: an object cannot be restored, or `path` is not a path.
            ReplicaMismatchError: the ranks restore different things.

        Examples:
            >>> import tempfile
            >>> w, b = hs.Variable(1.0), hs.Variable(2.0)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = hs.checkpoint.Checkpoint(w=w).save(f"{folder}/model")
            ...     _ = w.assign(5.0)
            ...     both = hs.checkpoint.Checkpoint(w=w, b=b)
            ...     print(both.restore(path, partial=True).missing, w.numpy())
            ('b',) 1.0
        """
        path = check_path(path)
        return restore_from(path, objects_of(self), partial)[0]

    def __repr__(self) -> str:
        return f"Checkpoint({', '.join(self._objects)})"


def objects_of(checkpoint: Checkpoint) -> CheckpointObjects:
    """The objects of a checkpoint, as they are now."""
    return CheckpointObjects(checkpoint._objects)


_Object = TypeVar("_Object")


def restore_from(
    path: str, objects: CheckpointObjects, partial: bool = False
) -> tuple[Restored, int | None]:
    """What `Checkpoint.restore` does; also returns the number of the step. Collective."""
    communicator, file = connect(), None
    finish_background()  # it may write this very file
    require_cross_replica(objects)
    root = agree(objects, objects.entries(objects.slots()), path, f"partial={bool(partial)}")
    try:
        with communicator.raise_together():
            if communicator.rank == root:
                file = _open(path)
            header = None if file is None else (file.entries, file.metadata, file.step)
            # The header alone tells whether a file fits, so every rank can check its own objects
            # before anything changes.
            saved, metadata, step = communicator.broadcast_obj(header, root)
        with communicator.raise_together():
            common, restored = require_compatible(path, objects, saved, metadata, partial)
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
            # mixture is useless, so reading them raises until the program makes them again.
            for v in self.objects.variables.values():
                storage_of(v).mark_interrupted(error, [state_of(v).block])
            raise

    def _run(self) -> None:
        self._make_slots()
        self._load_arrays()
        for name, optimizer in self._in_both(self.objects.optimizers).items():
            state = state_of_optimizer(optimizer)
            state.iterations = int(self.metadata[name]["iterations"])
        for name, data in self._in_both(self.objects.positions).items():
            data._seek(position_of(self.metadata[name]))
        self.communicator.exchange(signature_of(f"{current_call()}: restored"))

    def _in_both(self, objects: Mapping[str, _Object]) -> dict[str, _Object]:
        """Those of the objects that the file has too."""
        return {name: each for name, each in objects.items() if name in self.common}

    def _make_slots(self) -> None:
        # A new optimizer has no slots before its first step, and the file's slots would be lost.
        for name, optimizer in self._in_both(self.objects.optimizers).items():
            slots = optimizer.slots
            with_slots = [
                v
                for of, v in self.objects.variables.items()
                if slots and self.common.issuperset(slot_name(name, slot, of) for slot in slots)
            ]
            state_of_optimizer(optimizer).make_slots(optimizer, with_slots)

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
            if storage.copies == 1:
                storage.publish(blocks)

    def _load(self, name: str, v: Variable, block: Block) -> None:
        """Reads an array of the file into a block, on the root or on every rank that has a copy.

        It does so part by part, so that a model that fills the memory can be restored. An error in
        reading a part is raised on all ranks.
        """
        # If there are several copies, all ranks get every part. The root writes a single one, which
        # is published at the end.
        storage = storage_of(v)
        has_copies = storage.copies > 1 or storage.communicator.size < self.communicator.size
        parts = self._parts(name)
        block.checksum = None  # also on ranks that only see what another one writes
        for place in ByteRange(0, v.size * v.dtype.itemsize).split(PART):
            with self.communicator.raise_together():
                part = next(parts, None)
                if has_copies:
                    what = f"{name} from byte {place.start}"
                    part = self._broadcast_part(what, part, place.size)
            if part is not None and (storage.writes_here or not has_copies):
                storage.write_part(block, place.start, part)

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
        state_of(v).storage.write(state_of(v).block, own_share(v, array), RULES["assign"])

    def _reset(self, slot: Slot) -> None:
        """Fills a slot that is not in the file because no step had updated its variable."""
        v, storage = slot.variable, storage_of(slot.variable)
        if not storage.writes_here:
            return
        itemsize = v.dtype.itemsize
        # In parts, so that a slot as large as the model needs no second copy of it.
        part = np.full(PART // itemsize, v.dtype.type(slot.initial), v.dtype).view(np.uint8)
        for place in ByteRange(0, v.size * itemsize).split(part.size):
            storage.write_part(slot.block, place.start, part[: place.size])


def _open(path: str) -> CheckpointFile:
    """Opens the file for reading; its errors name the call."""
    try:
        with explaining(path, "nothing was changed; correct this, and restore again"):
            return CheckpointFile(path, connect().work)
    except ValueError as error:
        raise ValueError(
            f"{current_call()}: {error}. Nothing was changed; pass another file"
        ) from None
