"""Calls of NCCL, through CuPy: their arguments and their errors."""

from __future__ import annotations

import functools
import threading
import traceback
from collections.abc import Sequence
from functools import partial
from typing import Any, final

import numpy as np

from hpcstrat._agreement.collective import Waiting
from hpcstrat._core import gpu
from hpcstrat._core.call_name import current_call
from hpcstrat._core.timeline import COMMUNICATION, span
from hpcstrat._core.types import Array, ReduceOp
from hpcstrat._memory.layout import Layout
from hpcstrat._process import failure
from hpcstrat._transports import nccl_start
from hpcstrat._transports.device import Move
from hpcstrat._transports.host import HostCommunicator
from hpcstrat._transports.reduction import REDUCTIONS, accumulator

AHEAD = 32
"""Calls of NCCL, two per update mostly, that a host may be ahead: the GPU then has enough to do."""
_TOGETHER = 8
"""The host waits once for as many of them: to ask for each would cost each update a microsecond."""
_TYPES = {
    "int8": "NCCL_INT8",
    "int32": "NCCL_INT32",
    "int64": "NCCL_INT64",
    "uint8": "NCCL_UINT8",
    "uint32": "NCCL_UINT32",
    "uint64": "NCCL_UINT64",
    "float16": "NCCL_FLOAT16",
    "bfloat16": "NCCL_BFLOAT16",
    "float32": "NCCL_FLOAT32",
    "float64": "NCCL_FLOAT64",
    # What NCCL does not have travels as what it has: booleans as bytes, complex numbers as twice as
    # many reals.
    "bool": "NCCL_UINT8",
    "complex64": "NCCL_FLOAT32",
    "complex128": "NCCL_FLOAT64",
}


