"""The strategy that a line runs in, and the default strategy, in effect outside every scope."""

from __future__ import annotations

import functools
from typing import final

from hpcstrat._core.types import MaybeNone
from hpcstrat._replicas import contexts
from hpcstrat._replicas.contexts import InReplica
from hpcstrat._replicas.group import default_group
from hpcstrat._strategies.base import ReplicaContext, Scope, Strategy


@final
class DefaultStrategy(Strategy):
    """Outside every scope each process is a single replica. Does not start MPI."""

    def __init__(self) -> None:
        super().__init__(default_group())

    def scope(self) -> Scope:
        """Changes nothing: code outside every scope is in the default strategy's context already."""
        return _DefaultScope(self, self._across)


class _DefaultScope(Scope):
    """The default strategy's scope, which changes nothing, as in TensorFlow: its context is in effect already."""

    __slots__ = ()

    def __enter__(self) -> Strategy:
        if has_strategy():
            raise RuntimeError(
                "Strategy.scope was called in the scope of another strategy; leave that scope first"
            )
        return self._strategy

    def __exit__(self, *_: object) -> None:
        pass


# One object: `get_strategy()` is compared by identity, and programs may keep it.
@functools.cache
def default_strategy() -> Strategy:
    """The strategy in effect outside every scope, of one replica."""
    return DefaultStrategy()


def get_strategy() -> Strategy:
    """The strategy that this line runs in; outside every scope the default strategy, of one replica."""
    found = contexts.context()
    if found is None:
        return default_strategy()
    owner = found.owner
    if isinstance(owner, ReplicaContext):
        return owner.strategy
    assert isinstance(owner, Strategy)
    return owner


def has_strategy() -> bool:
    """Whether this line runs in the scope, or in a replica, of a strategy other than the default one."""
    return contexts.group() is not default_group()


def get_replica_context() -> ReplicaContext | MaybeNone:
    """This replica's context; None in the cross-replica context; the default strategy's outside every scope.

    The latter's `all_reduce`, `all_gather` and `merge_call` need a single rank.
    """
    found = contexts.context()
    if found is None:
        return default_strategy()._replica_context
    if not isinstance(found, InReplica):
        return None
    assert isinstance(found.owner, ReplicaContext)
    return found.owner


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Makes `strategy` the default outside any scope; None restores the default.

    Raises:
        RuntimeError: called inside a scope or a replica.
    """
    contexts.set_outside_scopes(
        None if strategy is None or strategy is default_strategy() else strategy._across
    )
