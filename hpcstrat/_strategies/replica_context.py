"""The context of a replica: which replica it is, and its calls outside collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcstrat._calls.records import signature_of
from hpcstrat._core import nests
from hpcstrat._core.call_name import current_call, explained, names_call
from hpcstrat._core.types import select
from hpcstrat._process import worlds
from hpcstrat._replicas import contexts
from hpcstrat._replicas.contexts import AcrossReplicas, check_arguments
from hpcstrat._replicas.group import default_group
from hpcstrat._strategies.replica_collectives import ReplicaCollectives
from hpcstrat._strategies.transfer import regroup

if TYPE_CHECKING:
    from hpcstrat._strategies.base import Strategy


class ReplicaContext(ReplicaCollectives):
    """Tells a replica function which replica it is, and lets it communicate with the others.

    `hpcstrat.get_replica_context()` returns it inside `Strategy.run`.

    Examples:
        With one replica; of two, the second prints `1 of 2` and the sum is 3:

        >>> import hpcstrat as hs
        >>> strategy = hs.CentralStorageStrategy()
        >>> def step():
        ...     context = hs.get_replica_context()
        ...     print(context.rank, "of", context.num_replicas_in_sync)
        ...     return context.all_reduce("SUM", 1 + context.rank)
        >>> print(strategy.run(step))
        0 of 1
        1
    """

    __slots__ = ("_across", "_group", "_strategy")

    def __init__(self, strategy: Strategy, across: AcrossReplicas) -> None:
        self._strategy = strategy
        self._across = across
        self._group = across.group

    @property
    def strategy(self) -> Strategy:
        """The strategy that runs this replica.

        Examples:
            >>> strategy = hs.CentralStorageStrategy()
            >>> strategy.run(lambda: hs.get_replica_context().strategy is strategy)
            True
        """
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> int:
        """The index of this replica, from 0 to `num_replicas_in_sync - 1`.

        Examples:
            With one replica; two would return 0 and 1:

            >>> strategy = hs.CentralStorageStrategy()
            >>> strategy.run(lambda: hs.get_replica_context().replica_id_in_sync_group)
            0
        """
        return self._group.communicator.rank

    @property
    def rank(self) -> int:
        """`replica_id_in_sync_group`, by its short name.

        Examples:
            This replica's files; of two, the first would read `a.npy` and `c.npy`:

            >>> strategy = hs.CentralStorageStrategy()
            >>> def names():
            ...     context = hs.get_replica_context()
            ...     return ["a.npy", "b.npy", "c.npy"][context.rank :: context.num_replicas_in_sync]
            >>> print(*strategy.run(names))
            a.npy b.npy c.npy
        """
        return self._group.communicator.rank

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas.

        Examples:
            Each replica's share of a loss; the sum of the shares is the mean loss, 0.5:

            >>> strategy = hs.CentralStorageStrategy()
            >>> share = strategy.run(lambda: 0.5 / hs.get_replica_context().num_replicas_in_sync)
            >>> print(strategy.reduce("SUM", share, axis=None))
            0.5
        """
        return self._group.communicator.size

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of this replica, as a tuple of one canonical string.

        Examples:
            >>> strategy = hs.OneDeviceStrategy("CPU:0")
            >>> strategy.run(lambda: hs.get_replica_context().devices)
            ('/job:localhost/replica:0/task:0/device:CPU:0',)
        """
        return (str(self._group.device),)

    @names_call("ReplicaContext.merge_call")
    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs `merge_fn(strategy, *args, **kwargs)` in the cross-replica context.

        Collective: all replicas call this.

        Args:
            merge_fn: the function to run on every rank, with the leaves of `args` and `kwargs` as
                `PerReplica` values.
            args: positional arguments, a tuple of nests.
            kwargs: keyword arguments, nests.

        Returns:
            This replica's component of the result of `merge_fn`.

        Raises:
            RuntimeError: called outside a replica function. With one rank, calls outside all scopes
                are allowed.
            TypeError: `merge_fn` is not callable, or `args` is not a tuple or list.

        Examples:
            With several replicas `value` is a `PerReplica`, and each gets the sum of all:

            >>> strategy = hs.CentralStorageStrategy()
            >>> def total(strategy, value):
            ...     return strategy.reduce("SUM", value, axis=0)
            >>> def step(value):
            ...     return hs.get_replica_context().merge_call(total, args=(value,))
            >>> parts = strategy.scatter(np.array([1.0, 2.0, 3.0]))
            >>> print(strategy.run(step, args=(parts,)))
            6.0
        """
        self._require()
        check_arguments(merge_fn, args)
        # `args` and `kwargs` as one nest: it is flattened and compared once.
        given = (tuple(args), dict(kwargs or {}))
        leaves, structure = nests.flatten(given)
        # The function runs only after all replicas have called this with nests of one structure.
        self._group.communicator.exchange(signature_of(current_call(), nests.describe(structure)))
        merged_args, merged_kwargs = regroup(self._group, given) if leaves else given
        before = contexts.current.get()
        try:
            contexts.current.set(self._across)
            merge_fn = explained(merge_fn, "merge_fn is called with the strategy, and then args")
            result = merge_fn(self._strategy, *merged_args, **merged_kwargs)
        finally:
            contexts.current.set(before)
        return select(result)

    def random_generator(self, seed: int) -> Any:
        """A random generator for this replica: `numpy.random.Generator`, or CuPy's on a GPU.

        One seed gives each replica an independent stream, and the same streams in every run of the
        program.

        Examples:
            Each replica has its own numbers, and the same ones each time it asks:

            >>> strategy = hs.OneDeviceStrategy("CPU:0")
            >>> def noise():
            ...     return hs.get_replica_context().random_generator(seed=7).integers(100, size=4)
            >>> print(strategy.run(noise), strategy.run(noise))
            [30 79 20  5] [30 79 20  5]
        """
        xp = self._group.xp
        own = np.random.SeedSequence(entropy=seed, spawn_key=(self.replica_id_in_sync_group,))
        if xp is np:
            return np.random.default_rng(own)
        return xp.random.default_rng(int(own.generate_state(1, np.uint64)[0]))

    def _require(self) -> None:
        here = contexts.context()
        # Outside every scope each process is the only replica of the default strategy.
        is_own = self._group is default_group() if here is None else here.owner is self
        if not is_own:
            raise RuntimeError(
                f"{current_call()} was called outside of its replica context; call it inside the "
                "function that Strategy.run runs"
            )
        # The default strategy has one replica: a sum would silently be this rank's own value.
        if here is None and (ranks := worlds.size()) > 1:
            raise RuntimeError(
                f"{current_call()} was called outside of Strategy.run, where each of the {ranks} "
                "ranks is alone; call it inside the function that strategy.run runs, or use "
                "strategy.reduce and strategy.gather"
            )

    def __repr__(self) -> str:
        index, count = self.replica_id_in_sync_group, self.num_replicas_in_sync
        return f"ReplicaContext(replica {index} of {count})"
