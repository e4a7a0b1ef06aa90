"""ReplicaGroup: what a strategy, its variables, and all that works on them share."""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import NoReturn, SupportsIndex, TypeVar, final

from hpcstrat._communicators.base import Communicator
from hpcstrat._communicators.device import DeviceCommunicator
from hpcstrat._communicators.host import SoloCommunicator
from hpcstrat._core import device_names, gpu
from hpcstrat._storage.base import Storage
from hpcstrat._storage.mirrored_host import MirroredHostStorage

_Value = TypeVar("_Value")


class UpdatesOn(enum.Enum):
    """The ranks that change variables, and have the optimizers' slots."""

    ALL_RANKS = "ALL_RANKS"
    ROOT = "ROOT"


@dataclass(frozen=True)
class Workers:
    """The workers, which are hosts, and their replicas.

    Attributes:
        of: for each rank the index of its worker.
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
        """This rank's worker."""
        return self.of[self.rank]

    def grouped(self, values: Sequence[_Value]) -> list[list[_Value]]:
        """Values of all ranks, worker by worker."""
        groups: list[list[_Value]] = [[] for _ in range(self.count)]
        for worker, value in zip(self.of, values, strict=True):
            groups[worker].append(value)
        return groups

    @property
    def peers(self) -> list[int]:
        """The ranks of this rank's worker, in order."""
        return [rank for rank, worker in enumerate(self.of) if worker == self.index]


@final
class Lifetime:
    """Whether a strategy was closed: the only thing about a group that changes."""

    __slots__ = ("is_closed",)

    def __init__(self, is_closed: bool = False) -> None:
        self.is_closed: bool = is_closed


@final
@dataclass(frozen=True, eq=False, repr=False, slots=True)
class ReplicaGroup:
    """The replicas of one strategy, where they compute, and where they keep their variables.

    A strategy builds one. Variables, optimizers, metrics, checkpoints and contexts hold it, and not
    the strategy. Two groups are equal only if they are one object: that is how a variable knows its
    own strategy's contexts.

    Attributes:
        name: the strategy's, for messages.
        communicator: all ranks, one a replica.
        devices: each replica's device, in rank order.
        parameter_device: where the parameter rank keeps its variables.
        storage: where ordinary variables are.
        replica_storage: where `ON_READ` variables are, on each replica's own device.
        root: the parameter rank, whose initial values count.
        updates_on: who changes variables, and so runs the function of `StrategyExtended.update`.
        mirrors: whether each replica keeps a copy of every variable on its own device.
        requires_aggregation: whether a write in a replica context needs an aggregation.
        hosts: the host of each rank; by default all are on one.
        lifetime: whether the strategy was closed.
        workers: the hosts, each of which reads data for its own replicas.
        device: this replica's device.
        stream: the stream that this replica's GPU computes on; `None` on the CPU.
    """

    name: str
    communicator: Communicator
    devices: Sequence[device_names.Device]
    parameter_device: device_names.Device
    storage: Storage
    replica_storage: Storage
    root: int = 0
    updates_on: UpdatesOn = UpdatesOn.ALL_RANKS
    mirrors: bool = False
    requires_aggregation: bool = True
    hosts: Sequence[int] = ()
    # An object of its own: the group is frozen, and shared by all that belongs to the strategy.
    lifetime: Lifetime = field(default_factory=Lifetime)
    workers: Workers = field(init=False)
    device: device_names.Device = field(init=False)
    stream: gpu.Stream | None = field(init=False)

    def __post_init__(self) -> None:
        communicator = self.communicator
        hosts = self.hosts or (0,) * communicator.size
        # The communicator has made it, since strategies on one GPU share both.
        stream = communicator.stream if isinstance(communicator, DeviceCommunicator) else None
        # Steps read them, so they are no properties; a frozen dataclass lets its fields be set in
        # this way only.
        object.__setattr__(self, "workers", Workers(tuple(hosts), communicator.rank))
        object.__setattr__(self, "device", self.devices[communicator.rank])
        object.__setattr__(self, "stream", stream)

    def __reduce_ex__(self, _: SupportsIndex) -> NoReturn:
        # Strategies and all that works on their variables come here when they are pickled.
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
        """Where this replica reads ordinary variables: its own device for mirrors, else the parameter device."""
        return self.device if self.mirrors else self.parameter_device

    @property
    def updates_here(self) -> bool:
        """Whether this rank changes variables."""
        return self.updates_on is UpdatesOn.ALL_RANKS or self.communicator.rank == self.root

    def on_stream(self) -> contextlib.AbstractContextManager[None]:
        """In this context the group's stream, and its GPU, is the current one; on the CPU nothing changes."""
        return contextlib.nullcontext() if self.stream is None else self.stream.current()


# One for the whole process, so that variables made outside of every scope belong together.
@functools.cache
def default_group() -> ReplicaGroup:
    """The group of one replica that every process is outside every scope. Does not start MPI."""
    communicator = SoloCommunicator()
    storage = MirroredHostStorage(communicator)
    return ReplicaGroup(
        "DefaultStrategy",
        communicator,
        (device_names.CPU,),
        device_names.CPU,
        storage,
        storage,
        requires_aggregation=False,
    )
