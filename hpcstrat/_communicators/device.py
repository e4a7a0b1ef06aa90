"""Communicators of replicas on GPUs: their interface, and who waits for whom."""

from __future__ import annotations

import abc
import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

from hpcstrat._calls.collective import Waiting
from hpcstrat._calls.records import CallSignature
from hpcstrat._communicators.base import Communicator, Write
from hpcstrat._communicators.host import HostCommunicator
from hpcstrat._core import gpu
from hpcstrat._core.types import Array, ReduceOp
from hpcstrat._memory.intervals import Interval

AHEAD = 32
"""Calls of NCCL, two per update mostly, that a host may be ahead: the GPU then has enough to do."""


class Move(NamedTuple):
    """A call that moves a flat array.

    Attributes:
        make: makes it.
        nbytes: bytes of the array.
    """

    make: Callable[[], object]
    nbytes: int


class RankSlice(NamedTuple):
    """Elements of a flat array that belong to one rank.

    Attributes:
        rank: the rank.
        elements: the elements of the array.
        own: the same in the rank's own array, which has its elements only.
    """

    rank: int
    elements: Interval
    own: Interval


# The streams of a rank, and who waits for whom: at each "v" or "^" a stream waits for an event.
#
#   program's stream  ---+ - - - - - - - - - - - - - - - - - - - - - - - - - - - - - - - +--->
#                        | `entered` of `gpu.Stream`                           `left`    ^
#                        v                                                               |
#   `stream`             +--- gradients ---+--- more gradients ---+--- NCCL, update -----+
#                                          | `_fork_event`        ^ `_join_event`
#                                          v                      |
#   side stream                            +--- NCCL -------------+
#
# `stream` is current in a block of `stream.current()`, such as `Strategy.run`: the first event is
# at the block's start, the last at its end. A block of `side_stream()` sums the gradients that are
# already there while the others are computed, and `join_side_stream()` waits for the sums. In such
# a block `active_stream` is the side stream, else `stream`.
#
# The host queues all of this and waits for none of it, except where it is 32 calls of NCCL ahead
# (`RunAhead`), and in `StagedCommunicator`, whose messages go through host memory.
class DeviceCommunicator(Communicator):
    """Ranks of which some, or all, compute on GPUs.

    In addition to the calls of every communicator it has calls for storage. These move flat arrays
    on each rank's own device, after the ranks have agreed in a call of their own.

    Args:
        control: moves records, objects and host arrays of the same ranks.
        stream: this rank's stream, on which GPU arrays move; `None` if it computes on the CPU.

    Attributes:
        active_stream: the stream that the calls for storage use now: `stream`, or the side stream.
        agree: compares the ranks' signatures of a call, as `exchange` without messages does.
        has_side_stream: whether there is a side stream.
    """

    has_side_stream: bool = False

    def __init__(self, control: HostCommunicator, stream: gpu.Stream | None) -> None:
        super().__init__(control.rank, control.size, control.calls)
        self._control = control
        self.agree: Callable[[CallSignature], object] = control.exchange
        self.watchdog = control.watchdog
        self.has_many_ranks = control.has_many_ranks
        self.stream = stream
        self.active_stream = stream

    def exchange_records(self, record: bytes, nbytes: int, write: Write | None) -> list[memoryview]:
        # GPU calls start with the same records as host calls, so a mismatch is an error before NCCL
        # sees it, which would hang.
        return self._control.exchange_records(record, nbytes, write)

    def collect_messages(self, sizes: Sequence[int], write: Write | None) -> list[Any]:
        return self._control.collect_messages(sizes, write)

    @abc.abstractmethod
    def all_reduce_flat(self, array: Array, out: Array, op: ReduceOp) -> None:
        """Reduces the ranks' arrays elementwise into every rank's `out`, which may be the array."""

    @abc.abstractmethod
    def reduce_flat(self, array: Array, out: Array, op: ReduceOp, root: int) -> None:
        """Reduces the ranks' arrays elementwise into rank `root`'s `out`, which may be the array.

        On the other ranks `out` is undefined afterwards.
        """

    @abc.abstractmethod
    def broadcast_flat(self, array: Array, root: int) -> None:
        """Copies the array of rank `root` to all ranks' arrays."""

    @abc.abstractmethod
    def reduce_scatter_flat(self, array: Array, out: Array, slices: Sequence[RankSlice]) -> None:
        """Sums the ranks' arrays of floats; each rank's `out` gets the elements of its slices."""

    @abc.abstractmethod
    def all_gather_flat(self, array: Array, slices: Sequence[RankSlice]) -> None:
        """Copies each slice of its rank's array to all ranks' arrays."""

    # ---- the same calls with the same arrays in many steps: prepared once, launched in each step

    def prepare_reduce(self, array: Array, op: ReduceOp, root: int | None) -> list[Move]:
        """A `reduce_flat` of floats in place, or without `root` an `all_reduce_flat`.

        Not of what is cast or divided after it, such as integers: moves are launched together.
        """
        if root is None:
            make = functools.partial(self.all_reduce_flat, array, array, op)
        else:
            make = functools.partial(self.reduce_flat, array, array, op, root)
        return [Move(make, array.nbytes)]

    def prepare_broadcast(self, array: Array, root: int) -> list[Move]:
        """A `broadcast_flat`."""
        return [Move(functools.partial(self.broadcast_flat, array, root), array.nbytes)]

    def prepare_reduce_scatter(
        self, array: Array, out: Array, slices: Sequence[RankSlice]
    ) -> list[Move]:
        """A `reduce_scatter_flat`."""
        make = functools.partial(self.reduce_scatter_flat, array, out, slices)
        return [Move(make, array.nbytes)]

    def prepare_all_gather(self, array: Array, slices: Sequence[RankSlice]) -> list[Move]:
        """An `all_gather_flat`."""
        return [Move(functools.partial(self.all_gather_flat, array, slices), array.nbytes)]

    def launch(self, what: str, moves: Sequence[Move]) -> None:
        """Makes prepared calls, named `what` in errors, all at once. `stream` is current."""
        for move in moves:
            move.make()

    def side_stream(self, memory: Array) -> contextlib.AbstractContextManager[None]:
        """A block whose calls for storage use a second stream, after what is on `stream` now.

        `stream` is current.

        Args:
            memory: what the calls use; it is kept until `join_side_stream`.

        Raises:
            NotImplementedError: there is no second stream.
        """
        raise NotImplementedError(f"{type(self).__name__} has no second stream")

    def join_side_stream(self) -> None:
        """Makes `stream` wait for what is on the side stream."""
        return

    @abc.abstractmethod
    def close(self) -> None:
        """Releases what the transport holds.

        No rank may have work under way that other ranks do not have.
        """


