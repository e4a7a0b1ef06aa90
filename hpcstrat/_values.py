"""Distributed values: what each replica holds its own component of."""

from __future__ import annotations

from typing import Any

from hpcstrat import _nest


class DistributedValues:
    """A value with one component a replica; a process holds the component of its own replica only.

    `Strategy.experimental_local_results` brings the components of all replicas together, `Strategy.reduce` and
    `Strategy.gather` combine them, and `Strategy.run` hands each replica its own. No operator works on the whole,
    because an operator never communicates.
    """

    __slots__ = ("_component", "_replica_id")

    def __init__(self, component: Any, replica_id: int) -> None:
        self._component = component
        self._replica_id = replica_id

    def __repr__(self) -> str:
        return f"{type(self).__name__}({{{self._replica_id}: {self._component!r}}})"


class PerReplica(DistributedValues):
    """A value that may differ from replica to replica."""

    __slots__ = ()


class Mirrored(DistributedValues):
    """A value that is the same on every replica, each of which holds a copy."""

    __slots__ = ()


def select(nest: Any) -> Any:
    """`nest` with every distributed value replaced by the component of this process's replica."""
    leaves, structure = _nest.flatten(nest)
    for leaf in leaves:
        if isinstance(leaf, DistributedValues):
            break
    else:
        return nest
    return structure.unflatten([leaf._component if isinstance(leaf, DistributedValues) else leaf for leaf in leaves])
