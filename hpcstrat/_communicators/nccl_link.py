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
    **{
        name: f"NCCL_{name.upper()}"
        for name in ("int8", "int32", "int64", "uint8", "uint32", "uint64")
    },
    **{name: f"NCCL_{name.upper()}" for name in ("float16", "bfloat16", "float32", "float64")},
    # What NCCL does not know goes as what it does: booleans as bytes, complex numbers as twice as
    # many reals.
    "bool": "NCCL_UINT8",
    "complex64": "NCCL_FLOAT32",
    "complex128": "NCCL_FLOAT64",
}


class NcclLink(DeviceCommunicator):
    """What `NcclCommunicator` moves arrays with."""

    stream: gpu.Stream
    lane: gpu.Stream
    has_second_lane = True

    def __init__(self, control: HostCommunicator, stream: gpu.Stream) -> None:
        super().__init__(control, stream)
        self._nccl = load_nccl()
        self._comm: Any = start(control, stream)
        with stream.current():
            self._reached: Any = stream.xp.cuda.Event(disable_timing=True)
            self._joined: Any = stream.xp.cuda.Event(disable_timing=True)
        self._second: gpu.Stream | None = None
        self._held: list[Array] = []  # memory that the second stream uses
        self.run_ahead: RunAhead = RunAhead(stream, self.calls.waiting)
        if self.watchdog is not None:
            self.watchdog.add_check(self._failure, self.run_ahead.is_behind)
        self._types: dict[
            np.dtype[Any], int
        ] = {}  # the names of dtypes, which those of NCCL's types go by, are slow
        # Both tables once: attributes of a C module and names of dtypes are slow to look up at each
        # step.
        self._operations = {
            op: getattr(self._nccl, reduction.nccl) for op, reduction in REDUCTIONS.items()
        }

    # ---- for storage

    def all_reduce_flat(self, array: Array, out: Array, op: ReduceOp) -> None:
        """See `DeviceCommunicator.all_reduce_flat`."""
        self._all_reduce("the sum of gradients", array, out, op)

    @span(COMMUNICATION, lambda self, what, array, *_, **__: Details(what, array.nbytes, self.lane))
    def _all_reduce(self, what: str, array: Array, out: Array, op: ReduceOp) -> None:
        if (dtype := reduced_dtype(out.dtype, op)) != out.dtype:
            wide = array.reshape(-1).astype(dtype)
            self._all_reduce(what, wide, wide, op)
            out[...] = wide
        elif array.size:
            target, count, kind = self._flat(out)
            with self._guarded(what):
                self._comm.allReduce(
                    array.data.ptr, target, count, kind, self._operations[op], self.lane.raw.ptr
                )
            self._divide(out, op)

    @span(COMMUNICATION, on_stream("reduce"))
    def reduce_flat(self, array: Array, out: Array, op: ReduceOp, root: int) -> None:
        """See `DeviceCommunicator.reduce_flat`."""
        if (dtype := reduced_dtype(array.dtype, op)) != array.dtype:
            wide = array.reshape(-1).astype(dtype)
            self.reduce_flat(wide, wide, op, root)
            out[...] = wide
        elif out.size:
            target, count, kind = self._flat(out)
            with self._guarded("the sum of gradients"):
                self._comm.reduce(
                    array.data.ptr,
                    target,
                    count,
                    kind,
                    self._operations[op],
                    root,
                    self.lane.raw.ptr,
                )
            if self.rank == root:
                self._divide(out, op)

    @span(COMMUNICATION, on_stream("broadcast"))
    def broadcast_flat(self, array: Array, root: int) -> None:
        """See `DeviceCommunicator.broadcast_flat`."""
        if array.size:
            address = array.data.ptr
            with self._guarded("the broadcast of new values"):
                self._comm.broadcast(
                    address, address, array.nbytes, self._nccl.NCCL_UINT8, root, self.lane.raw.ptr
                )

    @span(COMMUNICATION, on_stream("reduce-scatter"))
    def reduce_scatter_flat(self, array: Array, out: Array, segments: Sequence[RankSlice]) -> None:
        """See `DeviceCommunicator.reduce_scatter_flat`."""
        source, count, kind = self._flat(array)
        target, operation, stream = out.data.ptr, self._operations[ReduceOp.SUM], self.lane.raw.ptr
        factor, itemsize = (
            count // max(array.size, 1),
            array.dtype.itemsize,
        )  # a complex number counts as two
        equal = _equal_part(segments, self.size)
        with self._grouped("the sum of gradients"):
            if equal:
                self._comm.reduceScatter(source, target, factor * equal, kind, operation, stream)
            for root, begin, end, place in _beyond(equal, segments):
                there, into = (
                    source + begin * itemsize,
                    target + place * itemsize if root == self.rank else 0,
                )
                self._comm.reduce(
                    there, into, factor * (end - begin), kind, operation, root, stream
                )

    @span(COMMUNICATION, on_stream("all-gather"))
    def all_gather_flat(self, array: Array, segments: Sequence[RankSlice]) -> None:
        """See `DeviceCommunicator.all_gather_flat`."""
        address, itemsize = array.data.ptr, array.dtype.itemsize
        kind, stream = self._nccl.NCCL_UINT8, self.lane.raw.ptr
        equal = _equal_part(segments, self.size)
        with self._grouped("the new values"):
            if equal:  # in place
                own = address + self.rank * equal * itemsize
                self._comm.allGather(own, address, equal * itemsize, kind, stream)
            for root, begin, end, _ in _beyond(equal, segments):
                at = address + begin * itemsize
                self._comm.broadcast(at, at, (end - begin) * itemsize, kind, root, stream)

    @contextlib.contextmanager
    def beside(self, memory: Array) -> Iterator[None]:
        """See `DeviceCommunicator.beside`."""
        if self._second is None:
            self._second = gpu.Stream(self.stream.ordinal)
        self._reached.record(self.stream.raw)
        self._second.raw.wait_event(self._reached)
        # CuPy's pool gives freed memory to the first stream's next work, which is not ordered with
        # the second.
        self._held.append(memory)
        self.lane = self._second
        try:
            yield
        finally:
            self.lane = self.stream

    def join(self) -> None:
        """See `DeviceCommunicator.join`."""
        if self._second is not None and self._held:
            self._joined.record(self._second.raw)
            self.stream.raw.wait_event(self._joined)
            self._held.clear()

    @contextlib.contextmanager
    def _grouped(self, what: str) -> Iterator[None]:
        """A block whose calls NCCL starts together: one by one, two ranks that both send first would wait forever."""
        with self._guarded(what):
            self._nccl.groupStart()
            try:
                yield
            finally:  # after an error too: an open group would hold back every later call
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
            self.join()
            # NCCL's communicator must not be destroyed before its work is done
            self.stream.synchronize()
            comm, self._comm = self._comm, None
            if self.watchdog is not None:
                self.watchdog.remove_check(self._failure, self.run_ahead.is_behind)
            self.run_ahead.close()
            comm.destroy()

    def _guarded(self, what: str) -> _Guard:
        if self._comm is None:
            raise RuntimeError(
                f"{what}: the strategy's NCCL communicator is closed; make another strategy"
            )
        if (
            self.lane is self.stream
        ):  # a communicator's calls must be made one after the other, on all ranks alike
            self.join()
        return _Guard(self, what)

    def _failure(self) -> str:
        """What NCCL says has gone wrong since the last call, if anything: a peer or the network is gone, say.

        The watchdog asks, because a host that waits for the GPU never hears of it.
        """
        comm = self._comm
        try:
            if comm is not None:
                comm.check_async_error()
        except Exception as error:  # CuPy has no name for NCCL's newer results: they are a KeyError
            return self.describe_failure(error)
        return ""

    def describe_failure(self, error: Exception) -> str:
        """What the end of the job says where NCCL has raised this."""
        return (
            f"hpcstrat: the job ends: NCCL failed on rank {self.rank} of {self.size}: {error!r} "
            f"({describe(self.stream.xp)}). Start with NCCL_DEBUG=INFO to see why"
        )


