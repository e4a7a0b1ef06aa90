"""StrategyExtended: methods for libraries built on strategies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from hpcstrat._agreement.collective import collective
from hpcstrat._core import device_names, nests
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import (
    DistributedValues,
    IndexedSlices,
    Mirrored,
    PerReplica,
    ReduceOp,
    component_of,
)
from hpcstrat._replicas import contexts
from hpcstrat._replicas.contexts import (
    InUpdate,
    check_arguments,
    check_cross_replica,
)
from hpcstrat._replicas.group import ReplicaGroup
from hpcstrat._strategies import reduce
from hpcstrat._strategies.tensorflow_names import ExtendedNames
from hpcstrat._strategies.transfer import from_wire, regroup, to_wire
from hpcstrat._variable.variable import Variable, state_of


class StrategyExtended(ExtendedNames):
    """Methods of a strategy that programs rarely need, as `Strategy.extended`.

    All ranks call the methods marked collective, in the cross-replica context or outside all
    scopes.

    Examples:
        A step of gradient descent, with one replica; with more, the same value is subtracted once:

        >>> import numpy as np
        >>> import hpcstrat as hs
        >>> strategy = hs.OneDeviceStrategy("CPU:0")
        >>> with strategy.scope():
        ...     weights = hs.Variable(np.ones(2))
        >>> gradients = strategy.run(lambda: np.array([0.25, 0.5]))
        >>> mean = strategy.extended.reduce_to("MEAN", gradients, destinations=weights)
        >>> def descend(variable, gradient):
        ...     variable.assign_sub(gradient)
        >>> strategy.extended.update(weights, descend, args=(mean,))
        >>> print(weights.numpy())
        [0.75 0.5 ]
    """

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group

    # ---- properties

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The canonical string of each replica's device: `/job:localhost/.../device:GPU:0`."""
        return tuple(str(device) for device in self._group.devices)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The canonical string of the device that stores variables, in a tuple."""
        return (str(self._group.parameter_device),)

    @collective("StrategyExtended.reduce_to", check_cross_replica)
    def reduce_to(
        self, reduce_op: ReduceOp | str, value: Any, destinations: Any, options: Any = None
    ) -> Any:
        """Reduces `value` elementwise over the replicas. Collective.

        Args:
            reduce_op: a `ReduceOp` or its name.
            value: a distributed value, or a nest of them.
            destinations: where to put the result: a variable, a device string, or a distributed
                value for all replicas.
            options: ignored; accepted for compatibility with TensorFlow.

        Returns:
            The result, on every rank; a `Mirrored` value if the destinations are all replicas.

        Raises:
            RuntimeError: called inside a replica function or the scope of another strategy.
            ValueError: unsupported `destinations`, or the sum over several replicas of a plain
                value other than zero.

        Examples:
            With one replica; two would have the sum 3.0:

            >>> strategy = hs.CentralStorageStrategy()
            >>> value = strategy.run(lambda: 1.0 + hs.replica_id())
            >>> print(strategy.extended.reduce_to("SUM", value, destinations="CPU:0"))
            1.0
        """
        del options
        return self._reduce(reduce_op, [(value, destinations)])[0]

    @collective("StrategyExtended.batch_reduce_to", check_cross_replica)
    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: Any = None,
    ) -> list[Any]:
        """Reduces (value, destinations) pairs as `reduce_to`, in one message. Collective.

        Examples:
            With one replica; two would have `6 2.0`:

            >>> strategy = hs.CentralStorageStrategy()
            >>> count, loss = strategy.run(lambda: (3, 1.0))
            >>> pairs = [(count, "CPU:0"), (loss, "CPU:0")]
            >>> print(*strategy.extended.batch_reduce_to("SUM", pairs))
            3 1.0
        """
        del options
        return self._reduce(reduce_op, list(value_destination_pairs))

    def _reduce(self, reduce_op: ReduceOp | str, pairs: Sequence[tuple[Any, Any]]) -> list[Any]:
        for _, destinations in pairs:
            self._check_destinations(destinations)
        totals = reduce.reduce(
            self._group.communicator, reduce_op, [value for value, _ in pairs], None
        )
        return [
            self._deliver(total, destinations)
            for total, (_, destinations) in zip(totals, pairs, strict=True)
        ]

    @collective("StrategyExtended.broadcast_to", check_cross_replica)
    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Copies the parameter rank's `tensor` to every rank. Collective.

        Args:
            tensor: a nest of plain values.
            destinations: as in `reduce_to`.

        Returns:
            The copy, on every rank; a `Mirrored` value if the destinations are all replicas.

        Raises:
            RuntimeError: called inside a replica function or the scope of another strategy.
            ValueError: unsupported `destinations`.

        Examples:
            All ranks get the values of the first replica's rank:

            >>> strategy = hs.CentralStorageStrategy()
            >>> strategy.extended.broadcast_to({"seed": 7, "rank": hs.rank()}, destinations="CPU:0")
            {'seed': 7, 'rank': 0}
        """
        group = self._group
        with group.on_stream():
            self._check_destinations(destinations)
            sent = group.communicator.broadcast_obj(to_wire(tensor), group.root)
            return self._deliver(from_wire(sent, group.stream), destinations)

    def _check_destinations(self, destinations: Any) -> None:
        if isinstance(destinations, (Variable, DistributedValues)):
            return
        alone = self._group.communicator.size == 1
        is_list = isinstance(destinations, (list, tuple)) and destinations
        for destination in destinations if is_list else [destinations]:
            if isinstance(destination, str):
                device_names.parse(destination)
            elif alone and isinstance(destination, (int, float, complex, IndexedSlices)):
                continue  # the value of the only replica
            # A plain array may be the value of the only replica, too.
            elif not hasattr(destination, "__array__"):
                raise ValueError(
                    f"{current_call()}: destinations is {destinations!r}; pass a variable, a "
                    "device string or a distributed value"
                )

    def _deliver(self, total: Any, destinations: Any) -> Any:
        communicator = self._group.communicator
        if communicator.size == 1 or not isinstance(destinations, DistributedValues):
            return total
        return nests.map_leaves(
            lambda leaf: Mirrored(leaf, communicator.rank, communicator.size), total
        )

    # ---- variables

    def variable_created_in_scope(self, v: Variable) -> bool:
        """Whether the variable was made in this strategy's scope.

        Examples:
            >>> strategy, other = hs.CentralStorageStrategy(), hs.MirroredStrategy()
            >>> with strategy.scope():
            ...     weights = hs.Variable(np.ones(2))
            >>> [s.extended.variable_created_in_scope(weights) for s in (strategy, other)]
            [True, False]
        """
        return state_of(v).group is self._group

    # ---- updates

    @collective("StrategyExtended.update", check_cross_replica)
    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Runs `fn(var, *args, **kwargs)` on the ranks that update the variable. Collective.

        These are all ranks for `ON_READ` variables and copies on GPUs, and otherwise the parameter
        rank alone. In `fn`, writes are local, no call may communicate, and only `var` and variables
        in `args` or `kwargs` may be written. Where one rank runs it, those must be of this
        strategy, and `ON_READ` if `var` is, and otherwise must not. Reading an `ON_READ` variable
        there returns this replica's own value.

        Args:
            var: the variable.
            fn: the update.
            args: plain or `Mirrored` values.
            kwargs: plain or `Mirrored` values.
            group: if false, each leaf of the result is wrapped in a tuple.

        Returns:
            The nest that `fn` returns, on every rank. For an `ON_READ` variable each replica has
            its own result, whose leaves are `PerReplica` if there are several replicas.

        Raises:
            ValueError: `var` is not a variable of this strategy.
            TypeError: `fn` is not callable, or `args` is not a tuple or list.
            RuntimeError: called inside a replica function or the scope of another strategy.
            Exception: whatever `fn` raised, on every rank.

        Examples:
            The update runs where the variable is stored; all ranks get its result:

            >>> strategy = hs.CentralStorageStrategy()
            >>> with strategy.scope():
            ...     weights = hs.Variable(np.array([1.0, 2.0]))
            >>> def decay(variable, factor):
            ...     variable.assign(factor * variable.value())
            ...     return variable.value().sum()
            >>> print(strategy.extended.update(weights, decay, args=(0.5,)), weights.numpy())
            1.5 [0.5 1. ]
        """
        if not isinstance(var, Variable) or state_of(var).group is not self._group:
            raise ValueError(
                f"{current_call()}: {var!r} is not a variable of this strategy; pass one made "
                "under `with strategy.scope():`"
            )
        check_arguments(fn, args)
        with self._group.communicator.change():
            return self._update(fn, (var, *args), dict(kwargs or {}), group)

    @collective("StrategyExtended.update_non_slot", check_cross_replica)
    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Runs `fn(*args, **kwargs)` on the `non_slot_devices`; otherwise as `update`. Collective.

        The first variable among the arguments, if any, plays the role of `var`.

        Examples:
            A count of steps, increased once whatever the number of replicas:

            >>> strategy = hs.CentralStorageStrategy()
            >>> with strategy.scope():
            ...     steps = hs.Variable(0)
            >>> devices = strategy.extended.non_slot_devices([steps])
            >>> def count(variable):
            ...     variable.assign_add(1)
            >>> strategy.extended.update_non_slot(devices, count, args=(steps,))
            >>> print(steps.numpy())
            1
        """
        del colocate_with
        check_arguments(fn, args)
        with self._group.communicator.change():
            return self._update(fn, tuple(args), dict(kwargs or {}), group)

    # Called in a block of `Communicator.change`.
    def _update(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        is_grouped: bool,
    ) -> Any:
        group, communicator = self._group, self._group.communicator
        leaves, structure = nests.flatten((args, kwargs))
        variables = [leaf for leaf in leaves if isinstance(leaf, Variable)]
        if any(isinstance(leaf, PerReplica) for leaf in leaves):
            raise ValueError(
                f"{current_call()}: an argument is one value per replica; reduce it first: "
                "StrategyExtended.reduce_to"
            )
        plain = [component_of(leaf) for leaf in leaves]
        args, kwargs = cast("tuple[tuple[Any, ...], dict[str, Any]]", structure.unflatten(plain))
        run = functools.partial(fn, *args, **kwargs)
        is_on_read = any(
            state_of(v).is_on_read and state_of(v).group is group for v in variables[:1]
        )
        # If one rank updates the variables that exist once, an update writes either those, or
        # ON_READ variables, which every rank writes; never both. Of another group's variables it
        # would change that rank's alone.
        is_on_all_ranks = not group.root_writes
        writable = [
            v
            for v in variables
            if is_on_all_ranks
            or (state_of(v).group is group and state_of(v).is_on_read is is_on_read)
        ]
        # The function writes in place: no rank may still be reading.
        communicator.barrier()
        if is_on_read or is_on_all_ranks:
            with communicator.raise_together():
                results, returned = self._update_here(run, writable)
                if is_on_read:  # the replicas' values may differ, and so may their results
                    results = [regroup(group, leaf) for leaf in results]
                # Inside the block, so that an exception of one rank reaches the others here.
                communicator.barrier()
        else:
            written = [state.block for state in map(state_of, writable) if state.group is group]
            try:
                results, returned = self._update_by_root(run, variables, writable)
            except Exception:
                # All ranks raise it. Earlier writes stay, and must be the same for all readers.
                group.storage.publish(written)
                communicator.calls.note_shared_error()
                raise
            group.storage.publish(written)
        return returned.unflatten(results if is_grouped else [(leaf,) for leaf in results])  # pyright: ignore

    def _update_here(
        self, run: Callable[[], Any], writable: Sequence[Variable]
    ) -> tuple[list[Any], nests.Structure]:
        """Calls `run` on this rank in an update's context, and flattens its result."""
        group = self._group
        before = contexts.current.get()
        try:
            contexts.current.set(InUpdate(group, writable))
            # One rank may run this alone: a collective call in it would wait forever.
            group.communicator.calls.set_paused(current_call())
            with group.on_stream():
                return nests.flatten(run())
        finally:
            group.communicator.calls.set_paused(None)
            contexts.current.set(before)

    def _update_by_root(
        self, run: Callable[[], Any], variables: Sequence[Variable], writable: Sequence[Variable]
    ) -> tuple[list[Any], nests.Structure]:
        """Calls `run` on the parameter rank, sends its result to every rank, and flattens it there.

        A variable in the result is not sent: each rank puts its own variable in its place.
        """
        group, communicator = self._group, self._group.communicator
        sent: Any = None
        with group.on_stream(), communicator.raise_together():
            if communicator.rank == group.root:
                leaves, returned = self._update_here(run, writable)
                # The indices of the leaves that are variables, and of those among the arguments.
                own = {
                    i: _index(leaf, variables)
                    for i, leaf in enumerate(leaves)
                    if isinstance(leaf, Variable)
                }
                others = [None if i in own else leaf for i, leaf in enumerate(leaves)]
                sent = to_wire(returned.unflatten(others)), own
            result, own = communicator.broadcast_obj(sent, group.root)
            leaves, returned = nests.flatten(from_wire(result, group.stream))
        for i, index in own.items():
            leaves[i] = variables[index]
        return leaves, returned


def _index(variable: Variable, variables: Sequence[Variable]) -> int:
    for i, candidate in enumerate(variables):
        if candidate is variable:
            return i
    raise ValueError(
        "StrategyExtended.update: the function returned a variable that was not passed to it; pass "
        "it too"
    )
