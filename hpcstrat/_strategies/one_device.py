"""OneDeviceStrategy: one replica."""

from __future__ import annotations

from hpcstrat import _devices
from hpcstrat._communicators.connection import connect
from hpcstrat._edge import current_call, names_call
from hpcstrat._group import ReplicaGroup
from hpcstrat._storage.factory import replica_storage
from hpcstrat._strategies.base import Strategy
from hpcstrat._strategies.placement import place_on_one_host


class OneDeviceStrategy(Strategy):
    """One replica on one device, with the interface of all strategies, to try a program out.

    Args:
        device: the device.

    Raises:
        ValueError: a string that names no device.
        RuntimeError: there are several ranks, or the device is not there.

    Examples:
        >>> import hpcstrat as hs
        >>> strategy = hs.OneDeviceStrategy("CPU:0")
        >>> result = 0
        >>> for i in range(10):
        ...     result += strategy.run(lambda x: 2 * x, args=(i,))
        >>> result
        90
    """

    @names_call("OneDeviceStrategy")
    def __init__(self, device: str) -> None:
        call, control = current_call(), connect()
        with control.raise_together():
            _devices.parse(device, call)
            if control.size > 1:
                raise RuntimeError(
                    f"{call} has one replica, and {control.size} ranks run; start the program without mpirun"
                )
        placed, communicator = place_on_one_host([device])
        storage = replica_storage(communicator)
        super().__init__(
            ReplicaGroup(call, communicator, placed, placed[0], storage, storage, requires_aggregation=False)
        )
