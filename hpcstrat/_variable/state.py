"""VariableState: what a variable is made of, as optimizers, checkpoints and strategies use it."""

from __future__ import annotations

from typing import Any, final

import numpy as np

from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import Array
from hpcstrat._memory.blocks import Block
from hpcstrat._replicas import contexts
from hpcstrat._replicas.contexts import Context, InReplica, InUpdate
from hpcstrat._replicas.group import ReplicaGroup, default_group
from hpcstrat._storage.base import Storage
from hpcstrat._storage.plan import Plan


@final
class VariableState:
    """Where a variable's numbers are, and whose they are. Making one is collective.

    Args:
        group: the replicas of the variable's strategy.
        is_on_read: whether each replica has a value of its own.
        initial: the value; the parameter rank's counts.

    Attributes:
        group: as above.
        is_on_read: as above.
        block: the numbers.
        plan: how to update this variable alone; made by the first such update.
        interface: what `__array_interface__` gives in a replica context; `None` where NumPy cannot
            describe it.
    """

    __slots__ = ("block", "group", "interface", "is_on_read", "plan")

    def __init__(self, group: ReplicaGroup, is_on_read: bool, initial: Array) -> None:
        self.group = group
        self.is_on_read = is_on_read
        self.block: Block = self.storage.create(initial)
        self.plan: Plan | None = None
        view = self.block.view
        # A dtype of `ml_dtypes` has no name in it: then NumPy takes `__array__`, as everywhere
        # outside of a replica.
        has_interface = isinstance(view, np.ndarray) and view.dtype.kind != "V"
        # Made once: `np.asarray` of a variable asks for it, and an array makes a new dict each
        # time.
        self.interface: dict[str, Any] | None = view.__array_interface__ if has_interface else None

    @property
    def storage(self) -> Storage:
        """Where the numbers are."""
        return self.group.replica_storage if self.is_on_read else self.group.storage

    def needs_aggregation_to_read(self) -> bool:
        """Whether a read in this line would have to bring several replicas' values together."""
        if not self.is_on_read or self.group.communicator.size == 1:
            return False
        context = contexts.current.get()
        return not (isinstance(context, (InReplica, InUpdate)) and context.group is self.group)

    def plan_alone(self) -> Plan:
        """The plan of updates of this variable alone."""
        if self.plan is None:
            self.plan = self.storage.plan([self.block], [()])
        return self.plan

    def require_strategy(self) -> None:
        """Refuses an update in the context of another strategy.

        Raises:
            RuntimeError: this line runs in one.
        """
        context = contexts.context()
        if context is not None and context.group is not self.group:
            raise RuntimeError(self._foreign_context_message(context))

    def require_writable(self) -> None:
        """`require_strategy`, but what was made outside of every scope may be written by all ranks alike.

        Raises:
            RuntimeError: this line runs in another strategy's context.
        """
        context = contexts.context()
        if context is None or context.group is self.group:
            return
        # With one replica there is nobody to differ from.
        differs = isinstance(context, InReplica) and context.group.communicator.size > 1
        if self.group is not default_group() or differs:
            raise RuntimeError(self._foreign_context_message(context))

    def _foreign_context_message(self, context: Context) -> str:
        if self.group is default_group():
            return (
                f"{current_call()}: the variable was made outside of this strategy's scope, so "
                "every process has one of its own; make it under `with strategy.scope():`"
            )
        return (
            f"{current_call()}: the variable belongs to another strategy than "
            f"{context.group.name}, which runs here; write it in its own strategy's scope"
        )


def in_replica_of(group: ReplicaGroup) -> bool:
    """Whether this line runs in a replica of the group."""
    context = contexts.current.get()
    return type(context) is InReplica and context.group is group
