"""CentralStorageStrategy: variables live once."""

from __future__ import annotations

from collections.abc import Sequence

from hpcstrat._communicators.connection import given_back_on_error
from hpcstrat._communicators.device import DeviceCommunicator
from hpcstrat._core import device_names
from hpcstrat._core.call_name import current_call, names_call
from hpcstrat._replicas.group import ReplicaGroup, UpdatesOn
from hpcstrat._storage.factory import central_storage, replica_storage, sharded_storage
from hpcstrat._strategies.base import Strategy
from hpcstrat._strategies.placement import agree_on_placement, place_on_one_host


class CentralStorageStrategy(Strategy):
    """One replica per rank; each variable exists once, in central storage on the parameter device.

    Collective: all ranks construct it. The first strategy of a program starts MPI.

    Args:
        compute_devices: the device of each rank, in rank order. By default rank i gets the host's
            GPU i; on a host without GPUs all ranks use the CPU.
        parameter_device: where variables live: the compute device of some rank, or `"CPU:0"`, the
            memory of the host; by default rank 0's compute device.
        shard_updates: whether each replica on a GPU keeps the optimizers' slots for its part of all
            elements, and updates that part, instead of the parameter device alone. On CPUs the
            ranks share the updates, and one copy of the slots, in any case.

    Raises:
        TypeError: `shard_updates` is not a bool.
        ValueError: a string does not name a device, the list does not have one entry per rank, no
            rank computes on the parameter device, or updates on GPUs are to be split and the
            parameter device is the host's memory.
        RuntimeError: a device does not exist, there are more ranks than GPUs, the ranks are on
            several hosts, or MPI or NCCL cannot start.
    """

    @names_call("CentralStorageStrategy")
    def __init__(
        self,
        compute_devices: Sequence[str] | None = None,
        parameter_device: str | None = None,
        *,
        shard_updates: bool = False,
    ) -> None:
        call = current_call()
        devices, communicator = place_on_one_host(compute_devices)
        # A wrong argument must not leave a connected GPU behind, on any rank.
        with given_back_on_error(communicator), communicator.raise_together():
            parameter = (
                devices[0] if parameter_device is None else device_names.parse(parameter_device)
            )
            if parameter not in (*devices, device_names.CPU):
                names = ", ".join(map(str, dict.fromkeys([*devices, device_names.CPU])))
                raise ValueError(
                    f"{call}: parameter_device is {parameter}, and no rank computes there; name "
                    f"one of {names}"
                )
            shards = shard_updates and isinstance(communicator, DeviceCommunicator)
            if shards and parameter not in devices:
                raise ValueError(
                    f"{call}: shard_updates=True keeps a part of the slots on every replica's GPU, "
                    f"and parameter_device is {parameter.short}, the memory of the host; leave one "
                    "of them out"
                )
            agree_on_placement(communicator, devices, shard_updates, str(parameter))
        # The host's memory belongs to no rank: rank 0 then updates the variables there.
        root = devices.index(parameter) if parameter in devices else 0
        local = replica_storage(communicator)
        if (
            communicator.size == 1 and parameter == devices[0]
        ):  # the central copy and the replica's are one
            storage = local
        elif shards:
            storage = sharded_storage(communicator, root)
        else:
            storage = central_storage(communicator, root, on_host=parameter != devices[root])
        updates_on = UpdatesOn.ALL_RANKS if communicator.size == 1 or shards else UpdatesOn.ROOT
        super().__init__(
            ReplicaGroup(
                call,
                communicator,
                devices,
                parameter,
                storage,
                local,
                root=root,
                updates_on=updates_on,
            )
        )
