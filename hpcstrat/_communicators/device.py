"""Communicators of replicas on GPUs: records and host arrays use the host communicator, GPU arrays NCCL or staging."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

from hpcstrat import _gpu
from hpcstrat._communicators.base import Communicator, Write
from hpcstrat._communicators.host import HostCommunicator
from hpcstrat._spans import Details
from hpcstrat._types import Array, ReduceOp


def on_stream(name: str) -> Callable[..., Details]:
    """The span of a method that moves a flat array on the communicator's stream."""
    return lambda communicator, array, *_, **__: Details(name, array.nbytes, communicator.stream)


class DeviceCommunicator(Communicator):
    """Ranks of which some, or all, compute on GPUs.

    Besides the calls of every communicator it has three for storage: they move flat arrays that lie on each rank's own
    device, after the ranks have agreed on what they do by a call of their own.

    Args:
        control: moves records, objects and host arrays of the same ranks.
        stream: this rank's, on which GPU arrays are moved; `None` where it computes on the CPU.
    """

    def __init__(self, control: HostCommunicator, stream: _gpu.Stream | None) -> None:
        super().__init__(control.rank, control.size, control.calls)
        self._control = control
        self.watchdog = control.watchdog
        self.stream = stream

    def _post(self, record: bytes, nbytes: int, write: Write | None) -> list[memoryview]:
        return self._control._post(record, nbytes, write)

    def _messages(self, sizes: Sequence[int], write: Write | None) -> list[Any]:
        return self._control._messages(sizes, write)

    @abc.abstractmethod
    def all_reduce_flat(self, array: Array, out: Array, op: ReduceOp) -> None:
        """Reduces the ranks' arrays elementwise into `out`, which may be the array, on every rank."""

    @abc.abstractmethod
    def reduce_flat(self, array: Array, out: Array, op: ReduceOp, root: int) -> None:
        """Reduces the ranks' arrays elementwise into rank `root`'s `out`, which may be the array.

        What `out` is on the others is undefined then.
        """

    @abc.abstractmethod
    def broadcast_flat(self, array: Array, root: int) -> None:
        """Copies the array of rank `root` to all ranks' arrays."""

    @abc.abstractmethod
    def close(self) -> None:
        """Gives back what the transport holds. No rank may have work under way that others do not have too."""
