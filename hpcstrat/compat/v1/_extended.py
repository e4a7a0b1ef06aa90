"""`StrategyExtended` with the method of `tf.compat.v1.distribute` that runs several steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from hpcstrat._core.call_name import current_call, names_call
from hpcstrat._core.types import ReduceOp
from hpcstrat._replicas.contexts import require_cross_replica
from hpcstrat._strategies.base import Strategy
from hpcstrat._strategies.current import get_replica_context, get_strategy
from hpcstrat._strategies.extended import StrategyExtended


@final
class MultiStepContext:
    """Takes outputs of the steps of `experimental_run_steps_on_iterator`, and returns them.

    Attributes:
        last_step_outputs: the outputs of the last step by name; arrays that were reduced, or else
            what was set.
        non_tensor_outputs: other outputs by name; what was set, or the values of all replicas in a
            tuple if replicas set it.
        run_op: `None`: the steps have been run.
    """

    def __init__(self) -> None:
        self.last_step_outputs: dict[str, Any] = {}
        self.non_tensor_outputs: dict[str, Any] = {}
        self.run_op: None = None

    @names_call("MultiStepContext.set_last_step_output")
    def set_last_step_output(
        self, name: str, output: Any, reduce_op: ReduceOp | str | None = None
    ) -> None:
        """Sets an output of the step; a later step replaces it.

        Collective with a `reduce_op`: all ranks call it.

        Args:
            name: the name of the output.
            output: with a `reduce_op`, what `Strategy.reduce` takes, and in a replica context this
                replica's array.
            reduce_op: reduces the output over the replicas.

        Raises:
            ValueError: there is no `reduce_op` in a replica context.

        Examples:
            >>> strategy = hs.compat.v1.MirroredStrategy()
            >>> context = hs.compat.v1.MultiStepContext()
            >>> with strategy.scope():
            ...     for step in 1, 2:
            ...         context.set_last_step_output("loss", strategy.run(lambda: step / 2), "SUM")
            >>> print(context.last_step_outputs["loss"])
            1.0
        """
        context = get_replica_context()
        if context is None:
            if reduce_op is not None:
                output = get_strategy().reduce(reduce_op, output, axis=None)
        elif reduce_op is None:
            raise ValueError(
                f"{current_call()}: reduce_op is None, and each replica has its own output "
                f"{name!r}; pass ReduceOp.SUM or ReduceOp.MEAN, or return the output from run and "
                "set it in the cross-replica context"
            )
        else:
            output = context.all_reduce(reduce_op, output)
        self.last_step_outputs[name] = output

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Sets an output of any type. Collective in a replica context.

        Examples:
            >>> context = hs.compat.v1.MultiStepContext()
            >>> strategy = hs.compat.v1.MirroredStrategy()
            >>> strategy.run(lambda: context.set_non_tensor_output("names", "of this replica"))
            >>> context.non_tensor_outputs  # of one replica
            {'names': ('of this replica',)}
        """
        context = get_replica_context()
        if context is not None:
            output = context.merge_call(
                lambda strategy, value: strategy.experimental_local_results(value), (output,)
            )
        self.non_tensor_outputs[name] = output


class StrategyExtendedV1(StrategyExtended):
    """`hpcstrat.StrategyExtended` with the method of version 1."""

    @names_call("StrategyExtended.experimental_run_steps_on_iterator")
    def experimental_run_steps_on_iterator(
        self,
        fn: Callable[[MultiStepContext, Any], Any],
        iterator: Any,
        iterations: int = 1,
        initial_loop_values: Any = None,
    ) -> MultiStepContext:
        """Runs `fn(context, inputs)` for each of the next elements of an iterator. Collective.

        Args:
            fn: a step in the cross-replica context, which calls `Strategy.run`, and sets outputs of
                the `MultiStepContext`.
            iterator: has `get_next()`, as those of `make_dataset_iterator`.
            iterations: the number of steps.
            initial_loop_values: ignored: the first step sets the outputs.

        Returns:
            The context, with the outputs of the last step.

        Raises:
            ValueError: `iterations` is less than 1.
            RuntimeError: called inside a replica function or the scope of another strategy.
            StopIteration: the iterator has fewer elements; the steps before have been run.

        Examples:
            >>> strategy = hs.compat.v1.MirroredStrategy()
            >>> iterator = strategy.make_dataset_iterator(hs.data.Dataset.range(6).batch(2))
            >>> iterator.initialize()
            >>> def step(context, batch):
            ...     total = strategy.run(np.sum, args=(batch,))
            ...     context.set_last_step_output("total", total, "SUM")
            >>> extended = strategy.extended
            >>> context = extended.experimental_run_steps_on_iterator(step, iterator, iterations=2)
            >>> print(context.last_step_outputs["total"])  # of the second batch, [2 3]
            5
        """
        del initial_loop_values
        require_cross_replica(self._group)
        if iterations < 1:
            raise ValueError(f"{current_call()}: iterations is {iterations}; it must be at least 1")
        strategy, context = self._across.owner, MultiStepContext()
        assert isinstance(strategy, Strategy)
        with strategy.scope():
            for _ in range(iterations):
                fn(context, iterator.get_next())
        return context
