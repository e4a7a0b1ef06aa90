"""Checkpoint: objects that are saved to a file and restored from one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple, final

import numpy as np

from hpcstrat import _gpu
from hpcstrat._communicators.base import Communicator
from hpcstrat._communicators.connection import connect
from hpcstrat._communicators.protocol import CallSignature, Listed, new_signature, signature
from hpcstrat._group import UpdatesOn
from hpcstrat._memory.blocks import Block
from hpcstrat._spans import CHECKPOINT, span
from hpcstrat._storage.base import PART, flat, host_parts
from hpcstrat._types import Bytes
from hpcstrat._variable_writing import RULES
from hpcstrat._variables import Variable, state_of
from hpcstrat.checkpoint import _file
from hpcstrat.checkpoint._contents import Contents, Fit, listed, own_share, position_of, storage_of
from hpcstrat.optimizers.base import state_of_optimizer


class Restored(NamedTuple):
    """What `Checkpoint.restore` did not do; both are empty unless it was allowed to leave something.

    Attributes:
        missing: the names of objects that the file has not; they are as they were.
        left_over: the names of what the file has, and the checkpoint has not.
    """

    missing: tuple[str, ...]
    left_over: tuple[str, ...]


@final
class Checkpoint:
    """Objects that are saved to a file and restored from one: `Checkpoint(model=[w, b], optimizer=optimizer)`.

    Of a variable its value is saved; of an optimizer the number of steps and the slots of its variables, which must be
    among the objects too; of a metric what it has counted; of a dataset or an iterator which elements come next, in
    which order. For a dataset this is the iteration over it that is going on: after `restore`, the next
    `for batch in dataset:` gives the rest of it. What a program passes to constructors, such as a learning rate, is not
    saved.

    Args:
        **objects: variables, optimizers, metrics, datasets, distributed datasets, their iterators, and nests of them.
            Their names and places make the names in the file, so a program that restores must give the same.
    """

    def __init__(self, **objects: Any) -> None:
        self._objects = objects
        Contents("Checkpoint", objects)

    @span(CHECKPOINT, "save")
    def save(self, path: str | os.PathLike[str], keep: int | None = None) -> None:
        """Writes the objects to a file, in the place of one that is there. Collective: all ranks call this.

        The parameter rank alone writes, while the others wait. It writes to a file beside `path` first, so that a kill
        at any moment leaves the file before whole; when this returns, the new one is on disk. The permissions stay. The
        arrays are not copied in memory. Of variables made outside of every scope, of which each rank has its own, the
        writing rank's are saved.

        Args:
            path: of the file; a symbolic link is followed, and folders that are not there are made.
            keep: how many files are kept: `path`, which is always the newest, and the ones before, `path.1`, `path.2`
                ...; older ones are removed. `None` keeps none before, and touches none.

        Raises:
            OSError: the file system says no, on the parameter rank, or `path` is a folder, a device or a FIFO; all
                ranks raise. The file before is whole.
            RuntimeError: called inside a replica function, or in the scope of another strategy.
            TypeError: an object is none that can be saved, or `path` is none.
            ValueError: an optimizer's variable is missing among the objects, or `keep` is not positive.
            ReplicaMismatchError: the ranks save different things.
        """
        call = "Checkpoint.save"
        communicator = connect()
        with communicator.raise_together(call):
            contents = Contents(call, self._objects)
            contents.require_cross_replica()
            path = _checked_path(call, path)
            if keep is not None and (not isinstance(keep, int) or keep < 1):
                raise ValueError(
                    f"{call}: keep is {keep!r}; it must be the number of files to keep, from 1 up, or None"
                )
            entries, facts, root = contents.entries(), contents.facts(), contents.parameter_rank()
            communicator.exchange(_signature(call, path, f"keep={keep}", root, contents, entries))
        arrays = {name: _all_values(call, v) for name, v in contents.divided.items()}
        blocks = {name: (v, state_of(v).block) for name, v in contents.variables.items()}
        blocks |= {name: (slot.variable, slot.block) for name, slot in contents.slots().items()}

        def parts(name: str) -> Iterator[Bytes]:
            if name in arrays:
                found = host_parts(arrays[name])
            else:
                v, block = blocks[name]
                found = storage_of(v).parts(block)
            for part in found:
                communicator.work()
                yield part

        with communicator.raise_together(call):
            if communicator.rank == root:
                try:
                    _file.write(path, entries, facts, parts, keep)
                except OSError as error:
                    not_saved = "nothing was saved; what was there before is whole. Correct this, and save again"
                    raise _told(call, path, error, not_saved) from error
            communicator.exchange(signature(f"{call}: written"))

    @span(CHECKPOINT, "restore")
    def restore(self, path: str | os.PathLike[str], partial: bool = False) -> Restored:
        """Sets the objects to what a file holds. Collective: all ranks call this.

        The parameter rank alone reads. It first checks the whole file, and all ranks that it fits the objects: nothing
        is changed if anything is wrong. The number of ranks, the strategy and the devices need not be those of the
        program that saved. The slots of an optimizer that has none yet are made.

        Args:
            path: of the file.
            partial: whether objects that the file has not, and what the file has beyond the objects, are left alone.

        Returns:
            The names of what was left alone.

        Raises:
            FileNotFoundError: there is no such file; the message names older ones.
            OSError: it cannot be read.
            ValueError: it is no checkpoint, cut off, damaged, or does not fit the objects; the message says where.
            MemoryError: there is no room for slots.
            RuntimeError: called inside a replica function, or in the scope of another strategy.
            TypeError: an object is none that can be restored, or `path` is none.
            ReplicaMismatchError: the ranks restore different things.
        """
        call = "Checkpoint.restore"
        communicator = connect()
        with communicator.raise_together(call):
            contents = Contents(call, self._objects)
            contents.require_cross_replica()
            path = _checked_path(call, path)
            entries, root = contents.entries(), contents.parameter_rank()
            communicator.exchange(_signature(call, path, f"partial={bool(partial)}", root, contents, entries))
        file = None
        try:
            with communicator.raise_together(call):
                if communicator.rank == root:
                    file = _opened(call, path, communicator)
                header = None if file is None else (file.entries, file.facts)
                saved, facts = communicator.broadcast_obj(call, header, root)
            with communicator.raise_together(call):
                fit = _checked_fit(call, path, contents, saved, facts, partial)
            _Restoring(call, communicator, root, contents, fit, facts, file).run()
        finally:
            if file is not None:
                file.close()
        return Restored(fit.missing, fit.left_over)

    def __repr__(self) -> str:
        return f"Checkpoint({', '.join(self._objects)})"


class _Restoring:
    """Sets objects to what a file holds that fits them. All ranks do; only the parameter rank has the file."""

    def __init__(
        self,
        call: str,
        communicator: Communicator,
        root: int,
        contents: Contents,
        fit: Fit,
        facts: dict[str, Any],
        file: _file.CheckpointFile | None,
    ) -> None:
        self._call = call
        self._communicator = communicator
        self._root = root
        self._contents = contents
        self._fit = fit
        self._facts = facts
        self._file = file

    def run(self) -> None:
        """Makes what is missing first, which can fail; then writes. Collective."""
        try:
            self._run()
        except BaseException as error:  # which not all ranks raise: a signal's, say
            for v in self._contents.variables.values():
                storage_of(v).tear(self._call, error, [state_of(v).block])
            raise

    def _run(self) -> None:
        contents, names = self._contents, sorted(self._fit.common)
        for name in names:
            if (optimizer := contents.optimizers.get(name)) is not None:
                with_slots = [v for of, v in contents.variables.items() if self._has_slots(name, of)]
                state_of_optimizer(optimizer).make_slots(with_slots, optimizer.name, optimizer.slots)
        slots = contents.slots()
        for name in names:
            if name in contents.variables:
                v = contents.variables[name]
                self._load(name, v, state_of(v).block)
            elif name in slots:
                self._load(name, slots[name].variable, slots[name].block)
            elif name in contents.divided:
                self._load_divided(name, contents.divided[name])
        for name, slot in slots.items():
            if name not in self._fit.common and self._is_of_restored_optimizer(name):
                self._reset(slot.variable, slot.block, slot.initial)
        self._publish([contents.variables[name] for name in names if name in contents.variables])
        for name in names:
            if name in contents.optimizers:
                state_of_optimizer(contents.optimizers[name]).iterations = int(self._facts[name]["iterations"])
            elif name in contents.positions:
                contents.positions[name]._seek(position_of(self._facts[name]))
        self._communicator.exchange(signature(f"{self._call}: restored"))

    def _has_slots(self, optimizer: str, variable: str) -> bool:
        slots = self._contents.optimizers[optimizer].slots
        return bool(slots) and all(f"{optimizer}/{slot}/{variable}" in self._fit.common for slot in slots)

    def _is_of_restored_optimizer(self, slot: str) -> bool:
        return any(slot.startswith(f"{name}/") for name in self._contents.optimizers if name in self._fit.common)

    def _load(self, name: str, v: Variable, block: Block) -> None:
        """Brings an array of the file to a block: on the rank that has it, or on every rank."""
        communicator, is_root = self._communicator, self._file is not None
        is_everywhere = state_of(v).group.updates_on is UpdatesOn.ALL_RANKS and communicator.size > 1
        nbytes = v.size * v.dtype.itemsize
        parts = self._parts(name)
        for start in range(0, nbytes, PART):
            with communicator.raise_together(self._call):
                part = next(parts, None)
                if is_everywhere:
                    part = self._shared(f"{name} from byte {start}", part, min(PART, nbytes - start))
            if part is not None and (is_root or is_everywhere):
                storage_of(v).write_part(block, start, part)

    def _parts(self, name: str) -> Iterator[Bytes]:
        """The array in the file, part by part; nothing on the other ranks."""
        if self._file is not None:
            try:
                yield from self._file.parts(name)
            except OSError as error:
                part_done = "the objects are restored in part; restore them again"
                raise _told(self._call, self._file.path, error, part_done) from error

    def _shared(self, what: str, part: Bytes | None, nbytes: int) -> Bytes:
        """The parameter rank's part, of so many bytes, on every rank, valid until the next call."""

        def write(message: Bytes) -> None:
            assert part is not None
            message[:nbytes] = part

        own = {} if part is None else {"nbytes": nbytes, "write": write}
        return self._communicator.exchange(signature(self._call, what), **own)[self._root][:nbytes]

    def _load_divided(self, name: str, v: Variable) -> None:
        communicator, array = self._communicator, None
        with communicator.raise_together(self._call):
            if self._file is not None:
                array = np.empty(self._file.entries[name].shape, v.dtype)
                start = 0
                for part in self._parts(name):
                    flat(array)[start : start + part.size] = part
                    start += part.size
            array = communicator.broadcast_obj(self._call, array, self._root)
        state_of(v).storage.write(state_of(v).block, own_share(v, array), RULES["assign"])

    def _reset(self, v: Variable, block: Block, value: float) -> None:
        """Fills a slot of which the file knows nothing: when it was written, the variable had no step behind it."""
        if state_of(v).group.updates_here:
            itemsize = v.dtype.itemsize
            part = np.full(PART // itemsize, v.dtype.type(value), v.dtype).view(np.uint8)
            for start in range(0, v.size * itemsize, part.size):
                storage_of(v).write_part(block, start, part[: v.size * itemsize - start])

    def _publish(self, variables: list[Variable]) -> None:
        for storage in dict.fromkeys(map(storage_of, variables)):
            storage.publish(self._call, [state_of(v).block for v in variables if storage_of(v) is storage])


def _all_values(call: str, v: Variable) -> np.ndarray[Any, Any]:
    """All replicas' values of an ON_READ variable, of shape `(replicas, ...)`, in host memory. Collective."""
    state = state_of(v)
    with state.group.on_stream():
        return _gpu.to_host(state.group.communicator.all_gather(call, [state.block.view[np.newaxis]], 0)[0])


def _opened(call: str, path: str, communicator: Communicator) -> _file.CheckpointFile:
    try:
        return _file.CheckpointFile(path, communicator.work)
    except OSError as error:
        raise _told(call, path, error, "nothing was changed; correct this, and restore again") from error
    except ValueError as error:
        raise ValueError(f"{call}: {error}. Nothing was changed; pass another file") from error


def _checked_fit(
    call: str, path: str, contents: Contents, entries: dict[str, _file.Entry], facts: dict[str, Any], partial: bool
) -> Fit:
    try:
        fit = contents.fit(entries, facts)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{call}: what {path} says of its objects makes no sense: {error!r}; pass another file"
        ) from error
    problems = list(fit.problems)
    if not partial:
        if fit.missing:
            problems.append(f"missing in the file: {listed(fit.missing)}")
        if fit.left_over:
            problems.append(f"left over in the file: {listed(fit.left_over)}")
    if problems:
        lines = "".join(f"\n  {problem}" for problem in problems[:12])
        more = f"\n  and {len(problems) - 12} more" if len(problems) > 12 else ""
        hint = "" if fit.problems else "\nrestore(path, partial=True) takes what both have."
        raise ValueError(
            f"{call}: {path} does not fit the objects. Nothing was changed; pass objects like those that were saved."
            f"{lines}{more}{hint}"
        )
    return fit


def _told(call: str, path: str, error: OSError, consequence: str) -> OSError:
    """The error, of the same class, in our words."""
    text = f"{call} of {path}: {error.strerror or error}; {consequence}"
    return OSError(error.errno, text) if error.errno is not None else OSError(text)


def _checked_path(call: str, path: Any) -> str:
    path = os.fspath(path)
    if not isinstance(path, str) or not os.path.basename(path):
        raise TypeError(f"{call}: path is {path!r}; it must be the name of a file")
    return path


def _signature(
    call: str, path: str, option: str, root: int, contents: Contents, entries: dict[str, _file.Entry]
) -> CallSignature:
    """What the ranks must agree on: the file, who writes or reads it, the objects and their arrays."""
    arrays = [f"{name} ({entry.dtype} of shape {entry.shape})" for name, entry in sorted(entries.items())]
    others = [name for name in contents.names if name not in entries]
    return new_signature(call, path, option, f"by rank {root}", Listed((*arrays, *others)))
