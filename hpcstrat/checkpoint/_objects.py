"""The objects of a checkpoint by name: what a file holds of each, and whether a file fits them.

Of ON_READ variables a file has the values of all replicas, and any number of replicas restores it.
A new aggregation is added to `_on_read_problem` and `own_share`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import optree

from hpcstrat._agreement.records import ManyValues, new_signature
from hpcstrat._core import gpu, nests
from hpcstrat._core.call_name import current_call
from hpcstrat._core.ranks_in_words import ranks_in_words
from hpcstrat._memory.blocks import Block
from hpcstrat._replicas import contexts
from hpcstrat._replicas.group import ReplicaGroup
from hpcstrat._storage.base import Storage
from hpcstrat._transports.connection import connect
from hpcstrat._transports.reduction import accumulator
from hpcstrat._variable.options import VariableAggregation
from hpcstrat._variable.variable import Variable, state_of
from hpcstrat.checkpoint._format import Entry
from hpcstrat.data._dataset import Dataset
from hpcstrat.data._distributed import DistributedDataset
from hpcstrat.data._iterators import DatasetIterator, Position
from hpcstrat.metrics import Metric
from hpcstrat.optimizers._optimizer import Optimizer
from hpcstrat.optimizers._state import state_of_optimizer


class Slot(NamedTuple):
    """A slot of an optimizer.

    Attributes:
        optimizer: the optimizer's name.
        variable: its variable.
        block: its memory.
        initial: its value before the first step.
    """

    optimizer: str
    variable: Variable
    block: Block
    initial: float


class CheckpointObjects:
    """The objects of a checkpoint, by name: the path to each, as in `model/layers/0/w`.

    All dicts are in the order of the names, which is the same on all ranks.

    Args:
        objects: nests of variables, optimizers, metrics, datasets and their iterators, by name.

    Attributes:
        kinds: the kind of each object, as it is saved; `None` for an ordinary variable.
        variables: the ordinary variables.
        on_read: the variables with one value per replica; a metric's has the metric's name.
        optimizers: the optimizers.
        positions: the datasets and iterators.

    Raises:
        TypeError: an object is of another kind.
        ValueError: two objects have the same name.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self.kinds: dict[str, str | None] = {}
        self.variables: dict[str, Variable] = {}
        self.on_read: dict[str, Variable] = {}
        self.optimizers: dict[str, Optimizer] = {}
        self.positions: dict[str, Dataset | DistributedDataset | DatasetIterator] = {}
        seen: set[int] = set()
        for name, leaf in _leaves(dict(objects)):
            if name in self.kinds or name == "__metadata__":
                raise ValueError(
                    f"{current_call()}: two objects have the name {name!r}; rename one"
                )
            # Shared, such as the weights of two layers: saved once, under the first name.
            if id(leaf) not in seen:
                seen.add(id(leaf))
                self.kinds[name] = self._add(name, leaf)

    def _add(self, name: str, leaf: Any) -> str | None:
        """Adds an object to the dict of its kind, and returns its kind."""
        if isinstance(leaf, Variable) and not state_of(leaf).is_on_read:
            self.variables[name] = leaf
            return None
        if isinstance(leaf, Variable):
            self.on_read[name] = leaf
            return "ON_READ variable"
        if isinstance(leaf, Metric):
            # A metric's totals are one ON_READ variable, and saved as such.
            self.on_read[name] = leaf.totals
            return type(leaf).__name__
        if isinstance(leaf, Optimizer):
            self.optimizers[name] = leaf
            return type(leaf).__name__
        if isinstance(leaf, (Dataset, DistributedDataset, DatasetIterator)):
            self.positions[name] = leaf
            return "position in data"
        raise TypeError(
            f"{current_call()}: {name} is {leaf!r:.80}, which cannot be saved; "
            "pass variables, optimizers, metrics, datasets, their iterators, and dicts, lists "
            "and tuples of these. To save a number, put it into a variable: "
            "Variable(0, dtype=np.int64); to save an object, pass its attributes: "
            'Checkpoint(model={"w": model.w, "b": model.b})'
        )

    def slots(self) -> dict[str, Slot]:
        """The slots that optimizers have now, by name.

        Raises:
            ValueError: a slot's variable is not among the objects, or an object has its name.
        """
        names = {id(v): name for name, v in self.variables.items()}
        slots: dict[str, Slot] = {}
        for name, optimizer in self.optimizers.items():
            for v, blocks in state_of_optimizer(optimizer).slots.items():
                if id(v) not in names:
                    raise ValueError(
                        f"{current_call()}: {name} has slots of the variable {v.name!r}, shape "
                        f"{v.shape}, which is not among the objects; pass it too: "
                        f"Checkpoint({name}=..., variable=...)"
                    )
                for (slot, initial), block in zip(optimizer.slots.items(), blocks, strict=True):
                    slots[slot_name(name, slot, names[id(v)])] = Slot(name, v, block, initial)
        if taken := slots.keys() & self.kinds.keys():
            raise ValueError(
                f"{current_call()}: an object and a slot have the name {min(taken)!r}; "
                "rename the object"
            )
        return slots

    def blocks(self, slots: Mapping[str, Slot]) -> dict[str, tuple[Variable, Block]]:
        """The memory of ordinary variables and of `slots`, after the variable it is for."""
        blocks = {name: (v, state_of(v).block) for name, v in self.variables.items()}
        return blocks | {name: (slot.variable, slot.block) for name, slot in slots.items()}

    def entries(self, slots: Mapping[str, Slot]) -> dict[str, Entry]:
        """The arrays to save; those of optimizers are `slots`."""
        entries = {name: entry_of(v) for name, (v, _) in self.blocks(slots).items()}
        for name, v in self.on_read.items():
            replicas = state_of(v).group.communicator.size
            entries[name] = entry_of(v)._replace(shape=(replicas, *v.shape))
        return entries

    def metadata(self) -> dict[str, dict[str, Any]]:
        """What to save in addition to arrays, by object: its kind and its counts.

        Ordinary variables have no entry.
        """
        metadata: dict[str, dict[str, Any]] = {
            name: {"kind": kind} for name, kind in self.kinds.items() if kind is not None
        }
        for name, optimizer in self.optimizers.items():
            slots = list(optimizer.slots)
            metadata[name] |= {"iterations": optimizer.iterations, "slots": slots}
        for name, data in self.positions.items():
            metadata[name] |= data._position()._asdict()
        return metadata


