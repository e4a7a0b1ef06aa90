"""Restoring: the file is checked, then compared with the objects; only then do these change.

Of ON_READ variables a file has the values of all replicas, and any number of replicas restores it.
A new aggregation is added to `_on_read_problem` and `own_value`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcstrat._agreement.records import signature_of
from hpcstrat._core.atomic_file import explaining
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import Bytes
from hpcstrat._memory.blocks import Block
from hpcstrat._memory.intervals import ByteRange
from hpcstrat._storage.base import Storage
from hpcstrat._storage.parts import PART, flat, writer_of
from hpcstrat._transports.connection import connect
from hpcstrat._transports.reduction import accumulator
from hpcstrat._variable.options import VariableAggregation
from hpcstrat._variable.variable import Variable, state_of
from hpcstrat._variable.writing import RULES
from hpcstrat.checkpoint._format import CheckpointFile, Entry
from hpcstrat.checkpoint._objects import (
    CheckpointObjects,
    Slot,
    agree,
    entry_of,
    require_cross_replica,
    slot_name,
)
from hpcstrat.checkpoint._saving import finish_background
from hpcstrat.data._iterators import Position
from hpcstrat.optimizers._optimizer import Optimizer
from hpcstrat.optimizers._state import state_of_optimizer

_MOST_NAMES = 8  # in a message
_MOST_PROBLEMS = 12


class Restored(NamedTuple):
    """What `Checkpoint.restore` did not restore; both are empty unless `partial=True`.

    Attributes:
        missing: the names of objects that are not in the file and so are unchanged.
        left_over: the names in the file that are not among the objects.
    """

    missing: tuple[str, ...]
    left_over: tuple[str, ...]


def restore_from(
    path: str, objects: CheckpointObjects, partial: bool = False
) -> tuple[Restored, int | None]:
    """What `Checkpoint.restore` does; also returns the number of the step. Collective."""
    finish_background()  # it may write this very file
    communicator, file = connect(), None
    require_cross_replica(objects)
    root = agree(objects, objects.entries(objects.slots()), path, f"partial={bool(partial)}")
    try:
        with communicator.raise_together():
            if communicator.rank == root:
                file = _open(path)
            header = None if file is None else (file.entries, file.metadata, file.step)
            # The header alone tells whether a file fits, so every rank can check its own objects
            # before anything changes.
            entries, metadata, step = communicator.broadcast_obj(header, root)
        with communicator.raise_together():
            common, restored = _compare(path, objects, entries, metadata, partial)
        try:
            _set(objects, common, entries, metadata, _Source(root, file))
        except BaseException as error:
            # Some variables may be restored and some not, perhaps on one rank only (Ctrl-C). Such a
            # mixture is useless, so reading them raises until the program makes them again.
            for v in (*objects.variables.values(), *objects.on_read.values()):
                state_of(v).storage.mark_interrupted(error, [state_of(v).block])
            raise
    finally:
        if file is not None:
            file.close()
    return restored, step


def _open(path: str) -> CheckpointFile:
    """Opens the file for reading; its errors name the call."""
    try:
        with explaining(path, "nothing was changed; correct this, and restore again"):
            return CheckpointFile(path, connect().work)
    except ValueError as error:
        raise ValueError(
            f"{current_call()}: {error}. Nothing was changed; pass another file"
        ) from None


# ---- setting the objects


class _Source(NamedTuple):
    """The file, open on rank `root` only."""

    root: int
    file: CheckpointFile | None

    def parts(self, name: str, nbytes: int, to_all: bool) -> Iterator[tuple[int, Bytes | None]]:
        """The bytes of an array, part by part, each after its place. Collective.

        So a model that fills the memory can be restored. An error in reading is raised on all
        ranks.

        Args:
            name: the array's.
            nbytes: its bytes.
            to_all: whether all ranks get the parts, each valid until the next; else the root alone,
                and the others `None`.
        """
        communicator = connect()
        parts = iter(()) if self.file is None else self.file.parts(name)
        for place in ByteRange(0, nbytes).split(PART):
            with communicator.raise_together():
                part = None
                if self.file is not None:
                    what = "some objects are restored and some are not; restore them again"
                    with explaining(self.file.path, what):
                        part = next(parts)
                if to_all:
                    own = {} if part is None else {"nbytes": place.size, "write": writer_of(part)}
                    signature = signature_of(current_call(), f"{name} from byte {place.start}")
                    part = communicator.exchange(signature, **own)[self.root][: place.size]
            yield place.start, part


def _set(
    objects: CheckpointObjects,
    common: frozenset[str],
    entries: Mapping[str, Entry],
    metadata: Mapping[str, Any],
    source: _Source,
) -> None:
    """Sets the objects that have a name in `common` to the contents of the file. Collective."""
    for name, optimizer in objects.optimizers.items():
        if name in common:  # first, since it may fail for lack of memory
            _make_slots(objects, common, name, optimizer)
    slots = objects.slots()
    restored: dict[Storage, list[Block]] = {}
    for name, (v, block) in sorted(objects.blocks(slots).items()):
        if name in common:
            _load(source, name, v, block)
            if name in objects.variables:  # slots are read by the ranks that have written them
                restored.setdefault(state_of(v).storage, []).append(block)
        elif name in slots and slots[name].optimizer in common:
            _reset(slots[name])
    for name, v in objects.on_read.items():
        if name in common:
            _load_on_read(source, name, v, entries[name])
    for storage, blocks in restored.items():
        if storage.copies == 1:
            storage.publish(blocks)
    for name, optimizer in objects.optimizers.items():
        if name in common:
            state_of_optimizer(optimizer).iterations = int(metadata[name]["iterations"])
    for name, data in objects.positions.items():
        if name in common:
            data._seek(_position_of(metadata[name]))
    connect().exchange(signature_of(f"{current_call()}: restored"))


def _make_slots(
    objects: CheckpointObjects, common: frozenset[str], name: str, optimizer: Optimizer
) -> None:
    """Makes the slots that the file has: a new optimizer has none before its first step."""
    with_slots = [
        v
        for of, v in objects.variables.items()
        if optimizer.slots
        and common.issuperset(slot_name(name, slot, of) for slot in optimizer.slots)
    ]
    state_of_optimizer(optimizer).make_slots(optimizer, with_slots)


def _load(source: _Source, name: str, v: Variable, block: Block) -> None:
    """Reads an array of the file into a block, on the root or on every rank that has a copy."""
    # If there are several copies, all ranks get every part. The root writes a single one, which is
    # published at the end.
    storage = state_of(v).storage
    to_all = storage.copies > 1 or storage.communicator.size < connect().size
    block.checksum = None  # also on ranks that only see what another one writes
    for start, part in source.parts(name, v.size * v.dtype.itemsize, to_all):
        if part is not None and (storage.writes_here or not to_all):
            storage.write_part(block, start, part)


def _load_on_read(source: _Source, name: str, v: Variable, entry: Entry) -> None:
    values = np.empty(entry.shape, v.dtype)
    for start, part in source.parts(name, entry.nbytes, to_all=True):
        assert part is not None
        flat(values)[start : start + part.size] = part
    state_of(v).storage.write(state_of(v).block, own_value(v, values), RULES["assign"])


@np.errstate(all="ignore")
def own_value(v: Variable, values: np.ndarray[Any, Any]) -> Any:
    """This replica's value, of those that n replicas have saved as `(n, ...)`.

    With n replicas again, each gets its own value. With another number, reading the variable must
    still return the same: for a SUM variable the first replica gets the sum and the others zeros,
    because dividing the sum would round; for a MEAN variable all get the mean; otherwise all get
    the first value.
    """
    communicator = state_of(v).group.communicator
    if len(values) == communicator.size:
        return values[communicator.rank]
    if v.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return values[0]
    add = functools.partial(np.add, dtype=accumulator(v.dtype))  # as a read of the variable sums
    total = functools.reduce(add, values)
    if v.aggregation is VariableAggregation.MEAN:
        return (total / len(values)).astype(v.dtype)
    if v.aggregation is VariableAggregation.SUM:
        return total.astype(v.dtype) if communicator.rank == 0 else np.zeros(v.shape, v.dtype)
    raise NotImplementedError(
        f"Checkpoint: values of aggregation {v.aggregation.name} for another number of replicas"
    )


def _reset(slot: Slot) -> None:
    """Fills a slot that is not in the file because no step had updated its variable."""
    v, storage = slot.variable, state_of(slot.variable).storage
    if not storage.writes_here:
        return
    itemsize = v.dtype.itemsize
    # In parts, so that a slot as large as the model needs no second copy of it.
    part = np.full(PART // itemsize, v.dtype.type(slot.initial), v.dtype).view(np.uint8)
    for place in ByteRange(0, v.size * itemsize).split(part.size):
        storage.write_part(slot.block, place.start, part[: place.size])


# ---- comparing a file with the objects


def _compare(
    path: str,
    objects: CheckpointObjects,
    entries: Mapping[str, Entry],
    metadata: Mapping[str, Any],
    partial: bool,
) -> tuple[frozenset[str], Restored]:
    """Compares the objects with what a file holds.

    Args:
        path: the file's name, for the message.
        objects: the program's objects.
        entries: the file's arrays.
        metadata: what the file has in addition to them.
        partial: whether names may be missing or left over.

    Returns:
        The names of arrays and objects that both have, and the other names.

    Raises:
        ValueError: they do not fit.
    """
    arrays = _possible_slots(objects) | objects.variables
    in_file, known = entries.keys() | metadata.keys(), objects.kinds.keys() | arrays.keys()
    common = frozenset(in_file & known)
    missing = tuple(sorted(objects.kinds.keys() - in_file))
    left_over = tuple(sorted(in_file - known))
    try:
        found = [
            _problem(name, objects, arrays, entries.get(name), metadata.get(name, {}))
            for name in sorted(common)
        ]
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{current_call()}: the description of the objects in {path} makes no sense: "
            f"{error!r}; pass another file"
        ) from error
    problems = [problem for problem in found if problem is not None]
    hint = "" if problems else "\nrestore(path, partial=True) restores what both have."
    if missing and not partial:
        problems.append(f"missing in the file: {_first(missing, _MOST_NAMES)}")
    if left_over and not partial:
        problems.append(f"left over in the file: {_first(left_over, _MOST_NAMES)}")
    if problems:
        listed = _first(problems, _MOST_PROBLEMS, "\n  ")
        raise ValueError(
            f"{current_call()}: {path} does not fit the objects. Nothing was changed; pass objects "
            f"like those that were saved.\n  {listed}{hint}"
        )
    return common, Restored(missing, left_over)


def _position_of(metadata: Mapping[str, Any]) -> Position:
    """The saved position.

    Raises:
        ValueError: it has a number that is not a count.
    """
    shuffles = tuple([(_count(seed), _count(number)) for seed, number in metadata["shuffles"]])
    taken = None if metadata["taken"] is None else _count(metadata["taken"])
    by_worker = [
        _position_of(dict(zip(Position._fields, values, strict=True)))
        for values in metadata["by_worker"]
    ]
    return Position(
        str(metadata["pipeline"]),
        shuffles,
        taken,
        _count(metadata["size"]),
        metadata["loader"],
        tuple(by_worker),
    )


def _possible_slots(objects: CheckpointObjects) -> dict[str, Variable]:
    """The variable of each slot that could exist: before the first step usually none does."""
    return {
        slot_name(name, slot, of): v
        for name, optimizer in objects.optimizers.items()
        for slot in optimizer.slots
        for of, v in objects.variables.items()
    }


def _problem(
    name: str,
    objects: CheckpointObjects,
    arrays: Mapping[str, Variable],
    entry: Entry | None,
    saved: Mapping[str, Any],
) -> str | None:
    """How a file's array `entry` and metadata `saved` differ from the object with this name."""
    kind, saved_kind = objects.kinds.get(name), saved.get("kind")
    if kind != saved_kind:
        return f"{name} is {_kind_text(kind)} here and {_kind_text(saved_kind)} in the file"
    if name in objects.optimizers:
        return _optimizer_problem(name, objects.optimizers[name], saved)
    if name in objects.positions:
        problem = objects.positions[name]._incompatibility(_position_of(saved))
        return None if problem is None else f"{name}: {problem}"
    if name in objects.on_read:
        return _on_read_problem(name, objects.on_read[name], entry)
    own = entry_of(arrays[name])
    return None if entry == own else f"{name} is {own} here and {entry} in the file"


