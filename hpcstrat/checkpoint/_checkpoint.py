"""Checkpoint: objects that are saved to a file and restored from one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple, final

import numpy as np

from hpcstrat import _gpu
from hpcstrat._communicators.base import Communicator
from hpcstrat._communicators.collective import collective
from hpcstrat._communicators.connection import connect
from hpcstrat._communicators.protocol import CallSignature, Listed, new_signature, signature
from hpcstrat._edge import current_call, names_call
from hpcstrat._group import UpdatesOn
from hpcstrat._memory.blocks import Block
from hpcstrat._spans import CHECKPOINT, span
from hpcstrat._storage.base import PART, flat, host_parts
from hpcstrat._types import Bytes
from hpcstrat._variable_writing import RULES
from hpcstrat._variables import Variable, state_of
from hpcstrat.checkpoint import _safetensors
from hpcstrat.checkpoint._objects import CheckpointObjects, Compatibility, listed, own_share, position_of, storage_of
from hpcstrat.optimizers.base import state_of_optimizer


class Restored(NamedTuple):
    """What `Checkpoint.restore` did not restore; both are empty unless `partial=True`.

    Attributes:
        missing: the names of objects that are not in the file; they are unchanged.
        left_over: the names in the file that are not among the objects.
    """

    missing: tuple[str, ...]
    left_over: tuple[str, ...]


@final
class Checkpoint:
    """Objects that are saved to a file and restored from one: `Checkpoint(model=[w, b], optimizer=optimizer)`.

    A checkpoint holds the values of variables; an optimizer's number of steps, and the slots of its variables, which
    must be among the objects too; the totals of a metric; and the position of a dataset or an iterator: which elements
    come next, in which order. A dataset's position is that of the iteration under way: after `restore`, the next
    `for batch in dataset:` yields the rest. Arguments of constructors, such as a learning rate, are not saved.

    Args:
        **objects: variables, optimizers, metrics, datasets, distributed datasets, their iterators, and nests of them.
            Their names and their paths in nests are the names in the file, so restore with the same ones.
    """

    @names_call("Checkpoint")
    def __init__(self, **objects: Any) -> None:
        self._objects = objects
        CheckpointObjects(objects)

    @span(CHECKPOINT, "save")
    @collective("Checkpoint.save", communicator_of=lambda _: connect())
    def save(self, path: str | os.PathLike[str], keep: int | None = None) -> None:
        """Writes the objects to a file and replaces the previous one. Collective: all ranks call this.

        Only the parameter rank writes, while the others wait. It writes to a file next to `path` first, so that a kill
        at any moment leaves the previous file whole; when this returns, the new one is on disk. Permissions stay.
        Arrays are not copied in memory. Variables made outside every scope may differ between ranks; those of the
        writing rank are saved.

        Args:
            path: the file; symbolic links are followed, and missing folders are made.
            keep: the number of files to keep: `path`, always the newest, and the previous ones, `path.1`, `path.2`
                ...; older files are removed. `None` keeps no previous file, and removes none.

        Raises:
            OSError: the file system refuses on the parameter rank, or `path` is a folder, a device or a FIFO; all
                ranks raise. The previous file is whole.
            RuntimeError: called inside a replica function, or in the scope of another strategy.
            TypeError: an object cannot be saved, or `path` is not a path.
            ValueError: an optimizer's variable is not among the objects, or `keep` is not positive.
            ReplicaMismatchError: the ranks save different things.
        """
        communicator = connect()
        objects = CheckpointObjects(self._objects)
        objects.require_cross_replica()
        path = _checked_path(path)
        if keep is not None and (not isinstance(keep, int) or keep < 1):
            raise ValueError(
                f"{current_call()}: keep is {keep!r}; it must be the number of files to keep, from 1 up, or None"
            )
        entries, metadata, root = objects.entries(), objects.metadata(), objects.parameter_rank()
        communicator.exchange(_signature(path, f"keep={keep}", root, objects, entries))
        # ON_READ variables have a value on each rank, so all ranks gather them before one begins to write.
        arrays = {name: _all_values(v) for name, v in objects.on_read.items()}
        blocks = {name: (v, state_of(v).block) for name, v in objects.variables.items()}
        blocks |= {name: (slot.variable, slot.block) for name, slot in objects.slots().items()}

        def parts(name: str) -> Iterator[Bytes]:
            if name in arrays:
                found = host_parts(arrays[name])
            else:
                v, block = blocks[name]
                found = storage_of(v).parts(block)
            for part in found:
                # The other ranks wait for the disk. Every part counts as progress, so that the watchdog sees no stall.
                communicator.work()
                yield part

        with communicator.raise_together():
            if communicator.rank == root:
                try:
                    _safetensors.write(path, entries, metadata, parts, keep)
                except OSError as error:
                    not_saved = "nothing was saved, and the previous file is whole. Correct this, and save again"
                    raise _explained(path, error, not_saved) from error
            # A full disk is an error on all ranks, and no rank continues before the file exists: it may be killed next.
            communicator.exchange(signature(f"{current_call()}: written"))

    @span(CHECKPOINT, "restore")
    @collective("Checkpoint.restore", communicator_of=lambda _: connect())
    def restore(self, path: str | os.PathLike[str], partial: bool = False) -> Restored:
        """Sets the objects to the contents of a file. Collective: all ranks call this.

        Only the parameter rank reads. Before anything changes, it checks the whole file, and all ranks check that the
        file fits the objects. The number of ranks, the strategy and the devices may differ from those of the program
        that saved. Optimizers without slots get theirs.

        Args:
            path: the file.
            partial: whether to skip objects that are not in the file, and contents of the file without an object.

        Returns:
            The names of whatever was skipped.

        Raises:
            FileNotFoundError: there is no such file; the message names older ones.
            OSError: the file cannot be read.
            ValueError: the file is not a checkpoint, or truncated, damaged, or does not fit the objects; the message
                says where.
            MemoryError: there is not enough memory for slots.
            RuntimeError: called inside a replica function, or in the scope of another strategy.
            TypeError: an object cannot be restored, or `path` is not a path.
            ReplicaMismatchError: the ranks restore different things.
        """
        communicator = connect()
        objects = CheckpointObjects(self._objects)
        objects.require_cross_replica()
        path = _checked_path(path)
        entries, root = objects.entries(), objects.parameter_rank()
        communicator.exchange(_signature(path, f"partial={bool(partial)}", root, objects, entries))
        file = None
        try:
            with communicator.raise_together():
                if communicator.rank == root:
                    file = _opened(path, communicator)
                header = None if file is None else (file.entries, file.metadata)
                saved, metadata = communicator.broadcast_obj(header, root)
            with communicator.raise_together():
                compatibility = _require_compatible(path, objects, saved, metadata, partial)
            _Restoring(communicator, root, objects, compatibility, metadata, file).run()
        finally:
            if file is not None:
                file.close()
        return Restored(compatibility.missing, compatibility.left_over)

    def __repr__(self) -> str:
        return f"Checkpoint({', '.join(self._objects)})"


class _Restoring:
    """Sets objects to the contents of a compatible file, on all ranks; only the parameter rank has the file."""

    def __init__(
        self,
        communicator: Communicator,
        root: int,
        objects: CheckpointObjects,
        compatibility: Compatibility,
        metadata: dict[str, Any],
        file: _safetensors.CheckpointFile | None,
    ) -> None:
        self._communicator = communicator
        self._root = root
        self._objects = objects
        self._compatibility = compatibility
        self._metadata = metadata
        self._file = file

    def run(self) -> None:
        """Makes missing slots first, since that may fail for lack of memory; then writes. Collective."""
        try:
            self._run()
        except BaseException as error:
            # Some variables may be restored and some not, perhaps on one rank only (Ctrl-C). Nobody may compute with
            # such a mixture, so reading them raises until they are assigned again.
            for v in self._objects.variables.values():
                storage_of(v).tear(error, [state_of(v).block])
            raise

    def _run(self) -> None:
        objects, names = self._objects, sorted(self._compatibility.common)
        for name in names:
            if (optimizer := objects.optimizers.get(name)) is not None:
                with_slots = [v for of, v in objects.variables.items() if self._has_slots(name, of)]
                state_of_optimizer(optimizer).make_slots(with_slots, optimizer.name, optimizer.slots)
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
        self._publish([objects.variables[name] for name in names if name in objects.variables])
        for name in names:
            if name in objects.optimizers:
                state_of_optimizer(objects.optimizers[name]).iterations = int(self._metadata[name]["iterations"])
            elif name in objects.positions:
                objects.positions[name]._seek(position_of(self._metadata[name]))
        self._communicator.exchange(signature(f"{current_call()}: restored"))

    def _has_slots(self, optimizer: str, variable: str) -> bool:
        slots = self._objects.optimizers[optimizer].slots
        return bool(slots) and all(f"{optimizer}/{slot}/{variable}" in self._compatibility.common for slot in slots)

    def _is_of_restored_optimizer(self, slot: str) -> bool:
        return any(
            slot.startswith(f"{name}/") for name in self._objects.optimizers if name in self._compatibility.common
        )

    def _load(self, name: str, v: Variable, block: Block) -> None:
        """Reads an array of the file into a block: on the rank that owns the block, or on every rank.

        It goes part by part, so that a model that fills the memory can be restored, and an error in reading a part is
        raised on all ranks.
        """
        communicator, is_root = self._communicator, self._file is not None
        is_everywhere = state_of(v).group.updates_on is UpdatesOn.ALL_RANKS and communicator.size > 1
        nbytes = v.size * v.dtype.itemsize
        parts = self._parts(name)
        for start in range(0, nbytes, PART):
            with communicator.raise_together():
                part = next(parts, None)
                if is_everywhere:
                    part = self._shared(f"{name} from byte {start}", part, min(PART, nbytes - start))
            if part is not None and (is_root or is_everywhere):
                storage_of(v).write_part(block, start, part)

    def _parts(self, name: str) -> Iterator[Bytes]:
        """An array of the file, part by part; nothing on ranks without the file."""
        if self._file is not None:
            try:
                yield from self._file.parts(name)
            except OSError as error:
                part_done = "some objects are restored and some are not; restore them again"
                raise _explained(self._file.path, error, part_done) from error

    def _shared(self, what: str, part: Bytes | None, nbytes: int) -> Bytes:
        """The parameter rank's part, of `nbytes` bytes, on every rank; valid until the next call."""

        def write(message: Bytes) -> None:
            assert part is not None
            message[:nbytes] = part

        own = {} if part is None else {"nbytes": nbytes, "write": write}
        return self._communicator.exchange(signature(current_call(), what), **own)[self._root][:nbytes]

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
        state_of(v).storage.write(state_of(v).block, own_share(v, array), RULES["assign"])

    def _reset(self, v: Variable, block: Block, value: float) -> None:
        """Fills a slot that is not in the file: no step had updated its variable when the file was written."""
        if state_of(v).group.updates_here:
            itemsize = v.dtype.itemsize
            part = np.full(PART // itemsize, v.dtype.type(value), v.dtype).view(np.uint8)
            for start in range(0, v.size * itemsize, part.size):
                storage_of(v).write_part(block, start, part[: v.size * itemsize - start])

    def _publish(self, variables: list[Variable]) -> None:
        for storage in dict.fromkeys(map(storage_of, variables)):
            storage.publish([state_of(v).block for v in variables if storage_of(v) is storage])


def _all_values(v: Variable) -> np.ndarray[Any, Any]:
    """All replicas' values of an ON_READ variable, of shape `(replicas, ...)`, in host memory. Collective."""
    state = state_of(v)
    with state.group.on_stream():
        return _gpu.to_host(state.group.communicator.all_gather([state.block.view[np.newaxis]], 0)[0])


def _opened(path: str, communicator: Communicator) -> _safetensors.CheckpointFile:
    try:
        return _safetensors.CheckpointFile(path, communicator.work)
    except OSError as error:
        raise _explained(path, error, "nothing was changed; correct this, and restore again") from error
    except ValueError as error:
        raise ValueError(f"{current_call()}: {error}. Nothing was changed; pass another file") from error


def _require_compatible(
    path: str,
    objects: CheckpointObjects,
    entries: dict[str, _safetensors.Entry],
    metadata: dict[str, Any],
    partial: bool,
) -> Compatibility:
    try:
        compatibility = objects.compatibility(entries, metadata)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{current_call()}: the description of the objects in {path} makes no sense: {error!r}; pass another file"
        ) from error
    problems = list(compatibility.problems)
    if not partial:
        if compatibility.missing:
            problems.append(f"missing in the file: {listed(compatibility.missing)}")
        if compatibility.left_over:
            problems.append(f"left over in the file: {listed(compatibility.left_over)}")
    if problems:
        lines = "".join(f"\n  {problem}" for problem in problems[:12])
        more = f"\n  and {len(problems) - 12} more" if len(problems) > 12 else ""
        hint = "" if compatibility.problems else "\nrestore(path, partial=True) restores what both have."
        raise ValueError(
            f"{current_call()}: {path} does not fit the objects. Nothing was changed; pass objects like those that "
            f"were saved.{lines}{more}{hint}"
        )
    return compatibility


def _explained(path: str, error: OSError, consequence: str) -> OSError:
    """The error with the call and the consequence, of the same class: OSError picks the subclass by `errno`."""
    text = f"{current_call()} of {path}: {error.strerror or error}; {consequence}"
    return OSError(error.errno, text) if error.errno is not None else OSError(text)


def _checked_path(path: Any) -> str:
    path = os.fspath(path)
    if not isinstance(path, str) or not os.path.basename(path):
        raise TypeError(f"{current_call()}: path is {path!r}; it must be the name of a file")
    return path


def _signature(
    path: str, option: str, root: int, objects: CheckpointObjects, entries: dict[str, _safetensors.Entry]
) -> CallSignature:
    """What must match on all ranks: the file, who writes or reads it, the objects and their arrays."""
    arrays = [f"{name} ({entry.dtype} of shape {entry.shape})" for name, entry in sorted(entries.items())]
    others = [name for name in objects.names if name not in entries]
    return new_signature(current_call(), path, option, f"by rank {root}", Listed((*arrays, *others)))
