"""The data that an optimizer keeps between steps: slots, plans, and gradient buffers."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from hpcstrat._calls.collective import collective
from hpcstrat._core.call_name import call_named, current_call
from hpcstrat._core.types import Array, Bytes, IndexedSlices
from hpcstrat._memory.allocator import Block, Shares
from hpcstrat._replicas import contexts
from hpcstrat._replicas.contexts import InReplica
from hpcstrat._replicas.group import ReplicaGroup
from hpcstrat._storage.base import Storage
from hpcstrat._storage.plan import Plan
from hpcstrat._variable.variable import Variable, state_of
from hpcstrat.optimizers._gradients import check_pairs, group_of_variable

_MOST_PLANS = 16  # each for a subset of the variables; a program may draw its subsets at random


@final
class OptimizerState:
    """The steps done, the slots of the variables seen, and the plans of their updates.

    It has no reference to the optimizer, so the slots' memory is freed as soon as the program drops
    the optimizer. Its methods take the optimizer, for its name and its `all_slots`.

    Attributes:
        iterations: the number of steps done.
        slots: the slots of each variable.
        plans: the plans of updates, each by its group and its variables.
        calls: the number of calls whose gradients were added up since the last step.
        sums: what was added up, by variable.
        marked: the plan with marked gradient buffers in this step, and its group; else `None`.
    """

    __slots__ = ("calls", "iterations", "marked", "plans", "slots", "sums")

    def __init__(self) -> None:
        self.iterations: int = 0
        self.slots: dict[Variable, tuple[Block, ...]] = {}
        self.plans: dict[tuple[ReplicaGroup | Variable, ...], Plan] = {}
        self.calls: int = 0
        self.sums: dict[Variable, Array] = {}
        self.marked: tuple[ReplicaGroup, Plan] | None = None

    def variables(self) -> list[Variable]:
        """The variables seen, in the order in which they were made: the same on all ranks."""
        return sorted(dict.fromkeys((*self.slots, *self.sums)), key=_number_of)

    def drop_sums(self) -> None:
        """Forgets the gradients that were added up."""
        self.calls = 0
        self.sums.clear()

    def make_slots(self, optimizer: Any, variables: Sequence[Variable]) -> None:
        """Makes the slots of variables that have none yet. Collective."""
        missing = [v for v in variables if v not in self.slots]
        for group in dict.fromkeys(state_of(v).group for v in missing):
            new = sorted([v for v in missing if state_of(v).group is group], key=_number_of)
            shares = group.storage.split([state_of(v).block for v in new])
            made: list[list[Block]] = [[] for _ in new]
            # Kind by kind, in the order of the variables: so each kind is contiguous in memory, as
            # the variables are.
            for kind, value in optimizer.all_slots.items():
                for v, of, slots in zip(new, shares, made, strict=True):
                    slots.append(_slot(group, f"{optimizer.name}: {kind}", v, value, of))
            self.slots |= zip(new, map(tuple, made), strict=True)

    def copy_from(self, optimizer: Any, pairs: Sequence[tuple[Variable, Variable]]) -> None:
        """Copies the steps done, slots and added gradients of another optimizer. Collective.

        `pairs` are its variables, each with the copy that belongs to this state.
        """
        other = state_of_optimizer(optimizer)
        self.iterations, self.calls = other.iterations, other.calls
        self.sums = {new: other.sums[old].copy() for old, new in pairs if old in other.sums}
        updated = [(old, new) for old, new in pairs if old in other.slots]
        self.make_slots(optimizer, [new for _, new in updated])
        for old, new in updated:
            group = state_of(new).group
            if group.writes_here:
                for source, target in zip(other.slots[old], self.slots[new], strict=True):
                    copy_block(group.storage, source, target)

    def plan_of(self, optimizer: Any, group: ReplicaGroup, variables: Sequence[Variable]) -> Plan:
        """The plan for these variables; without buffers, only the newest few plans are kept."""
        wanted = (group, *variables)
        if wanted not in self.plans:
            self.make_slots(optimizer, variables)
            plan = group.storage.plan(
                [state_of(v).block for v in variables], [self.slots[v] for v in variables]
            )
            droppable = [other for other, old in self.plans.items() if not old.buffers.arrays]
            for other in droppable[: 1 - _MOST_PLANS]:
                del self.plans[other]
            self.plans[wanted] = plan
        return self.plans[wanted]

    def check_marked(self, pairs: Sequence[tuple[Any, Variable]], are_summed: bool) -> None:
        """Checks that a step gets all buffers if some are marked, perhaps with `IndexedSlices`."""
        if self.marked is None or not self.marked[1].buffers.marked:
            return
        group, plan = self.marked
        with group.communicator.raise_together():
            check_pairs(pairs)
            dense = [pair for pair in pairs if not isinstance(pair[0], IndexedSlices)]
            is_all = self.plans.get((group, *[v for _, v in dense])) is plan
            if not is_all or not plan.buffers.are([gradient for gradient, _ in dense]):
                raise ValueError(
                    f"{current_call()}: some gradient buffers are marked ready in this step, so "
                    "it takes all of them, with their variables in their order: zip(buffers, "
                    "variables)"
                )
            if group.communicator.size > 1 and (
                are_summed or not isinstance(contexts.context(), InReplica)
            ):
                raise ValueError(
                    f"{current_call()}: gradient buffers that are marked ready are summed over the "
                    "replicas; call it in the replica function, without skip_gradients_aggregation"
                )

    def end_marks(self) -> None:
        """Forgets the marks after a step."""
        if self.marked is not None:
            group, plan = self.marked
            group.storage.end_marks(plan)
            self.marked = None


state_of_optimizer: Callable[[Any], OptimizerState] = operator.attrgetter("_state")
"""What an optimizer keeps from step to step."""


def copy_block(storage: Storage, source: Block, target: Block) -> None:
    """Copies values of a variable or slot, on a rank that updates it; on all if it is split."""
    start = 0
    for part in storage.local.parts(source) if source.shares is None else storage.all_parts(source):
        storage.local.write_part(target, start, part)
        start += part.size


def _slot(
    group: ReplicaGroup, kind: str, variable: Variable, value: float | None, shares: Shares | None
) -> Block:
    own = state_of(variable).block
    with call_named(f"{kind} of {variable.name!r}"):
        block = group.storage.create_slot(own, 0.0 if value is None else value, shares)
    if value is None and group.writes_here:
        copy_block(group.storage, own, block)
    return block


def _number_of(variable: Variable) -> int:
    return state_of(variable).block.number


# ---- inspection


@final
@dataclass(eq=False, repr=False)
class OptimizerVariable:
    """An array or a number that an optimizer keeps, for inspection.

    Attributes:
        name: such as `Adam/m/w` for the slot `m` of the variable `w`.
        shape: the variable's shape.
        dtype: the variable's dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    _read: Callable[[], np.ndarray[Any, Any]]

    def __repr__(self) -> str:
        return f"OptimizerVariable({self.name!r}, shape={self.shape}, dtype={self.dtype.name})"

    def numpy(self) -> Any:
        """A copy on the host, the same on every rank. Collective: all ranks call this."""
        with call_named(f"{self.name}.numpy"):
            return self._read()


