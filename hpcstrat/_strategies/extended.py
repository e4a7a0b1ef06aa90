"""StrategyExtended: what libraries on top of strategies use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from hpcstrat._calls.collective import collective
from hpcstrat._core import device_names, nests
from hpcstrat._core.call_name import current_call, names_call
from hpcstrat._core.types import IndexedSlices, ReduceOp
from hpcstrat._core.values import DistributedValues, Mirrored, PerReplica, component_of
from hpcstrat._replicas import contexts
from hpcstrat._replicas.contexts import (
    AcrossReplicas,
    InUpdate,
    check_arguments,
    check_cross_replica,
    require_cross_replica,
)
from hpcstrat._replicas.group import UpdatesOn, default_group
from hpcstrat._strategies import reduction
from hpcstrat._strategies.transfer import from_wire, regroup, to_wire
from hpcstrat._variable.variable import Variable, state_of


class StrategyExtended:
    """Methods of a strategy that programs rarely need: `Strategy.extended`.

    All ranks call those marked collective, in the cross-replica context or outside every scope.
    """

    def __init__(self, across: AcrossReplicas, run: Callable[..., Any]) -> None:
        self._across = across
        self._group = across.group
        self._run = run

    # ---- properties

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The canonical string of each replica's device."""
        return tuple(str(device) for device in self._group.devices)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The canonical string of the device where variables live."""
        return (str(self._group.parameter_device),)

    @property
    def should_checkpoint(self) -> bool:
        """Whether this worker should write checkpoints."""
        return True

    @property
    def should_save_summary(self) -> bool:
        """Whether this worker should write summaries."""
        return True

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Whether shapes must be the same in every step: no."""
        return False

    @property
    def experimental_between_graph(self) -> bool:
        """Whether workers run programs of their own: no, there is one program."""
        return False

    # ---- replicas

    @names_call("StrategyExtended.call_for_each_replica")
    def call_for_each_replica(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """`Strategy.run` by its older name."""
        require_cross_replica(self._group)
        return self._run(fn, args, kwargs)

    @collective("StrategyExtended.reduce_to", check_cross_replica)
    def reduce_to(
        self, reduce_op: ReduceOp | str, value: Any, destinations: Any, options: Any = None
    ) -> Any:
        """Reduces `value` elementwise over the replicas. Collective.

        Args:
            reduce_op: a `ReduceOp` or its name.
            value: a distributed value, or a nest of them.
            destinations: where the result is wanted: a variable, a device string, or a distributed
                value for all replicas.
            options: ignored; accepted for compatibility with TensorFlow.

        Returns:
            The result, on every rank; a `Mirrored` value if the destinations are all replicas.

        Raises:
            RuntimeError: called inside a replica function or the scope of another strategy.
            ValueError: `destinations` is none of these, or a plain value other than zero is summed
                over several replicas.
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
        """`reduce_to` of several (value, destinations) pairs, in one message. Collective."""
        del options
        return self._reduce(reduce_op, list(value_destination_pairs))

    def _reduce(self, reduce_op: ReduceOp | str, pairs: Sequence[tuple[Any, Any]]) -> list[Any]:
        for _, destinations in pairs:
            self._check_destinations(destinations)
        totals = reduction.reduce(
            self._group.communicator, reduce_op, [value for value, _ in pairs], None
        )
        return [
            self._sent(total, destinations)
            for total, (_, destinations) in zip(totals, pairs, strict=True)
        ]

    @collective("StrategyExtended.broadcast_to", check_cross_replica)
    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """The parameter rank's `tensor`, a nest of plain values, on every rank. Collective.

        Args:
            tensor: what to send.
            destinations: as in `reduce_to`.

        Raises:
            RuntimeError: called inside a replica function or the scope of another strategy.
            ValueError: `destinations` is none of these.
        """
        group = self._group
        with group.on_stream():
            self._check_destinations(destinations)
            sent = group.communicator.broadcast_obj(to_wire(tensor), group.root)
            return self._sent(from_wire(sent, group.stream), destinations)

    def _check_destinations(self, destinations: Any) -> None:
        if isinstance(destinations, (Variable, DistributedValues)):
            return
        alone = self._group.communicator.size == 1
        for one in (
            destinations
            if isinstance(destinations, (list, tuple)) and destinations
            else [destinations]
        ):
            if isinstance(one, str):
                device_names.parse(one)
            elif alone and isinstance(one, (int, float, complex, IndexedSlices)):
                continue  # what a single replica returned
            elif not hasattr(
                one, "__array__"
            ):  # a plain array stands for the one replica that it came from
                raise ValueError(
                    f"{current_call()}: destinations is {destinations!r}; pass a variable, a "
                    "device string or a distributed value"
                )

    def _sent(self, total: Any, destinations: Any) -> Any:
        communicator = self._group.communicator
        if communicator.size == 1 or not isinstance(destinations, DistributedValues):
            return total
        return nests.map_leaves(
            lambda leaf: Mirrored(leaf, communicator.rank, communicator.size), total
        )

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
        """Runs `fn(var, *args, **kwargs)` where the variable lives. Collective.

        That is the parameter rank only, or every rank for mirrored and `ON_READ` variables. Inside,
        writes are local, no call may communicate, and only `var` and variables passed in `args` or
        `kwargs` may be written: under a strategy whose variables live once only the `ON_READ` ones
        of them, or only the others, as `var` is. An `ON_READ` variable is read there as this
        replica's own value.

        Args:
            var: the variable.
            fn: the update; what it returns, a nest, reaches every rank. For an `ON_READ` variable
                each replica has its own result, and with several replicas the leaves are
                `PerReplica`.
            args: plain values, or `Mirrored` ones.
            kwargs: likewise.
            group: if false, each leaf of the result is wrapped in a tuple.

        Raises:
            ValueError: `var` is not a variable of this strategy.
            TypeError: `fn` is not callable, or `args` is not a tuple or list.
            RuntimeError: called inside a replica function or the scope of another strategy.
            Exception: what `fn` raised, on every rank.
        """
        if not isinstance(var, Variable) or not self.variable_created_in_scope(var):
            raise ValueError(
                f"{current_call()}: {var!r} is not a variable of this strategy; pass one made "
                "under `with strategy.scope():`"
            )
        check_arguments(fn, args)
        return self._run_update(fn, (var, *args), dict(kwargs or {}), group)

    @collective("StrategyExtended.update_non_slot", check_cross_replica)
    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Runs `fn(*args, **kwargs)` on the devices of `non_slot_devices`; otherwise like `update`. Collective.

        The first variable among the arguments, if there is one, takes the place of `var`.
        """
        del colocate_with
        check_arguments(fn, args)
        return self._run_update(fn, tuple(args), dict(kwargs or {}), group)

    def _run_update(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        is_grouped: bool,
    ) -> Any:
        with self._group.communicator.change():
            return self._changed(fn, args, kwargs, is_grouped)

    def _changed(
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
                f"{current_call()}: an argument is one value a replica; reduce it first: "
                "StrategyExtended.reduce_to"
            )
        plain = [component_of(leaf) for leaf in leaves]
        args, kwargs = cast("tuple[tuple[Any, ...], dict[str, Any]]", structure.unflatten(plain))
        is_on_read = any(
            state_of(v).is_on_read and state_of(v).group is group for v in variables[:1]
        )
        # Where one rank writes what lives once, every rank writes its own values only, and neither
        # does both.
        is_everyones = group.updates_on is UpdatesOn.ALL_RANKS
        writable = [v for v in variables if is_everyones or state_of(v).is_on_read is is_on_read]
        # The function writes in place, and other ranks may still be reading: they must all have
        # come here first.
        communicator.barrier()
        if is_on_read or is_everyones:
            with communicator.raise_together():
                results, returned = self._updated(lambda: fn(*args, **kwargs), writable)
                if is_on_read:  # the replicas' values may differ, and so what comes of them
                    results = [regroup(group, leaf) for leaf in results]
                # Inside the block, so that what `fn` raises on one rank reaches the others here.
                communicator.barrier()
        else:
            written = [state.block for state in map(state_of, writable) if state.group is group]
            try:
                result = self._updated_by_root(lambda: fn(*args, **kwargs), variables, writable)
            except Exception:
                # All ranks raise it. What was written before it stays, and must be the same for
                # every reader.
                group.storage.publish(written)
                communicator.settle()
                raise
            group.storage.publish(written)
            results, returned = nests.flatten(result)
            results = [
                variables[leaf.index] if isinstance(leaf, _Reference) else leaf for leaf in results
            ]
        return returned.unflatten(results if is_grouped else [(leaf,) for leaf in results])  # pyright: ignore

    def _updated(
        self, fn: Callable[[], Any], writable: Sequence[Variable]
    ) -> tuple[list[Any], nests.Structure]:
        """The leaves and the structure of what `fn` returns, which this rank runs in an update's context."""
        group = self._group
        before = contexts.current.get()
        try:
            contexts.current.set(InUpdate(group, self._across.owner, writable))
            # One rank may run this alone, so a collective call in it would wait for ranks that
            # never come.
            group.communicator.pause()
            with group.on_stream():
                return nests.flatten(fn())
        finally:
            group.communicator.resume()
            contexts.current.set(before)

    def _updated_by_root(
        self, fn: Callable[[], Any], variables: Sequence[Variable], writable: Sequence[Variable]
    ) -> Any:
        """What `fn` returns on the parameter rank, on every rank; a variable in it as a `_Reference`."""
        group, communicator = self._group, self._group.communicator
        sent: list[Any] = []
        with group.on_stream(), communicator.raise_together():
            if communicator.rank == group.root:
                results, returned = self._updated(fn, writable)
                leaves = [
                    # A variable stays where it is; on each rank the result names that rank's own.
                    _Reference(_index(leaf, variables)) if isinstance(leaf, Variable) else leaf
                    for leaf in results
                ]
                sent = [returned.unflatten(leaves)]
            sent = communicator.broadcast_obj(to_wire(sent), group.root)
            return from_wire(sent, group.stream)[0]

    def non_slot_devices(self, var_list: Sequence[Variable]) -> tuple[str, ...]:
        """The device for values that belong to several variables: the parameter device."""
        del var_list
        return self.parameter_devices

    # ---- variables

    def colocate_vars_with(
        self, colocate_with_variable: Variable
    ) -> contextlib.AbstractContextManager[None]:
        """A context manager in which variables are made on this one's device, as all of a strategy's variables are.

        Raises:
            RuntimeError: on entering, outside of the strategy's scope.
            ValueError: on entering, if the variable is not the strategy's.
        """
        return self._colocated(colocate_with_variable)

    @contextlib.contextmanager
    def _colocated(self, variable: Variable) -> Any:
        context = contexts.context()
        is_here = self._group is default_group() if context is None else context is self._across
        if not is_here:
            raise RuntimeError(
                "StrategyExtended.colocate_vars_with is for use under `with strategy.scope():`"
            )
        if not self.variable_created_in_scope(variable):
            raise ValueError(
                "StrategyExtended.colocate_vars_with: the variable is not one of this strategy; "
                "make it under `with strategy.scope():`"
            )
        yield

    def variable_created_in_scope(self, v: Variable) -> bool:
        """Whether the variable was made in this strategy's scope."""
        return state_of(v).group is self._group

    def value_container(self, value: Any) -> Any:
        """The container that `value` is a component of: `value` itself, because variables have no components."""
        return value

    def read_var(self, v: Variable) -> Any:
        """A copy of the variable's value, like `Variable.read_value`. Collective where that is."""
        return v.read_value()


class _Reference:
    """Stands for a variable in a result that travels."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def _index(variable: Variable, variables: Sequence[Variable]) -> int:
    for i, one in enumerate(variables):
        if one is variable:
            return i
    raise ValueError(
        "StrategyExtended.update: the function returned a variable that was not passed to it; pass "
        "it too"
    )
