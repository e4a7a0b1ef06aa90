"""The data that an optimizer keeps between steps: slots, and the plans of its updates."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from hpcstrat._core.call_name import call_named
from hpcstrat._memory.blocks import Block
from hpcstrat._replicas.group import ReplicaGroup
from hpcstrat._storage.plan import Plan
from hpcstrat._variable.variable import Variable, state_of

_MOST_PLANS = 16  # each for a subset of the variables; a program may draw its subsets at random


@final
class OptimizerState:
    """The steps done, the slots of the variables seen, and the plans of their updates.

    It has no reference to the optimizer, so the slots' memory is freed as soon as the program drops
    the optimizer. Its methods take the optimizer, for its name and its `slots`.

    Attributes:
        iterations: the number of steps done.
        slots: the slots of each variable.
        plans: the plans of updates, each by its group and its variables.
    """

    __slots__ = ("iterations", "plans", "slots")

    def __init__(self) -> None:
        self.iterations: int = 0
        self.slots: dict[Variable, tuple[Block, ...]] = {}
        self.plans: dict[tuple[ReplicaGroup | Variable, ...], Plan] = {}

    def variables(self) -> list[Variable]:
        """The variables seen, in the order in which they were made: the same on all ranks."""
        return sorted(self.slots, key=_number_of)

    def make_slots(self, optimizer: Any, variables: Sequence[Variable]) -> None:
        """Makes the slots of variables that have none yet. Collective."""
        missing = [v for v in variables if v not in self.slots]
        for group in dict.fromkeys(state_of(v).group for v in missing):
            new = sorted([v for v in missing if state_of(v).group is group], key=_number_of)
            made: list[list[Block]] = [[] for _ in new]
            # Kind by kind, in the order of the variables: so each kind is contiguous in memory, as
            # the variables are.
            for kind, value in optimizer.slots.items():
                for v, slots in zip(new, made, strict=True):
                    with call_named(f"{optimizer.name}: {kind} of {v.name!r}"):
                        slots.append(group.storage.create_slot(state_of(v).block, value))
            self.slots |= zip(new, map(tuple, made), strict=True)

    def plan_of(self, optimizer: Any, group: ReplicaGroup, variables: Sequence[Variable]) -> Plan:
        """The plan for these variables; without buffers, only the newest few plans are kept."""
        wanted = (group, *variables)
        if wanted not in self.plans:
            self.make_slots(optimizer, variables)
            plan = group.storage.plan(
                [state_of(v).block for v in variables], [self.slots[v] for v in variables]
            )
            droppable = [other for other, old in self.plans.items() if old.buffers is None]
            for other in droppable[: 1 - _MOST_PLANS]:
                del self.plans[other]
            self.plans[wanted] = plan
        return self.plans[wanted]


state_of_optimizer: Callable[[Any], OptimizerState] = operator.attrgetter("_state")
"""What an optimizer keeps from step to step."""


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


def list_variables(optimizer: Any, rate: float) -> list[OptimizerVariable]:
    """The number of steps, the learning rate, and the slots of all variables, kind by kind."""
    state, name = state_of_optimizer(optimizer), optimizer.name
    numbers = [("iterations", np.int64(state.iterations)), ("learning_rate", np.float64(rate))]
    scalars = [OptimizerVariable(f"{name}/{number}", (), n.dtype, n.copy) for number, n in numbers]
    pairs = [(v, state.slots[v]) for v in state.variables()]
    return scalars + [
        OptimizerVariable(
            f"{name}/{kind}/{v.name}", v.shape, v.dtype, functools.partial(_read, v, blocks[i])
        )
        for i, kind in enumerate(optimizer.slots)
        for v, blocks in pairs
    ]


def _read(variable: Variable, block: Block) -> np.ndarray[Any, Any]:
    group = state_of(variable).group
    value = None
    with group.communicator.raise_together():
        if group.communicator.rank == group.root:
            parts = [part.copy() for part in group.storage.parts(block)]
            joined = np.concatenate([np.empty(0, np.uint8), *parts])
            value = joined.view(variable.dtype).reshape(variable.shape)
    return group.communicator.broadcast_obj(value, group.root)
