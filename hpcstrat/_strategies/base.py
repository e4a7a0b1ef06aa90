"""Strategy and what programs get from it: its scope, and the context of each replica."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, TracebackType
from typing import Any

import numpy as np

from hpcstrat import _context, _nest, _world
from hpcstrat._communicators.collective import collective
from hpcstrat._communicators.connection import disconnect_devices, keep_connected
from hpcstrat._communicators.device import DeviceCommunicator
from hpcstrat._communicators.protocol import signature
from hpcstrat._context import AcrossReplicas, InReplica, check_arguments, require_cross_replica
from hpcstrat._edge import current_call, names_call
from hpcstrat._group import Lifetime, ReplicaGroup, default_group
from hpcstrat._spans import RUN, Details, span
from hpcstrat._strategies import reduction
from hpcstrat._strategies.extended import StrategyExtended
from hpcstrat._strategies.input import InputMethods
from hpcstrat._strategies.transfer import check_alike, explain_empty_part, regroup, require_equal_arguments
from hpcstrat._strategies.values import ValueMethods
from hpcstrat._types import ReduceOp, RunOptions
from hpcstrat._values import select
from hpcstrat._variable_array import note_read_only
from hpcstrat._variable_options import creators
from hpcstrat._warnings import warn_renamed


def _described(strategy: Strategy, fn: Any, *_: Any, **__: Any) -> Details:
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    return Details(f"run {name.rpartition('.<locals>.')[2]}", None, group_of(strategy).stream)


class Strategy(InputMethods, ValueMethods):
    """Runs one program on several replicas: one a rank, each on its own device.

    Make one of its subclasses. Methods marked collective are called by all ranks, in one order; the script's own level
    does so by itself, because every rank runs the same lines.
    """

    def __init__(self, group: ReplicaGroup) -> None:
        self._connect(group)

    def _connect(self, group: ReplicaGroup) -> None:
        self._group = group
        self._across = AcrossReplicas(group, self)
        self._replica_context = ReplicaContext(self, self._across)
        self._in_replica = InReplica(group, self._replica_context)
        self._extended = StrategyExtended(self._across, self.run)

    # ---- facts

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
        """Further methods, for those who write libraries on top of strategies."""
        return self._extended

    @property
    def xp(self) -> ModuleType:
        """The array module of this rank's device: `numpy` or `cupy`."""
        return self._group.xp

    def __repr__(self) -> str:
        group, replicas = self._group, self.num_replicas_in_sync
        places = ", ".join(dict.fromkeys(device.short for device in group.devices))
        variables = "" if group.mirrors or replicas == 1 else f", variables on {group.parameter_device.short}"
        state = ", closed" if group.lifetime.is_closed else ""
        return f"{type(self).__name__}({replicas} replica{'s' * (replicas != 1)} on {places}{variables}{state})"

    # ---- life

    def scope(self) -> Scope:
        """A context manager: variables made inside are the strategy's.

        Raises:
            RuntimeError: on entering, inside a replica function or the scope of another strategy.
        """
        return Scope(self, self._across)

    @names_call("Strategy.close")
    def close(self) -> None:
        """Closes the strategy; its variables can still be read. Collective. Closing it again does nothing."""
        group = self._group
        if not group.lifetime.is_closed:
            group.communicator.barrier()
            group.lifetime.is_closed = True
            if isinstance(group.communicator, DeviceCommunicator):
                disconnect_devices(group.communicator)

    def __enter__(self) -> Strategy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:  # after an error the ranks do not meet again
            self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        """A copy that shares the communicator and the variables, and whose `extended` belongs to the copy."""
        other = copy.copy(self)
        memo[id(self)] = other
        group = self._group
        if isinstance(group.communicator, DeviceCommunicator):
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
            args: positional arguments, a tuple of nests. Distributed values in them are replaced by this replica's
                component.
            kwargs: keyword arguments, likewise.
            options: taken for TensorFlow's sake.

        Returns:
            A nest like the one `fn` returns, whose leaves are `PerReplica`; plain values with one replica. A variable
            of the strategy comes back as itself, `None` as `None`.

        Raises:
            RuntimeError: called inside a replica function or the scope of another strategy.
            TypeError: `fn` cannot be called, or `args` is no tuple or list.
            ReplicaMismatchError: with `HPCSTRAT_CHECK=1`, arrays or numbers of `args` or `kwargs` that are no
                distributed values differ between ranks. Every rank must make the call then.
            Exception: what `fn` raised. The program may catch it and go on only where every replica raised.

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
        # It does not become the current call: that would cost every step, and what runs here is the program's own.
        require_cross_replica(self._group, "Strategy.run")
        stream = self._group.stream
        if stream is None:
            return self._run(fn, args, kwargs)
        with stream.current():
            return self._run(fn, args, kwargs)

    def _run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
        communicator, before = self._group.communicator, _context.current.get()
        try:  # in which the context is set: a signal's exception may come right behind that
            check_arguments(fn, args, "Strategy.run")
            if communicator.checks:
                require_equal_arguments(communicator, args, kwargs or {})
            own = [select(one) for one in args]
            own_by_name = {name: select(one) for name, one in kwargs.items()} if kwargs else {}
            _context.current.set(self._in_replica)
            result = regroup(self._group, fn(*own, **own_by_name))
            if communicator.checks:
                check_alike(communicator, result)
            return result
        except BaseException as error:
            note_read_only(error)
            communicator.note_fault(error)
            explain_empty_part(error, args, kwargs)
            raise
        finally:
            _context.current.set(before)

    def experimental_run_v2(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The name of `run` in TensorFlow 2.0."""
        warn_renamed("Strategy.experimental_run_v2", "Strategy.run")
        return self.run(fn, args, kwargs)


class Scope:
    """The scope of a strategy: its cross-replica context, in which variables are its own. See `Strategy.scope`."""

    __slots__ = ("_across", "_entered", "_strategy")

    def __init__(self, strategy: Strategy, across: AcrossReplicas) -> None:
        self._strategy = strategy
        self._across = across
        self._entered: list[Any] = []

    @names_call("Strategy.scope")
    def __enter__(self) -> Strategy:
        require_cross_replica(self._across.group)
        self._entered.append((_context.current.set(self._across), creators.get()))
        return self._strategy

    def __exit__(self, *_: Any) -> None:
        token, asked = self._entered[-1]
        if creators.get() != asked:
            raise RuntimeError(
                "Strategy.scope was left inside a variable_creator_scope that was entered in it; leave that one first"
            )
        self._entered.pop()
        _context.current.reset(token)


_REQUIRE: Callable[[Any], None] = operator.methodcaller("_require")


class ReplicaContext:
    """What a replica function knows of its replica, and how it talks to the others.

    `hpcstrat.get_replica_context()` gives it, inside `Strategy.run`.
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

    @collective("ReplicaContext.all_reduce", _REQUIRE)
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
        return reduction.all_reduce(self._group.communicator, reduce_op, value)

    @collective("ReplicaContext.all_gather", _REQUIRE)
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
        return reduction.all_gather(self._group.communicator, value, axis)

    @names_call("ReplicaContext.merge_call")
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
        self._require()
        check_arguments(merge_fn, args)
        given = (tuple(args), dict(kwargs or {}))
        leaves, structure = _nest.flatten(given)
        # All replicas must be here, with nests of one structure, before the function runs on any of them.
        self._group.communicator.exchange(signature(current_call(), _nest.describe(structure)))
        merged_args, merged_kwargs = regroup(self._group, given) if leaves else given
        before = _context.current.get()
        try:
            _context.current.set(self._across)
            result = merge_fn(self._strategy, *merged_args, **merged_kwargs)
        finally:
            _context.current.set(before)
        return select(result)

    def random_generator(self, seed: int) -> Any:
        """A random generator of this replica's own: `numpy.random.Generator`, or CuPy's on a GPU.

        One seed gives independent streams on all replicas, and the same ones in every run.
        """
        xp = self._group.xp
        own = np.random.SeedSequence(entropy=seed, spawn_key=(self.replica_id_in_sync_group,))
        if xp is np:
            return np.random.default_rng(own)
        return xp.random.default_rng(int(own.generate_state(1, np.uint64)[0]))

    def _require(self) -> None:
        """Refuses a call outside of the replica function that was given this context."""
        found = _context.context()
        # Outside of every scope each process is in the only replica of the default strategy.
        is_here = self._group is default_group() if found is None else found.owner is self
        if not is_here:
            raise RuntimeError(
                f"{current_call()} was called outside of its replica context; call it inside the function that "
                "Strategy.run runs"
            )
        if found is None and (ranks := _world.size()) > 1:
            raise RuntimeError(
                f"{current_call()} was called outside of Strategy.run, where each of the {ranks} ranks is "
                "alone; call it inside the function that strategy.run runs, or use strategy.reduce and strategy.gather"
            )

    def __repr__(self) -> str:
        return f"ReplicaContext(replica {self.replica_id_in_sync_group} of {self.num_replicas_in_sync})"


def group_of(strategy: Strategy) -> ReplicaGroup:
    """What a strategy shares with its variables."""
    return strategy._group
