"""Chooses the storage for the kind of connection between the ranks."""

from __future__ import annotations

from hpcstrat._communicators.base import Communicator
from hpcstrat._communicators.device import DeviceCommunicator
from hpcstrat._communicators.host import HostCommunicator
from hpcstrat._communicators.shared_memory import SharedMemoryCommunicator
from hpcstrat._core.call_name import current_call
from hpcstrat._storage.base import Storage
from hpcstrat._storage.host import MirroredHostStorage

# The modules for GPUs are imported where a rank computes on one: other programs do not need them.


def make_replica_storage(communicator: Communicator) -> Storage:
    """Storage in which each replica has its own variables, on its device."""
    if isinstance(communicator, DeviceCommunicator):
        from hpcstrat._storage.device import MirroredDeviceStorage

        return MirroredDeviceStorage(communicator, root=0)
    assert isinstance(communicator, HostCommunicator)
    return MirroredHostStorage(communicator)


def make_sharded_storage(communicator: Communicator, root: int = 0) -> Storage:
    """Storage in which each replica has all variables on its device, but only a part of the slots.

    Args:
        communicator: the replicas.
        root: the rank whose initial values count.
    """
    if communicator.size == 1:  # nothing to split
        return make_replica_storage(communicator)
    if isinstance(communicator, DeviceCommunicator):
        from hpcstrat._storage.sharded_device import ShardedDeviceStorage

        return ShardedDeviceStorage(communicator, root)
    from hpcstrat._storage.sharded_host import ShardedHostStorage

    assert isinstance(communicator, HostCommunicator)
    return ShardedHostStorage(communicator)


def make_central_storage(communicator: Communicator, root: int, on_host: bool = False) -> Storage:
    """Storage with one copy of the variables for all replicas.

    Args:
        communicator: the replicas.
        root: the parameter rank.
        on_host: whether it stores them in host memory although it computes on a GPU.

    Raises:
        TypeError: the ranks share no memory.
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
