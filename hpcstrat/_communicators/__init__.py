"""How arrays and objects move between replicas."""

from __future__ import annotations

import atexit
import functools

from hpcstrat import _world
from hpcstrat._communicators.base import Communicator as Communicator
from hpcstrat._communicators.solo import SoloCommunicator as SoloCommunicator


@functools.cache
def connect() -> Communicator:
    """The communicator of all ranks of the program, the same for every strategy. Starts MPI. Collective, once.

    Raises:
        RuntimeError: MPI cannot be started, or the ranks cannot share memory.
    """
    world = _world.start()
    if world.size == 1:
        return SoloCommunicator()
    if world.local_size == world.size:
        from hpcstrat._communicators.shared_memory import SharedMemoryCommunicator

        communicator: Communicator = SharedMemoryCommunicator(world.comm)
    else:
        from hpcstrat._communicators.host import HostCommunicator

        communicator = HostCommunicator(world.comm)
    atexit.register(_leave, communicator)  # after mpi4py's own hook, so it runs before MPI is finalised
    return communicator


def _leave(communicator: Communicator) -> None:
    from mpi4py import MPI

    if not MPI.Is_finalized():  # by the program itself
        communicator.leave()