@final
class NcclCollectives:
    """NCCL's communicator. Its calls are put on the stream; the host waits only if it is far ahead.

    The ranks have agreed on each call before: if it fails, the job ends, because some ranks may be
    in it forever. Arrays are C-contiguous. `what` names the call in errors and in the timeline.

    The constructor is collective.

    Args:
        control: the communicator by which the ranks agree.
        stream: this rank's stream.

    Raises:
        RuntimeError: NCCL does not start, on any rank.
    """

    def __init__(self, control: HostCommunicator, stream: gpu.Stream) -> None:
        self._control = control
        self._stream = stream
        self._nccl = nccl_start.load_nccl()
        self._byte: int = self._nccl.NCCL_UINT8  # what is only copied travels as bytes
        self._comm: Any = nccl_start.start(control, stream)
        self._run_ahead = RunAhead(stream, control.calls.waiting)
        if control.watchdog is not None:
            control.watchdog.add_check(self._failure, self._run_ahead.is_behind)

    # ---- calls

    def reduce(
        self,
        what: str,
        array: Array,
        out: Array,
        op: ReduceOp,
        root: int | None = None,
    ) -> None:
        """Reduces the ranks' arrays elementwise into rank `root`'s flat `out`, or into each rank's.

        `array` has the dtype of `out`, or that of `dtype_to_reduce`. It is overwritten if these
        differ, and may be `out` otherwise.
        """
        array = array.reshape(-1).astype(dtype_to_reduce(out.dtype, op), copy=False)
        result = out if out.dtype == array.dtype else array
        self.launch(what, self.bind_reduce(array, result, op, root))
        if root in (None, self._control.rank):
            self._divide(result, op)
        if result is not out:
            out[...] = result

    def reduce_scatter(
        self,
        what: str,
        arrays: Sequence[Array],
        outs: Sequence[Array],
        sizes: Sequence[Sequence[int]],
        op: ReduceOp,
    ) -> None:
        """Reduces flat arrays elementwise; each rank's `outs` get its parts, of these sizes.

        The parts of an array are in rank order, without gaps.
        """
        moves: list[Move] = []
        for array, out, of_ranks in zip(arrays, outs, sizes, strict=True):
            moves += self.bind_reduce_scatter(array, out, of_ranks, op)
        self.launch(what, moves)
        for out in outs:
            self._divide(out, op)

    # ---- their arguments: what `launch` takes, in this step or in many

    def bind_reduce(self, array: Array, out: Array, op: ReduceOp, root: int | None) -> list[Move]:
        """See `reduce`; of arrays of one dtype, which NCCL reduces."""
        if not out.size:
            return []
        source, raw = array.data.ptr, self._stream.raw.ptr
        target, count, kind = resolve(out)
        numbers = (source, target, count, kind, operation_of(op))
        if root is None:
            make = partial(self._opened().allReduce, *numbers, raw)
        else:
            make = partial(self._opened().reduce, *numbers, root, raw)
        return [Move(make, array.nbytes)]

    def bind_broadcast(self, array: Array, root: int) -> list[Move]:
        """Copies the array of rank `root` to all ranks' arrays."""
        if not array.size:
            return []
        place, raw = array.data.ptr, self._stream.raw.ptr
        numbers = (place, place, array.nbytes, self._byte, root, raw)
        return [Move(partial(self._opened().broadcast, *numbers), array.nbytes)]

    def bind_reduce_scatter(
        self, array: Array, out: Array, sizes: Sequence[int], op: ReduceOp
    ) -> list[Move]:
        """See `reduce_scatter`; of one array, in which no operation divides."""
        add, raw, comm = operation_of(op), self._stream.raw.ptr, self._opened()
        if len(set(sizes)) == 1:  # NCCL's own takes equal parts only
            source, target = array.data.ptr, out.data.ptr
            _, count, kind = resolve(out)
            make = partial(comm.reduceScatter, source, target, count, kind, add, raw)
            return [Move(make, array.nbytes)] if count else []
        moves, start = list[Move](), 0
        for root, size in enumerate(sizes):
            part, start = array[start : start + size], start + size
            if size:
                source, count, kind = resolve(part)
                target = out.data.ptr if root == self._control.rank else 0
                make = partial(comm.reduce, source, target, count, kind, add, root, raw)
                moves.append(Move(make, part.nbytes))
        return moves

    def bind_all_gather(
        self, arrays: Sequence[Array], messages: Sequence[Array], layouts: Sequence[Layout]
    ) -> list[Move]:
        """Copies each rank's part of an array to all ranks' messages, which have these layouts."""
        moves: list[Move] = []
        for array, message, layout in zip(arrays, messages, layouts, strict=True):
            if len(set(layout.sizes)) > 1:
                # NCCL's own takes equal parts only. It copies what a rank sends to itself.
                sent = [(rank, array) for rank in range(self._control.size)]
                moves += self.bind_messages(sent, [*enumerate(layout.views(message))])
            elif array.size:
                source, raw = array.data.ptr, self._stream.raw.ptr
                numbers = (source, message.data.ptr, array.nbytes, self._byte, raw)
                moves.append(Move(partial(self._opened().allGather, *numbers), message.nbytes))
        return moves

    def bind_messages(
        self, sent: Sequence[tuple[int, Array]], received: Sequence[tuple[int, Array]]
    ) -> list[Move]:
        """Sends an array to each of these ranks, and receives arrays from others.

        Each rank receives another rank's arrays in the order in which that sends them.
        """
        comm, byte, raw = self._opened(), self._byte, self._stream.raw.ptr
        return [
            Move(partial(call, array.data.ptr, array.nbytes, byte, rank, raw), nbytes)
            for call, pairs in ((comm.send, sent), (comm.recv, received))
            for rank, array in pairs
            if (nbytes := array.nbytes)
        ]

    # ---- how calls start

    def _opened(self) -> Any:
        """NCCL's communicator."""
        if self._comm is None:
            raise RuntimeError(
                f"{current_call()}: the strategy's NCCL communicator is closed; make another "
                "strategy"
            )
        return self._comm

    @span(COMMUNICATION, lambda _, what, moves: (what, sum(move.nbytes for move in moves)))
    def launch(self, what: str, moves: Sequence[Move]) -> None:
        """Makes calls of NCCL, in which the host may wait until NCCL has connected it.

        NCCL starts them together: two ranks that send first would both hang.
        """
        if self._comm is None:  # or NCCL would crash in prepared calls
            self._opened()
        waiting = self._control.calls.waiting
        waiting.depth += 1
        try:
            self._nccl.groupStart()
            try:
                for make, _ in moves:
                    make()
            finally:  # after an error too: an open group would block all later calls
                self._nccl.groupEnd()
        except Exception as error:
            lines = "".join(traceback.format_exception(error))
            failure.end_job(f"{lines}{self._describe(error)}")
        except BaseException as error:
            self._control.calls.mark_interrupted(error, what)
            raise
        finally:
            waiting.depth -= 1
        # An event of a capture would become a part of the graph, and never be done.
        if self._stream.capture is None:
            self._run_ahead.note()

    def launch_graph(self, graph: Any) -> None:
        """Launches a graph with calls of NCCL on the strategy's stream. All ranks do."""
        with self._control.calls.waiting:
            graph.launch(self._stream.raw)
        self._run_ahead.note()

    def _divide(self, array: Array, op: ReduceOp) -> None:
        if REDUCTIONS[op].is_mean:
            if array.dtype.kind == "c":
                array = array.view(array.real.dtype)
            array /= self._control.size

    # ---- the end

    def close(self) -> None:
        """Waits for the calls, and releases NCCL's communicator. All ranks have made all calls."""
        if self._comm is not None:
            # NCCL's communicator must not be destroyed before its work is done.
            self._stream.synchronize()
            # NCCL waits for ever for what a graph still holds.
            self._stream.drop_graphs()
            comm, self._comm = self._comm, None
            if self._control.watchdog is not None:
                self._control.watchdog.remove_check(self._failure, self._run_ahead.is_behind)
            self._run_ahead.close()
            comm.destroy()

    def _failure(self) -> str:
        """NCCL's error since the last call, if any: for example, a peer or the network is gone.

        The watchdog calls it, because a host that waits for the GPU is not told.
        """
        comm = self._comm
        try:
            if comm is not None:
                comm.check_async_error()
        except Exception as error:  # CuPy has no names for NCCL's newer results: a KeyError
            return self._describe(error)
        return ""

    def _describe(self, error: Exception) -> str:
        """The text with which the job ends when NCCL raises this error."""
        return (
            f"hpcstrat: the job ends: NCCL failed on rank {self._control.rank} of "
            f"{self._control.size}: {error!r} ({nccl_start.describe(self._stream.xp)}). Start with "
            "NCCL_DEBUG=INFO to see why"
        )


