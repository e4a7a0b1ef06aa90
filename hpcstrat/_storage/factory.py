"""Chooses the storage for the kind of connection between the ranks."""

from __future__ import annotations

from hpcstrat._communicators.base import Communicator
from hpcstrat._communicators.device import DeviceCommunicator
from hpcstrat._communicators.host import HostCommunicator
from hpcstrat._communicators.shared_memory import SharedMemoryCommunicator
from hpcstrat._core.call_name import current_call
from hpcstrat._storage.base import Storage
from hpcstrat._storage.mirrored_host import MirroredHostStorage


def make_replica_storage(communicator: Communicator) -> Storage:
    """Storage in which each replica has its own variables, on its device.

    Raises:
        TypeError: there is no storage for this kind of connection.
    """
    if isinstance(communicator, DeviceCommunicator):
        # Imported here, because a program on CPUs does not need the modules for GPUs.
        from hpcstrat._storage.mirrored_device import MirroredDeviceStorage

        return MirroredDeviceStorage(communicator, root=0)
    if isinstance(communicator, HostCommunicator):
        return MirroredHostStorage(communicator)
    raise TypeError(
        f"{current_call()}: no storage supports a {type(communicator).__name__}; add one "
        "to the factory"
    )


def make_sharded_storage(communicator: Communicator, root: int = 0) -> Storage:
    """Storage in which each replica has all variables on its device, but only a part of the slots.

    Args:
        communicator: the replicas.
        root: the rank whose initial values count.

    Raises:
        TypeError: there is no storage for this kind of connection.
    """
    if communicator.size == 1:  # nothing to split
        return make_replica_storage(communicator)
    if isinstance(communicator, DeviceCommunicator):
        from hpcstrat._storage.sharded_device import ShardedDeviceStorage

        return ShardedDeviceStorage(communicator, root)
    if isinstance(communicator, HostCommunicator):
        from hpcstrat._storage.sharded_host import ShardedHostStorage

        return ShardedHostStorage(communicator)
    raise TypeError(
        f"{current_call()}: no storage supports a {type(communicator).__name__}; add one "
        "to the factory"
    )


def make_central_storage(communicator: Communicator, root: int, on_host: bool = False) -> Storage:
    """Storage with one copy of the variables for all replicas.

    Args:
        communicator: the replicas.
        root: the parameter rank.
        on_host: whether it stores them in host memory although it computes on a GPU.

    Raises:
        TypeError: there is no storage for this kind of connection.
    """
    if isinstance(communicator, DeviceCommunicator):
        from hpcstrat._storage.central_device import CentralDeviceStorage

        return CentralDeviceStorage(communicator, root, on_host and communicator.rank == root)
    if isinstance(communicator, SharedMemoryCommunicator):
        from hpcstrat._storage.central_host import central_host_storage

        return central_host_storage(communicator)
    raise TypeError(
        f"{current_call()}: the ranks of a {type(communicator).__name__} share no memory for one "
        "copy of variables; take MirroredStrategy"
    )
