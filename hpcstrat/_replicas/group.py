"""ReplicaGroup: the state that a strategy, its variables and their users share."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, TypeVar, final

from hpcstrat._core import device_names, gpu
from hpcstrat._storage.base import Storage
from hpcstrat._storage.host import HostStorage
from hpcstrat._transports.device import DeviceCommunicator
from hpcstrat._transports.host import SoloCommunicator
from hpcstrat._transports.verbs import Communicator

if TYPE_CHECKING:
    from hpcstrat._update.graph_numbers import GraphNumbers

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Workers:
    """The workers, one per host, and their replicas.

    Attributes:
        of: the index of each rank's worker.
        rank: this rank.
    """

    of: tuple[int, ...]
    rank: int

    @property
    def count(self) -> int:
        """The number of workers."""
        return max(self.of) + 1

    @property
    def index(self) -> int:
        """The index of this rank's worker."""
        return self.of[self.rank]

    def group_by_worker(self, values: Sequence[_Value]) -> list[list[_Value]]:
        """Splits a list with one value per rank into one list per worker."""
        groups: list[list[_Value]] = [[] for _ in range(self.count)]
        for worker, value in zip(self.of, values, strict=True):
            groups[worker].append(value)
        return groups

    @property
    def peers(self) -> list[int]:
        """The ranks of this rank's worker, in order."""
        return [rank for rank, worker in enumerate(self.of) if worker == self.index]


@final
@dataclass(eq=False, repr=False, slots=True)
class ReplicaGroup:
    """The replicas of one strategy, where they compute, and where they store variables.

    A strategy builds one. Variables, optimizers, metrics, checkpoints and contexts hold the group,
    not the strategy. Groups are compared by identity: a variable recognizes the contexts of its
    strategy by their group. Only `is_closed`, `strategy`, `replica_context` and
    `graph_numbers` change.

    Attributes:
        name: the strategy's name, for messages.
        communicator: connects all ranks, one per replica.
        devices: each replica's device, in rank order.
        parameter_device: where the parameter rank stores its variables.
        storage: holds its variables.
        root: the parameter rank, whose initial values are used.
        mirrors: whether every replica's device has the variables, which stay equal.
        requires_aggregation: whether a write in a replica context needs an aggregation.
        is_default: whether it is the default strategy's.
        hosts: the host of each rank; by default all ranks are on one host.
        is_closed: whether the strategy is closed.
        strategy: the strategy; its type is not known in this package.
        replica_context: the `ReplicaContext` of this rank's replica, once a program asked for it.
        graph_numbers: takes the numbers of updates while a function runs that becomes a graph.
        workers: the hosts, each of which reads data for its own replicas.
        device: this replica's device.
        stream: the stream that this replica computes on; `None` on the CPU.
    """

    name: str
    communicator: Communicator
    devices: Sequence[device_names.Device]
    parameter_device: device_names.Device
    storage: Storage
    root: int = 0
    mirrors: bool = False
    requires_aggregation: bool = True
    is_default: bool = False
    hosts: Sequence[int] = ()
    is_closed: bool = False
    strategy: Any = None
    replica_context: Any = None
    graph_numbers: GraphNumbers | None = None
    workers: Workers = field(init=False)
    device: device_names.Device = field(init=False)
    stream: gpu.Stream | None = field(init=False)

    def __post_init__(self) -> None:
        communicator = self.communicator
        # Fields, not properties, because every step reads them.
        self.workers = Workers(tuple(self.hosts or (0,) * communicator.size), communicator.rank)
        self.device = self.devices[communicator.rank]
        # The communicator makes the stream: strategies on one GPU share both.
        self.stream = communicator.stream if isinstance(communicator, DeviceCommunicator) else None

    def __reduce_ex__(self, _: SupportsIndex) -> NoReturn:
        # Pickling a strategy, or an object that works on its variables, ends here.
        raise TypeError(
            f"{self.name} cannot be pickled, nor what belongs to it: its ranks are connected in "
            "this job only; pickle arrays, as by variable.numpy(), or save a "
            "hs.checkpoint.Checkpoint"
        )

    @property
    def xp(self) -> ModuleType:
        """The array module of this replica's device: `numpy` or `cupy`."""
        return self.device.xp

    @property
    def variable_device(self) -> device_names.Device:
        """Where this replica reads ordinary variables."""
        return self.device if self.mirrors else self.parameter_device

    def on_stream(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the group's stream and GPU are current; on the CPU it does nothing."""
        return contextlib.nullcontext() if self.stream is None else self.stream.current()


# One for the whole process, so that variables made outside every scope belong together.
@functools.cache
def default_group() -> ReplicaGroup:
    """The group outside every scope: this process as a single replica. Does not start MPI."""
    communicator = SoloCommunicator()
    return ReplicaGroup(
        "DefaultStrategy",
        communicator,
        (device_names.CPU,),
        device_names.CPU,
        HostStorage(communicator),
        requires_aggregation=False,
        is_default=True,
    )
