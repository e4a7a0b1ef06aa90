"""The objects of a checkpoint by name, and what a file holds of each."""

from __future__ import annotations

from collections.abc import Mapping
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
from hpcstrat._transports.connection import connect
from hpcstrat._variable.variable import Variable, state_of
from hpcstrat.checkpoint._format import Entry
from hpcstrat.data._dataset import Dataset
from hpcstrat.data._distributed import DistributedDataset
from hpcstrat.data._iterators import DatasetIterator
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
        """The ordinary variables and the variables of `slots`, each with the memory to save."""
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


def all_values(v: Variable) -> np.ndarray[Any, Any]:
    """All replicas' values, of shape `(replicas, ...)`, in host memory. Collective."""
    state = state_of(v)
    with state.group.on_stream():
        return gpu.to_host(
            state.group.communicator.all_gather([state.block.view[np.newaxis]], 0)[0]
        )


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
    """The rank that writes the file, because it has all optimizers' slots.

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
