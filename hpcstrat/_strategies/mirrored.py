"""MirroredStrategy: a copy of every variable on each replica."""

from __future__ import annotations

from collections.abc import Sequence

from hpcstrat._communicators.base import Communicator
from hpcstrat._communicators.connection import given_back_on_error
from hpcstrat._communicators.device import DeviceCommunicator
from hpcstrat._communicators.protocol import signature
from hpcstrat._devices import Device
from hpcstrat._edge import current_call, names_call
from hpcstrat._group import ReplicaGroup, UpdatesOn
from hpcstrat._storage.factory import central_storage, replica_storage
from hpcstrat._strategies.base import Strategy
from hpcstrat._strategies.placement import place_on_one_host


class MirroredStrategy(Strategy):
    """One replica a rank; each holds a copy of every variable, and all copies change alike.

    Collective: all ranks make it. The first strategy of a program starts MPI.

    Args:
        devices: the device of each rank, in rank order; `None` takes GPU i of the host for rank i, or the CPU for all
            where the host has no GPU.

    Raises:
        ValueError: a string that names no device, or a list of another length than there are ranks.
        RuntimeError: a device that is not there, more ranks than GPUs, ranks on several hosts, or MPI or NCCL cannot
            start.
    """

    @names_call("MirroredStrategy")
    def __init__(self, devices: Sequence[str] | None = None) -> None:
        super().__init__(mirrored_group(*place_on_one_host(devices)))


def mirrored_group(devices: Sequence[Device], communicator: Communicator, hosts: Sequence[int] = ()) -> ReplicaGroup:
    """Replicas that are placed and connected, over which variables are mirrored. Collective."""
    call = current_call()
    with given_back_on_error(communicator):
        communicator.exchange(signature(call, *map(str, devices)))
    local = storage = replica_storage(communicator)
    updates_on = UpdatesOn.ALL_RANKS
    if isinstance(communicator, DeviceCommunicator) and len({device.kind for device in devices}) > 1:
        # A CPU and a GPU round differently, so that copies which each updates itself would not stay equal.
        storage, updates_on = central_storage(communicator, root=0), UpdatesOn.ROOT
    return ReplicaGroup(
        call, communicator, devices, devices[0], storage, local, updates_on=updates_on, mirrors=True, hosts=hosts
    )
