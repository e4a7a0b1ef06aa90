"""The communicator of replicas whose GPU arrays travel through host memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from hpcstrat._calls.records import signature_of
from hpcstrat._communicators.base import Outgoing, check_gatherable
from hpcstrat._communicators.device import DeviceCommunicator, RankSlice
from hpcstrat._communicators.host import HostCommunicator
from hpcstrat._core import gpu
from hpcstrat._core.call_name import COMMUNICATION, Details, call_named, span
from hpcstrat._core.types import Array, Bytes, ReduceOp
from hpcstrat._memory.layout import layout_of


def _on_stream(name: str) -> Callable[..., Details]:
    """The span of a method that moves a flat array."""
    return lambda communicator, array, *_: Details(name, array.nbytes, communicator.stream)


@final
class StagedCommunicator(DeviceCommunicator):
    """Replicas on CPUs and GPUs, GPUs that NCCL does not connect, or a single replica.

    A GPU array is copied to pinned host memory, moved by the control communicator, and copied back.
    A rank that computes on the CPU makes the same calls with its host arrays.
    """

    def __init__(self, control: HostCommunicator, stream: gpu.Stream | None) -> None:
        super().__init__(control, stream)
        self._pinned: Bytes = np.empty(0, np.uint8)

    def reduce_arrays(
        self, must_match: tuple[Any, ...], arrays: Sequence[Array], op: ReduceOp
    ) -> list[Array]:
        return self._stage(self._control.reduce_arrays, must_match, arrays, op)

    def gather_arrays(
        self, must_match: Sequence[Any], arrays: Sequence[Array], axis: int
    ) -> list[Array]:
        if self.size == 1:  # the control communicator, which would check, is not called
            for array in arrays:
                check_gatherable([array.shape], axis)
        return self._stage(self._control.gather_arrays, must_match, arrays, axis)

    def broadcast_arrays(
        self, must_match: tuple[Any, ...], arrays: Sequence[Array], root: int
    ) -> list[Array]:
        return self._stage(self._control.broadcast_arrays, must_match, arrays, root)

    def _stage(
        self,
        move: Callable[..., list[Array]],
        must_match: Sequence[Any],
        arrays: Sequence[Array],
        *options: Any,
    ) -> list[Array]:
        """Calls `move` with host copies of the arrays; each result goes to where its array is."""
        with self._current():
            arrays = [self._here(array) for array in arrays]
            if self.size == 1:  # nothing is exchanged
                return [array.copy() for array in arrays]
            results = move(must_match, self._host_copies(arrays), *options)
            return [
                self._placed(result, gpu.is_on_gpu(array))
                for array, result in zip(arrays, results, strict=True)
            ]

    def reduce_parts(
        self, must_match: tuple[Any, ...], parts: Sequence[Sequence[Array]], op: ReduceOp
    ) -> list[Array]:
        with self._current():
            arrays = [self._here(part) for leaf in parts for part in leaf]
            if self.size == 1:
                return [array.copy() for array in arrays]
            hosts = iter(self._host_copies(arrays))
            leaves = [[next(hosts) for _ in leaf] for leaf in parts]
            results = self._control.reduce_parts(must_match, leaves, op)
            return [
                self._placed(result, gpu.is_on_gpu(leaf[0]))
                for leaf, result in zip(parts, results, strict=True)
            ]

    def exchange_parts(
        self, must_match: tuple[Any, ...], outgoing: Sequence[Outgoing]
    ) -> list[dict[int, Array]]:
        with self._current():
            if self.size == 1:
                return [
                    {rank: array.copy() for rank, array in item.to.items()} for item in outgoing
                ]
            arrays = [self._here(array) for item in outgoing for array in item.to.values()]
            hosts = iter(self._host_copies(arrays))
            staged = [
                item._replace(to={rank: next(hosts) for rank in item.to}, is_on_gpu=False)
                for item in outgoing
            ]
            received = self._control.exchange_parts(must_match, staged)
            return [
                {source: self._placed(array, item.is_on_gpu) for source, array in of.items()}
                for item, of in zip(outgoing, received, strict=True)
            ]

    def _current(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.stream is None else self.stream.current()

    def _here(self, array: Array) -> Array:
        """The array on this rank's GPU, if it is on a GPU."""
        return self.stream.here(array) if self.stream and gpu.is_on_gpu(array) else array

    def _placed(self, host: Array, is_on_gpu: bool) -> Array:
        return self.stream.xp.asarray(host) if self.stream and is_on_gpu else host

    def _host_copies(self, arrays: Sequence[Array]) -> Sequence[Array]:
        """The arrays, those on the GPU as copies in pinned memory; valid until the next call."""
        if self.stream is None:
            return arrays
        on_gpu = [i for i, array in enumerate(arrays) if gpu.is_on_gpu(array)]
        layout = layout_of(
            tuple([arrays[i].shape for i in on_gpu]), tuple([arrays[i].dtype for i in on_gpu])
        )
        # Kept from call to call: to pin memory is slow, because the system must lock each page. It
        # may be reused once the host has waited for the stream.
        if self._pinned.size < layout.nbytes:
            self._pinned = gpu.allocate_pinned(layout.nbytes)
        copies = list(arrays)
        for i, view in zip(on_gpu, layout.views(self._pinned), strict=True):
            # All copies are queued before the one wait below.
            arrays[i].get(out=view, blocking=False, stream=self.stream.raw)
            copies[i] = view
        self.stream.synchronize()
        return copies

    @span(COMMUNICATION, _on_stream("all-reduce"))
    def all_reduce_flat(self, array: Array, out: Array, op: ReduceOp) -> None:
        """See `DeviceCommunicator.all_reduce_flat`."""
        if self.size > 1:
            hosts = self._host_copies([array.reshape(-1)])
            with call_named("the sum of gradients"):
                _fill(out, self._control.reduce_arrays((op.name,), hosts, op)[0])
        elif array is not out:
            out[...] = array.reshape(-1)

    @span(COMMUNICATION, _on_stream("reduce"))
    def reduce_flat(self, array: Array, out: Array, op: ReduceOp, root: int) -> None:
        """See `DeviceCommunicator.reduce_flat`."""
        # Through the host all ranks get the messages anyway, and other ranks' `out` is undefined.
        self.all_reduce_flat(array, out, op)

    @span(COMMUNICATION, _on_stream("broadcast"))
    def broadcast_flat(self, array: Array, root: int) -> None:
        """See `DeviceCommunicator.broadcast_flat`."""
        if self.size == 1:
            return
        # With the root's number: ranks that disagree about it would wait for each other.
        signature = signature_of("new values", array.dtype, array.shape, root)
        if self.rank == root:
            own = self._host_copies([array])[0].view(np.uint8)

            def write(message: Bytes) -> None:
                message[: own.size] = own

            self._control.exchange(signature, own.size, write)
        else:
            message = self._control.exchange(signature)[root]
            _fill(array, message[: array.nbytes].view(array.dtype))

    @span(COMMUNICATION, _on_stream("reduce-scatter"))
    def reduce_scatter_flat(self, array: Array, out: Array, slices: Sequence[RankSlice]) -> None:
        """See `DeviceCommunicator.reduce_scatter_flat`."""
        with call_named("the sum of gradients"):
            hosts = self._host_copies([array.reshape(-1)])
            (total,) = self._control.reduce_arrays((ReduceOp.SUM.name,), hosts, ReduceOp.SUM)
        for rank, elements, own in slices:
            if rank == self.rank:
                _fill(out[own.slice], total[elements.slice])

    @span(COMMUNICATION, _on_stream("all-gather"))
    def all_gather_flat(self, array: Array, slices: Sequence[RankSlice]) -> None:
        """See `DeviceCommunicator.all_gather_flat`."""
        # Copied once more: the next slice overwrites the pinned memory.
        own = [
            self._host_copies([array[elements.slice]])[0].copy()
            for rank, elements, _ in slices
            if rank == self.rank
        ]
        with call_named("new values"):
            everything = [np.concatenate([np.empty(0, array.dtype), *own])]
            (new,) = self._control.gather_arrays((array.dtype, array.shape), everything, 0)
        stop = 0
        for rank, elements, _ in sorted(slices):  # by rank, as in what was gathered
            start, stop = stop, stop + elements.size
            if rank != self.rank:
                _fill(array[elements.slice], new[start:stop])

    def close(self) -> None:
        """See `DeviceCommunicator.close`. Pinned memory is freed with this object."""


def _fill(array: Array, host: Array) -> None:
    """Writes host memory, which may be overwritten afterwards, to a flat array on any device."""
    if gpu.is_on_gpu(array):
        array.set(np.ascontiguousarray(host))
    else:
        array[...] = host
