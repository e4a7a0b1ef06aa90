"""The data that an optimizer keeps between steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from hpcstrat._core.call_name import call_named
from hpcstrat._core.types import Bytes
from hpcstrat._memory.allocator import Block, Cuts
from hpcstrat._replicas.group import ReplicaGroup
from hpcstrat._storage.base import Storage
from hpcstrat._storage.plan import Plan
from hpcstrat._variable.variable import Variable, state_of
from hpcstrat.optimizers._steps import Accumulation

_MOST_PLANS = 16  # each for a subset of the variables; a program may draw its subsets at random


@final
class OptimizerState:
    """The steps done, the slots of the variables seen, and the plans of their updates.

    It has no reference to the optimizer, so the slots' memory is freed as soon as the program drops
    the optimizer. Its methods take the optimizer's name and its `slots`.

    Attributes:
        iterations: the number of steps done.
        slots: the variables and their slots, by the variable's id; keeps the variables alive.
        plans: the plans of updates, by `plan_key`.
        accumulator: adds up gradients if variables are updated once every N calls; else `None`.
        marked: the plan with marked gradient buffers in this step, and its group; else `None`.
    """

    __slots__ = ("accumulator", "iterations", "marked", "plans", "slots")

    def __init__(self, accumulation_steps: int | None) -> None:
        self.iterations: int = 0
        self.accumulator: Accumulation | None = (
            None if accumulation_steps is None else Accumulation(int(accumulation_steps))
        )
        self.slots: dict[int, tuple[Variable, tuple[Block, ...]]] = {}
        self.plans: dict[tuple[int, ...], Plan] = {}
        self.marked: tuple[ReplicaGroup, Plan] | None = None

    def variables(self) -> list[Variable]:
        """The variables seen, in the order in which they were made: the same on all ranks."""
        seen = [v for v, _ in self.slots.values()]
        if self.accumulator is not None:
            seen += [v for v in self.accumulator.variables() if id(v) not in self.slots]
        return sorted(seen, key=_number_of)

    def make_slots(
        self, variables: Sequence[Variable], name: str, initial: Mapping[str, float | None]
    ) -> None:
        """Makes the slots of variables that have none yet. Collective."""
        missing = [v for v in variables if id(v) not in self.slots]
        for group in dict.fromkeys(state_of(v).group for v in missing):
            new = sorted([v for v in missing if state_of(v).group is group], key=_number_of)
            cuts = group.storage.split([state_of(v).block for v in new])
            made: list[list[Block]] = [[] for _ in new]
            # Kind by kind, in the order of the variables: so each kind is contiguous in memory, as
            # the variables are.
            for kind, value in initial.items():
                for v, of, slots in zip(new, cuts, made, strict=True):
                    slots.append(_slot(group, f"{name}: {kind}", v, value, of))
            self.slots |= {id(v): (v, tuple(slots)) for v, slots in zip(new, made, strict=True)}

    def copy_from(
        self,
        other: OptimizerState,
        pairs: Sequence[tuple[Variable, Variable]],
        name: str,
        initial: Mapping[str, float | None],
    ) -> None:
        """Copies the slots of another state, and the gradients it has added up. Collective.

        `pairs` are its variables, each with the copy that belongs to this state.
        """
        if other.accumulator is not None:
            self.accumulator = other.accumulator.copy_for({id(old): new for old, new in pairs})
        updated = [(old, new) for old, new in pairs if id(old) in other.slots]
        self.make_slots([new for _, new in updated], name, initial)
        for old, new in updated:
            group = state_of(new).group
            sources, targets = other.slots[id(old)][1], self.slots[id(new)][1]
            if group.updates_here:
                for source, target in zip(sources, targets, strict=True):
                    copy_block(group.storage, source, target)

    def plan_of(
        self,
        group: ReplicaGroup,
        variables: Sequence[Variable],
        name: str,
        initial: Mapping[str, float | None],
    ) -> Plan:
        """The plan for these variables; without buffers, only the newest few plans are kept."""
        wanted = plan_key(group, variables)
        if wanted not in self.plans:
            self.make_slots(variables, name, initial)
            plan = group.storage.plan(
                [state_of(v).block for v in variables], [self.slots[id(v)][1] for v in variables]
            )
            droppable = [other for other, old in self.plans.items() if old.buffers is None]
            for other in droppable[: 1 - _MOST_PLANS]:
                del self.plans[other]
            self.plans[wanted] = plan
        return self.plans[wanted]


def plan_key(group: ReplicaGroup, variables: Sequence[Variable]) -> tuple[int, ...]:
    """The key of a plan: ids of objects that its optimizer keeps alive, so no id is reused."""
    return (id(group), *[id(v) for v in variables])


def copy_block(storage: Storage, source: Block, target: Block) -> None:
    """Copies values of a variable or slot, on a rank that updates it; on all if it is split."""
    start = 0
    for part in storage.local.parts(source) if source.cuts is None else storage.all_parts(source):
        storage.local.write_part(target, start, part)
        start += part.size


def _slot(
    group: ReplicaGroup, kind: str, variable: Variable, value: float | None, cuts: Cuts | None
) -> Block:
    own = state_of(variable).block
    with call_named(f"{kind} of {variable.name!r}"):
        block = group.storage.create_slot(own, 0.0 if value is None else value, cuts)
    if value is None and group.updates_here:
        copy_block(group.storage, own, block)
    return block


def _number_of(variable: Variable) -> int:
    return state_of(variable).block.number


# ---- inspection


@final
@dataclass(eq=False, repr=False)
class OptimizerVariable:
    """An array or a number that an optimizer keeps, for inspection.

    Attributes:
        name: such as `Adam/m/w` for the slot `m` of the variable `w`.
        shape: the variable's shape.
        dtype: the variable's dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    _read: Callable[[], np.ndarray[Any, Any]]

    def __repr__(self) -> str:
        return f"OptimizerVariable({self.name!r}, shape={self.shape}, dtype={self.dtype.name})"

    def numpy(self) -> Any:
        """A copy on the host, the same on every rank. Collective: all ranks call this."""
        with call_named(f"{self.name}.numpy"):
            return self._read()


def list_variables(
    state: OptimizerState, name: str, rate: float, kinds: Sequence[str]
) -> list[OptimizerVariable]:
    """The number of steps, the learning rate, and the slots of all variables, kind by kind."""
    numbers = [("iterations", np.int64(state.iterations)), ("learning_rate", np.float64(rate))]
    scalars = [OptimizerVariable(f"{name}/{number}", (), n.dtype, n.copy) for number, n in numbers]
    pairs = [state.slots[id(v)] for v in state.variables() if id(v) in state.slots]
    return scalars + [
        OptimizerVariable(
            f"{name}/{kind}/{v.name}", v.shape, v.dtype, functools.partial(_read, v, blocks[i])
        )
        for i, kind in enumerate(kinds)
        for v, blocks in pairs
    ]


def _read(variable: Variable, block: Block) -> np.ndarray[Any, Any]:
    group = state_of(variable).group
    value = None
    if block.cuts is not None:
        return _join(variable, group.storage.all_parts(block))
    with group.communicator.raise_together():
        if group.communicator.rank == group.root:
            value = _join(variable, group.storage.local.parts(block))
    return group.communicator.broadcast_obj(value, group.root)


def _join(variable: Variable, parts: Iterable[Bytes]) -> np.ndarray[Any, Any]:
    joined = np.concatenate([np.empty(0, np.uint8), *[part.copy() for part in parts]])
    return joined.view(variable.dtype).reshape(variable.shape)
