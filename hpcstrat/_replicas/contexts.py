"""The context of a line: outside every strategy, cross-replica, or in a replica.

A line of the program that runs ...     has the context ...
--------------------------------------  -------------------
outside every scope                     None
under `with strategy.scope():`          AcrossReplicas
in the function of `Strategy.run`       InReplica
in that of `ReplicaContext.merge_call`  AcrossReplicas
in that of `StrategyExtended.update`    AcrossReplicas; `InReplica` for `ON_READ` variables
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, final

from hpcstrat._core.call_name import current_call
from hpcstrat._replicas.group import ReplicaGroup, default_group


class Context:
    """Where a line runs within a strategy.

    Attributes:
        group: the replicas of the strategy.
    """

    __slots__ = ("group",)

    def __init__(self, group: ReplicaGroup) -> None:
        self.group: ReplicaGroup = group


@final
class InReplica(Context):
    """The replica context: inside the function that `Strategy.run` runs on every replica."""

    __slots__ = ()


@final
class AcrossReplicas(Context):
    """The cross-replica context: in a strategy's scope, outside every replica function."""

    __slots__ = ()


# A context variable, so that each thread of the program has its own, and a new thread has none.
current: ContextVar[Context | None] = ContextVar("hpcstrat_context", default=None)
"""The context; None outside all scopes."""


def group() -> ReplicaGroup:
    """The replicas of the caller's strategy; outside all scopes, of the default strategy."""
    here = current.get()
    return default_group() if here is None else here.group


def in_cross_replica_context() -> bool:
    """Whether the caller runs in the cross-replica context of a strategy.

    Examples:
        >>> strategy = hs.CentralStorageStrategy()
        >>> with strategy.scope():
        ...     print(hs.in_cross_replica_context(), strategy.run(hs.in_cross_replica_context))
        True False
        >>> hs.in_cross_replica_context()
        False
    """
    return isinstance(current.get(), AcrossReplicas)


def require_cross_replica(group: ReplicaGroup, call: str = "") -> None:
    """Raises unless a group that is open may communicate here, across replicas."""
    here = current.get()
    is_allowed = here is None or (isinstance(here, AcrossReplicas) and here.group is group)
    if is_allowed and not group.is_closed:
        group.communicator.calls.require_open(call)
        return
    call = call or current_call()
    if group.is_closed:
        raise RuntimeError(
            f"{call} was called on a strategy that is closed, by close() or the end of "
            "`with strategy:` (`with strategy.scope():` is for variables); make another"
        )
    if isinstance(here, InReplica):
        raise RuntimeError(
            f"{call} was called inside a replica function; call it outside of Strategy.run, or "
            "inside ReplicaContext.merge_call. For a sum over replicas there is "
            "ReplicaContext.all_reduce"
        )
    raise RuntimeError(
        f"{call} was called in the scope of another strategy; leave that scope first"
    )


def check_cross_replica(owner: Any) -> None:
    """`require_cross_replica` for `@collective` of a strategy, or of a part of one."""
    require_cross_replica(owner.replica_group)


def check_arguments(fn: Any, args: Any, call: str = "") -> None:
    """Raises unless `fn` is callable and `args` a tuple or list: not an array, or its elements."""
    if not callable(fn):
        raise TypeError(
            f"{call or current_call()}: fn is {fn!r}; pass the function itself, as in run(fn, "
            "args=(x,)), and not fn(x)"
        )
    if not isinstance(args, (tuple, list)):
        raise TypeError(
            f"{call or current_call()}: args is of type {type(args).__name__}; it must be a tuple: "
            "args=(x,) for one argument x"
        )


def is_one_of_several_replicas() -> bool:
    """Whether the caller is one of several replicas."""
    here = current.get()
    return isinstance(here, InReplica) and here.group.communicator.size > 1