def _optimizer_problem(name: str, optimizer: Optimizer, saved: Mapping[str, Any]) -> str | None:
    slots, saved_slots = sorted(optimizer.slots), sorted(saved["slots"])
    _count(saved["iterations"])
    if slots == saved_slots:
        return None
    return (
        f"{name} has the slots {slots} here and {saved_slots} in the file; make the optimizer with "
        "the same arguments"
    )


def _on_read_problem(name: str, v: Variable, entry: Entry | None) -> str | None:
    """Why these replicas cannot restore an array of a file; `None` if they can."""
    own = entry_of(v)
    if (
        entry is None
        or not any(entry.shape[:1])
        or entry != own._replace(shape=entry.shape[:1] + own.shape)
    ):
        return f"{name} is {own} on each replica here and {entry} for all replicas in the file"
    replicas = state_of(v).group.communicator.size
    integer_mean = v.aggregation is VariableAggregation.MEAN and v.dtype.kind not in "fcV"
    if entry.shape[0] != replicas and (v.aggregation is VariableAggregation.NONE or integer_mean):
        return (
            f"{name} has the values of {entry.shape[0]} replicas in the file, which its "
            f"aggregation, {v.aggregation.name} of {v.dtype.name}, cannot convert to {replicas}"
        )
    return None


def _count(number: Any) -> int:
    """A count from a file, after a check: any program may have written the file."""
    if type(number) is not int or not 0 <= number < 2**64:
        raise ValueError(f"{number!r} is not a count")
    return number


def _kind_text(kind: str | None) -> str:
    return "a variable" if kind is None else kind


def _first(texts: Sequence[str], most: int, separator: str = ", ") -> str:
    more = [f"and {len(texts) - most} more"] if len(texts) > most else []
    return separator.join([*texts[:most], *more])
