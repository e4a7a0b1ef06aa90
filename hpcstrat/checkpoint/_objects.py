"""The objects of a checkpoint: what to save of each kind, and whether a file fits them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import optree

from hpcstrat._core import nests
from hpcstrat._core.call_name import current_call
from hpcstrat._memory.blocks import Block
from hpcstrat._replicas import contexts
from hpcstrat._replicas.group import ReplicaGroup, UpdatesOn, default_group
from hpcstrat._storage.base import Storage
from hpcstrat._variable.options import VariableAggregation
from hpcstrat._variable.variable import Variable, state_of
from hpcstrat.checkpoint._safetensors import Entry
from hpcstrat.data._pass import Position, Resumable
from hpcstrat.metrics import Metric
from hpcstrat.optimizers._optimizer import Optimizer, state_of_optimizer

_POSITION = "position in data"
_ON_READ = "ON_READ variable"


class Slot(NamedTuple):
    """A slot of an optimizer.

    Attributes:
        variable: its variable.
        block: its memory.
        initial: its value before the first step; `None` for the variable's.
    """

    variable: Variable
    block: Block
    initial: float | None


class Compatibility(NamedTuple):
    """How well a file fits a program's objects.

    Attributes:
        common: names of arrays and objects that both have.
        missing: names that the file lacks.
        left_over: names that the program lacks.
        problems: for each name with different contents, a line that says how they differ.
    """

    common: frozenset[str]
    missing: tuple[str, ...]
    left_over: tuple[str, ...]
    problems: tuple[str, ...]


class CheckpointObjects:
    """The objects of a checkpoint, by name: the path to each, as in `model/layers/0/w`.

    Args:
        objects: nests of variables, optimizers, metrics, datasets and their iterators, by name.

    Attributes:
        variables: the ordinary variables.
        on_read: the variables with one value per replica; a metric's has the metric's name.
        optimizers: the optimizers.
        positions: the datasets and iterators.

    Raises:
        TypeError: an object is of another kind.
        ValueError: two objects have the same name.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self.variables: dict[str, Variable] = {}
        self.on_read: dict[str, Variable] = {}
        self.optimizers: dict[str, Optimizer] = {}
        self.positions: dict[str, Resumable] = {}
        self._kinds: dict[str, str] = {}  # of all objects except ordinary variables
        seen: set[int] = set()
        for name, leaf in _leaves(dict(objects)):
            if name in self._kinds or name in self.variables or name == "__metadata__":
                raise ValueError(
                    f"{current_call()}: two objects have the name {name!r}; rename one"
                )
            # Shared, such as the weights of two layers: saved once, under the first name.
            if id(leaf) in seen:
                continue
            seen.add(id(leaf))
            self._add(name, leaf)

    def _add(self, name: str, leaf: Any) -> None:
        if isinstance(leaf, Variable) and not state_of(leaf).is_on_read:
            self.variables[name] = leaf
            return
        if isinstance(leaf, Variable):
            self.on_read[name] = leaf
            self._kinds[name] = _ON_READ
        elif isinstance(leaf, Metric):
            # A metric's totals are one ON_READ variable, and saved as such.
            self.on_read[name] = leaf.totals
            self._kinds[name] = type(leaf).__name__
        elif isinstance(leaf, Optimizer):
            self.optimizers[name] = leaf
            self._kinds[name] = type(leaf).__name__
        elif isinstance(leaf, Resumable):
            self.positions[name] = leaf
            self._kinds[name] = _POSITION
        else:
            raise TypeError(
                f"{current_call()}: {name} is {_shorten(repr(leaf))}, which cannot be saved; "
                "pass variables, optimizers, metrics, datasets, their iterators, and dicts, lists "
                "and tuples of these. To save a number, put it into a variable: "
                "Variable(0, dtype=np.int64); to save an object, pass its attributes: "
                'Checkpoint(model={"w": model.w, "b": model.b})'
            )

    @property
    def names(self) -> list[str]:
        """The names of all objects, in order."""
        return sorted(self.variables.keys() | self._kinds.keys())

    # ---- saving

    def slots(self) -> dict[str, Slot]:
        """The slots that optimizers have now, by name: `optimizer/momentum/model/w`.

        Raises:
            ValueError: a slot's variable is not among the objects, or an object has its name.
        """
        names = {id(v): name for name, v in self.variables.items()}
        slots: dict[str, Slot] = {}
        for name, optimizer in self.optimizers.items():
            for v, blocks in state_of_optimizer(optimizer).slots.values():
                if id(v) not in names:
                    raise ValueError(
                        f"{current_call()}: {name} has slots of the variable {v.name!r}, shape "
                        f"{v.shape}, which is not among the objects; pass it too: "
                        f"Checkpoint({name}=..., variable=...)"
                    )
                for slot, block in zip(optimizer.all_slots, blocks, strict=True):
                    slots[f"{name}/{slot}/{names[id(v)]}"] = Slot(
                        v, block, optimizer.all_slots[slot]
                    )
        if taken := slots.keys() & (self.variables.keys() | self._kinds.keys()):
            raise ValueError(
                f"{current_call()}: an object and a slot have the name {min(taken)!r}; "
                "rename the object"
            )
        return slots

    def entries(self) -> dict[str, Entry]:
        """The arrays to save."""
        entries = {name: _entry(v) for name, v in self.variables.items()}
        entries |= {name: _entry(slot.variable) for name, slot in self.slots().items()}
        for name, v in self.on_read.items():
            entries[name] = _entry(v, state_of(v).group.communicator.size)
        return entries

    def metadata(self) -> dict[str, dict[str, Any]]:
        """What to save in addition to arrays, by object: its kind and its counts.

        Ordinary variables have no entry.
        """
        metadata: dict[str, dict[str, Any]] = {
            name: {"kind": kind} for name, kind in self._kinds.items()
        }
        for name, optimizer in self.optimizers.items():
            accumulator = state_of_optimizer(optimizer).accumulator
            if accumulator is not None and accumulator.calls:
                raise ValueError(
                    f"{current_call()}: {name} has the gradients of {accumulator.calls} of "
                    f"{accumulator.steps} calls, each replica its own, which no checkpoint holds; "
                    "save after the call that changes the variables"
                )
            slots = list(optimizer.all_slots)
            metadata[name] |= {"iterations": optimizer.iterations, "slots": slots}
        for name, resumable in self.positions.items():
            metadata[name] |= resumable._position()._asdict()
        return metadata

    # ---- restoring

    def compatibility(
        self, entries: Mapping[str, Entry], metadata: Mapping[str, Any]
    ) -> Compatibility:
        """Compares the objects with what a file holds."""
        # All slots that the optimizers could have: usually none exists yet, before the first step.
        slots = {
            f"{name}/{slot}/{of}": v
            for name, optimizer in self.optimizers.items()
            for slot in optimizer.all_slots
            for of, v in self.variables.items()
        }
        needed = self.variables.keys() | self._kinds.keys()
        in_file = entries.keys() | metadata.keys()
        common = frozenset(in_file & (needed | slots.keys()))
        problems: list[str] = []
        for name in sorted(common):
            kind, saved = self._kinds.get(name), metadata.get(name, {}).get("kind")
            if kind != saved:
                problems.append(
                    f"{name} is {_kind_text(kind)} here and {_kind_text(saved)} in the file"
                )
            elif name in self.optimizers:
                problems += _optimizer_problems(name, self.optimizers[name], metadata[name])
            elif name in self.positions:
                why = self.positions[name]._incompatibility(position_of(metadata[name]))
                problems += [] if why is None else [f"{name}: {why}"]
            elif name in self.on_read:
                problems += _on_read_problems(name, self.on_read[name], entries.get(name))
            elif entries.get(name) != (
                own := _entry(self.variables[name] if name in self.variables else slots[name])
            ):
                problems.append(f"{name} is {own} here and {entries.get(name)} in the file")
        missing = tuple(sorted(needed - in_file))
        left_over = tuple(sorted(in_file - needed - slots.keys()))
        return Compatibility(common, missing, left_over, tuple(problems))

    # ---- ranks

    def groups(self) -> list[ReplicaGroup]:
        """The groups of replicas that the variables belong to, in the same order on all ranks."""
        # Sorted, because all ranks must use the groups in the same order, and dicts' may differ.
        everything = [*sorted(self.variables.items()), *sorted(self.on_read.items())]
        return list(dict.fromkeys(state_of(v).group for _, v in everything))

    def parameter_rank(self) -> int:
        """The rank that writes, because it has all optimizers' slots.

        Raises:
            ValueError: the slots are on different ranks.
        """
        roots = {group.root for group in self.groups() if group.updates_on is UpdatesOn.ROOT}
        if len(roots) > 1:
            raise ValueError(
                f"{current_call()}: the objects belong to strategies whose variables live on the "
                f"ranks {sorted(roots)}, but one rank writes the file; make a checkpoint for each "
                "strategy"
            )
        return roots.pop() if roots else 0

    def require_cross_replica(self) -> None:
        """Raises RuntimeError unless called outside replica functions and other scopes."""
        context = contexts.context()
        if isinstance(context, (contexts.InReplica, contexts.InUpdate)):
            raise RuntimeError(
                f"{current_call()} was called inside a replica function or an update; call it at "
                "the top level of the script, outside Strategy.run"
            )
        for group in self.groups():
            # Variables that were made outside every scope may be saved anywhere.
            if group is not default_group():
                contexts.require_cross_replica(group)


