"""What users pass to datasets: options, checked arguments, and names that only `tf.data` has.

The messages of the checks name the call and the argument.
"""

from __future__ import annotations

import dataclasses
import enum
import operator
import os
import reprlib
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np

from hpcstrat.data._threads import AUTOTUNED

AUTOTUNE = -1
"""Leaves a size or a number to the library."""


def whole(number: Any, call: str, argument: str) -> int:
    """The argument as an int."""
    try:
        return operator.index(number)
    except TypeError:
        raise TypeError(
            f"{call}: {argument} is {reprlib.repr(number)}; it must be an int"
        ) from None


def positive(number: Any, call: str, argument: str) -> int:
    """The argument as an int that is at least 1."""
    number = whole(number, call, argument)
    if number < 1:
        raise ValueError(f"{call}: {argument} is {number}; it must be at least 1")
    return number


def seed_of(number: Any, call: str) -> int | None:
    """The argument `seed`, an int or `None`."""
    return None if number is None else whole(number, call, "seed")


def weights_of(weights: Any, call: str, count: int) -> list[float]:
    """The argument `weights`: one number for each of `count` datasets."""
    array = np.asarray(weights)
    if array.ndim != 1 or array.dtype.kind not in "biuf":
        raise TypeError(
            f"{call}: weights is {reprlib.repr(weights)}; it must be a sequence of numbers"
        )
    numbers = array.astype(float).tolist()
    if len(numbers) != count or min(numbers) < 0 or not 0 < sum(numbers) < np.inf:
        raise ValueError(
            f"{call}: weights is {numbers}; it must have one number for each of the {count} "
            "datasets, not negative and not all 0"
        )
    return numbers


def function_of(function: Any, call: str, argument: str) -> Callable[..., Any]:
    """The argument, which must be callable."""
    if not callable(function):
        raise TypeError(
            f"{call}: {argument} is {type(function).__name__}; it must be a function of an element"
        )
    return function


def path_of(path: Any, call: str, argument: str = "path") -> str:
    """The argument, a path, as text."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise TypeError(f"{call}: {argument} is {reprlib.repr(path)}; it must be a path")
    return text


def thread_count(calls: int | None, call: str) -> int:
    """The number of threads that `num_parallel_calls` asks for; 0 for `None`."""
    if calls is None:
        return 0
    return AUTOTUNED if calls == AUTOTUNE else positive(calls, call, "num_parallel_calls")


def refuse_second(name: Any, method: str) -> None:
    """Refuses a second array, which would count as the name that TensorFlow takes."""
    if not isinstance(name, (str, type(None))):
        raise TypeError(
            f"Dataset.{method}: name is {reprlib.repr(name)}; pass arrays of one element as a "
            f"tuple: {method}((x, y))"
        )


def refuse_arguments(call: str, **arguments: Any) -> None:
    """Refuses arguments that only TensorFlow's file format has."""
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(
                f"{call}: {name} is {value!r}, but elements are kept as they are in memory, one "
                "file per leaf; leave it None"
            )


class AutoShardPolicy(enum.IntEnum):
    """How TensorFlow divides a dataset between workers; see `Options`."""

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


class _OptionGroup:
    """A group of options, `None` or other groups until they are set; unknown names raise."""

    def __init__(self, name: str, attributes: dict[str, Any]) -> None:
        self.__dict__.update(attributes, _name=name)

    if TYPE_CHECKING:  # type checkers do not know the attributes

        def __getattr__(self, attribute: str) -> Any: ...

    def __setattr__(self, attribute: str, value: Any) -> None:
        known = [name for name in self.__dict__ if name != "_name"]
        if attribute not in known:
            raise AttributeError(
                f"{self._name} has no attribute {attribute!r}; it has {', '.join(known)}"
            )
        self.__dict__[attribute] = value

    def __repr__(self) -> str:
        given = {
            name: value
            for name, value in self.__dict__.items()
            if name != "_name" and value is not None
        }
        return f"{self._name}({', '.join(map('{}={!r}'.format, given, given.values()))})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.__dict__ == other.__dict__

    __hash__: ClassVar[None] = None  # pyright: ignore[reportIncompatibleMethodOverride]


@final
class Options(_OptionGroup):
    """Options for `Dataset.with_options`.

    A pipeline keeps its options, and `Dataset.options` returns them; only one has an effect.

    With `experimental_distribute.auto_shard_policy = AutoShardPolicy.OFF`, a short batch fills the
    replicas in order, each up to its share of a full batch, instead of being split evenly; a
    strategy with several workers refuses it. The order of elements is always kept, whatever
    `deterministic` is. The groups are `autotune`, `experimental_distribute`,
    `experimental_optimization` and `threading`.

    Examples:
        >>> import hpcstrat as hs
        >>> options = hs.data.Options()
        >>> options.experimental_distribute.auto_shard_policy = hs.data.AutoShardPolicy.OFF
        >>> dataset = hs.data.Dataset.range(5).batch(8).with_options(options)
        >>> options.experimental_distribute.shard_policy = hs.data.AutoShardPolicy.OFF
        Traceback (most recent call last):
        AttributeError: Options.experimental_distribute has no attribute 'shard_policy'; ...
    """

    def __init__(self) -> None:
        groups = {
            name: _OptionGroup(f"Options.{name}", dict(attributes))
            for name, attributes in _GROUPS.items()
        }
        super().__init__("Options", {**dict.fromkeys(_ATTRIBUTES), **groups})

    def __setattr__(self, attribute: str, value: Any) -> None:
        if attribute in _GROUPS and not isinstance(value, _OptionGroup):
            raise TypeError(
                f"Options: {attribute} has attributes of its own, so {value!r} cannot replace it; "
                f"set them instead: options.{attribute}.<name> = ..."
            )
        super().__setattr__(attribute, value)

    def merge(self, options: Options) -> Options:
        """A copy of these options, overridden by those that are set in `options`.

        Examples:
            >>> ours, theirs = hs.data.Options(), hs.data.Options()
            >>> ours.deterministic, ours.experimental_slack = True, True
            >>> theirs.deterministic = False
            >>> merged = ours.merge(theirs)
            >>> merged.deterministic, merged.experimental_slack
            (False, True)
        """
        merged = Options()
        for source in (self, options):
            for name in _ATTRIBUTES:
                if getattr(source, name) is not None:
                    setattr(merged, name, getattr(source, name))
            for group, attributes in _GROUPS.items():
                for name, default in attributes.items():
                    if (value := getattr(getattr(source, group), name)) != default:
                        setattr(getattr(merged, group), name, value)
        return merged