@final
class RunAhead:
    """Records an event after each call of NCCL, on its stream.

    A host that runs ahead of a hanging GPU fills CUDA's launch queue, and then waits in the driver
    with a lock held. Other calls of CUDA may wait for that lock; if CuPy makes one of them with
    Python's lock held, no thread of the process runs any more, and nothing ends the job. So the
    host waits here first, where it counts as waiting. The watchdog only reads numbers, which
    a thread of this class updates. Both wait by `gpu.wait_for`, without Python's lock.

    Args:
        stream: the stream.
        waiting: counts this rank as waiting for others.
    """

    def __init__(self, stream: gpu.Stream, waiting: Waiting) -> None:
        with stream.current():
            self._events: list[Any] = [stream.cuda.Event(disable_timing=True) for _ in range(AHEAD)]
        self._raw: Any = stream.raw
        self._device: Any = stream.cuda.Device(stream.ordinal)
        self._waiting = waiting
        self._noted = 0  # calls
        self._done = 0  # the number of the last call that the GPU is known to have done
        self._look = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._wait, name="hpcstrat-nccl", daemon=True)
        self._thread.start()

    def note(self) -> None:
        """Notes the call that was just put on the stream.

        Waits while the host is too far ahead.
        """
        noted = self._noted
        if noted % _TOGETHER == 0 and noted >= AHEAD:  # the next calls record these events again
            self._waiting.depth += 1
            try:
                gpu.wait_for(self._events[(noted + _TOGETHER - 1) % AHEAD], pause=1e-4)
            finally:
                self._waiting.depth -= 1
        self._events[noted % AHEAD].record(self._raw)
        self._noted = noted + 1

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
        # CUDA may open a context on the GPU that is current in a thread: in a new one, GPU 0.
        self._device.use()
        while True:
            self._look.wait()
            self._look.clear()
            if self._is_closed:
                return
            noted = self._noted
            if self._done < noted:
                try:
                    # The event may belong to a newer call by now, which is done later.
                    gpu.wait_for(self._events[(noted - 1) % AHEAD], pause=1e-2)
                except Exception:  # the program gets the same error in its next call of CUDA
                    pass
                self._done = noted


# ---- what NCCL calls arrays and operations, and in which dtype it reduces


def resolve(array: Array) -> tuple[int, int, int]:
    """Where NCCL finds an array: its address, number of elements, and NCCL's type of them."""
    count = 2 * array.size if array.dtype.kind == "c" else array.size
    return array.data.ptr, count, _type(array.dtype)


# Cached: names of dtypes and attributes of a C module are slow to look up at each step.
@functools.cache
def _type(dtype: np.dtype[Any]) -> int:
    return getattr(nccl_start.load_nccl(), _TYPES[dtype.name])


@functools.cache
def operation_of(op: ReduceOp) -> int:
    return getattr(nccl_start.load_nccl(), REDUCTIONS[op].nccl)


@functools.cache
def dtype_to_reduce(dtype: np.dtype[Any], op: ReduceOp) -> np.dtype[Any]:
    """The dtype in which NCCL reduces `dtype`; the result is cast back."""
    # NCCL does not have these. A sum that is cast back is the same modulo 2**16.
    if dtype.kind in "iu" and dtype.itemsize == 2:
        return np.dtype(np.int32)
    # The sum of 16-bit floats may overflow where their mean does not.
    return accumulator(dtype) if REDUCTIONS[op].is_mean else dtype
