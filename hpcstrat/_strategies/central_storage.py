"""CentralStorageStrategy: variables live once."""

from __future__ import annotations

from collections.abc import Sequence

from hpcstrat import _devices
from hpcstrat._communicators.connection import given_back_on_error
from hpcstrat._communicators.protocol import signature
from hpcstrat._edge import current_call, names_call
from hpcstrat._group import ReplicaGroup, UpdatesOn
from hpcstrat._storage.factory import central_storage, replica_storage
from hpcstrat._strategies.base import Strategy
from hpcstrat._strategies.placement import place_on_one_host


class CentralStorageStrategy(Strategy):
    """One replica a rank; variables live once, in central storage on the parameter device.

    Collective: all ranks make it. The first strategy of a program starts MPI.

    Args:
        compute_devices: the device of each rank, in rank order; `None` takes GPU i of the host for rank i, or the CPU
            for all where the host has no GPU.
        parameter_device: where variables live: the compute device of some rank, or `"CPU:0"`, the memory of the host;
            `None` takes rank 0's compute device.

    Raises:
        ValueError: a string that names no device, a list of another length than there are ranks, a parameter device
            that is no rank's.
        RuntimeError: a device that is not there, more ranks than GPUs, ranks on several hosts, or MPI or NCCL cannot
            start.
    """

    @names_call("CentralStorageStrategy")
    def __init__(self, compute_devices: Sequence[str] | None = None, parameter_device: str | None = None) -> None:
        call = current_call()
        devices, communicator = place_on_one_host(compute_devices)
        with given_back_on_error(communicator), communicator.raise_together():
            parameter = devices[0] if parameter_device is None else _devices.parse(parameter_device, call)
            if parameter not in (*devices, _devices.CPU):
                names = ", ".join(map(str, dict.fromkeys([*devices, _devices.CPU])))
                raise ValueError(
                    f"{call}: parameter_device is {parameter}, and no rank computes there; name one of {names}"
                )
            communicator.exchange(signature(call, *map(str, devices), str(parameter)))
        # The host's memory belongs to no rank: rank 0 then updates the variables there.
        root = devices.index(parameter) if parameter in devices else 0
        local = replica_storage(communicator)
        if communicator.size == 1 and parameter == devices[0]:  # the central copy and the replica's are one
            storage = local
        else:
            storage = central_storage(communicator, root, on_host=parameter != devices[root])
        updates_on = UpdatesOn.ALL_RANKS if communicator.size == 1 else UpdatesOn.ROOT
        super().__init__(
            ReplicaGroup(call, communicator, devices, parameter, storage, local, root=root, updates_on=updates_on)
        )
