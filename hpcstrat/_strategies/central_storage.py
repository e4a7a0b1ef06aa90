"""CentralStorageStrategy: each variable is stored once, on the parameter device."""

from __future__ import annotations

from collections.abc import Sequence

from hpcstrat._agreement.records import signature_of
from hpcstrat._core import device_names
from hpcstrat._core.call_name import current_call, names_call
from hpcstrat._replicas.group import ReplicaGroup
from hpcstrat._storage import make_storage
from hpcstrat._strategies.base import Strategy
from hpcstrat._strategies.placement import place
from hpcstrat._transports.connection import disconnect_on_error


class CentralStorageStrategy(Strategy):
    """One replica per rank, on one host; each variable is stored once, on the parameter device.

    In host memory all ranks share it, and each updates a slice. Collective: all ranks construct it.
    The first strategy of a program starts MPI.

    Args:
        compute_devices: the device of each rank, in rank order. By default rank i gets the host's
            GPU i; on a host without GPUs all ranks use the CPU.
        parameter_device: the device that stores variables: the compute device of a rank, or
            `"CPU:0"`, the memory of the host. By default rank 0's compute device.

    Raises:
        ValueError: a string does not name a device, the list does not have one entry per rank, or
            has CPUs and GPUs, or no rank computes on the parameter device.
        RuntimeError: a device does not exist, there are more ranks than GPUs, only some ranks have
            a GPU, there are GPUs and CuPy is not installed, several GPUs cannot use NCCL, the ranks
            are on several hosts, or MPI cannot start.

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
    ) -> None:
        call = current_call()
        devices, communicator = place(compute_devices)
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
            communicator.exchange(signature_of(call, str(parameter)))
        # The host's memory belongs to no rank: there rank 0's initial values count.
        root = devices.index(parameter) if parameter in devices else 0
        storage = make_storage(communicator, root, on_host=parameter != devices[root])
        super().__init__(ReplicaGroup(call, communicator, devices, parameter, storage, root=root))