def slot_name(optimizer: str, slot: str, variable: str) -> str:
    """The name of a slot's array: `optimizer/momentum/model/w`."""
    return f"{optimizer}/{slot}/{variable}"


def entry_of(v: Variable) -> Entry:
    """The array of a variable, or of each of its slots."""
    return Entry(v.dtype.name, v.dtype.itemsize, v.shape)


def storage_of(v: Variable) -> Storage:
    """The storage of an ordinary variable and its slots."""
    return state_of(v).group.storage


def require_no_replica() -> None:
    """Raises RuntimeError if called inside a replica function."""
    if isinstance(contexts.current.get(), contexts.InReplica):
        raise RuntimeError(
            f"{current_call()} was called inside a replica function; call it at the top level of "
            "the script, outside Strategy.run"
        )


def require_cross_replica(objects: CheckpointObjects) -> None:
    """Raises RuntimeError unless called outside replica functions and other scopes."""
    require_no_replica()
    for group in _groups(objects):
        # Variables that were made outside every scope may be saved anywhere.
        if not group.is_default:
            contexts.require_cross_replica(group)


def parameter_rank(objects: CheckpointObjects) -> int:
    """The rank that makes the file, because it has all optimizers' slots.

    Raises:
        ValueError: the slots are on different ranks.
    """
    roots = {group.root for group in _groups(objects) if not group.storage.has_all_slots}
    if len(roots) > 1:
        raise ValueError(
            f"{current_call()}: the objects belong to strategies whose variables live on "
            f"{ranks_in_words(sorted(roots))}, but one rank writes the file; make a checkpoint "
            "for each strategy"
        )
    return roots.pop() if roots else 0


def agree(objects: CheckpointObjects, entries: Mapping[str, Entry], *where: str) -> int:
    """Checks that all ranks have the same objects and arrays; returns the parameter rank.

    Collective.

    Args:
        objects: the objects.
        entries: their arrays.
        where: file and options, which must be equal on all ranks too.

    Raises:
        ReplicaMismatchError: the ranks differ.
        ValueError: as `parameter_rank`.
    """
    root = parameter_rank(objects)
    arrays = [f"{name} ({entry})" for name, entry in sorted(entries.items())]
    others = [name for name in objects.kinds if name not in entries]
    names = ManyValues((*arrays, *others))
    # `new_signature`, because `signature_of` would keep the names of all arrays for a rare call.
    # All ranks of the program, not of a strategy: the objects may belong to several strategies.
    connect().exchange(new_signature(current_call(), *where, f"by rank {root}", names))
    return root


def _groups(objects: CheckpointObjects) -> list[ReplicaGroup]:
    """The groups of replicas that the variables belong to, in the same order on all ranks."""
    variables = [*objects.variables.values(), *objects.on_read.values()]
    return list(dict.fromkeys(state_of(v).group for v in variables))


def _leaves(objects: dict[str, Any]) -> list[tuple[str, Any]]:
    """Each object with the path to it, in the order of the paths."""
    leaves, structure = nests.flatten(objects)
    # Sorted by path: dicts may be filled in another order on another rank, or in the program that
    # restores.
    paths = ["/".join(map(str, path)) for path in optree.treespec_paths(structure)]
    return [(path, leaves[i]) for path, i in sorted(zip(paths, range(len(leaves)), strict=True))]


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


def require_compatible(
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


def position_of(metadata: Mapping[str, Any]) -> Position:
    """The saved position.

    Raises:
        ValueError: it has a number that is not a count.
    """
    shuffles = tuple([(_count(seed), _count(number)) for seed, number in metadata["shuffles"]])
    taken = None if metadata["taken"] is None else _count(metadata["taken"])
    by_worker = [
        position_of(dict(zip(Position._fields, values, strict=True)))
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


def all_values(v: Variable) -> np.ndarray[Any, Any]:
    """All replicas' values, of shape `(replicas, ...)`, in host memory. Collective."""
    state = state_of(v)
    with state.group.on_stream():
        return gpu.to_host(
            state.group.communicator.all_gather([state.block.view[np.newaxis]], 0)[0]
        )


@np.errstate(all="ignore")
def own_share(v: Variable, values: np.ndarray[Any, Any]) -> Any:
    """This replica's share of values that n replicas have saved as `(n, ...)`.

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
        problem = objects.positions[name]._incompatibility(position_of(saved))
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
        or (entry.dtype, entry.shape[1:]) != (own.dtype, own.shape)
        or not entry.shape[0]
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
