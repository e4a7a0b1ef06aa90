"""The methods of `StrategyExtended` that update variables where they are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from hpcstrat._calls.collective import collective
from hpcstrat._core import nests
from hpcstrat._core.call_name import current_call, explained
from hpcstrat._core.types import PerReplica, component_of
from hpcstrat._replicas import contexts
from hpcstrat._replicas.contexts import (
    AcrossReplicas,
    InUpdate,
    check_arguments,
    check_cross_replica,
)
from hpcstrat._replicas.group import ReplicaGroup, UpdatesOn
from hpcstrat._strategies.transfer import from_wire, regroup, to_wire
from hpcstrat._variable.variable import Variable, state_of


class UpdateMethods:
    """The part of `StrategyExtended` that updates variables; `StrategyExtended` sets the group."""

    _across: AcrossReplicas
    _group: ReplicaGroup

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

        These are all ranks for mirrored and `ON_READ` variables, and otherwise the parameter rank
        alone. In `fn`, writes are local, no call may communicate, and only `var` and variables in
        `args` or `kwargs` may be written. Under a strategy that stores variables once, those must
        be `ON_READ` if `var` is, and otherwise must not. Reading an `ON_READ` variable there
        returns this replica's own value.

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
        fn = explained(fn, "fn is called with the variable, and then args")
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
        return self._run_update(fn, tuple(args), dict(kwargs or {}), group)

    def _run_update(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        is_grouped: bool,
    ) -> Any:
        with self._group.communicator.change():
            return self._update(fn, args, kwargs, is_grouped)

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
        is_on_read = any(
            state_of(v).is_on_read and state_of(v).group is group for v in variables[:1]
        )
        # If one rank updates the variables that exist once, an update writes either those, or
        # ON_READ variables, which every rank writes; never both.
        is_on_all_ranks = group.updates_on is UpdatesOn.ALL_RANKS
        writable = [v for v in variables if is_on_all_ranks or state_of(v).is_on_read is is_on_read]
        # The function writes in place: no rank may still be reading.
        communicator.barrier()
        if is_on_read or is_on_all_ranks:
            with communicator.raise_together():
                results, returned = self._update_here(lambda: fn(*args, **kwargs), writable)
                if is_on_read:  # the replicas' values may differ, and so may their results
                    results = [regroup(group, leaf) for leaf in results]
                # Inside the block, so that an exception of one rank reaches the others here.
                communicator.barrier()
        else:
            written = [state.block for state in map(state_of, writable) if state.group is group]
            try:
                result = self._update_by_root(lambda: fn(*args, **kwargs), variables, writable)
            except Exception:
                # All ranks raise it. Earlier writes stay, and must be the same for all readers.
                group.storage.publish(written)
                communicator.calls.note_shared_error()
                raise
            group.storage.publish(written)
            results, returned = nests.flatten(result)
            results = [
                variables[leaf.index] if isinstance(leaf, _Reference) else leaf for leaf in results
            ]
        return returned.unflatten(results if is_grouped else [(leaf,) for leaf in results])  # pyright: ignore

    def _update_here(
        self, fn: Callable[[], Any], writable: Sequence[Variable]
    ) -> tuple[list[Any], nests.Structure]:
        """Runs `fn` on this rank in an update's context, and flattens its result."""
        group = self._group
        before = contexts.current.get()
        try:
            contexts.current.set(InUpdate(group, self._across.owner, writable))
            # One rank may run this alone: a collective call in it would wait forever.
            group.communicator.calls.set_paused(current_call())
            with group.on_stream():
                return nests.flatten(fn())
        finally:
            group.communicator.calls.set_paused(None)
            contexts.current.set(before)

    def _update_by_root(
        self, fn: Callable[[], Any], variables: Sequence[Variable], writable: Sequence[Variable]
    ) -> Any:
        """Runs `fn` on the parameter rank, and sends its result to every rank.

        A variable in the result is sent as a `_Reference`.
        """
        group, communicator = self._group, self._group.communicator
        sent: list[Any] = []
        with group.on_stream(), communicator.raise_together():
            if communicator.rank == group.root:
                results, returned = self._update_here(fn, writable)
                # A variable is not sent: each rank puts its own variable in the result.
                leaves = [
                    _Reference(_index(leaf, variables)) if isinstance(leaf, Variable) else leaf
                    for leaf in results
                ]
                sent = [returned.unflatten(leaves)]
            sent = communicator.broadcast_obj(to_wire(sent), group.root)
            return from_wire(sent, group.stream)[0]


class _Reference:
    """The index of a variable among the arguments of an update, to send in its place."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def _index(variable: Variable, variables: Sequence[Variable]) -> int:
    for i, candidate in enumerate(variables):
        if candidate is variable:
            return i
    raise ValueError(
        "StrategyExtended.update: the function returned a variable that was not passed to it; pass "
        "it too"
    )