def list_variables(optimizer: Any, rate: float) -> list[OptimizerVariable]:
    """The number of steps, the learning rate, and the slots of all variables, kind by kind."""
    state, name = state_of_optimizer(optimizer), optimizer.name
    numbers = [("iterations", np.int64(state.iterations)), ("learning_rate", np.float64(rate))]
    scalars = [OptimizerVariable(f"{name}/{number}", (), n.dtype, n.copy) for number, n in numbers]
    pairs = [(v, state.slots[v]) for v in state.variables() if v in state.slots]
    return scalars + [
        OptimizerVariable(
            f"{name}/{kind}/{v.name}", v.shape, v.dtype, functools.partial(_read, v, blocks[i])
        )
        for i, kind in enumerate(optimizer.all_slots)
        for v, blocks in pairs
    ]


def _read(variable: Variable, block: Block) -> np.ndarray[Any, Any]:
    group = state_of(variable).group
    value = None
    if block.shares is not None:
        return _join(variable, group.storage.all_parts(block))
    with group.communicator.raise_together():
        if group.communicator.rank == group.root:
            value = _join(variable, group.storage.local.parts(block))
    return group.communicator.broadcast_obj(value, group.root)


def _join(variable: Variable, parts: Iterable[Bytes]) -> np.ndarray[Any, Any]:
    joined = np.concatenate([np.empty(0, np.uint8), *[part.copy() for part in parts]])
    return joined.view(variable.dtype).reshape(variable.shape)


# ---- gradient buffers