_ATTRIBUTES = (
    "deterministic",
    "experimental_deterministic",
    "experimental_external_state_policy",
    "experimental_slack",
    "experimental_symbolic_checkpoint",
    "experimental_warm_start",
)
_GROUPS: dict[str, dict[str, Any]] = {
    "autotune": dict.fromkeys(("autotune_algorithm", "cpu_budget", "enabled", "ram_budget")),
    "experimental_distribute": {"auto_shard_policy": AutoShardPolicy.AUTO, "num_devices": None},
    "experimental_optimization": dict.fromkeys(
        (
            "apply_default_optimizations",
            "filter_fusion",
            "filter_parallelization",
            "inject_prefetch",
            "map_and_batch_fusion",
            "map_and_filter_fusion",
            "map_fusion",
            "map_parallelization",
            "noop_elimination",
            "parallel_batch",
            "seq_interleave_prefetch",
            "shuffle_and_repeat_fusion",
        )
    ),
    "threading": dict.fromkeys(("max_intra_op_parallelism", "private_threadpool_size")),
}


@dataclasses.dataclass(frozen=True)
class InputContext:
    """Tells a function that makes a dataset which replicas get its elements.

    Attributes:
        num_input_pipelines: the number of pipelines that feed the replicas: one per worker.
        input_pipeline_id: the index of this pipeline.
        num_replicas_in_sync: the total number of replicas of all workers.

    Examples:
        What the second of two workers gets, for its two replicas:

        >>> import hpcstrat as hs
        >>> def pipeline(context):
        ...     dataset = hs.data.Dataset.range(16)
        ...     dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
        ...     return dataset.batch(context.get_per_replica_batch_size(8))
        >>> print(*pipeline(hs.InputContext(2, input_pipeline_id=1, num_replicas_in_sync=4)))
        [1 3] [5 7] [ 9 11] [13 15]
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """The size of each replica's batch.

        Raises:
            ValueError: `global_batch_size` is not a multiple of the number of replicas.

        Examples:
            >>> context = hs.data.InputContext(num_input_pipelines=2, num_replicas_in_sync=4)
            >>> context.get_per_replica_batch_size(256)
            64
        """
        share, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise ValueError(
                "InputContext.get_per_replica_batch_size: global_batch_size is "
                f"{global_batch_size}, not a multiple of {self.num_replicas_in_sync}, the number "
                f"of replicas; pass a multiple, such as {(share + 1) * self.num_replicas_in_sync}"
            )
        return share


class InputReplicationMode(enum.Enum):
    """Whether a function that makes a dataset is called once per worker or once per replica."""

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@dataclasses.dataclass(frozen=True)
class InputOptions:
    """How a dataset is distributed.

    Attributes:
        experimental_fetch_to_device: whether batches are copied to the replicas' devices before
            they are used; `None` means `True`.
        experimental_replication_mode: `InputReplicationMode.PER_WORKER`; or `PER_REPLICA`, as in
            TensorFlow only with `MirroredStrategy.distribute_datasets_from_function`.
        experimental_place_dataset_on_device: `True` only with `PER_REPLICA` and without
            `experimental_fetch_to_device`. Pipelines run on the host anyway, and batches are copied
            to the device.
        experimental_per_replica_buffer_size: the number of batches that are copied ahead, in
            addition to the next batch.
        even_batches: deprecated: `True` is the default behaviour, which splits every batch evenly;
            instead of `False`, set `AutoShardPolicy.OFF` in the dataset's options.

    Examples:
        >>> import hpcstrat as hs
        >>> strategy = hs.CentralStorageStrategy()
        >>> three_ahead = hs.InputOptions(experimental_per_replica_buffer_size=3)
        >>> dataset = hs.data.Dataset.range(5).batch(2)
        >>> print(*strategy.experimental_distribute_dataset(dataset, three_ahead))
        [0 1] [2 3] [4]
    """

    experimental_fetch_to_device: bool | None = None
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1
    even_batches: bool | None = None

    def __post_init__(self) -> None:
        if self.experimental_fetch_to_device is None:
            object.__setattr__(self, "experimental_fetch_to_device", True)
        if self.even_batches is not None:
            off = ", and set AutoShardPolicy.OFF in the options of the dataset"
            remedy = "" if self.even_batches else off
            warnings.warn(
                f"InputOptions: even_batches is {self.even_batches}, but every batch is split "
                f"evenly now; leave it out{remedy}",
                DeprecationWarning,
                stacklevel=3,
            )
