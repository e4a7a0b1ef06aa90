"""OneDeviceStrategy: one replica on one device."""

from __future__ import annotations

from hpcstrat._agreement.collective import collective
from hpcstrat._core import device_names
from hpcstrat._core.call_name import current_call
from hpcstrat._replicas.group import ReplicaGroup
from hpcstrat._storage import make_storage
from hpcstrat._strategies.base import Strategy
from hpcstrat._strategies.placement import place
from hpcstrat._transports.connection import connect


class OneDeviceStrategy(Strategy):
    """One replica on one device, to try out a program without changing its code.

    Args:
        device: the string of the device, such as `"CPU:0"` or `"GPU:0"`.

    Raises:
        ValueError: `device` does not name a device.
        RuntimeError: there are several ranks, or the device does not exist.

    Examples:
        >>> import hpcstrat as hs
        >>> strategy = hs.OneDeviceStrategy("CPU:0")
        >>> result = 0
        >>> for i in range(10):
        ...     result += strategy.run(lambda x: 2 * x, args=(i,))
        >>> result
        90
    """

    @collective(communicator_of=lambda _: connect())
    def __init__(self, device: str) -> None:
        call, control = current_call(), connect()
        # Checked before the replica is placed, so that with several ranks all of them raise.
        device_names.parse(device)
        if control.size > 1:
            raise RuntimeError(
                f"{call} has one replica, but {control.size} ranks run; start the program without "
                "mpirun"
            )
        placed, communicator = place([device])
        storage = make_storage(communicator)
        super().__init__(
            ReplicaGroup(call, communicator, placed, placed[0], storage, requires_aggregation=False)
        )