def storage_of(v: Variable) -> Storage:
    """The storage of an ordinary variable and its slots."""
    return state_of(v).group.storage


def position_of(metadata: Mapping[str, Any]) -> Position:
    """The saved position."""
    shuffles = tuple([(_count(seed), _count(number)) for seed, number in metadata["shuffles"]])
    return Position(
        str(metadata["pipeline"]),
        shuffles,
        None if metadata["taken"] is None else _count(metadata["taken"]),
    )


@np.errstate(all="ignore")
def own_share(v: Variable, values: np.ndarray[Any, Any]) -> Any:
    """This replica's share of an ON_READ variable's values, saved as `(n, ...)` by n replicas.

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
    total = functools.reduce(np.add, values)
    if v.aggregation is VariableAggregation.MEAN:
        return (total / len(values)).astype(v.dtype)
    if v.aggregation is VariableAggregation.SUM:
        return total if communicator.rank == 0 else np.zeros_like(total)
    raise NotImplementedError(
        f"Checkpoint: values of aggregation {v.aggregation.name} for another number of replicas"
    )


def list_names(names: Sequence[str], most: int = 8) -> str:
    """The first `most` names, and the number of those that are left out."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _leaves(objects: dict[str, Any]) -> list[tuple[str, Any]]:
    """Each object with the path to it, in the order of the paths."""
    leaves, structure = nests.flatten(objects)
    # Sorted by path: dicts may be filled in another order on another rank, or in the program that
    # restores.
    paths = ["/".join(map(str, path)) for path in optree.treespec_paths(structure)]
    return [(path, leaves[i]) for path, i in sorted(zip(paths, range(len(leaves)), strict=True))]