@final
class RunAhead:
    """Records an event after each call of NCCL, on the call's stream.

    A host that runs ahead of a hanging GPU fills CUDA's launch queue, and then waits in the driver
    with a lock held. The next call of CUDA, such as for an event's state, waits for that lock, in
    CuPy with Python's lock held: no thread of the process runs any more, and nothing ends the job.
    So the host waits here first, where it counts as waiting. The watchdog only reads numbers, which
    a thread of this class updates: it waits for the GPU in a call during which CuPy releases
    Python's lock.

    Args:
        stream: makes the events, on its GPU.
        waiting: counts this rank as waiting for others.
    """

    def __init__(self, stream: gpu.Stream, waiting: Waiting) -> None:
        with stream.current():
            # Threads sleep while they wait for them: spinning would take a core from the program.
            self._events: list[Any] = [
                stream.cuda.Event(block=True, disable_timing=True) for _ in range(AHEAD)
            ]
        self._waiting = waiting
        self._noted = 0  # calls
        self._done = 0  # the number of the last call that the GPU is known to have done
        self._look = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._wait, name="hpcstrat-nccl", daemon=True)
        self._thread.start()

    def note(self, raw: Any) -> None:
        """Notes the call that was just put on this `cupy.cuda.Stream`.

        Waits while the host is too far ahead.
        """
        event = self._events[self._noted % AHEAD]
        if self._noted >= AHEAD:
            # Without asking first whether it is done: that would hold Python's lock, and this
            # returns at once if it is.
            self._waiting.depth += 1
            try:
                event.synchronize()
            finally:
                self._waiting.depth -= 1
        event.record(raw)
        self._noted += 1

    def is_behind(self) -> bool:
        """Whether the GPU has calls left, as far as is known.

        Makes no call of CUDA, and may return true for a moment too long.
        """
        self._look.set()
        return self._done < self._noted

    def close(self) -> None:
        """Ends the thread. The GPU has done all calls."""
        self._is_closed = True
        self._look.set()
        self._thread.join()

    def _wait(self) -> None:
        while True:
            self._look.wait()
            self._look.clear()
            if self._is_closed:
                return
            noted = self._noted
            if self._done < noted:
                try:
                    # The event may belong to a newer call by now, which is done later.
                    self._events[(noted - 1) % AHEAD].synchronize()
                except Exception:  # the program gets the same error in its next call of CUDA
                    pass
                self._done = noted
