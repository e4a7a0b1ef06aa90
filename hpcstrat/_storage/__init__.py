"""Chooses the storage of variables for where the ranks compute."""

from __future__ import annotations

from hpcstrat._storage.base import Storage
from hpcstrat._storage.host import HostStorage
from hpcstrat._transports.device import DeviceCommunicator
from hpcstrat._transports.verbs import Communicator


def make_storage(
    communicator: Communicator, root: int | None = None, on_host: bool = False
) -> Storage:
    """The storage of a strategy's variables; see the table in `base`.

    Args:
        communicator: the replicas.
        root: the parameter rank on GPUs; `None` if each replica has its own copy there.
        on_host: whether variables are in host memory although replicas compute on GPUs.
    """
    if not isinstance(communicator, DeviceCommunicator):
        return HostStorage(communicator)
    if on_host:
        return HostStorage(communicator, communicator.stream)
    from hpcstrat._storage.gpu import GpuStorage  # few programs need it

    return GpuStorage(communicator, root)
