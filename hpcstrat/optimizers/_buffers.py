"""GradientBuffers: arrays to write gradients to, which may be marked as complete one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

from hpcstrat._calls.collective import collective
from hpcstrat._calls.records import signature_of
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import IndexedSlices
from hpcstrat._replicas import contexts
from hpcstrat._replicas.contexts import InReplica
from hpcstrat._replicas.group import ReplicaGroup
from hpcstrat._storage.marks import places_of
from hpcstrat._storage.plan import Plan
from hpcstrat._variable.variable import Variable, state_of
from hpcstrat.optimizers._gradients import check_pair, check_variables, group_of_variables


def agreed_group(variables: Sequence[Variable]) -> ReplicaGroup:
    """The group of variables that are to have gradient buffers, which are the same on all ranks.

    Collective.

    Raises:
        ValueError: no variable, one that no optimizer can change, or that occurs twice.
        ReplicaMismatchError: the replicas pass different variables.
    """
    if not variables or not all(isinstance(v, Variable) for v in variables):
        raise ValueError(
            f"{current_call()}: it takes variables, at least one, and got {variables!r}; pass them "
            "in a list"
        )
    group = group_of_variables(variables[0], "of")
    with group.communicator.raise_together():
        check_variables(group, variables)
        group.communicator.exchange(
            signature_of(current_call(), *[state_of(v).block.held() for v in variables])
        )
    return group


@final
class MarkedStep:
    """What is marked in an optimizer's step.

    Attributes:
        buffers: those of which some are marked; `None` where there are none.
    """

    __slots__ = ("buffers",)

    def __init__(self) -> None:
        self.buffers: GradientBuffers | None = None


@final
class GradientBuffers(list[Any]):
    """The list of arrays that `Optimizer.gradient_buffers` returns, one for each variable.

    Examples:
        >>> import numpy as np, hpcstrat as hs
        >>> strategy = hs.MirroredStrategy()
        >>> with strategy.scope():
        ...     a, b, optimizer = hs.Variable(np.ones(2)), hs.Variable(np.ones(3)), hs.optimizers.SGD(0.1)
        >>> d_a, d_b = buffers = optimizer.gradient_buffers([a, b])
        >>> def step():
        ...     d_b[...] = 5.0 / strategy.num_replicas_in_sync
        ...     buffers.ready(d_b)  # its sum over the replicas begins
        ...     d_a[...] = 2.0 / strategy.num_replicas_in_sync
        ...     optimizer.apply_gradients(zip(buffers, [a, b]))
        >>> strategy.run(step)
        >>> a.numpy(), b.numpy()
        (array([0.8, 0.8]), array([0.5, 0.5, 0.5]))
    """

    def __init__(
        self,
        step: MarkedStep,
        group: ReplicaGroup,
        plan: Plan,
        variables: Sequence[Variable],
        may_begin: Callable[[], bool],
    ) -> None:
        super().__init__(plan.buffers or [])
        self._step = step
        self._group = group
        self._plan = plan
        self._variables = tuple(variables)
        self._may_begin = may_begin

    def require_replica(self) -> None:
        """Refuses a line that is not in a replica function.

        Raises:
            RuntimeError: it is not, though there are several replicas.
        """
        group_of_variables(self._variables[0], "of")
        if not isinstance(contexts.context(), InReplica) and self._group.communicator.size > 1:
            raise RuntimeError(
                f"{current_call()} was called outside of a replica function; call it in the "
                "function that strategy.run runs, before apply_gradients"
            )

    @collective("GradientBuffers.ready", check=lambda buffers: buffers.require_replica())
    def ready(self, *buffers: Any) -> None:
        """Says that these gradients are complete: their sum over the replicas begins, while you compute the others.

        The results are those without it. A backward pass computes the gradients of the last layer
        first: mark each as
        soon as it is written, the large ones at least, and pass all buffers to `apply_gradients` in
        the end, which waits for what is under way. Do not read or write a buffer between the two.

        It helps between several hosts, and between GPUs. On one host's CPUs the sum is made in
        memory, and begins in `apply_gradients`; so it does with `clipnorm`, `global_clipnorm` or
        `gradient_accumulation_steps`, and where MPI was started without `THREAD_MULTIPLE`. Sums
        that begin early take memory: once more the gradients, on the host. On GPUs NCCL may add up
        in another order.

        Collective: all replicas mark the same buffers, in one order.

        Args:
            *buffers: some of the list, in any order, each once in a step.

        Raises:
            ValueError: none, something that is not in the list, or a buffer that is marked already
                in this step.
            RuntimeError: called outside of a replica function.
            ReplicaMismatchError: the replicas mark different buffers. Nothing has begun.
            MemoryError: there is no room for the sums, on any rank.
        """
        plan = self._plan
        if not buffers:
            raise ValueError(
                f"{current_call()}: it takes gradient buffers, at least one, and got none"
            )
        try:
            places = places_of(buffers, plan.in_order(plan.buffers or []))
        except LookupError as error:
            wrong = buffers[error.args[0]]
            raise ValueError(
                f"{current_call()}: argument {error.args[0] + 1} of {len(buffers)}, of type "
                f"{type(wrong).__name__}, is none of these buffers; pass those that "
                "gradient_buffers returned themselves, not views or copies"
            ) from None
        marked = plan.marks.marked
        for i, place in enumerate(places):
            if place in marked or place in places[:i]:
                raise ValueError(
                    f"{current_call()}: the gradient of {plan.blocks[place].name} is marked twice "
                    "in this step; mark each once, and pass all buffers to apply_gradients before "
                    "the next step"
                )
        other = self._step.buffers
        if other is not None and other.is_marked and not marked:
            raise ValueError(
                f"{current_call()}: buffers of other variables of this optimizer are marked in "
                "this step; pass them to apply_gradients first"
            )
        self._group.storage.mark(plan, places, self._may_begin())
        self._step.buffers = self

    @property
    def is_marked(self) -> bool:
        """Whether any of them is, since the last step."""
        return bool(self._plan.marks.marked)

    def require_all(self, pairs: Sequence[tuple[Any, Variable]], are_summed: bool) -> None:
        """Checks what `apply_gradients` is given after marks: all buffers, and perhaps `IndexedSlices` besides.

        Raises:
            ValueError: it is something else, on all ranks.
        """
        with self._group.communicator.raise_together():
            for pair in pairs:
                check_pair(pair)
            dense = [pair for pair in pairs if not isinstance(pair[0], IndexedSlices)]
            is_all = [id(v) for _, v in dense] == [id(v) for v in self._variables]
            if not is_all or not self._plan.are_in_buffers([gradient for gradient, _ in dense]):
                raise ValueError(
                    f"{current_call()}: some gradient buffers are marked ready in this step, so it "
                    "takes all of them, with their variables in their order: zip(buffers, "
                    "variables)"
                )
            if self._group.communicator.size > 1 and (
                are_summed or not isinstance(contexts.context(), InReplica)
            ):
                raise ValueError(
                    f"{current_call()}: gradient buffers that are marked ready are summed over the "
                    "replicas; call it in the replica function, without skip_gradients_aggregation"
                )

    def end_step(self) -> None:
        """Forgets the marks: the variables are updated."""
        self._group.storage.end_marks(self._plan)
