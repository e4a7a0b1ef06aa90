"""VariableState: the inside of a variable, which optimizers, checkpoints and strategies use."""

from __future__ import annotations

from typing import Any, final

import numpy as np

from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import Array
from hpcstrat._memory.blocks import Block
from hpcstrat._replicas import contexts
from hpcstrat._replicas.contexts import Context, InReplica
from hpcstrat._replicas.group import ReplicaGroup
from hpcstrat._storage.base import Storage
from hpcstrat._storage.plan import Plan


@final
class VariableState:
    """Where a variable is stored, and which replicas it belongs to. Making one is collective.

    Args:
        group: the replicas of the variable's strategy.
        is_on_read: whether each replica has its own value.
        initial: the initial value; the parameter rank's is used.

    Attributes:
        group: as above.
        is_on_read: as above.
        block: the memory that holds the value.
        plan: how to update this variable alone; made by the first such update.
        interface: the `__array_interface__` in a replica context; `None` if NumPy cannot describe
            the array.
    """

    __slots__ = ("block", "group", "interface", "is_on_read", "plan")

    def __init__(self, group: ReplicaGroup, is_on_read: bool, initial: Array) -> None:
        self.group = group
        self.is_on_read = is_on_read
        self.block: Block = self.storage.create(initial, per_replica=is_on_read)
        self.plan: Plan | None = None
        view = self.block.view
        # The interface cannot name a dtype of `ml_dtypes`: NumPy then calls `__array__`, as it does
        # everywhere outside a replica.
        has_interface = isinstance(view, np.ndarray) and view.dtype.kind != "V"
        # Made once: `np.asarray` of a variable asks for it, and an array makes a new dict per call.
        self.interface: dict[str, Any] | None = view.__array_interface__ if has_interface else None

    @property
    def storage(self) -> Storage:
        """The storage that holds the value."""
        return self.group.storage

    def needs_aggregation_to_read(self) -> bool:
        """Whether a read here would have to aggregate the values of several replicas."""
        if not self.is_on_read or self.group.communicator.size == 1:
            return False
        return not in_replica_of(self.group)

    def plan_alone(self) -> Plan:
        """The plan for updates of this variable alone."""
        if self.plan is None:
            self.plan = self.storage.plan([self.block], [()])
        return self.plan

    def require_strategy(self) -> None:
        """Refuses an update in the context of another strategy.

        Raises:
            RuntimeError: the caller runs in another strategy's context.
        """
        context = contexts.current.get()
        if context is not None and context.group is not self.group:
            raise RuntimeError(self._foreign_context_message(context))

    def require_writable(self) -> None:
        """Refuses a write in the context of another strategy.

        A variable made outside every scope may be written in any strategy's cross-replica context,
        and in the only replica of a strategy: all ranks write the same there.

        Raises:
            RuntimeError: the caller runs in another strategy's context.
        """
        context = contexts.current.get()
        if context is None or context.group is self.group:
            return
        # A single replica cannot differ from another.
        differs = isinstance(context, InReplica) and context.group.communicator.size > 1
        if not self.group.is_default or differs:
            raise RuntimeError(self._foreign_context_message(context))

    def _foreign_context_message(self, context: Context) -> str:
        if self.group.is_default:
            return (
                f"{current_call()}: the variable was made outside of this strategy's scope, so "
                "every process has its own; make it under `with strategy.scope():`"
            )
        return (
            f"{current_call()}: the variable belongs to another strategy than "
            f"{context.group.name}, which runs here; write it in its own strategy's scope"
        )


def in_replica_of(group: ReplicaGroup) -> bool:
    """Whether the caller runs in a replica of the group."""
    context = contexts.current.get()
    return type(context) is InReplica and context.group is group
