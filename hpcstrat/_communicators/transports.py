"""The transports, best first: what connects the ranks, and what moves the arrays on their GPUs.

A new transport is a file next to this file, and an entry in a table here. Modules of transports are
imported where they are needed: a single rank needs no MPI, and ranks on CPUs need no CuPy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hpcstrat._communicators.host import HostCommunicator
from hpcstrat._core.call_name import current_call
from hpcstrat._process.worlds import World
from hpcstrat._watchdog.channels import StatusChannel, connect_by_tcp, share_memory_channel

if TYPE_CHECKING:
    from hpcstrat._communicators.device import DeviceCommunicator
    from hpcstrat._core import gpu


class HostTransport(NamedTuple):
    """Moves records, objects and host arrays between all ranks.

    Attributes:
        reaches: whether it can connect ranks with this placement.
        connect: makes the communicator, and the channel of its watchdog, `None` if there cannot be
            a channel. Collective.
    """

    reaches: Callable[[World], bool]
    connect: Callable[[World], tuple[HostCommunicator, StatusChannel | None]]


class DeviceTransport(NamedTuple):
    """Moves arrays that are on GPUs.

    Attributes:
        name: for messages.
        why_not: why this rank cannot use it among ranks with these GPUs; empty if it can. This
            rank's GPU is current. GPUs are unique ids, empty for ranks that compute on the CPU.
        connect: makes the communicator on top of the host's; the stream is `None` on the CPU.
            Collective.
    """

    name: str
    why_not: Callable[[Sequence[str]], str]
    connect: Callable[[HostCommunicator, gpu.Stream | None], DeviceCommunicator]


def _share_memory(world: World) -> tuple[HostCommunicator, StatusChannel]:
    from hpcstrat._communicators.shared_memory import SharedMemoryCommunicator

    communicator = SharedMemoryCommunicator(world.comm)
    return communicator, share_memory_channel(world.comm, communicator.status_slots)


def _connect_hosts(world: World) -> tuple[HostCommunicator, StatusChannel | None]:
    from hpcstrat._communicators.hierarchical import HierarchicalCommunicator
    from hpcstrat._communicators.mpi import MpiCommunicator

    # Where each host has one rank, copies through its shared memory would gain nothing.
    is_flat = len(set(world.hosts)) == world.size
    communicator = (
        MpiCommunicator(world.comm)
        if is_flat
        else HierarchicalCommunicator(world.comm, world.host_comm)
    )
    return communicator, connect_by_tcp(world.comm)


HOST_TRANSPORTS: list[HostTransport] = [
    HostTransport(lambda world: world.local_size == world.size, _share_memory),
    HostTransport(lambda world: True, _connect_hosts),
]
"""The first that reaches all ranks is used."""


def _why_no_nccl(gpus: Sequence[str]) -> str:
    from hpcstrat._communicators import nccl_start

    if not all(gpus):
        return "some of them compute on the CPU; name a GPU for each"
    return nccl_start.why_not(shared=len(set(gpus)) < len(gpus))


def _connect_by_nccl(control: HostCommunicator, stream: gpu.Stream | None) -> DeviceCommunicator:
    from hpcstrat._communicators.nccl import NcclCommunicator

    assert stream is not None
    return NcclCommunicator(control, stream)


def _connect_by_staging(control: HostCommunicator, stream: gpu.Stream | None) -> DeviceCommunicator:
    from hpcstrat._communicators.staged import StagedCommunicator

    return StagedCommunicator(control, stream)


STAGING = DeviceTransport("host memory", lambda gpus: "", _connect_by_staging)
"""Any ranks can use it: also if some compute on the CPU, and a single rank."""
DEVICE_TRANSPORTS: list[DeviceTransport] = [
    DeviceTransport("NCCL", _why_no_nccl, _connect_by_nccl),
    STAGING,
]
"""The first that all ranks with a GPU support is used."""


def connect_host(world: World) -> tuple[HostCommunicator, StatusChannel | None]:
    """The communicator of all ranks, by the best transport, and the channel of its watchdog.

    Collective.

    Raises:
        RuntimeError: no transport reaches them.
    """
    for transport in HOST_TRANSPORTS:
        if transport.reaches(world):
            return transport.connect(world)
    raise RuntimeError(
        "hpcstrat: no transport supports this placement of ranks; add one to HOST_TRANSPORTS"
    )


def choose_device_transport(
    control: HostCommunicator, gpus: Sequence[str], has_gpu: bool
) -> tuple[DeviceTransport, str]:
    """The transport chosen, and the faster one that was not possible, with the reason, as text.

    The text is empty if the fastest is possible. Collective: a rank alone cannot know what the
    others can use.

    Raises:
        RuntimeError: no transport can be used.
    """
    if control.size == 1:  # nothing is exchanged
        return STAGING, ""
    reason = ""
    for transport in DEVICE_TRANSPORTS:
        # One rank's problem is enough: NCCL connects all ranks or none.
        by_rank = control.all_gather_obj(transport.why_not(gpus) if has_gpu else "")
        problems = [problem for problem in by_rank if problem]
        if not problems:
            return transport, reason
        reason = reason or f"instead of {transport.name}: {problems[0]}"
    raise RuntimeError(
        f"{current_call()}: no transport is left {reason}; add one to DEVICE_TRANSPORTS"
    )
