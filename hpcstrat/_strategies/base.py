"""Strategy and what programs get from it: its scope, and the context of each replica."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, TracebackType
from typing import Any

import numpy as np

from hpcstrat._calls.records import signature_of
from hpcstrat._communicators.connection import disconnect_devices, keep_connected
from hpcstrat._communicators.device import DeviceCommunicator
from hpcstrat._core import nests
from hpcstrat._core.call_name import current_call, names_call, warn_renamed
from hpcstrat._core.span import RUN, Details, span
from hpcstrat._core.types import RunOptions
from hpcstrat._core.values import select
from hpcstrat._process import worlds
from hpcstrat._replicas import contexts
from hpcstrat._replicas.contexts import (
    AcrossReplicas,
    InReplica,
    check_arguments,
    require_cross_replica,
)
from hpcstrat._replicas.group import Lifetime, ReplicaGroup, default_group
from hpcstrat._strategies.extended import StrategyExtended
from hpcstrat._strategies.input import InputMethods
from hpcstrat._strategies.replica_collectives import ReplicaCollectives
from hpcstrat._strategies.transfer import (
    check_alike,
    explain_empty_part,
    regroup,
    require_equal_arguments,
)
from hpcstrat._strategies.values import ValueMethods
from hpcstrat._variable.array import note_read_only
from hpcstrat._variable.options import creators


def _described(strategy: Strategy, fn: Any, *_: Any, **__: Any) -> Details:
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    return Details(f"run {name.rpartition('.<locals>.')[2]}", None, group_of(strategy).stream)


class Strategy(InputMethods, ValueMethods):
    """Runs one program on several replicas: one per rank, each on its own device.

    Construct one of the subclasses. All ranks must call the methods marked collective, in the same
    order. Code at the script's top level does so by itself, because every rank runs the same lines.
    """

    def __init__(self, group: ReplicaGroup) -> None:
        self._connect(group)

    # Apart from the constructor, because a copy of a strategy has no devices to place.
    def _connect(self, group: ReplicaGroup) -> None:
        self._group = group
        self._across = AcrossReplicas(group, self)
        self._replica_context = ReplicaContext(self, self._across)
        self._in_replica = InReplica(group, self._replica_context)
        self._extended = StrategyExtended(self._across, self.run)

    # ---- properties

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas."""
        return self._group.communicator.size

    @property
    def cluster_resolver(self) -> Any:
        """None: this strategy has one worker."""
        return None

    @property
    def extended(self) -> StrategyExtended:
        """Further methods, for libraries built on strategies."""
        return self._extended

    @property
    def xp(self) -> ModuleType:
        """The array module of this rank's device: `numpy` or `cupy`."""
        return self._group.xp

    def __repr__(self) -> str:
        group, replicas = self._group, self.num_replicas_in_sync
        devices = ", ".join(dict.fromkeys(device.short for device in group.devices))
        variables = (
            ""
            if group.mirrors or replicas == 1
            else f", variables on {group.parameter_device.short}"
        )
        state = ", closed" if group.lifetime.is_closed else ""
        return f"{type(self).__name__}({replicas} replica{'s' * (replicas != 1)} on {devices}{variables}{state})"

    # ---- life

    def scope(self) -> Scope:
        """A context manager: variables made inside are the strategy's.

        Raises:
            RuntimeError: on entering, inside a replica function or the scope of another strategy.
        """
        return Scope(self, self._across)

    @names_call("Strategy.close")
    def close(self) -> None:
        """Closes the strategy; its variables can still be read. Collective.

        Closing it again does nothing.
        """
        group = self._group
        if not group.lifetime.is_closed:
            # NCCL's communicator may only be closed when no rank still uses it.
            group.communicator.barrier()
            group.lifetime.is_closed = True
            if isinstance(group.communicator, DeviceCommunicator):
                disconnect_devices(group.communicator)

    def __enter__(self) -> Strategy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is None:  # after an error the ranks do not meet again
            self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        """A copy that shares the communicator and the variables, and whose `extended` belongs to the copy."""
        other = copy.copy(self)
        memo[id(self)] = other
        group = self._group
        if isinstance(group.communicator, DeviceCommunicator):
            # Each copy is closed by itself; the last one closes the connection.
            keep_connected(group.communicator)
        other._connect(dataclasses.replace(group, lifetime=Lifetime(group.lifetime.is_closed)))
        return other

    # ---- replicas

    @span(RUN, _described)
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Runs `fn(*args, **kwargs)` once on each replica.

        Args:
            fn: the replica function.
            args: positional arguments, a tuple of nests. Distributed values in them are replaced by
                this replica's component.
            kwargs: keyword arguments, likewise.
            options: ignored; accepted for compatibility with TensorFlow.

        Returns:
            A nest like the one `fn` returns, whose leaves are `PerReplica`; plain values with one
            replica. A variable of the strategy comes back as itself, `None` as `None`.

        Raises:
            RuntimeError: called inside a replica function or the scope of another strategy.
            TypeError: `fn` is not callable, or `args` is not a tuple or list.
            ReplicaMismatchError: with `HPCSTRAT_CHECK=1`, arrays or numbers in `args` or `kwargs`,
                other than distributed values, differ between ranks. All ranks must make the call
                then.
            Exception: what `fn` raised. The program may catch it and go on only where every replica
                raised.

        Examples:
            As one replica prints it:

            >>> import hpcstrat as hs
            >>> strategy = hs.CentralStorageStrategy()
            >>> dataset = strategy.experimental_distribute_dataset(hs.data.Dataset.range(5).batch(2))
            >>> for x in dataset:
            ...     print(strategy.run(lambda value: value + 1, args=(x,)))
            [1 2]
            [3 4]
            [5]
        """
        del options
        # It does not become the current call: that would cost every step, and what runs here is the
        # program's own.
        require_cross_replica(self._group, "Strategy.run")
        # Without a GPU there is no context manager to enter, which every step would pay for.
        stream = self._group.stream
        if stream is None:
            return self._run(fn, args, kwargs)
        with stream.current():
            return self._run(fn, args, kwargs)

    def _run(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> Any:
        communicator, before = self._group.communicator, contexts.current.get()
        try:  # in which the context is set: a signal's exception may come right behind that
            check_arguments(fn, args, "Strategy.run")
            if communicator.checks:
                # Plain values count as one value of all replicas. Comparing them communicates, so
                # it has to be asked for.
                require_equal_arguments(communicator, args, kwargs or {})
            own = [select(one) for one in args]
            own_by_name = {name: select(one) for name, one in kwargs.items()} if kwargs else {}
            contexts.current.set(self._in_replica)
            result = regroup(self._group, fn(*own, **own_by_name))
            if communicator.checks:
                check_alike(communicator, result)
            return result
        except BaseException as error:
            note_read_only(error)
            # The other ranks may know nothing of this one. If the program catches it, the next call
            # compares, and ends the job.
            communicator.note_fault(error)
            self._group.storage.drop_marks()
            explain_empty_part(error, args, kwargs)
            raise
        finally:
            contexts.current.set(before)

    def experimental_run_v2(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """The name of `run` in TensorFlow 2.0."""
        warn_renamed("Strategy.experimental_run_v2", "Strategy.run")
        return self.run(fn, args, kwargs)


class Scope:
    """The scope of a strategy: its cross-replica context, in which new variables belong to it.

    See `Strategy.scope`.
    """

    __slots__ = ("_across", "_entered", "_strategy")

    def __init__(self, strategy: Strategy, across: AcrossReplicas) -> None:
        self._strategy = strategy
        self._across = across
        self._entered: list[Any] = []

    @names_call("Strategy.scope")
    def __enter__(self) -> Strategy:
        require_cross_replica(self._across.group)
        self._entered.append((contexts.current.set(self._across), creators.get()))
        return self._strategy

    def __exit__(self, *_: Any) -> None:
        token, asked = self._entered[-1]
        if creators.get() != asked:
            raise RuntimeError(
                "Strategy.scope was left inside a variable_creator_scope that was entered in it; "
                "leave that one first"
            )
        self._entered.pop()
        contexts.current.reset(token)


class ReplicaContext(ReplicaCollectives):
    """What a replica function knows about its replica, and how it communicates with the others.

    Inside `Strategy.run`, `hpcstrat.get_replica_context()` returns it.
    """

    __slots__ = ("_across", "_group", "_strategy")

    def __init__(self, strategy: Strategy, across: AcrossReplicas) -> None:
        self._strategy = strategy
        self._across = across
        self._group = across.group

    @property
    def strategy(self) -> Strategy:
        """The strategy that runs this replica."""
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> int:
        """The index of this replica, 0..num_replicas_in_sync-1."""
        return self._group.communicator.rank

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas."""
        return self._group.communicator.size

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of this replica, as a tuple of one canonical string."""
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
            merge_fn: runs on every rank, with the leaves of `args` and `kwargs` as `PerReplica`
                values.
            args: positional arguments, nests.
            kwargs: keyword arguments, nests.

        Returns:
            This replica's component of what `merge_fn` returns.

        Raises:
            RuntimeError: called outside the replica context, or outside every strategy with several
                ranks.
            TypeError: `merge_fn` is not callable, or `args` is not a tuple or list.
        """
        self._require()
        check_arguments(merge_fn, args)
        # Args and kwargs as one nest: one structure to compare, one flattening.
        given = (tuple(args), dict(kwargs or {}))
        leaves, structure = nests.flatten(given)
        # All replicas must be here, with nests of one structure, before the function runs on any of
        # them.
        self._group.communicator.exchange(signature_of(current_call(), nests.describe(structure)))
        merged_args, merged_kwargs = regroup(self._group, given) if leaves else given
        before = contexts.current.get()
        try:
            contexts.current.set(self._across)
            result = merge_fn(self._strategy, *merged_args, **merged_kwargs)
        finally:
            contexts.current.set(before)
        return select(result)

    def random_generator(self, seed: int) -> Any:
        """This replica's own random generator: `numpy.random.Generator`, or CuPy's on a GPU.

        The same seed gives each replica an independent stream, and the same streams in every run.
        """
        xp = self._group.xp
        own = np.random.SeedSequence(entropy=seed, spawn_key=(self.replica_id_in_sync_group,))
        if xp is np:
            return np.random.default_rng(own)
        return xp.random.default_rng(int(own.generate_state(1, np.uint64)[0]))

    def _require(self) -> None:
        """Refuses a call outside of the replica function that was given this context."""
        found = contexts.context()
        # Outside of every scope each process is in the only replica of the default strategy.
        is_here = self._group is default_group() if found is None else found.owner is self
        if not is_here:
            raise RuntimeError(
                f"{current_call()} was called outside of its replica context; call it inside the "
                "function that Strategy.run runs"
            )
        # The default strategy has one replica, so a sum would silently be this rank's own value.
        if found is None and (ranks := worlds.size()) > 1:
            raise RuntimeError(
                f"{current_call()} was called outside of Strategy.run, where each of the {ranks} "
                "ranks is alone; call it inside the function that strategy.run runs, or use "
                "strategy.reduce and strategy.gather"
            )

    def __repr__(self) -> str:
        return f"ReplicaContext(replica {self.replica_id_in_sync_group} of {self.num_replicas_in_sync})"


def group_of(strategy: Strategy) -> ReplicaGroup:
    """What a strategy shares with its variables."""
    return strategy._group
