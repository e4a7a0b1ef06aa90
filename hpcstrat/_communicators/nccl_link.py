"""NCCL's communicator, through CuPy: its life, its errors, and what storage asks of it."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hpcstrat._communicators.device import DeviceCommunicator, RankSlice, on_stream
from hpcstrat._communicators.host import HostCommunicator
from hpcstrat._communicators.nccl_start import describe, load_nccl, start
from hpcstrat._communicators.reduction import REDUCTIONS, accumulator
from hpcstrat._communicators.run_ahead import RunAhead
from hpcstrat._core import gpu
from hpcstrat._core.span import COMMUNICATION, Details, span
from hpcstrat._core.types import Array, ReduceOp
from hpcstrat._process import failure

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


# Both streams use one NCCL communicator, whose calls must run one after the other, in the same
# order on all ranks. So two events order the streams (`device.py` shows them with the others):
#
#   `side_stream()`         `stream`    --- `_fork_event` --> side stream, for what NCCL reads
#   `join_side_stream()`    side stream --- `_join_event` --> `stream`, for what NCCL has written
#
# Each call of NCCL on `stream` joins first. Until then `_held` keeps the side stream's memory.
# After each call `run_ahead` records an event on the call's stream; the host waits for the event
# of 32 calls before.
class NcclLink(DeviceCommunicator):
    """The calls of NCCL by which `NcclCommunicator` moves arrays."""

    stream: gpu.Stream
    active_stream: gpu.Stream
    has_side_stream = True

    def __init__(self, control: HostCommunicator, stream: gpu.Stream) -> None:
        super().__init__(control, stream)
        self._nccl = load_nccl()
        self._comm: Any = start(control, stream)
        with stream.current():
            self._fork_event: Any = stream.xp.cuda.Event(disable_timing=True)
            self._join_event: Any = stream.xp.cuda.Event(disable_timing=True)
        self._side: gpu.Stream | None = None
        self._held: list[Array] = []  # memory that the side stream uses
        self.run_ahead: RunAhead = RunAhead(stream, self.calls.waiting)
        if self.watchdog is not None:
            self.watchdog.add_check(self._failure, self.run_ahead.is_behind)
        # NCCL's types and operations, looked up once: names of dtypes and attributes of a C module
        # are slow to look up at each step.
        self._types: dict[np.dtype[Any], int] = {}
        self._operations = {
            op: getattr(self._nccl, reduction.nccl) for op, reduction in REDUCTIONS.items()
        }

    # ---- for storage

    def all_reduce_flat(self, array: Array, out: Array, op: ReduceOp) -> None:
        """See `DeviceCommunicator.all_reduce_flat`."""
        self._all_reduce("the sum of gradients", array, out, op)

    @span(
        COMMUNICATION,
        lambda self, what, array, *_, **__: Details(what, array.nbytes, self.active_stream),
    )
    def _all_reduce(self, what: str, array: Array, out: Array, op: ReduceOp) -> None:
        if (dtype := dtype_to_reduce(out.dtype, op)) != out.dtype:
            wide = array.reshape(-1).astype(dtype)
            self._all_reduce(what, wide, wide, op)
            out[...] = wide
        elif array.size:
            target, count, kind = self._flat(out)
            operation, stream = self._operations[op], self.active_stream.raw.ptr
            with self._guard(what):
                self._comm.allReduce(array.data.ptr, target, count, kind, operation, stream)
            self._divide(out, op)

    @span(COMMUNICATION, on_stream("reduce"))
    def reduce_flat(self, array: Array, out: Array, op: ReduceOp, root: int) -> None:
        """See `DeviceCommunicator.reduce_flat`."""
        if (dtype := dtype_to_reduce(array.dtype, op)) != array.dtype:
            wide = array.reshape(-1).astype(dtype)
            self.reduce_flat(wide, wide, op, root)
            out[...] = wide
        elif out.size:
            target, count, kind = self._flat(out)
            operation, stream = self._operations[op], self.active_stream.raw.ptr
            with self._guard("the sum of gradients"):
                self._comm.reduce(array.data.ptr, target, count, kind, operation, root, stream)
            if self.rank == root:
                self._divide(out, op)

    @span(COMMUNICATION, on_stream("broadcast"))
    def broadcast_flat(self, array: Array, root: int) -> None:
        """See `DeviceCommunicator.broadcast_flat`."""
        if array.size:
            address, kind = array.data.ptr, self._nccl.NCCL_UINT8
            stream = self.active_stream.raw.ptr
            with self._guard("the broadcast of new values"):
                self._comm.broadcast(address, address, array.nbytes, kind, root, stream)

    @span(COMMUNICATION, on_stream("reduce-scatter"))
    def reduce_scatter_flat(self, array: Array, out: Array, segments: Sequence[RankSlice]) -> None:
        """See `DeviceCommunicator.reduce_scatter_flat`."""
        source, count, kind = self._flat(array)
        operation, stream = self._operations[ReduceOp.SUM], self.active_stream.raw.ptr
        target, itemsize = out.data.ptr, array.dtype.itemsize
        factor = count // max(array.size, 1)  # a complex number counts as two
        equal = _equal_part(segments, self.size)
        with self._start_group("the sum of gradients"):
            if equal:
                self._comm.reduceScatter(source, target, factor * equal, kind, operation, stream)
            for root, start, stop, place in _beyond(equal, segments):
                there = source + start * itemsize
                into = target + place * itemsize if root == self.rank else 0
                self._comm.reduce(
                    there, into, factor * (stop - start), kind, operation, root, stream
                )

    @span(COMMUNICATION, on_stream("all-gather"))
    def all_gather_flat(self, array: Array, segments: Sequence[RankSlice]) -> None:
        """See `DeviceCommunicator.all_gather_flat`."""
        address, itemsize = array.data.ptr, array.dtype.itemsize
        kind, stream = self._nccl.NCCL_UINT8, self.active_stream.raw.ptr
        equal = _equal_part(segments, self.size)
        with self._start_group("the new values"):
            if equal:  # in place
                own = address + self.rank * equal * itemsize
                self._comm.allGather(own, address, equal * itemsize, kind, stream)
            for root, start, stop, _ in _beyond(equal, segments):
                at = address + start * itemsize
                self._comm.broadcast(at, at, (stop - start) * itemsize, kind, root, stream)

    @contextlib.contextmanager
    def side_stream(self, memory: Array) -> Iterator[None]:
        """See `DeviceCommunicator.side_stream`."""
        if self._side is None:
            self._side = gpu.Stream(self.stream.ordinal)
        self._fork_event.record(self.stream.raw)
        self._side.raw.wait_event(self._fork_event)
        # CuPy's pool gives freed memory to the next work of `stream`, which is not ordered with the
        # side stream.
        self._held.append(memory)
        self.active_stream = self._side
        try:
            yield
        finally:
            self.active_stream = self.stream

    def join_side_stream(self) -> None:
        """See `DeviceCommunicator.join_side_stream`."""
        if self._side is not None and self._held:
            self._join_event.record(self._side.raw)
            self.stream.raw.wait_event(self._join_event)
            self._held.clear()

    @contextlib.contextmanager
    def _start_group(self, what: str) -> Iterator[None]:
        """A block whose calls NCCL starts together: two ranks that send first would both hang."""
        with self._guard(what):
            self._nccl.groupStart()
            try:
                yield
            finally:  # after an error too: an open group would block all later calls
                self._nccl.groupEnd()

    def _flat(self, array: Array) -> tuple[int, int, int]:
        """Address, number of elements and NCCL's type of a flat array."""
        dtype = array.dtype
        kind = self._types.get(dtype)
        if kind is None:
            kind = self._types[dtype] = getattr(self._nccl, _TYPES[dtype.name])
        return array.data.ptr, 2 * array.size if dtype.kind == "c" else array.size, kind

    def _divide(self, array: Array, op: ReduceOp) -> None:
        if REDUCTIONS[op].is_mean:
            if array.dtype.kind == "c":
                array = array.view(array.real.dtype)
            array /= self.size

    # ---- life

    def close(self) -> None:
        """See `DeviceCommunicator.close`."""
        if self._comm is not None:
            self.join_side_stream()
            # NCCL's communicator must not be destroyed before its work is done.
            self.stream.synchronize()
            comm, self._comm = self._comm, None
            if self.watchdog is not None:
                self.watchdog.remove_check(self._failure, self.run_ahead.is_behind)
            self.run_ahead.close()
            comm.destroy()

    def _guard(self, what: str) -> _Guard:
        if self._comm is None:
            raise RuntimeError(
                f"{what}: the strategy's NCCL communicator is closed; make another strategy"
            )
        # A communicator's calls must run one after the other, in the same order on all ranks.
        if self.active_stream is self.stream:
            self.join_side_stream()
        return _Guard(self, what)

    def _failure(self) -> str:
        """NCCL's error since the last call, if any: for example, a peer or the network is gone.

        The watchdog calls it, because a host that waits for the GPU is not told.
        """
        comm = self._comm
        try:
            if comm is not None:
                comm.check_async_error()
        except Exception as error:  # CuPy has no names for NCCL's newer results: a KeyError
            return self.describe_failure(error)
        return ""

    def describe_failure(self, error: Exception) -> str:
        """The text with which the job ends when NCCL raises this error."""
        return (
            f"hpcstrat: the job ends: NCCL failed on rank {self.rank} of {self.size}: {error!r} "
            f"({describe(self.stream.xp)}). Start with NCCL_DEBUG=INFO to see why"
        )


