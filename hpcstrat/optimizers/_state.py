"""OptimizerState: what an optimizer keeps from step to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

from hpcstrat._edge import call_named
from hpcstrat._group import ReplicaGroup
from hpcstrat._memory.blocks import Block
from hpcstrat._storage.plan import Plan
from hpcstrat._variables import Variable, state_of

_MOST_PLANS = 16  # each for a subset of the variables; a program may draw its subsets at random


@final
class OptimizerState:
    """The steps done, the slots of the variables seen, and the plans of their updates.

    It holds no optimizer, so that the memory of slots returns as soon as nobody holds the optimizer. Its methods take
    the optimizer's name and its `slots`.

    Attributes:
        iterations: the number of steps done.
        slots: by the id of a variable, which is kept alive, the variable and its slots.
        plans: by `key`.
    """

    __slots__ = ("iterations", "plans", "slots")

    def __init__(self, iterations: int = 0) -> None:
        self.iterations: int = iterations
        self.slots: dict[int, tuple[Variable, tuple[Block, ...]]] = {}
        self.plans: dict[tuple[int, ...], Plan] = {}

    def variables(self) -> list[Variable]:
        """The variables that have slots, in the order in which they were made."""
        return sorted((v for v, _ in self.slots.values()), key=_number_of)

    def slots_of(
        self, group: ReplicaGroup, variables: Sequence[Variable], name: str, initial: Mapping[str, float]
    ) -> list[tuple[Block, ...]]:
        """Each variable's slots, made when it is first seen, which is at the same call on all ranks.

        Raises:
            MemoryError: there is no room for them, on any rank.
        """
        new = sorted([v for v in variables if id(v) not in self.slots], key=_number_of)
        if new:
            # One kind after the other, in the order of the variables: so each kind lies in a row, as they do.
            kinds = [[_slot(group, f"{name}: {kind}", v, value) for v in new] for kind, value in initial.items()]
            for i, v in enumerate(new):
                self.slots[id(v)] = (v, tuple(kind[i] for kind in kinds))
        return [self.slots[id(v)][1] for v in variables]

    def make_slots(self, variables: Sequence[Variable], name: str, initial: Mapping[str, float]) -> None:
        """Makes the slots of variables that have none yet. Collective: all ranks pass the same variables.

        Raises:
            MemoryError: there is no room for them, on any rank.
        """
        for group in dict.fromkeys(state_of(v).group for v in variables):
            self.slots_of(group, [v for v in variables if state_of(v).group is group], name, initial)

    def plan_of(
        self, group: ReplicaGroup, variables: Sequence[Variable], name: str, initial: Mapping[str, float]
    ) -> Plan:
        """The plan for these variables, kept; of those without buffers only the newest few are."""
        wanted = key(group, variables)
        if wanted not in self.plans:
            slots = self.slots_of(group, variables, name, initial)
            plan = group.storage.plan([state_of(v).block for v in variables], slots)
            droppable = [other for other, old in self.plans.items() if old.buffers is None]
            for other in droppable[: len(droppable) + 1 - _MOST_PLANS]:
                del self.plans[other]
            self.plans[wanted] = plan
        return self.plans[wanted]


def key(group: ReplicaGroup, variables: Sequence[Variable]) -> tuple[int, ...]:
    """The key of a plan: ids of what its optimizer keeps alive, so that they are not used again."""
    return (id(group), *[id(v) for v in variables])


def _slot(group: ReplicaGroup, kind: str, variable: Variable, value: float) -> Block:
    with call_named(f"{kind} of {variable.name!r}"):
        return group.storage.create_slot(state_of(variable).block, value)


def _number_of(variable: Variable) -> int:
    return state_of(variable).block.number
