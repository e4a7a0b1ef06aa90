"""Which context a line runs in: outside every strategy, in the cross-replica context of one, or in a replica of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcstrat import _output, _world
from hpcstrat._types import MaybeNone, ReduceOp

if TYPE_CHECKING:
    from hpcstrat._strategies.base import Strategy
    from hpcstrat._variables import Variable


class CrossReplicaContext:
    """The script's own level within a strategy."""

    __slots__ = ("strategy",)

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy


class UpdateContext(CrossReplicaContext):
    """Inside the function of `StrategyExtended.update`, which one rank runs: nothing here may communicate.

    Attributes:
        variables: those that may be written.
    """

    __slots__ = ("variables",)

    def __init__(self, strategy: Strategy, variables: Sequence[Variable]) -> None:
        super().__init__(strategy)
        self.variables = variables


class ReplicaContext:
    """What a replica function knows of its replica, and how it talks to the others.

    `hpcstrat.get_replica_context()` gives it, inside `Strategy.run`.
    """

    __slots__ = ("_strategy",)

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    @property
    def strategy(self) -> Strategy:
        """The strategy that runs this replica."""
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> int:
        """The index of this replica, 0..num_replicas_in_sync-1."""
        return self._strategy._communicator.rank

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas."""
        return self._strategy._communicator.size

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of this replica, as a tuple of one canonical string."""
        return (self._strategy.extended.worker_devices[self.replica_id_in_sync_group],)

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: Any = None) -> Any:
        """Reduces `value` elementwise over all replicas. Collective: all replicas call this.

        Args:
            reduce_op: a `ReduceOp` or its name.
            value: a nest of arrays or numbers, of equal shapes and dtypes on all replicas. They travel together.
            options: taken for TensorFlow's sake.

        Returns:
            A nest like `value`, the same on every replica; integers stay integers in a sum, and become `float64` in a
            mean.

        Raises:
            RuntimeError: called outside of the replica context; outside of every strategy there are several ranks.
            TypeError: a leaf is no array of numbers, or its dtype cannot be reduced so.
            ReplicaMismatchError: shapes or dtypes differ between replicas.
        """
        del options
        self._require("all_reduce")
        return self._strategy._all_reduce("ReplicaContext.all_reduce", reduce_op, value)

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Concatenates `value` over all replicas along `axis`, in replica order. Collective: all replicas call this.

        Args:
            value: a nest of arrays with at least one dimension; sizes may differ along `axis` only.
            axis: the axis, counted from the end where negative.
            options: taken for TensorFlow's sake.

        Returns:
            A nest like `value`, the same on every replica.

        Raises:
            RuntimeError: called outside of the replica context; outside of every strategy there are several ranks.
            NotImplementedError: a leaf is an `IndexedSlices`.
            ReplicaMismatchError: the shapes do not fit; every replica's is named.
        """
        del options
        self._require("all_gather")
        return self._strategy._all_gather("ReplicaContext.all_gather", value, axis)

    def merge_call(
        self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs `merge_fn(strategy, *args, **kwargs)` in the cross-replica context. Collective: all replicas call this.

        Args:
            merge_fn: runs on every rank, with the leaves of `args` and `kwargs` as `PerReplica` values.
            args: positional arguments, nests.
            kwargs: keyword arguments, nests.

        Returns:
            This replica's component of what `merge_fn` returns.

        Raises:
            RuntimeError: called outside of the replica context; outside of every strategy there are several ranks.
            TypeError: `merge_fn` cannot be called, or `args` is no tuple or list.
        """
        self._require("merge_call")
        check_arguments("ReplicaContext.merge_call", merge_fn, args)
        return self._strategy._merge_call(merge_fn, tuple(args), dict(kwargs or {}))

    def random_generator(self, seed: int) -> Any:
        """A random generator of this replica's own: `numpy.random.Generator`, or CuPy's on a GPU.

        One seed gives independent streams on all replicas, and the same ones in every run.
        """
        strategy = self._strategy
        own = np.random.SeedSequence(entropy=seed, spawn_key=(self.replica_id_in_sync_group,))
        if strategy.xp is np:
            return np.random.default_rng(own)
        return strategy.xp.random.default_rng(int(own.generate_state(1, np.uint64)[0]))

    def _require(self, method: str) -> None:
        if get_replica_context() is not self:
            raise RuntimeError(
                f"ReplicaContext.{method} was called outside of its replica context; call it inside the function that "
                "Strategy.run runs"
            )
        if context() is None and (ranks := _world.size()) > 1:  # the default strategy's, which has one replica
            raise RuntimeError(
                f"ReplicaContext.{method} was called outside of Strategy.run, where each of the {ranks} ranks is "
                "alone; call it inside the function that strategy.run runs, or use strategy.reduce and strategy.gather"
            )

    def __repr__(self) -> str:
        return f"ReplicaContext(replica {self.replica_id_in_sync_group} of {self.num_replicas_in_sync})"