def _equal_part(segments: Sequence[RankSlice], size: int) -> int:
    """The elements per part, if each rank has one, in rank order, and only the last is longer.

    Otherwise 0.

    NCCL's reduce-scatter and all-gather take equal parts only.
    """
    if len(segments) < size:
        return 0
    equal = segments[1].start
    for i, segment in enumerate(segments):
        # A segment may end before the next starts, with a gap between two variables.
        end = segment.start + equal
        if (segment.rank, segment.start) != (i, i * equal) or not (
            segment.stop >= end if i == size - 1 else segment.stop <= end
        ):
            return 0
    return equal


def _beyond(equal: int, segments: Sequence[RankSlice]) -> list[RankSlice]:
    """What equal parts leave out: the end of the last part, or everything if there are none."""
    if not equal:
        return [*segments]
    last = segments[-1]
    rest = last._replace(start=last.start + equal, place=last.place + equal)
    return [rest] if rest.stop > rest.start else []


@functools.cache
def dtype_to_reduce(dtype: np.dtype[Any], op: ReduceOp) -> np.dtype[Any]:
    """The dtype in which NCCL reduces `dtype`; the result is cast back."""
    # NCCL does not have these. A sum that is cast back is the same modulo 2**16.
    if dtype.kind in "iu" and dtype.itemsize == 2:
        return np.dtype(np.int32)
    # The sum of 16-bit floats may overflow where their mean does not.
    return accumulator(dtype) if REDUCTIONS[op].is_mean else dtype


class _Guard:
    """A call of NCCL: the host may wait in it, because NCCL connects ranks when it first has to.

    If it fails, the job ends: the ranks have agreed on the call, and some may be in it forever.
    """

    __slots__ = ("_communicator", "_what")

    def __init__(self, communicator: NcclLink, what: str) -> None:
        self._communicator = communicator
        self._what = what

    def __enter__(self) -> None:
        self._communicator.calls.waiting.depth += 1

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        communicator = self._communicator
        communicator.calls.waiting.depth -= 1
        if error is None:
            communicator.run_ahead.note(communicator.active_stream.raw)
        elif not isinstance(error, Exception):
            communicator.mark_interrupted(error, self._what)
        else:
            lines = "".join(traceback.format_exception(error))
            failure.end_job(f"{lines}{communicator.describe_failure(error)}")
