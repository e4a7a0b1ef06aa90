"""TensorFlow's names that do nothing of their own here, so that programs with them run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hpcstrat._core.call_name import names_call
from hpcstrat._core.types import RunOptions
from hpcstrat._core.user_frames import warn
from hpcstrat._replicas import contexts
from hpcstrat._replicas.contexts import InReplica, require_cross_replica
from hpcstrat._replicas.group import ReplicaGroup
from hpcstrat._variable.variable import Variable, state_of
from hpcstrat.data._arguments import InputContext, InputOptions
from hpcstrat.data._dataset import Dataset
from hpcstrat.data._distributed import DistributedDataset


class StrategyNames:
    """Those of `Strategy`."""

    replica_group: ReplicaGroup

    @property
    def cluster_resolver(self) -> Any:
        """None: this strategy has one worker."""
        return None

    def experimental_assign_to_logical_device(self, tensor: Any, logical_device_id: int) -> Any:
        """Returns `tensor`, which is already on the replica's only logical device, number 0.

        Raises:
            ValueError: `logical_device_id` is not 0.
        """
        if logical_device_id != 0:
            raise ValueError(
                "Strategy.experimental_assign_to_logical_device: there is no logical device "
                f"{logical_device_id}; a replica has one, so pass 0"
            )
        return tensor

    def experimental_split_to_logical_devices(
        self, tensor: Any, partition_dimensions: Sequence[int]
    ) -> Any:
        """Returns `tensor` whole, because a replica has one logical device.

        Args:
            tensor: an array.
            partition_dimensions: the number of parts along each dimension; each must be 1.

        Raises:
            ValueError: it is not a 1 for each dimension.
        """
        # A program for several must not run as if it had them.
        parts, shape = list(partition_dimensions), np.shape(tensor)
        if parts != [1] * len(shape):
            raise ValueError(
                f"Strategy.experimental_split_to_logical_devices: partition_dimensions is {parts}; "
                f"a replica has one logical device, so pass {[1] * len(shape)} for the shape "
                f"{shape}"
            )
        return tensor

    def experimental_replicate_to_logical_devices(self, tensor: Any) -> Any:
        """Returns `tensor`, which is already on every logical device of the replica."""
        return tensor

    def experimental_make_numpy_dataset(self, numpy_input: Any) -> Dataset:
        """`Dataset.from_tensor_slices`: slices of a nest of arrays along their first dimension."""
        return Dataset.from_tensor_slices(numpy_input)

    def experimental_run_v2(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Deprecated: TensorFlow 2.0's name of `run`."""
        _warn_of_older_name("experimental_run_v2", "run")
        return self.replica_group.strategy.run(fn, args, kwargs, options)

    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Deprecated: TensorFlow's older name of `distribute_datasets_from_function`."""
        new = "distribute_datasets_from_function"
        _warn_of_older_name(f"experimental_{new}", new)
        return self.replica_group.strategy.distribute_datasets_from_function(dataset_fn, options)


@functools.cache  # one warning a process for each
def _warn_of_older_name(old: str, new: str) -> None:
    warn(f"Strategy.{old} is now called Strategy.{new}; use that", DeprecationWarning)


class ExtendedNames:
    """Those of `StrategyExtended`."""

    replica_group: ReplicaGroup

    @property
    def should_checkpoint(self) -> bool:
        """True: all workers write checkpoints together."""
        return True

    @property
    def should_save_summary(self) -> bool:
        """True: all workers write summaries together."""
        return True

    @property
    def experimental_require_static_shapes(self) -> bool:
        """False: shapes may differ between steps."""
        return False

    @property
    def experimental_between_graph(self) -> bool:
        """False: all workers run the same program."""
        return False

    @names_call("StrategyExtended.call_for_each_replica")
    def call_for_each_replica(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Calls `Strategy.run`, by its older name."""
        require_cross_replica(self.replica_group)
        return self.replica_group.strategy.run(fn, args, kwargs)

    def non_slot_devices(self, var_list: Sequence[Variable]) -> tuple[str, ...]:
        """The device for values shared by several variables: the parameter device."""
        del var_list
        return (str(self.replica_group.parameter_device),)

    def value_container(self, value: Any) -> Any:
        """The container that holds `value`: `value` itself, since variables have no components."""
        return value

    def read_var(self, v: Variable) -> Any:
        """A copy of the variable's value: `Variable.read_value`. Collective whenever that is."""
        return v.read_value()

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: Variable) -> Iterator[None]:
        """A context manager that changes nothing: all variables of a strategy are on one device.

        Raises:
            RuntimeError: entered outside the strategy's scope.
            ValueError: entered with a variable of another strategy.
        """
        in_replica = isinstance(contexts.current.get(), InReplica)
        if in_replica or contexts.group() is not self.replica_group:
            raise RuntimeError(
                "StrategyExtended.colocate_vars_with is for use under `with strategy.scope():`"
            )
        if state_of(colocate_with_variable).group is not self.replica_group:
            raise ValueError(
                "StrategyExtended.colocate_vars_with: the variable is not one of this strategy; "
                "make it under `with strategy.scope():`"
            )
        yield
