"""The communicator where NCCL cannot serve: GPU arrays go through host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from hpcstrat import _gpu
from hpcstrat._communicators.base import check_gatherable
from hpcstrat._communicators.device import DeviceCommunicator, on_stream
from hpcstrat._communicators.host import HostCommunicator
from hpcstrat._communicators.packing import layout_of
from hpcstrat._communicators.protocol import signature
from hpcstrat._edge import call_named
from hpcstrat._spans import COMMUNICATION, span
from hpcstrat._types import Array, Bytes, ReduceOp


@final
class StagedCommunicator(DeviceCommunicator):
    """Replicas of both kinds, GPUs that NCCL does not connect, or one replica alone.

    A GPU array is copied to pinned host memory, moved by the control communicator, and copied back. A rank that
    computes on the CPU makes the same calls with its host arrays.
    """

    def __init__(self, control: HostCommunicator, stream: _gpu.Stream | None) -> None:
        super().__init__(control, stream)
        self._pinned: Bytes = np.empty(0, np.uint8)

    def _reduce_arrays(self, must_match: tuple[Any, ...], arrays: Sequence[Array], op: ReduceOp) -> list[Array]:
        return self._staged(lambda hosts: self._control._reduce_arrays(must_match, hosts, op), arrays)

    def _gather_arrays(self, must_match: Sequence[Any], arrays: Sequence[Array], axis: int) -> list[Array]:
        if self.size == 1:  # where the control communicator, which would check, is not asked
            for array in arrays:
                check_gatherable([array.shape], axis)
        return self._staged(lambda hosts: self._control._gather_arrays(must_match, hosts, axis), arrays)

    def _staged(self, move: Callable[[Sequence[Array]], list[Array]], arrays: Sequence[Array]) -> list[Array]:
        """What `move` makes of host copies of the arrays; a GPU array's result goes to the GPU."""
        if self.stream is None:
            return move(arrays)
        with self.stream.current():
            arrays = [self.stream.here(array) if _gpu.is_on_gpu(array) else array for array in arrays]
            if self.size == 1:
                # With one replica nothing is exchanged: copy on the device. Host arrays go to the control communicator.
                return [array.copy() if _gpu.is_on_gpu(array) else move([array])[0] for array in arrays]
            results = move(self._host_copies(arrays))
            return [
                self.stream.xp.asarray(result) if _gpu.is_on_gpu(array) else result
                for array, result in zip(arrays, results, strict=True)
            ]

    def _host_copies(self, arrays: Sequence[Array]) -> list[Array]:
        """The arrays with those on the GPU in pinned memory, valid until the next call."""
        assert self.stream is not None
        layout = layout_of(tuple([array.shape for array in arrays]), tuple([array.dtype for array in arrays]))
        if self._pinned.size < layout.nbytes:
            self._pinned = _gpu.pinned(layout.nbytes)
        copies = list(arrays)
        for i, view in enumerate(layout.views(self._pinned)):
            if _gpu.is_on_gpu(arrays[i]):
                # All copies are queued before the one wait below.
                arrays[i].get(out=view, blocking=False, stream=self.stream.raw)
                copies[i] = view
        self.stream.synchronize()
        return copies

    @span(COMMUNICATION, on_stream("all-reduce"))
    def all_reduce_flat(self, array: Array, out: Array, op: ReduceOp) -> None:
        """See `DeviceCommunicator.all_reduce_flat`."""
        if self.size > 1:
            hosts = self._on_host(array.reshape(-1))
            with call_named("the sum of gradients"):
                _fill(out, self._control._reduce_arrays((op.name,), hosts, op)[0])
        elif array is not out:
            out[...] = array.reshape(-1)

    @span(COMMUNICATION, on_stream("reduce"))
    def reduce_flat(self, array: Array, out: Array, op: ReduceOp, root: int) -> None:
        """See `DeviceCommunicator.reduce_flat`."""
        self.all_reduce_flat(array, out, op)

    @span(COMMUNICATION, on_stream("broadcast"))
    def broadcast_flat(self, array: Array, root: int) -> None:
        """See `DeviceCommunicator.broadcast_flat`."""
        if self.size == 1:
            return
        agreed = signature("new values", array.dtype, array.shape, root)
        if self.rank == root:
            own = self._on_host(array)[0].view(np.uint8)

            def write(message: Bytes) -> None:
                message[: own.size] = own

            self._control.exchange(agreed, own.size, write)
        else:
            message = self._control.exchange(agreed)[root]
            _fill(array, message[: array.nbytes].view(array.dtype))

    def _on_host(self, array: Array) -> list[Array]:
        return [array] if self.stream is None else self._host_copies([array])

    def close(self) -> None:
        """See `DeviceCommunicator.close`. There is nothing."""


def _fill(array: Array, host: Array) -> None:
    """Writes host memory, which may be overwritten afterwards, to a flat array anywhere."""
    if _gpu.is_on_gpu(array):
        array.set(np.ascontiguousarray(host))
    else:
        array[...] = host