def check_arguments(call: str, fn: Any, args: Any) -> None:
    """Checks what is to be called as `fn(*args)`.

    Raises:
        TypeError: `fn` cannot be called, or `args` is no tuple or list, whose elements would be taken for arguments.
    """
    if not callable(fn):
        raise TypeError(f"{call}: fn is {fn!r}; pass the function itself, as in run(fn, args=(x,)), and not fn(x)")
    if not isinstance(args, (tuple, list)):
        raise TypeError(
            f"{call}: args is of type {type(args).__name__}; it must be a tuple: args=(x,) for one argument x"
        )


current: ContextVar[CrossReplicaContext | ReplicaContext | None] = ContextVar("hpcstrat_context", default=None)
"""The context; None outside of every strategy."""


def _none_yet() -> Strategy:
    raise RuntimeError("hpcstrat is not imported completely")


default_strategy: Callable[[], Strategy] = _none_yet
"""Gives the strategy of one replica that counts outside of every scope. Filled in by the floor of the strategies."""

_set_by_user: CrossReplicaContext | None = None


def context() -> CrossReplicaContext | ReplicaContext | None:
    """The context of this line, what `experimental_set_strategy` set included."""
    found = current.get()
    return _set_by_user if found is None else found


def get_strategy() -> Strategy:
    """The strategy of this line; outside of every scope the default strategy, of one replica."""
    found = context()
    return default_strategy() if found is None else found.strategy


def has_strategy() -> bool:
    """Whether this line runs in the scope, or in a replica, of a strategy other than the default one."""
    return get_strategy() is not default_strategy()


def in_cross_replica_context() -> bool:
    """Whether this line runs in the cross-replica context of a strategy."""
    return isinstance(context(), CrossReplicaContext)


def get_replica_context() -> ReplicaContext | MaybeNone:
    """This replica's context; None in the cross-replica context; the default strategy's outside of every scope.

    That one's `all_reduce`, `all_gather` and `merge_call` work where there is one rank.
    """
    found = context()
    if found is None:
        return default_strategy()._replica_context
    return found if isinstance(found, ReplicaContext) else None


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Makes `strategy` the one of every line outside of scopes, as if all stood in its scope; None takes it back.

    Raises:
        RuntimeError: called inside a scope or a replica.
    """
    global _set_by_user
    if current.get() is not None:
        raise RuntimeError(
            "experimental_set_strategy was called inside a strategy's scope; call it outside of all scopes"
        )
    _set_by_user = None if strategy in (None, default_strategy()) else strategy._cross_context


def _shows() -> bool | None:
    """Whether this line's output is a replica's own; None where this thread has no context."""
    found = context()
    if found is None:
        return None
    return isinstance(found, ReplicaContext) and found.strategy._communicator.size > 1


_output.replica_context = _shows
