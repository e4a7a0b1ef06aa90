"""The one interface to where a strategy keeps its variables' numbers."""

from __future__ import annotations

import abc
from collections.abc import Sequence

from hpcstrat._communicators import Communicator
from hpcstrat._storage.memory import Block
from hpcstrat._storage.plan import Array as Array
from hpcstrat._storage.plan import Plan
from hpcstrat._storage.plan import Rule as Rule
from hpcstrat._types import ReduceOp


class Storage(abc.ABC):
    """Keeps variables' numbers. Its methods are collective: all ranks call them."""

    @property
    @abc.abstractmethod
    def communicator(self) -> Communicator:
        """The ranks that share the variables."""

    @abc.abstractmethod
    def create(self, call: str, initial: Array) -> Block:
        """A new block with the value that the parameter rank passes; the shapes and dtypes of all ranks are equal.

        Raises:
            MemoryError: there is no room for it.
            ReplicaMismatchError: shapes or dtypes differ.
        """

    @abc.abstractmethod
    def plan(self, variables: Sequence[Block], slots: Sequence[Sequence[Block]]) -> Plan:
        """The plan of updates of these variables, each with its slots."""

    @abc.abstractmethod
    def update(
        self,
        call: str,
        plan: Plan,
        values: Sequence[Array],
        op: ReduceOp | None,
        rule: Rule,
        numbers: tuple[float, ...] = (),
    ) -> None:
        """Reduces the replicas' `values` by `op` and applies `rule` once. Afterwards every rank reads the result.

        Args:
            call: the user's name of the method.
            plan: of the variables.
            values: one array a variable, of its shape; cast to its dtype.
            op: `None` takes the parameter rank's values.
            rule: how they change the variables.
            numbers: arguments of the rule; they must be equal on all ranks.

        Raises:
            ReplicaMismatchError: the ranks update different variables, or with different numbers.
        """

    @abc.abstractmethod
    def update_rows(
        self,
        call: str,
        variable: Block,
        slots: Sequence[Block],
        rows: Array,
        gradient: Array,
        rule: Rule,
    ) -> None:
        """Applies `rule` to some rows of a variable and of its slots; the others are neither read nor written.

        Args:
            call: the user's name of the method.
            variable: its block, of shape `(n, ...)`.
            slots: its slots' blocks.
            rows: integers of shape `(k,)`, all different and the same on every rank.
            gradient: of shape `(k, ...)` and the variable's dtype, the same on every rank.
            rule: how they change.
        """
