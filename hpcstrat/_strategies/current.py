"""The current strategy, and the default strategy, which is current outside all scopes."""

from __future__ import annotations

import functools
from typing import final

from hpcstrat._core.types import MaybeNone
from hpcstrat._replicas import contexts
from hpcstrat._replicas.contexts import InReplica
from hpcstrat._replicas.group import default_group
from hpcstrat._strategies.base import Strategy
from hpcstrat._strategies.replica_context import ReplicaContext


@final
class DefaultStrategy(Strategy):
    """The strategy outside all scopes: each process is a single replica. Does not start MPI."""


# Always the same object: programs may keep it, and compare `get_strategy()` with it by identity.
@functools.cache
def _default_strategy() -> Strategy:
    return DefaultStrategy(default_group())


def get_strategy() -> Strategy:
    """The current strategy; outside all scopes the default strategy, which has one replica.

    Examples:
        >>> strategy = hs.CentralStorageStrategy()
        >>> with strategy.scope():
        ...     hs.get_strategy() is strategy
        True
        >>> hs.get_strategy().num_replicas_in_sync
        1
    """
    context = contexts.current.get()
    if context is None:
        return _default_strategy()
    return context.group.strategy


def has_strategy() -> bool:
    """Whether a strategy other than the default strategy is current.

    Examples:
        >>> strategy = hs.CentralStorageStrategy()
        >>> with strategy.scope():
        ...     hs.has_strategy()
        True
        >>> hs.has_strategy()
        False
    """
    return not contexts.group().is_default


def replica_id() -> int:
    """The index of this replica, in a replica function. Does not start MPI.

    It is `get_replica_context().replica_id_in_sync_group`.

    Raises:
        RuntimeError: called outside a replica function.

    Examples:
        With one replica; two would return 0 and 1:

        >>> strategy = hs.CentralStorageStrategy()
        >>> strategy.run(hs.replica_id)
        0
        >>> hs.replica_id()
        Traceback (most recent call last):
        RuntimeError: replica_id was called outside of replica functions, ...
    """
    context = contexts.current.get()
    if not isinstance(context, InReplica):
        raise RuntimeError(
            "replica_id was called outside of replica functions, the functions that Strategy.run "
            "runs; hpcstrat.rank() is the index of this process"
        )
    return context.group.communicator.rank


def get_replica_context() -> ReplicaContext | MaybeNone:
    """This replica's context; None in the cross-replica context.

    Outside all scopes it is the default strategy's, whose collective methods raise if there are
    several ranks.

    Examples:
        >>> strategy = hs.CentralStorageStrategy()
        >>> strategy.run(lambda: hs.get_replica_context().num_replicas_in_sync)
        1
        >>> with strategy.scope():
        ...     print(hs.get_replica_context())
        None
    """
    context = contexts.current.get()
    if context is None:
        group = _default_strategy().replica_group
    elif isinstance(context, InReplica):
        group = context.group
    else:
        return None
    # Made once: programs may compare contexts by identity.
    if group.replica_context is None:
        group.replica_context = ReplicaContext(group)
    return group.replica_context
