"""Communicators of replicas on GPUs: their interface, and the one by way of host memory."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import numpy as np

from hpcstrat._agreement.records import CallSignature, signature_of
from hpcstrat._core import gpu
from hpcstrat._core.call_name import call_named
from hpcstrat._core.timeline import COMMUNICATION, span
from hpcstrat._core.types import Array, Bytes, ReduceOp
from hpcstrat._memory.layout import layout_of
from hpcstrat._transports.host import HostCommunicator
from hpcstrat._transports.verbs import Communicator, check_gatherable


class Move(NamedTuple):
    """A call that moves a flat array.

    Attributes:
        make: makes it.
        nbytes: bytes of the array.
    """

    make: Callable[[], object]
    nbytes: int


# The streams of a rank, and who waits for whom: at each "v" or "^" a stream waits for an event.
#
#   program's stream  ---+ - - - - - - - - - - - - - - - +--->
#                        | `entered` of `gpu.Stream`     ^
#                        v                               | `left`
#   `stream`             +--- gradients, NCCL, update ---+
#
# `stream` is current in a block of `stream.current()`, such as `Strategy.run`: the first event is
# at the block's start, the last at its end.
#
# The host queues all of this and waits for none of it, except where it is 32 calls of NCCL ahead
# (`RunAhead`), and in `StagedCommunicator`, whose messages go through host memory.
class DeviceCommunicator(Communicator):
    """Ranks that compute on GPUs.

    In addition to the calls of every communicator it has calls for storage. These move flat arrays
    on each rank's own GPU, after the ranks have agreed in a call of their own.

    Args:
        control: moves records, objects and host arrays of the same ranks.
        stream: this rank's stream, on which GPU arrays move.

    Attributes:
        agree: compares the ranks' signatures of a call, as `exchange` without messages does.
        can_capture: whether what it puts on the stream can become a graph.
        users: how many strategies use it; see `connection.connect_devices`.
    """

    can_capture: bool = False

    def __init__(self, control: HostCommunicator, stream: gpu.Stream) -> None:
        super().__init__(control.rank, control.size, control.calls)
        self.control = control
        self.agree: Callable[[CallSignature], object] = control.exchange
        self.watchdog = control.watchdog
        self.has_many_ranks = control.has_many_ranks
        self.stream = stream
        self.users: int = 0

    def exchange_records(self, record: bytes, nbytes: int, write: Write | None) -> list[memoryview]:
        # GPU calls start with the same records as host calls, so a mismatch is an error before NCCL
        # sees it, which would hang.
        return self.control.exchange_records(record, nbytes, write)

    def collect_messages(self, sizes: Sequence[int], write: Write | None) -> list[Any]:
        return self.control.collect_messages(sizes, write)

    @abc.abstractmethod
    def reduce_flat(self, array: Array, out: Array, op: ReduceOp, root: int | None = None) -> None:
        """Reduces the ranks' arrays elementwise into rank `root`'s `out`, or into every rank's.

        `out` may be the array. On other ranks than the root it is undefined afterwards.
        """

    def broadcast_flat(self, array: Array, root: int) -> None:
        """Copies the array of rank `root` to all ranks' arrays."""
        self.launch("the broadcast of new values", self.prepare_broadcast(array, root))

    # ---- calls with the same arrays in many steps: prepared once, launched in each step

    @abc.abstractmethod
    def prepare_reduce(self, array: Array, op: ReduceOp, root: int | None) -> list[Move]:
        """A `reduce_flat` of floats in place.

        Not of what is cast or divided after it, such as integers: moves are launched together.
        """

    @abc.abstractmethod
    def prepare_broadcast(self, array: Array, root: int) -> list[Move]:
        """A `broadcast_flat`."""

    def launch(self, what: str, moves: Sequence[Move]) -> None:
        """Makes prepared calls, named `what` in errors, all at once. `stream` is current."""
        for move in moves:
            move.make()

    def launch_graph(self, graph: Any) -> None:
        """Launches a `cupy.cuda.Graph` on `stream`, which is current. Collective."""
        graph.launch(self.stream.raw)

    @abc.abstractmethod
    def close(self) -> None:
        """Releases what the transport holds.

        No rank may have work under way that other ranks do not have.
        """


def _flat(name: str) -> Callable[..., tuple[str, int]]:
    """The span of a method that moves a flat array."""
    return lambda _, array, *__: (name, array.nbytes)