@final
class GradientBuffers(list[Any]):
    """The list of arrays that `Optimizer.gradient_buffers` returns, one for each variable.

    Examples:
        >>> import numpy as np, hpcstrat as hs
        >>> strategy = hs.MirroredStrategy()
        >>> with strategy.scope():
        ...     a, b = hs.Variable(np.ones(2)), hs.Variable(np.ones(3))
        ...     optimizer = hs.optimizers.SGD(0.1)
        >>> d_a, d_b = buffers = optimizer.gradient_buffers([a, b])
        >>> def step():
        ...     d_b[...] = 5.0 / strategy.num_replicas_in_sync
        ...     buffers.ready(d_b)  # its sum over the replicas starts
        ...     d_a[...] = 2.0 / strategy.num_replicas_in_sync
        ...     optimizer.apply_gradients(zip(buffers, [a, b]))
        >>> strategy.run(step)
        >>> a.numpy(), b.numpy()
        (array([0.8, 0.8]), array([0.5, 0.5, 0.5]))
    """

    def __init__(
        self,
        state: OptimizerState,
        group: ReplicaGroup,
        plan: Plan,
        variables: Sequence[Variable],
        may_start: Callable[[], bool],
    ) -> None:
        super().__init__(plan.buffers.arrays)
        self._state = state
        self._group = group
        self._plan = plan
        self._variables = tuple(variables)
        self._may_start = may_start

    @collective("GradientBuffers.ready", check=lambda buffers: buffers._require_replica())
    def ready(self, *buffers: Any) -> None:
        """Marks gradients as complete: their sums start while you compute the others. Collective.

        All replicas mark the same buffers, in one order. The results do not change. A backward pass
        computes the gradients of the last layer first: mark each as soon as it is written, at least
        the large ones, and pass all buffers to `apply_gradients` in the end, which waits for the
        sums. Do not read or write a buffer between the two calls.

        This helps between several hosts, and between GPUs. On one host's CPUs the sum is made in
        memory, and starts in `apply_gradients`. It also starts there with `clipnorm`,
        `global_clipnorm`, `gradient_accumulation_steps` or an `UpdateStep` that transforms or
        collects, or if MPI was started without `THREAD_MULTIPLE`. Sums that start early need memory
        on the host: as much as the gradients. On GPUs NCCL may add up in another order.

        Args:
            *buffers: some buffers of the list, in any order, each once per step.

        Raises:
            ValueError: no buffers, something that is not in the list, or a buffer that is already
                marked in this step.
            RuntimeError: called outside of a replica function.
            ReplicaMismatchError: the replicas mark different buffers. Nothing has started.
            MemoryError: cannot allocate the sums on some rank.

        Examples:
            >>> a, b, optimizer = hs.Variable([1.0]), hs.Variable([2.0]), hs.optimizers.SGD(1.0)
            >>> d_a, d_b = buffers = optimizer.gradient_buffers([a, b])
            >>> d_b[...] = 0.5
            >>> buffers.ready(d_b)  # of the last layer; the others follow
            >>> d_a[...] = 0.25
            >>> optimizer.apply_gradients(zip(buffers, [a, b]))
            >>> a.numpy(), b.numpy()
            (array([0.75], dtype=float32), array([1.5], dtype=float32))
        """
        plan, variables = self._plan, self._variables_of(buffers)
        marked = plan.buffers.marked
        for k, i in enumerate(variables):
            if i in marked or i in variables[:k]:
                name = plan.order.blocks[i].name
                raise ValueError(
                    f"{current_call()}: the gradient of {name} is marked twice in this step; mark "
                    "each once, and pass all buffers to apply_gradients before the next step"
                )
        other = self._state.marked
        if not marked and other is not None and other[1].buffers.marked:
            raise ValueError(
                f"{current_call()}: buffers of other variables of this optimizer are marked in "
                "this step; pass them to apply_gradients first"
            )
        self._group.storage.mark(plan, variables, self._may_start())
        self._state.marked = self._group, plan

    def _variables_of(self, buffers: Sequence[Any]) -> list[int]:
        """The variables of some of these buffers, in the order of the message."""
        if not buffers:
            raise ValueError(
                f"{current_call()}: got no arguments; pass gradient buffers, at least one"
            )
        every = self._plan.order.to_message(self._plan.buffers.arrays)
        variables = {id(buffer): i for i, buffer in enumerate(every)}
        for i, buffer in enumerate(buffers, 1):
            if id(buffer) not in variables:
                raise ValueError(
                    f"{current_call()}: argument {i} of {len(buffers)}, of type "
                    f"{type(buffer).__name__}, is not one of these buffers; pass the arrays that "
                    "gradient_buffers returned, not views or copies"
                )
        return sorted([variables[id(buffer)] for buffer in buffers])

    def _require_replica(self) -> None:
        """Checks that this line runs in a replica function.

        Raises:
            RuntimeError: it does not, and there are several replicas.
        """
        group_of_variable(self._variables[0], "of")
        if not isinstance(contexts.context(), InReplica) and self._group.communicator.size > 1:
            raise RuntimeError(
                f"{current_call()} was called outside of a replica function; call it in the "
                "function that strategy.run runs, before apply_gradients"
            )
