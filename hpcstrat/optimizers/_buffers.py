"""Gradient buffers: arrays from which `apply_gradients` need not copy gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from hpcstrat._calls.collective import collective
from hpcstrat._core.call_name import current_call
from hpcstrat._replicas import contexts
from hpcstrat._replicas.contexts import InReplica
from hpcstrat._replicas.group import ReplicaGroup
from hpcstrat._storage.plan import Plan
from hpcstrat._variable.variable import Variable
from hpcstrat.optimizers._gradients import group_of_variable
from hpcstrat.optimizers._state import OptimizerState


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
        may_start: bool,
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
        memory, and starts in `apply_gradients`. It also starts there with `clipnorm` or
        `global_clipnorm`, or if MPI was started without `THREAD_MULTIPLE`. Sums that start early
        need memory on the host: as much as the gradients. On GPUs NCCL may add up in another order.

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
        self._group.storage.mark(plan, variables, self._may_start)
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
