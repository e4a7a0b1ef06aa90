"""StrategyExtended: methods for libraries built on strategies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from hpcstrat._agreement.collective import collective
from hpcstrat._core import device_names, nests
from hpcstrat._core.call_name import current_call, names_call
from hpcstrat._core.types import (
    DistributedValues,
    IndexedSlices,
    Mirrored,
    PerReplica,
    ReduceOp,
    component_of,
)
from hpcstrat._replicas.contexts import check_arguments, check_cross_replica, require_cross_replica
from hpcstrat._replicas.group import ReplicaGroup
from hpcstrat._strategies import reduce
from hpcstrat._strategies.tensorflow_names import ExtendedNames
from hpcstrat._strategies.transfer import from_wire, to_wire
from hpcstrat._variable.variable import Variable, state_of


class StrategyExtended(ExtendedNames):
    """Methods of a strategy that programs rarely need, as `Strategy.extended`.

    All ranks call the methods marked collective, in the cross-replica context or outside all
    scopes; elsewhere they raise `RuntimeError`.

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
        self.replica_group: ReplicaGroup = group

    # ---- properties

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The canonical string of each replica's device: `/job:localhost/.../device:GPU:0`."""
        return tuple(str(device) for device in self.replica_group.devices)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The canonical string of the device that stores variables, in a tuple."""
        return (str(self.replica_group.parameter_device),)

    @collective(check_cross_replica)
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

    @collective(check_cross_replica)
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
        totals = reduce.reduce_distributed(
            self.replica_group.communicator, reduce_op, [value for value, _ in pairs], None
        )
        return [
            self._deliver(total, destinations)
            for total, (_, destinations) in zip(totals, pairs, strict=True)
        ]

    @collective(check_cross_replica)
    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Copies the parameter rank's `tensor` to every rank. Collective.

        Args:
            tensor: a nest of plain values.
            destinations: as in `reduce_to`.

        Returns:
            The copy, on every rank; a `Mirrored` value if the destinations are all replicas.

        Raises:
            ValueError: unsupported `destinations`.

        Examples:
            All ranks get the values of the first replica's rank:

            >>> strategy = hs.CentralStorageStrategy()
            >>> strategy.extended.broadcast_to({"seed": 7, "rank": hs.rank()}, destinations="CPU:0")
            {'seed': 7, 'rank': 0}
        """
        group = self.replica_group
        with group.on_stream():
            self._check_destinations(destinations)
            sent = group.communicator.broadcast_obj(to_wire(tensor), group.root)
            return self._deliver(from_wire(sent, group.stream), destinations)

    def _check_destinations(self, destinations: Any) -> None:
        if isinstance(destinations, (Variable, DistributedValues)):
            return
        alone = self.replica_group.communicator.size == 1
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
        communicator = self.replica_group.communicator
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
        return state_of(v).group is self.replica_group

    # ---- updates

    @names_call("StrategyExtended.update")
    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls `fn(var, *args, **kwargs)` in the cross-replica context, on every rank.

        All ranks call this: a write in `fn` is collective there, and applied once. If `var` is an
        `ON_READ` variable, `Strategy.run` calls `fn`, and each replica writes its own value.

        Args:
            var: the variable.
            fn: the update.
            args: plain or `Mirrored` values.
            kwargs: plain or `Mirrored` values.
            group: if false, each leaf of the result is wrapped in a tuple.

        Returns:
            The result of `fn`; for an `ON_READ` variable, as `Strategy.run` returns it.

        Raises:
            ValueError: `var` is not a variable of this strategy, or an argument is a `PerReplica`.
            TypeError: `fn` is not callable, or `args` is not a tuple or list.
            Exception: whatever `fn` raised. The program may catch it and continue only if every
                rank raised.

        Examples:
            The same with any number of replicas:

            >>> strategy = hs.CentralStorageStrategy()
            >>> with strategy.scope():
            ...     weights = hs.Variable(np.array([1.0, 2.0]))
            >>> def decay(variable, factor):
            ...     variable.assign(factor * variable.value())
            ...     return variable.value().sum()
            >>> print(strategy.extended.update(weights, decay, args=(0.5,)), weights.numpy())
            1.5 [0.5 1. ]
        """
        return self._update((var,), fn, args, kwargs, group)

    @names_call("StrategyExtended.update_non_slot")
    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls `fn(*args, **kwargs)`; otherwise as `update`.

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
        return self._update((), fn, args, kwargs, group)

    def _update(
        self,
        first: tuple[Variable, ...],
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        is_grouped: bool,
    ) -> Any:
        group = self.replica_group
        require_cross_replica(group)
        try:
            check_arguments(fn, args)
            if not all(isinstance(v, Variable) and state_of(v).group is group for v in first):
                raise ValueError(
                    f"{current_call()}: {first[0]!r} is not a variable of this strategy; pass one "
                    "made under `with strategy.scope():`"
                )
            leaves, structure = nests.flatten(((*first, *args), dict(kwargs or {})))
            if any(isinstance(leaf, PerReplica) for leaf in leaves):
                raise ValueError(
                    f"{current_call()}: an argument is one value per replica; reduce it first: "
                    "StrategyExtended.reduce_to"
                )
            own, own_by_name = cast("Any", structure.unflatten(map(component_of, leaves)))
            state = next((state_of(leaf) for leaf in leaves if isinstance(leaf, Variable)), None)
            if state is not None and state.is_on_read and state.group is group:
                result = group.strategy.run(fn, own, own_by_name)
            else:
                with group.strategy.scope(), group.on_stream():
                    result = fn(*own, **own_by_name)
        except BaseException as error:
            # As in `Strategy.run`: other ranks may not have raised, and the next call compares.
            group.communicator.calls.note_escaped(error)
            raise
        return result if is_grouped else nests.map_leaves(lambda leaf: (leaf,), result)
