"""What users pass to datasets: options, checked arguments, and names that only `tf.data` has.

The messages of the checks name the call and the argument.
"""

from __future__ import annotations

import dataclasses
import enum
import operator
import reprlib
from collections.abc import Callable
from typing import Any

AUTOTUNE = -1
"""Leaves a size or a number to the library."""

_AUTOTUNED_CALLS = 8  # not by the host: ranks compare how far a source was read ahead

INSTEAD = {
    "save": "hs.on_lead(np.save, path, np.stack([*dataset]))",
    "load": 'Dataset.from_tensor_slices(np.load(path, mmap_mode="r"))',
    "flat_map": "Dataset.range(n * rows).map(lambda i: parts[i // rows][i % rows])",
    "interleave": "Dataset.range(n * rows).map(lambda i: parts[i % n][i // n])",
    "padded_batch": "dataset.map(lambda x: np.pad(x, (0, size - len(x)))).batch(n)",
    "window": "from_tensor_slices(np.lib.stride_tricks.sliding_window_view(x, size, 0)[::shift])",
    "sample_from_datasets": "from_tensor_slices(np.random.default_rng(0).choice(x, n, p=p))",
    "choose_from_datasets": "from_tensor_slices((which, place)).map(lambda k, i: parts[k][i])",
    "scan": "Dataset.from_generator(lambda: itertools.accumulate(dataset, function))",
    "reduce": "functools.reduce(function, dataset, initial)",
    "counter": "Dataset.range(start, sys.maxsize, step)",
    "apply": "function(dataset)",
    "get_single_element": "[element] = dataset",
    "rebatch": "dataset.unbatch().batch(n)",
    "list_files": "Dataset.from_tensor_slices(sorted(glob.glob(pattern)))",
    "options": "nothing: options change nothing",
}
"""By methods that `tf.data.Dataset` has, what to write instead."""


class NamesWhatIsAbsent(type):
    """The class of `Dataset`, which says what to write instead of methods that it lacks."""

    def __getattr__(cls, name: str) -> Any:
        say_what_is_absent(name)
        return super().__getattribute__(name)  # raises Python's own error


def say_what_is_absent(name: str) -> None:
    """Raises the error of a method that `tf.data.Dataset` has and `Dataset` has not."""
    if name in INSTEAD:
        # Without its name, from which Python would guess another attribute beside these words.
        raise AttributeError(
            f"Dataset.{name} does not exist; write {INSTEAD[name]}", name=None, obj=None
        )


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


def function_of(function: Any, call: str, argument: str) -> Callable[..., Any]:
    """The argument, which must be callable."""
    if not callable(function):
        raise TypeError(
            f"{call}: {argument} is {type(function).__name__}; it must be a function of an element"
        )
    return function


def call_count(calls: Any, call: str) -> int:
    """The argument `num_parallel_calls`, an int or `None`."""
    if calls is None:
        return 1
    return _AUTOTUNED_CALLS if calls == AUTOTUNE else positive(calls, call, "num_parallel_calls")


class AutoShardPolicy(enum.IntEnum):
    """How TensorFlow divides a dataset between workers; see `Options`."""

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


@dataclasses.dataclass(slots=True)
class DistributeOptions:
    """The options `Options.experimental_distribute`.

    Attributes:
        auto_shard_policy: any but `OFF`, and all are the same.
    """

    auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO


@dataclasses.dataclass(slots=True)
class Options:
    """Options for `Dataset.with_options`, as programs for TensorFlow set them. They change nothing.

    Every batch is split evenly between all replicas, and the order of elements is always kept.

    Attributes:
        deterministic: whether the order is kept.
        experimental_distribute: has the attribute `auto_shard_policy`, an `AutoShardPolicy` other
            than `OFF`.

    Examples:
        >>> import hpcstrat as hs
        >>> options = hs.data.Options()
        >>> options.experimental_distribute.auto_shard_policy = hs.data.AutoShardPolicy.DATA
        >>> print(*hs.data.Dataset.range(5).batch(2).with_options(options))
        [0 1] [2 3] [4]
    """

    deterministic: bool | None = None
    experimental_distribute: DistributeOptions = dataclasses.field(
        default_factory=DistributeOptions
    )


def check_options(options: Any, call: str) -> None:
    """Refuses what is not an `Options`, and `AutoShardPolicy.OFF`."""
    if not isinstance(options, Options):
        raise TypeError(
            f"{call}: options is {type(options).__name__}; it must be a hpcstrat.data.Options"
        )
    if options.experimental_distribute.auto_shard_policy == AutoShardPolicy.OFF:
        raise NotImplementedError(
            f"{call}: auto_shard_policy is OFF, but every batch is split evenly between all "
            "replicas; leave it AUTO, or give each worker its own dataset with "
            "Strategy.distribute_datasets_from_function"
        )


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
    """Whether a function that makes a dataset is called once per worker or once per replica.

    Strategies accept `PER_WORKER` only.
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@dataclasses.dataclass(frozen=True)
class InputOptions:
    """How a dataset is distributed.

    Attributes:
        experimental_fetch_to_device: whether batches are copied to the replicas' devices before
            they are used; `None` means `True`.
        experimental_replication_mode: must be `InputReplicationMode.PER_WORKER`.
        experimental_place_dataset_on_device: must be `False`: pipelines run on the host.
        experimental_per_replica_buffer_size: the number of batches that are copied ahead, in
            addition to the next batch.

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

    def __post_init__(self) -> None:
        if self.experimental_fetch_to_device is None:
            object.__setattr__(self, "experimental_fetch_to_device", True)


def check_input_options(options: Any, call: str) -> None:
    """Refuses what is not an `InputOptions`, or asks for what strategies do not do."""
    if options is None:
        return
    if not isinstance(options, InputOptions):
        raise TypeError(
            f"{call}: options is {type(options).__name__}; it must be an InputOptions or None"
        )
    if options.experimental_replication_mode is not InputReplicationMode.PER_WORKER:
        raise NotImplementedError(
            f"{call}: experimental_replication_mode is {options.experimental_replication_mode!r}; "
            "it must be PER_WORKER: one pipeline feeds all replicas of a worker"
        )
    if options.experimental_place_dataset_on_device:
        raise ValueError(
            f"{call}: experimental_place_dataset_on_device is True, but pipelines run on the host; "
            "leave it False: experimental_fetch_to_device=True copies batches ahead"
        )
