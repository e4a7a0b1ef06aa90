"""CentralStorageStrategy: each variable is stored once."""

from __future__ import annotations

from collections.abc import Sequence

from hpcstrat._communicators.connection import disconnect_on_error
from hpcstrat._communicators.device import DeviceCommunicator
from hpcstrat._core import device_names
from hpcstrat._core.call_name import current_call, names_call
from hpcstrat._replicas.group import ReplicaGroup, UpdatesOn
from hpcstrat._storage import (
    make_central_storage,
    make_replica_storage,
)
from hpcstrat._strategies.base import Strategy
from hpcstrat._strategies.placement import agree_on_placement, place_on_one_host


class CentralStorageStrategy(Strategy):
    """One replica per rank; each variable is stored once, on the parameter device.

    Collective: all ranks construct it. The first strategy of a program starts MPI.

    Args:
        compute_devices: the device of each rank, in rank order. By default rank i gets the host's
            GPU i; on a host without GPUs all ranks use the CPU.
        parameter_device: the device that stores variables: the compute device of a rank, or
            `"CPU:0"`, the memory of the host. By default rank 0's compute device.
        shard_updates: whether each replica on a GPU keeps the optimizers' slots for its part of all
            elements, and updates that part, instead of the parameter device alone. On CPUs the
            ranks share the updates, and one copy of the slots, in any case.

    Raises:
        TypeError: `shard_updates` is not a bool.
        ValueError: a string does not name a device, the list does not have one entry per rank, no
            rank computes on the parameter device, or `shard_updates` is set for GPUs while the
            parameter device is the host's memory.
        RuntimeError: a device does not exist, there are more ranks than GPUs, the ranks are on
            several hosts, or MPI or NCCL cannot start.

    Examples:
        Computes and stores variables on the CPU, on a host with GPUs too:

        >>> import hpcstrat as hs
        >>> strategy = hs.CentralStorageStrategy(["CPU:0"] * hs.size(), parameter_device="CPU:0")
        >>> strategy
        CentralStorageStrategy(1 replica on CPU:0)
        >>> strategy.extended.parameter_devices
        ('/job:localhost/replica:0/task:0/device:CPU:0',)
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
        with disconnect_on_error(communicator), communicator.raise_together():
            parameter = (
                devices[0] if parameter_device is None else device_names.parse(parameter_device)
            )
            if parameter not in (*devices, device_names.CPU):
                names = ", ".join(map(str, dict.fromkeys([*devices, device_names.CPU])))
                raise ValueError(
                    f"{call}: parameter_device is {parameter}, and no rank computes there; pass "
                    f"one of {names}"
                )
            shards = shard_updates and isinstance(communicator, DeviceCommunicator)
            if shards and parameter not in devices:
                raise ValueError(
                    f"{call}: shard_updates=True keeps a part of the slots on every replica's GPU, "
                    f"but parameter_device is {parameter.short}, the memory of the host; leave one "
                    "of the two out"
                )
            agree_on_placement(communicator, devices, shard_updates, str(parameter))
        # The host's memory belongs to no rank: rank 0 updates the variables there.
        root = devices.index(parameter) if parameter in devices else 0
        local = make_replica_storage(communicator)
        if communicator.size == 1 and parameter == devices[0]:
            storage = local  # central storage and the replica's own are the same
        elif shards:
            storage = make_replica_storage(communicator, root, shard_updates=True)
        else:
            storage = make_central_storage(communicator, root, on_host=parameter != devices[root])
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
