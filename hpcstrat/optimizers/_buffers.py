"""GradientBuffers: arrays to write gradients to and mark as complete, one by one."""

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
from hpcstrat._storage.marks import indices_of
from hpcstrat._storage.plan import Plan
from hpcstrat._variable.variable import Variable, state_of
from hpcstrat.optimizers._gradients import check_pair, check_variables, group_of_variables


def agree_on_group(variables: Sequence[Variable]) -> ReplicaGroup:
    """The group of variables for gradient buffers, after a check that all ranks pass the same.

    Collective.

    Raises:
        ValueError: no variable; a variable occurs twice or cannot be changed by optimizers.
        ReplicaMismatchError: the replicas pass different variables.
    """
    if not variables or not all(isinstance(v, Variable) for v in variables):
        raise ValueError(
            f"{current_call()}: got {variables!r}; pass a list of variables, at least one"
        )
    group = group_of_variables(variables[0], "of")
    with group.communicator.raise_together():
        check_variables(group, variables)
        group.communicator.exchange(
            signature_of(current_call(), *[state_of(v).block.identity() for v in variables])
        )
    return group


@final
class MarkedStep:
    """The marks of an optimizer's step.

    Attributes:
        buffers: the gradient buffers of which some are marked; `None` if there are none.
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
        step: MarkedStep,
        group: ReplicaGroup,
        plan: Plan,
        variables: Sequence[Variable],
        may_start: Callable[[], bool],
    ) -> None:
        super().__init__(plan.buffers or [])
        self._step = step
        self._group = group
        self._plan = plan
        self._variables = tuple(variables)
        self._may_start = may_start

    def require_replica(self) -> None:
        """Checks that this line runs in a replica function.

        Raises:
            RuntimeError: it does not, and there are several replicas.
        """
        group_of_variables(self._variables[0], "of")
        if not isinstance(contexts.context(), InReplica) and self._group.communicator.size > 1:
            raise RuntimeError(
                f"{current_call()} was called outside of a replica function; call it in the "
                "function that strategy.run runs, before apply_gradients"
            )

    @collective("GradientBuffers.ready", check=lambda buffers: buffers.require_replica())
    def ready(self, *buffers: Any) -> None:
        """Marks gradients as complete: their sums start while you compute the others. Collective.

        All replicas mark the same buffers, in one order. The results do not change. A backward pass
        computes the gradients of the last layer first: mark each as soon as it is written, at least
        the large ones, and pass all buffers to `apply_gradients` in the end, which waits for the
        sums. Do not read or write a buffer between the two calls.

        This helps between several hosts, and between GPUs. On one host's CPUs the sum is made in
        memory, and starts in `apply_gradients`. It also starts there with `clipnorm`,
        `global_clipnorm` or `gradient_accumulation_steps`, or if MPI was started without
        `THREAD_MULTIPLE`. Sums that start early need memory on the host: as much as the gradients.
        On GPUs NCCL may add up in another order.

        Args:
            *buffers: some buffers of the list, in any order, each once per step.

        Raises:
            ValueError: no buffers, something that is not in the list, or a buffer that is already
                marked in this step.
            RuntimeError: called outside of a replica function.
            ReplicaMismatchError: the replicas mark different buffers. Nothing has started.
            MemoryError: cannot allocate the sums on some rank.
        """
        plan = self._plan
        if not buffers:
            raise ValueError(
                f"{current_call()}: got no arguments; pass gradient buffers, at least one"
            )
        try:
            chosen = indices_of(buffers, plan.order.to_message(plan.buffers or []))
        except LookupError as error:
            wrong = buffers[error.args[0]]
            raise ValueError(
                f"{current_call()}: argument {error.args[0] + 1} of {len(buffers)}, of type "
                f"{type(wrong).__name__}, is none of these buffers; pass the arrays that "
                "gradient_buffers returned, not views or copies"
            ) from None
        marked = plan.marks.marked
        for k, i in enumerate(chosen):
            if i in marked or i in chosen[:k]:
                name = plan.order.blocks[i].name
                raise ValueError(
                    f"{current_call()}: the gradient of {name} is marked twice "
                    "in this step; mark each once, and pass all buffers to apply_gradients before "
                    "the next step"
                )
        other = self._step.buffers
        if other is not None and other.is_marked and not marked:
            raise ValueError(
                f"{current_call()}: buffers of other variables of this optimizer are marked in "
                "this step; pass them to apply_gradients first"
            )
        self._group.storage.mark(plan, chosen, self._may_start())
        self._step.buffers = self

    @property
    def is_marked(self) -> bool:
        """Whether any buffer was marked since the last step."""
        return bool(self._plan.marks.marked)

    def require_all(self, pairs: Sequence[tuple[Any, Variable]], are_summed: bool) -> None:
        """Checks that `apply_gradients` gets all buffers after marks, perhaps with `IndexedSlices`.

        Raises:
            ValueError: it gets something else, on all ranks.
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
        """Forgets the marks after the variables were updated."""
        self._group.storage.end_marks(self._plan)
