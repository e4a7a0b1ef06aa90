"""Placing the replicas of a strategy that needs one host."""

from __future__ import annotations

from collections.abc import Sequence

from hpcstrat import _devices, _world
from hpcstrat._communicators import Communicator


def place_on_one_host(
    call: str, compute_devices: Sequence[str] | None, communicator: Communicator
) -> list[_devices.Device]:
    """The device of each rank, in rank order, after all checks.

    Raises:
        RuntimeError: the ranks are on several hosts, or this rank's device is not there.
        ValueError: a string that names no device, or a list of another length than there are ranks.
    """
    world = _world.start()
    if world.local_size < world.size:
        hosts = max(world.hosts) + 1
        raise RuntimeError(
            f"{call} has one worker, and the {world.size} ranks run on {hosts} hosts; start them on one, such as with "
            "`srun --nodes=1` or a host list of one"
        )
    devices = _devices.place(compute_devices, communicator.size, call)
    _devices.check_present(devices[communicator.rank], call)
    return devices