@final
class StagedCommunicator(DeviceCommunicator):
    """GPUs that NCCL does not connect, or a single replica.

    A GPU array is copied to pinned host memory, moved by the control communicator, and copied back.
    """

    def __init__(self, control: HostCommunicator, stream: gpu.Stream) -> None:
        super().__init__(control, stream)
        self.can_capture = control.size == 1  # more exchange host memory
        self._pinned: Bytes = np.empty(0, np.uint8)

    def reduce_arrays(
        self, must_match: tuple[Any, ...], arrays: Sequence[Array], op: ReduceOp
    ) -> list[Array]:
        return self._stage(self.control.reduce_arrays, must_match, arrays, op)

    def gather_arrays(
        self, must_match: Sequence[Any], arrays: Sequence[Array], axis: int
    ) -> list[Array]:
        if self.size == 1:  # the control communicator, which would check, is not called
            for array in arrays:
                check_gatherable([array.shape], axis)
        return self._stage(self.control.gather_arrays, must_match, arrays, axis)

    def broadcast_arrays(
        self, must_match: tuple[Any, ...], arrays: Sequence[Array], root: int
    ) -> list[Array]:
        return self._stage(self.control.broadcast_arrays, must_match, arrays, root)

    def _stage(
        self,
        move: Callable[..., list[Array]],
        must_match: Sequence[Any],
        arrays: Sequence[Array],
        *options: Any,
    ) -> list[Array]:
        """Calls `move` with host copies of the arrays; each result goes to where its array is."""
        with self.stream.current():
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
        with self.stream.current():
            arrays = [self._here(part) for leaf in parts for part in leaf]
            if self.size == 1:
                return [array.copy() for array in arrays]
            hosts = iter(self._host_copies(arrays))
            leaves = [[next(hosts) for _ in leaf] for leaf in parts]
            results = self.control.reduce_parts(must_match, leaves, op)
            return [
                self._placed(result, gpu.is_on_gpu(leaf[0]))
                for leaf, result in zip(parts, results, strict=True)
            ]

    def exchange_parts(
        self, must_match: tuple[Any, ...], outgoing: Sequence[Outgoing]
    ) -> list[dict[int, Array]]:
        with self.stream.current():
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
            received = self.control.exchange_parts(must_match, staged)
            return [
                {source: self._placed(array, item.is_on_gpu) for source, array in of.items()}
                for item, of in zip(outgoing, received, strict=True)
            ]

    def _here(self, array: Array) -> Array:
        """The array on this rank's GPU, if it is on a GPU."""
        return self.stream.here(array) if gpu.is_on_gpu(array) else array

    def _placed(self, host: Array, is_on_gpu: bool) -> Array:
        return self.stream.xp.asarray(host) if is_on_gpu else host

    def _host_copies(self, arrays: Sequence[Array]) -> Sequence[Array]:
        """The arrays, those on the GPU as copies in pinned memory; valid until the next call."""
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

    @span(COMMUNICATION, _flat("all-reduce"))
    def reduce_flat(self, array: Array, out: Array, op: ReduceOp, root: int | None = None) -> None:
        """See `DeviceCommunicator.reduce_flat`."""
        # With a root too: through the host all ranks get the messages anyway.
        if self.size > 1:
            hosts = self._host_copies([array.reshape(-1)])
            with call_named("the sum of gradients"):
                out.set(self.control.reduce_arrays((op.name,), hosts, op)[0])
        elif array is not out:
            out[...] = array.reshape(-1)

    def prepare_reduce(self, array: Array, op: ReduceOp, root: int | None) -> list[Move]:
        """See `DeviceCommunicator.prepare_reduce`."""
        return _prepare(self.reduce_flat, array, array, op, root)

    def prepare_broadcast(self, array: Array, root: int) -> list[Move]:
        """See `DeviceCommunicator.prepare_broadcast`."""
        return _prepare(self._broadcast, array, root)

    @span(COMMUNICATION, _flat("broadcast"))
    def _broadcast(self, array: Array, root: int) -> None:
        if self.size == 1:
            return
        # With the root's number: ranks that disagree about it would wait for each other.
        signature = signature_of("new values", array.dtype, array.shape, root)
        if self.rank == root:
            own = self._host_copies([array])[0].view(np.uint8)

            def write(message: Bytes) -> None:
                message[: own.size] = own

            self.control.exchange(signature, own.size, write)
        else:
            message = self.control.exchange(signature)[root]
            array.set(message[: array.nbytes].view(array.dtype))

    def close(self) -> None:
        """See `DeviceCommunicator.close`. Pinned memory is freed with this object."""


def _prepare(move: Callable[..., None], array: Array, *options: Any) -> list[Move]:
    return [Move(functools.partial(move, array, *options), array.nbytes)]