def _equal_part(segments: Sequence[RankSlice], size: int) -> int:
    """The elements of each part where each rank has one, in rank order, and only the last may be longer; else 0.

    NCCL's reduce-scatter and all-gather take equal parts only.
    """
    if len(segments) < size:
        return 0
    equal = segments[1].start
    for i, one in enumerate(segments):
        # One may end before the next begins, with a gap between two variables.
        end = one.start + equal
        if (one.rank, one.start) != (i, i * equal) or not (
            one.stop >= end if i == size - 1 else one.stop <= end
        ):
            return 0
    return equal


def _beyond(equal: int, segments: Sequence[RankSlice]) -> list[RankSlice]:
    """What equal parts leave out: the end of the last one, or everything where there are none."""
    if not equal:
        return [*segments]
    last = segments[-1]
    rest = last._replace(start=last.start + equal, place=last.place + equal)
    return [rest] if rest.stop > rest.start else []


@functools.cache
def reduced_dtype(dtype: np.dtype[Any], op: ReduceOp) -> np.dtype[Any]:
    """The dtype in which NCCL reduces `dtype`; what it makes is cast back."""
    if (
        dtype.kind in "iu" and dtype.itemsize == 2
    ):  # NCCL has none of these; a sum cast back is the same modulo 2**16
        return np.dtype(np.int32)
    # The sum of 16-bit floats may overflow where their mean does not.
    return accumulator(dtype) if REDUCTIONS[op].is_mean else dtype


class _Guard:
    """A call of NCCL, in which the host may wait for the other ranks: NCCL connects them when it first has to.

    If it fails the job ends. The ranks have agreed on the call, and some may be in it for good.
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
            communicator.run_ahead.note(communicator.lane.raw)
        elif not isinstance(error, Exception):
            communicator.mark_interrupted(error, self._what)
        else:
            lines = "".join(traceback.format_exception(error))
            failure.end_job(f"{lines}{communicator.describe_failure(error)}")
