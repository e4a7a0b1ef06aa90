"""CentralStorageStrategy: variables live once."""

from __future__ import annotations

from collections.abc import Sequence

from hpcstrat import _devices
from hpcstrat._communicators import connect
from hpcstrat._communicators.records import signature
from hpcstrat._storage.mirrored import MirroredStorage
from hpcstrat._strategies.base import Strategy
from hpcstrat._strategies.placement import place_on_one_host


class CentralStorageStrategy(Strategy):
    """One replica a rank; variables live once, in central storage on the parameter device.

    Collective: all ranks make it. The first strategy of a program starts MPI.

    Args:
        compute_devices: the device of each rank, in rank order; `None` takes the CPU of this host for all.
        parameter_device: where variables live; `None` takes rank 0's compute device.

    Raises:
        ValueError: a string that names no device, a list of another length than there are ranks, a parameter device
            that is no rank's.
        RuntimeError: a device that is not there, ranks on several hosts, or MPI cannot start.
    """

    def __init__(self, compute_devices: Sequence[str] | None = None, parameter_device: str | None = None) -> None:
        call = "CentralStorageStrategy"
        communicator = connect()
        with communicator.joint(call):
            devices = place_on_one_host(call, compute_devices, communicator)
            parameter = devices[0] if parameter_device is None else _devices.parse(parameter_device, call)
            if parameter not in devices:
                names = ", ".join(map(str, dict.fromkeys(devices)))
                raise ValueError(
                    f"{call}: parameter_device is {parameter}, and no rank computes there; name one of {names}"
                )
            communicator.exchange(signature(call, *map(str, devices), str(parameter)))
        local = MirroredStorage(communicator)
        storage = local
        if communicator.size > 1:
            from hpcstrat._communicators.shared_memory import SharedMemoryCommunicator
            from hpcstrat._storage.host import host_storage

            assert isinstance(communicator, SharedMemoryCommunicator)
            storage = host_storage(communicator)
        super().__init__(communicator, devices, parameter, storage, local)
        self._updates_everywhere = communicator.size == 1
