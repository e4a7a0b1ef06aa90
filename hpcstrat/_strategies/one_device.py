"""OneDeviceStrategy, and the strategy that counts outside of every scope: one replica."""

from __future__ import annotations

import functools
from typing import final

from hpcstrat import _context, _devices
from hpcstrat._communicators import SoloCommunicator, connect
from hpcstrat._storage.mirrored import MirroredStorage
from hpcstrat._strategies.base import Strategy
from hpcstrat._strategies.placement import place_on_one_host, replica_storage
from hpcstrat._strategies.scope import DefaultScope, Scope


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

    def __init__(self, device: str) -> None:
        call = "OneDeviceStrategy"
        control = connect()
        with control.joint(call):
            _devices.parse(device, call)
            if control.size > 1:
                raise RuntimeError(
                    f"{call} has one replica, and {control.size} ranks run; start the program without mpirun"
                )
        placed, communicator = place_on_one_host(call, [device])
        storage = replica_storage(communicator)
        super().__init__(communicator, placed, placed[0], storage, storage)
        self._aggregates_nothing = True


@final
class DefaultStrategy(Strategy):
    """Outside of every scope each process is one replica of its own; starts no MPI."""

    def __init__(self) -> None:
        communicator = SoloCommunicator()
        storage = MirroredStorage(communicator)
        super().__init__(communicator, [_devices.CPU], _devices.CPU, storage, storage)
        self._aggregates_nothing = True

    def scope(self) -> Scope:
        """Changes nothing: what is outside of every scope is in the default strategy's already."""
        return DefaultScope(self)


_context.default_strategy = functools.cache(DefaultStrategy)
