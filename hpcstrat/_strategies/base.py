"""Strategy and its scope."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, TracebackType
from typing import Any

from hpcstrat._communicators.connection import disconnect_devices, keep_connected
from hpcstrat._communicators.device import DeviceCommunicator
from hpcstrat._core.call_name import RUN, Details, names_call, span
from hpcstrat._core.types import RunOptions, select
from hpcstrat._replicas import contexts
from hpcstrat._replicas.contexts import (
    AcrossReplicas,
    InReplica,
    check_arguments,
    require_cross_replica,
)
from hpcstrat._replicas.group import Lifetime, ReplicaGroup
from hpcstrat._strategies.extended import StrategyExtended
from hpcstrat._strategies.input import InputMethods
from hpcstrat._strategies.replica_context import ReplicaContext
from hpcstrat._strategies.transfer import (
    check_same_structure,
    explain_arguments,
    explain_empty_part,
    regroup,
    require_equal_arguments,
)
from hpcstrat._strategies.values import ValueMethods
from hpcstrat._variable.options import creators
from hpcstrat._variable.writing import explain_assign, explain_read_only


def _describe_run(strategy: Strategy, fn: Any, *_: Any, **__: Any) -> Details:
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    return Details(f"run {name.rpartition('.<locals>.')[2]}", None, group_of(strategy).stream)


class Strategy(InputMethods, ValueMethods):
    """Runs one program on several replicas: one replica per rank, each on its own device.

    Construct one of the subclasses. All ranks must call the methods marked collective, in the same
    order. Code at the top level of the script does so automatically, because every rank runs the
    same lines.

    Examples:
        A program with one replica or any number of them. All print the sum of 0, 1, 2, 3 and 4:

        >>> import numpy as np
        >>> import hpcstrat as hs
        >>> with hs.CentralStorageStrategy() as strategy:
        ...     parts = strategy.scatter(np.arange(5))
        ...     sums = strategy.run(lambda part: part.sum(), args=(parts,))
        ...     print(strategy.reduce("SUM", sums, axis=None))
        10
    """

    def __init__(self, group: ReplicaGroup | None = None) -> None:
        if not isinstance(group, ReplicaGroup):
            raise TypeError(
                "Strategy: make a MirroredStrategy, a MultiWorkerMirroredStrategy, a "
                "CentralStorageStrategy or a OneDeviceStrategy"
            )
        self._connect(group)

    # Separate from the constructor, because copying a strategy does not place devices again.
    def _connect(self, group: ReplicaGroup) -> None:
        self._group = group
        group.lifetime.strategy = self
        self._across = AcrossReplicas(group, self)
        self._replica_context = ReplicaContext(self, self._across)
        self._in_replica = InReplica(group, self._replica_context)
        self._extended = StrategyExtended(self._across, self.run)

    # ---- properties

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas.

        Examples:
            The global batch size for 32 elements per replica, with one replica:

            >>> 32 * hs.CentralStorageStrategy().num_replicas_in_sync
            32
        """
        return self._group.communicator.size

    @property
    def cluster_resolver(self) -> Any:
        """None: this strategy has one worker.

        Examples:
            >>> print(hs.CentralStorageStrategy().cluster_resolver)
            None
            >>> hs.MultiWorkerMirroredStrategy().cluster_resolver.task_type
            'worker'
        """
        return None

    @property
    def extended(self) -> StrategyExtended:
        """More methods, for libraries built on strategies.

        Examples:
            >>> hs.OneDeviceStrategy("CPU:0").extended.worker_devices
            ('/job:localhost/replica:0/task:0/device:CPU:0',)
        """
        return self._extended

    @property
    def xp(self) -> ModuleType:
        """The array module of this rank's device: `numpy` or `cupy`.

        Examples:
            On a GPU the same line returns an array of CuPy:

            >>> strategy = hs.OneDeviceStrategy("CPU:0")
            >>> type(strategy.xp.zeros(3))
            <class 'numpy.ndarray'>
        """
        return self._group.xp

    def __repr__(self) -> str:
        group, replicas = self._group, self.num_replicas_in_sync
        devices = ", ".join(dict.fromkeys(device.short for device in group.devices))
        is_central = not group.mirrors and replicas > 1
        variables = f", variables on {group.parameter_device.short}" if is_central else ""
        state = ", closed" if group.lifetime.is_closed else ""
        placed = f"{replicas} replica{'s' * (replicas != 1)} on {devices}"
        return f"{type(self).__name__}({placed}{variables}{state})"

    # ---- life

    def scope(self) -> Scope:
        """A context manager in which the strategy is current and new variables belong to it.

        Raises:
            RuntimeError: entered inside a replica function or the scope of another strategy.

        Examples:
            >>> strategy = hs.MirroredStrategy()
            >>> with strategy.scope():
            ...     weights = hs.Variable(np.ones(2))
            >>> weights.distribute_strategy is strategy
            True
        """
        return Scope(self, self._across)

    @names_call("Strategy.close")
    def close(self) -> None:
        """Closes the strategy; its variables can still be read. Collective.

        Closing it again does nothing.

        Examples:
            `with` closes the strategy too, unless its block raises:

            >>> strategy = hs.MirroredStrategy()
            >>> with strategy, strategy.scope():
            ...     step = hs.Variable(3)
            >>> print(step.numpy())
            3
            >>> strategy.run(lambda: 1)
            Traceback (most recent call last):
            RuntimeError: Strategy.run was called on a strategy that is closed; make another
        """
        group = self._group
        if not group.lifetime.is_closed:
            # An NCCL communicator may be closed only when no rank uses it any more.
            group.communicator.barrier()
            group.lifetime.is_closed = True
            if isinstance(group.communicator, DeviceCommunicator):
                disconnect_devices(group.communicator)

    def __enter__(self) -> Strategy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is None:  # after an error the other ranks may never call `close`
            self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        """A copy with its own `extended`, which shares the communicator and the variables."""
        other = copy.copy(self)
        memo[id(self)] = other
        group = self._group
        if isinstance(group.communicator, DeviceCommunicator):
            # Each copy is closed separately; the last one closes the connection.
            keep_connected(group.communicator)
        other._connect(dataclasses.replace(group, lifetime=Lifetime(group.lifetime.is_closed)))
        return other

    # ---- replicas

    @span(RUN, _describe_run)
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Runs `fn(*args, **kwargs)` once on each replica, in its replica context.

        Args:
            fn: the replica function.
            args: positional arguments, a tuple of nests. Each distributed value in them is replaced
                by this replica's component.
            kwargs: keyword arguments, treated as `args` are.
            options: ignored; accepted for compatibility with TensorFlow.

        Returns:
            A nest like the one that `fn` returns, with `PerReplica` leaves; with one replica, plain
            values. A variable is returned as itself, `None` as `None`.

        Raises:
            RuntimeError: called inside a replica function or the scope of another strategy.
            TypeError: `fn` is not callable, or `args` is not a tuple or list.
            ReplicaMismatchError: with `HPCSTRAT_CHECK=1`, arrays or numbers in `args` or `kwargs`,
                other than distributed values, differ between ranks. All ranks must then call `run`.
            Exception: whatever `fn` raised. The program may catch it and continue only if every
                replica raised.

        Examples:
            With one replica:

            >>> import hpcstrat as hs
            >>> strategy = hs.CentralStorageStrategy()
            >>> dataset = hs.data.Dataset.range(5).batch(2)
            >>> for x in strategy.experimental_distribute_dataset(dataset):
            ...     print(strategy.run(lambda value: value + 1, args=(x,)))
            [1 2]
            [3 4]
            [5]
        """
        del options
        # Not recorded as the current call: that would cost time in every step, and the code that
        # runs inside is the program's.
        require_cross_replica(self._group, "Strategy.run")
        # On the CPU no context manager is entered: every step would pay for it.
        stream = self._group.stream
        if stream is None:
            return self._run(fn, args, kwargs)
        with stream.current():
            return self._run(fn, args, kwargs)

    def _run(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> Any:
        communicator, before = self._group.communicator, contexts.current.get()
        # The context is set inside the `try`: a signal may raise right after it was set.
        try:
            check_arguments(fn, args, "Strategy.run")
            if communicator.checks:
                # A plain value is the same for all replicas. Only HPCSTRAT_CHECK compares it,
                # because comparing communicates.
                require_equal_arguments(communicator, args, kwargs or {})
            own = [select(arg) for arg in args]
            own_by_name = {name: select(arg) for name, arg in kwargs.items()} if kwargs else {}
            contexts.current.set(self._in_replica)
            result = regroup(self._group, fn(*own, **own_by_name))
            if communicator.checks:
                check_same_structure(communicator, result)
            return result
        except BaseException as error:
            explain_read_only(error)
            explain_assign(error)
            # Other ranks may not have raised. If the program catches the exception, the next
            # collective call compares the ranks and ends the job.
            communicator.calls.note_escaped(error)
            self._group.storage.drop_marks()
            explain_arguments(error, fn, args, kwargs)
            explain_empty_part(error, args, kwargs)
            raise
        finally:
            contexts.current.set(before)


class Scope:
    """Enters a strategy's cross-replica context; see `Strategy.scope`."""

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

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if error is not None:
            explain_assign(error)
        token, creators_before = self._entered[-1]
        if creators.get() != creators_before:
            raise RuntimeError(
                "Strategy.scope was left inside a variable_creator_scope that was entered in it; "
                "leave that one first"
            )
        self._entered.pop()
        contexts.current.reset(token)


def group_of(strategy: Strategy) -> ReplicaGroup:
    """The group of a strategy."""
    return strategy._group
