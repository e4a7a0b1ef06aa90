"""Chooses the storage for the kind of connection between the ranks."""

from __future__ import annotations

import functools

from hpcstrat._communicators.base import Communicator
from hpcstrat._communicators.device import DeviceCommunicator
from hpcstrat._communicators.host import HostCommunicator
from hpcstrat._communicators.shared_memory import SharedMemoryCommunicator
from hpcstrat._core.call_name import current_call
from hpcstrat._storage.base import Storage
from hpcstrat._storage.central_host import CentralHostStorage
from hpcstrat._storage.mirrored_host import MirroredHostStorage

_central_host = functools.cache(CentralHostStorage)
"""The storage in a communicator's segment, the same for every strategy."""


def make_replica_storage(communicator: Communicator) -> Storage:
    """Storage in which each replica has its own variables, on its device.

    Args:
        communicator: the replicas. Rank 0's initial values count.
    """
    if isinstance(communicator, DeviceCommunicator):
        from hpcstrat._storage.device import MirroredDeviceStorage  # few programs need it

        return MirroredDeviceStorage(communicator, root=0)
    assert isinstance(communicator, HostCommunicator)
    return MirroredHostStorage(communicator)


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
        from hpcstrat._storage.device import CentralDeviceStorage  # few programs need it

        return CentralDeviceStorage(communicator, root, on_host and communicator.rank == root)
    if isinstance(communicator, SharedMemoryCommunicator):
        return _central_host(communicator)
    raise TypeError(
        f"{current_call()}: the ranks of a {type(communicator).__name__} share no memory for one "
        "copy of variables; take MirroredStrategy"
    )
