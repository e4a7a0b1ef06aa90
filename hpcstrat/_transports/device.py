"""Communicators of GPUs: their interface, and the one of a GPU alone, which moves nothing."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

from hpcstrat._agreement.agreement import Write
from hpcstrat._core import gpu
from hpcstrat._core.types import Array, ReduceOp
from hpcstrat._transports.host import HostCommunicator
from hpcstrat._transports.verbs import Communicator, check_gatherable


class Move(NamedTuple):
    """A prepared call, which moves a flat array.

    Attributes:
        call: makes it.
        nbytes: bytes of the array.
    """

    call: Callable[[], object]
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
# (`RunAhead`).
class DeviceCommunicator(Communicator):
    """Ranks that compute on GPUs.

    In addition to the calls of every communicator it has calls for storage. These move flat arrays
    on each rank's own GPU, after the ranks have agreed in a call of their own.

    Args:
        control: moves records, objects and host arrays of the same ranks.
        stream: this rank's stream, on which GPU arrays move.

    Attributes:
        users: how many strategies use it; see `connection.connect_devices`.
    """

    def __init__(self, control: HostCommunicator, stream: gpu.Stream) -> None:
        super().__init__(control.rank, control.size, control.calls)
        self.control = control
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
    def reduce_flat(
        self, what: str, array: Array, out: Array, op: ReduceOp, root: int | None = None
    ) -> None:
        """Reduces the ranks' arrays elementwise into rank `root`'s `out`, or into every rank's.

        `stream` is current.

        Args:
            what: the call's name in errors and in the timeline.
            array: this rank's array, of any shape, C-contiguous.
            out: a flat array of as many elements; it may be `array`. On other ranks than the root
                it is undefined afterwards.
            op: how they are reduced.
            root: the rank that gets the result; `None` for all ranks.
        """

    def broadcast_flat(self, array: Array, root: int) -> None:
        """Copies the array of rank `root` to all ranks' arrays. `stream` is current."""
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

    @abc.abstractmethod
    def launch(self, what: str, moves: Sequence[Move]) -> None:
        """Makes prepared calls, named `what` in errors, all at once. `stream` is current."""

    @abc.abstractmethod
    def launch_graph(self, graph: Any) -> None:
        """Launches a `cupy.cuda.Graph` on `stream`, which is current. All ranks do."""

    @abc.abstractmethod
    def close(self) -> None:
        """Releases what the transport holds.

        No rank may have work under way that other ranks do not have.
        """


@final
class SoloDevice(DeviceCommunicator):
    """A GPU alone: there is no rank to agree with, and results are copies."""

    def _copies(self, arrays: Sequence[Array]) -> list[Array]:
        with self.stream.current():
            return [
                (self.stream.here(array) if gpu.is_on_gpu(array) else array).copy()
                for array in arrays
            ]

    def reduce_arrays(
        self, must_match: tuple[Any, ...], arrays: Sequence[Array], op: ReduceOp
    ) -> list[Array]:
        return self._copies(arrays)

    def gather_arrays(
        self, must_match: tuple[Any, ...], arrays: Sequence[Array], axis: int
    ) -> list[Array]:
        for array in arrays:
            check_gatherable([array.shape], axis)
        return self._copies(arrays)

    def broadcast_arrays(
        self, must_match: tuple[Any, ...], arrays: Sequence[Array], root: int
    ) -> list[Array]:
        return self._copies(arrays)

    def send_arrays(
        self,
        must_match: tuple[Any, ...],
        sent: Sequence[tuple[int, Array]],
        expected: Sequence[tuple[int, Array]],
    ) -> list[Array]:
        return self._copies([array for _, array in sent])

    def reduce_flat(
        self, what: str, array: Array, out: Array, op: ReduceOp, root: int | None = None
    ) -> None:
        """See `DeviceCommunicator.reduce_flat`."""
        if array is not out:
            out[...] = array.reshape(-1)

    def prepare_reduce(self, array: Array, op: ReduceOp, root: int | None) -> list[Move]:
        """See `DeviceCommunicator.prepare_reduce`."""
        return []

    def prepare_broadcast(self, array: Array, root: int) -> list[Move]:
        """See `DeviceCommunicator.prepare_broadcast`."""
        return []

    def launch(self, what: str, moves: Sequence[Move]) -> None:
        """See `DeviceCommunicator.launch`."""

    def launch_graph(self, graph: Any) -> None:
        """See `DeviceCommunicator.launch_graph`."""
        graph.launch(self.stream.raw)

    def close(self) -> None:
        """See `DeviceCommunicator.close`."""