def _entry(v: Variable, replicas: int | None = None) -> Entry:
    shape = v.shape if replicas is None else (replicas, *v.shape)
    return Entry(v.dtype.name, v.dtype.itemsize, shape)


def _optimizer_problems(name: str, optimizer: Optimizer, metadata: Mapping[str, Any]) -> list[str]:
    slots, saved = sorted(optimizer.all_slots), sorted(metadata["slots"])
    _count(metadata["iterations"])
    if slots == saved:
        return []
    return [
        f"{name} has the slots {slots} here and {saved} in the file; make the optimizer with the "
        "same arguments"
    ]


def _on_read_problems(name: str, v: Variable, entry: Entry | None) -> list[str]:
    if (
        entry is None
        or (entry.dtype, entry.shape[1:]) != (v.dtype.name, v.shape)
        or not entry.shape[0]
    ):
        return [
            f"{name} is {_entry(v)} on each replica here and {entry} for all replicas in the file"
        ]
    replicas = state_of(v).group.communicator.size
    integer_mean = v.aggregation is VariableAggregation.MEAN and v.dtype.kind not in "fcV"
    if entry.shape[0] != replicas and (v.aggregation is VariableAggregation.NONE or integer_mean):
        return [
            f"{name} has the values of {entry.shape[0]} replicas in the file, which its "
            f"aggregation, {v.aggregation.name} of {v.dtype.name}, cannot convert to {replicas}"
        ]
    return []


def _count(number: Any) -> int:
    """A count from a file, after a check: any program may have written the file."""
    if type(number) is not int or not 0 <= number < 2**64:
        raise ValueError(f"{number!r} is not a count")
    return number


def _kind_text(kind: str | None) -> str:
    return "a variable" if kind is None else kind


def _shorten(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
