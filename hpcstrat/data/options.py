"""What a strategy's methods take and hand out besides data: input contexts and options."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any


@dataclasses.dataclass(frozen=True)
class InputContext:
    """What a function that makes a dataset is told about where its elements will go.

    Attributes:
        num_input_pipelines: how many pipelines feed the replicas: one a worker.
        input_pipeline_id: the index of this pipeline.
        num_replicas_in_sync: the number of replicas of all workers together.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """The number of elements of each replica's batch.

        Raises:
            ValueError: The replicas do not divide `global_batch_size`.
        """
        share, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise ValueError(
                f"InputContext.get_per_replica_batch_size: global_batch_size is {global_batch_size}, which "
                f"{self.num_replicas_in_sync} replicas do not divide; pass a multiple, such as "
                f"{(share + 1) * self.num_replicas_in_sync}"
            )
        return share


@dataclasses.dataclass(frozen=True)
class ValueContext:
    """What a function that makes one replica's value is told about the replica.

    Attributes:
        replica_id_in_sync_group: the index of the replica.
        num_replicas_in_sync: the number of replicas.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


class InputReplicationMode(enum.Enum):
    """For what a function that makes a dataset is called: once for each worker, or for each replica."""

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@dataclasses.dataclass(frozen=True)
class InputOptions:
    """How a dataset is distributed.

    Attributes:
        experimental_fetch_to_device: whether batches are copied to the replicas' devices ahead of their use; `None`
            stands for `True`.
        experimental_replication_mode: `InputReplicationMode.PER_WORKER`; `PER_REPLICA` is not implemented.
        experimental_place_dataset_on_device: must be `False`: pipelines run on the host.
        experimental_per_replica_buffer_size: the number of batches that are copied ahead besides the next one.
        even_batches: whether a short batch is split evenly too, so that replicas' parts differ by at most one element.
            Else it fills the replicas in order, each up to its share of a full batch, and can leave some without any.
            Nothing is left out, and nothing is there twice. With `experimental_distribute_dataset` only.
    """

    experimental_fetch_to_device: bool | None = None
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1
    even_batches: bool = False

    def __post_init__(self) -> None:
        if self.experimental_fetch_to_device is None:
            object.__setattr__(self, "experimental_fetch_to_device", True)


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Options of `Strategy.run`, which concern compilation and change nothing here.

    Attributes:
        experimental_enable_dynamic_batch_size: batches may differ in size.
        experimental_bucketizing_dynamic_shape: sizes are rounded up to few different ones.
        experimental_xla_options: options of a compiler.
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None
