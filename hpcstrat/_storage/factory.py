"""Which storage keeps the variables of ranks that are connected so."""

from __future__ import annotations

from hpcstrat._communicators.base import Communicator
from hpcstrat._communicators.device import DeviceCommunicator
from hpcstrat._communicators.host import HostCommunicator, MemorySharingCommunicator
from hpcstrat._core.call_name import current_call
from hpcstrat._storage.base import Storage
from hpcstrat._storage.mirrored_host import MirroredHostStorage


def replica_storage(communicator: Communicator) -> Storage:
    """Where each replica keeps variables of its own, on its device.

    Raises:
        TypeError: there is none for ranks that are connected so.
    """
    if isinstance(communicator, DeviceCommunicator):
        # Imported here, because a program on CPUs needs none of the modules for GPUs.
        from hpcstrat._storage.mirrored_device import MirroredDeviceStorage

        return MirroredDeviceStorage(communicator, root=0)
    if isinstance(communicator, HostCommunicator):
        return MirroredHostStorage(communicator)
    raise TypeError(
        f"{current_call()}: no storage takes a {type(communicator).__name__}; add what does to the "
        "factory"
    )


def sharded_storage(communicator: Communicator, root: int = 0) -> Storage:
    """Where each replica keeps a copy of the variables on its device, and the slots of a part of them only.

    Args:
        communicator: the replicas.
        root: the rank whose initial values count.

    Raises:
        TypeError: there is none for ranks that are connected so.
    """
    if communicator.size == 1:  # the part is all of it
        return replica_storage(communicator)
    if isinstance(communicator, DeviceCommunicator):
        from hpcstrat._storage.sharded_device import ShardedDeviceStorage

        return ShardedDeviceStorage(communicator, root)
    if isinstance(communicator, HostCommunicator):
        from hpcstrat._storage.sharded_host import ShardedHostStorage

        return ShardedHostStorage(communicator)
    raise TypeError(
        f"{current_call()}: no storage takes a {type(communicator).__name__}; add what does to the "
        "factory"
    )


def central_storage(communicator: Communicator, root: int, on_host: bool = False) -> Storage:
    """Where variables are once, for all replicas.

    Args:
        communicator: the replicas.
        root: the parameter rank.
        on_host: whether it keeps them in host memory although it computes on a GPU.

    Raises:
        TypeError: there is none for ranks that are connected so.
    """
    if isinstance(communicator, DeviceCommunicator):
        from hpcstrat._storage.central_device import CentralDeviceStorage

        return CentralDeviceStorage(communicator, root, on_host and communicator.rank == root)
    if isinstance(communicator, MemorySharingCommunicator):
        from hpcstrat._storage.central_host import central_host_storage

        return central_host_storage(communicator)
    raise TypeError(
        f"{current_call()}: the ranks of a {type(communicator).__name__} share no memory for one "
        "copy of variables; take MirroredStrategy"
    )
