"""The communicator of ranks on GPUs that NCCL connects, through CuPy."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import compress
from typing import Any, TypeVar, final

import numpy as np

from hpcstrat._agreement.records import signature_of
from hpcstrat._core import gpu
from hpcstrat._core.call_name import current_call
from hpcstrat._core.graph import drop_graphs
from hpcstrat._core.timeline import COMMUNICATION, span
from hpcstrat._core.types import Array, ReduceOp
from hpcstrat._memory.layout import Layout, layout_of
from hpcstrat._memory.packing import packings_of
from hpcstrat._process import failure
from hpcstrat._transports import nccl_start
from hpcstrat._transports.device import DeviceCommunicator, Move
from hpcstrat._transports.host import HostCommunicator, layout_and_signature_of
from hpcstrat._transports.reduction import REDUCTIONS, accumulator
from hpcstrat._transports.run_ahead import RunAhead
from hpcstrat._transports.verbs import check_gatherable

_Item = TypeVar("_Item")
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
class NcclCommunicator(DeviceCommunicator):
    """All ranks on GPUs. GPU arrays move on the strategy's stream; the host runs a little ahead.

    Every call starts with a record, as on the host, so that a mismatch is an error on all ranks
    before NCCL sees it. If NCCL itself fails, the job ends, because some ranks may be in the call
    forever. Sums are equal on all ranks, but NCCL chooses their order, and so their last bits. A
    minimum may ignore a NaN.

    The constructor is collective.

    Args:
        control: moves records, objects and host arrays of the same ranks.
        stream: this rank's stream.

    Raises:
        RuntimeError: the ranks load different versions of NCCL.
    """

    def __init__(self, control: HostCommunicator, stream: gpu.Stream) -> None:
        super().__init__(control, stream)
        self._nccl = nccl_start.load_nccl()
        self._byte: int = self._nccl.NCCL_UINT8  # what is only copied travels as bytes
        self._comm: Any = nccl_start.start(control, stream)
        self._run_ahead = RunAhead(stream, control.calls.waiting)
        self._packings_of = functools.lru_cache(maxsize=8)(packings_of)
        if control.watchdog is not None:
            control.watchdog.add_check(self._failure, self._run_ahead.is_behind)

    # ---- arrays on the GPU, then those on the host
    #
    # In the same order on all ranks: a rank that moves arrays on its GPU and a rank in a call of
    # the host would wait for each other.

    def reduce_arrays(
        self, must_match: tuple[Any, ...], arrays: Sequence[Array], op: ReduceOp
    ) -> list[Array]:
        return self._move_by_place(
            self._reduce_on_gpu, self.control.reduce_arrays, must_match, arrays, op
        )

    def gather_arrays(
        self, must_match: tuple[Any, ...], arrays: Sequence[Array], axis: int
    ) -> list[Array]:
        return self._move_by_place(
            self._gather_on_gpu, self.control.gather_arrays, must_match, arrays, axis
        )

    def broadcast_arrays(
        self, must_match: tuple[Any, ...], arrays: Sequence[Array], root: int
    ) -> list[Array]:
        return self._move_by_place(
            self._broadcast_on_gpu, self.control.broadcast_arrays, must_match, arrays, root
        )

    def _move_by_place(
        self,
        move_on_gpu: Callable[..., list[Array]],
        move_on_host: Callable[..., list[Array]],
        must_match: tuple[Any, ...],
        arrays: Sequence[Array],
        option: Any,
    ) -> list[Array]:
        are_on_gpu = [*map(gpu.is_on_gpu, arrays)]
        on_gpu, on_host = _split(arrays, are_on_gpu)
        from_gpu: Iterator[Array] = iter(())
        from_host: Iterator[Array] = iter(())
        if on_gpu:
            self._opened()
            must_match = (*must_match, f"on the GPU {[*compress(range(len(arrays)), are_on_gpu)]}")
            from_gpu = iter(move_on_gpu(must_match, on_gpu, option))
        if on_host or not arrays:  # of no arrays, the ranks still meet
            with self.raise_together():  # the ranks may have met, on the GPU
                from_host = iter(move_on_host(must_match, on_host, option))
        return [next(from_gpu if is_on_gpu else from_host) for is_on_gpu in are_on_gpu]

    def send_arrays(
        self,
        must_match: tuple[Any, ...],
        sent: Sequence[tuple[int, Array]],
        expected: Sequence[tuple[int, Array]],
    ) -> list[Array]:
        self._opened()
        # Both on every rank: one that sends and expects nothing does not know what the others do.
        are_on_gpu = [gpu.is_on_gpu(like) for _, like in expected]
        sent_on_gpu, sent_on_host = _split(sent, [gpu.is_on_gpu(array) for _, array in sent])
        on_gpu, on_host = _split(expected, are_on_gpu)
        from_gpu = iter(self._send_on_gpu(must_match, sent_on_gpu, on_gpu))
        with self.raise_together():  # the ranks have met, on the GPU
            from_host = iter(self.control.send_arrays(must_match, sent_on_host, on_host))
        return [next(from_gpu if is_on_gpu else from_host) for is_on_gpu in are_on_gpu]

    # ---- arrays on the GPU: allocate, agree, move
    #
    # The ranks agree only when each has the memory: a rank without it stops the others in the
    # exchange. In NCCL they would wait for it. And once they agree, they wait in NCCL for a rank
    # that a signal's exception interrupts: hence `change`.

    def _reduce_on_gpu(
        self, must_match: tuple[Any, ...], arrays: Sequence[Array], op: ReduceOp
    ) -> list[Array]:
        layout, signature = layout_and_signature_of(must_match, arrays)
        xp, stream = self.stream.xp, self.stream
        with stream.current():
            arrays = [stream.here(array) for array in arrays]
            out = xp.empty(layout.nbytes, np.uint8)
            sources = []
            for group, pack in zip(layout.groups, self._packings_of(layout), strict=True):
                if len(group.members) == 1:  # NCCL takes it from where it is
                    source = xp.ascontiguousarray(arrays[group.members[0]])
                else:
                    pack(arrays, out)
                    source = group.of(out)
                sources.append(source.astype(_dtype_to_reduce(group.dtype, op), copy=False))
            with self.change():
                self.exchange(signature)
                for group, source in zip(layout.groups, sources, strict=True):
                    self.reduce_flat(current_call(), source, group.of(out), op)
            return layout.views(out)

    def _gather_on_gpu(
        self, must_match: tuple[Any, ...], arrays: Sequence[Array], axis: int
    ) -> list[Array]:
        # The shapes first, through the host: before a call of NCCL a rank must know what it
        # receives.
        by_rank = self.all_gather_obj(
            [array.shape for array in arrays], *must_match, *[array.dtype for array in arrays]
        )
        shapes_of = [*zip(*by_rank, strict=True)]  # of each array, on all ranks
        for shapes in shapes_of:
            check_gatherable(shapes, axis)
        layouts = [
            layout_of(shapes, (array.dtype,) * self.size)
            for shapes, array in zip(shapes_of, arrays, strict=True)
        ]
        xp, stream = self.stream.xp, self.stream
        with stream.current():
            with self.change():
                with self.raise_together():
                    arrays = [xp.ascontiguousarray(stream.here(array)) for array in arrays]
                    messages = [xp.empty(layout.nbytes, np.uint8) for layout in layouts]
                    self.exchange(signature_of(current_call(), "memory"))
                self.launch(current_call(), self._prepare_gather(arrays, messages, layouts))
            results = []
            for message, layout, shapes in zip(messages, layouts, shapes_of, strict=True):
                if axis % len(shapes[0]) == 0:  # the parts are one after the other already
                    rows = sum(shape[0] for shape in shapes)
                    (group,) = layout.groups
                    results.append(group.of(message).reshape(rows, *shapes[0][1:]))
                else:
                    results.append(xp.concatenate(layout.views(message), axis))
            return results

    def _broadcast_on_gpu(
        self, must_match: tuple[Any, ...], arrays: Sequence[Array], root: int
    ) -> list[Array]:
        _, signature = layout_and_signature_of(must_match, arrays)
        with self.stream.current():
            copies = [self.stream.here(array).copy("C") for array in arrays]
            with self.change():
                self.exchange(signature)
                moves = [move for copy in copies for move in self.prepare_broadcast(copy, root)]
                self.launch(current_call(), moves)
            return copies

    def _send_on_gpu(
        self,
        must_match: tuple[Any, ...],
        sent: Sequence[tuple[int, Array]],
        expected: Sequence[tuple[int, Array]],
    ) -> list[Array]:
        # The shapes first, as in `_gather_on_gpu`.
        signature = signature_of(current_call(), *must_match)
        shapes = self.control.exchange_shapes(signature, sent, expected)
        xp, stream = self.stream.xp, self.stream
        with stream.current(), self.change():
            with self.raise_together():
                sources = [(rank, xp.ascontiguousarray(stream.here(array))) for rank, array in sent]
                received = [
                    (rank, xp.empty(shape, like.dtype))
                    for (rank, like), shape in zip(expected, shapes, strict=True)
                ]
                self.exchange(signature_of(current_call(), "memory"))
            self.launch(current_call(), self._prepare_messages(sources, received))
        return [array for _, array in received]

    # ---- flat arrays, for storage too

    def reduce_flat(
        self, what: str, array: Array, out: Array, op: ReduceOp, root: int | None = None
    ) -> None:
        """See `DeviceCommunicator.reduce_flat`.

        An `array` of the dtype in which NCCL reduces that of `out`, if it is another, is
        overwritten.
        """
        array = array.reshape(-1).astype(_dtype_to_reduce(out.dtype, op), copy=False)
        result = out if out.dtype == array.dtype else array
        self.launch(what, self.prepare_reduce(array, op, root, result))
        if REDUCTIONS[op].is_mean and root in (None, self.rank):
            parts = result.view(result.real.dtype) if result.dtype.kind == "c" else result
            parts /= self.size
        if result is not out:
            out[...] = result

    # ---- NCCL's calls and their arguments

    def prepare_reduce(
        self, array: Array, op: ReduceOp, root: int | None, out: Array | None = None
    ) -> list[Move]:
        """See `DeviceCommunicator.prepare_reduce`; into `out`, or in place."""
        if not array.size:
            return []
        is_complex = array.dtype.kind == "c"
        source, target = array.data.ptr, (array if out is None else out).data.ptr
        count = 2 * array.size if is_complex else array.size
        numbers = (source, target, count, _type(array.dtype), _operation(op))
        raw = self.stream.raw.ptr
        if root is None:
            return [Move(partial(self._opened().allReduce, *numbers, raw), array.nbytes)]
        return [Move(partial(self._opened().reduce, *numbers, root, raw), array.nbytes)]

    def prepare_broadcast(self, array: Array, root: int) -> list[Move]:
        """See `DeviceCommunicator.prepare_broadcast`."""
        if not array.size:
            return []
        place, raw = array.data.ptr, self.stream.raw.ptr
        numbers = (place, place, array.nbytes, self._byte, root, raw)
        return [Move(partial(self._opened().broadcast, *numbers), array.nbytes)]

    def _prepare_gather(
        self, arrays: Sequence[Array], messages: Sequence[Array], layouts: Sequence[Layout]
    ) -> list[Move]:
        """Copies each rank's part of an array to all ranks' messages, which have these layouts."""
        moves: list[Move] = []
        for array, message, layout in zip(arrays, messages, layouts, strict=True):
            if len(set(layout.sizes)) > 1:
                # NCCL's own takes equal parts only. It copies what a rank sends to itself.
                sent = [(rank, array) for rank in range(self.size)]
                moves += self._prepare_messages(sent, [*enumerate(layout.views(message))])
            elif array.size:
                source, raw = array.data.ptr, self.stream.raw.ptr
                numbers = (source, message.data.ptr, array.nbytes, self._byte, raw)
                moves.append(Move(partial(self._opened().allGather, *numbers), message.nbytes))
        return moves

    def _prepare_messages(
        self, sent: Sequence[tuple[int, Array]], received: Sequence[tuple[int, Array]]
    ) -> list[Move]:
        """Sends an array to each of these ranks, and receives arrays from others.

        Each rank receives another rank's arrays in the order in which that sends them.
        """
        comm, byte, raw = self._opened(), self._byte, self.stream.raw.ptr
        return [
            Move(partial(call, array.data.ptr, array.nbytes, byte, rank, raw), nbytes)
            for call, pairs in ((comm.send, sent), (comm.recv, received))
            for rank, array in pairs
            if (nbytes := array.nbytes)
        ]

    def _opened(self) -> Any:
        """NCCL's communicator.

        Raises:
            RuntimeError: it is closed.
        """
        if self._comm is None:
            raise RuntimeError(
                f"{current_call()}: the strategy's NCCL communicator is closed; make another "
                "strategy"
            )
        return self._comm

    @span(COMMUNICATION, lambda _, what, moves: (what, sum(move.nbytes for move in moves)))
    def launch(self, what: str, moves: Sequence[Move]) -> None:
        """See `DeviceCommunicator.launch`. The host may wait until NCCL has connected it.

        NCCL starts the calls together: two ranks that send first would both hang.
        """
        if self._comm is None:  # or NCCL would crash
            self._opened()
        # As `with waiting:`, without its calls: every step comes through here.
        waiting = self.calls.waiting
        waiting.depth += 1
        try:
            self._nccl.groupStart()
            try:
                for call, _ in moves:
                    call()
            finally:  # after an error too: an open group would block all later calls
                self._nccl.groupEnd()
        except Exception as error:
            text = nccl_start.describe_failure(error, self.control, self.stream)
            failure.end_job(f"{traceback.format_exc()}{text}")
        except BaseException as error:
            self.calls.mark_interrupted(error, what)
            raise
        finally:
            waiting.depth -= 1
        # An event of a capture would become a part of the graph, and never be done.
        if not self.calls.is_capturing:
            self._run_ahead.note()

    def launch_graph(self, graph: Any) -> None:
        """See `DeviceCommunicator.launch_graph`."""
        with self.calls.waiting:
            graph.launch(self.stream.raw)
        self._run_ahead.note()

    # ---- failure and the end

    def _failure(self) -> str:
        """NCCL's error since the last call, if any: for example, a peer or the network is gone.

        The watchdog calls it, because a host that waits for the GPU is not told.
        """
        comm = self._comm
        try:
            if comm is not None:
                comm.check_async_error()
        except Exception as error:  # CuPy has no names for NCCL's newer results: a KeyError
            return nccl_start.describe_failure(error, self.control, self.stream)
        return ""

    def close(self) -> None:
        """See `DeviceCommunicator.close`. Waits for this rank's calls."""
        if self._comm is not None:
            # NCCL's communicator must not be destroyed before its work is done.
            self.stream.synchronize()
            # NCCL waits for ever for what a graph still holds.
            drop_graphs(self.stream)
            comm, self._comm = self._comm, None
            if self.watchdog is not None:
                self.watchdog.remove_check(self._failure, self._run_ahead.is_behind)
            self._run_ahead.close()
            comm.destroy()


def _split(items: Sequence[_Item], are_on_gpu: Sequence[bool]) -> tuple[list[_Item], list[_Item]]:
    """The items that are on the GPU, and the others."""
    split: tuple[list[_Item], list[_Item]] = ([], [])
    for item, is_on_gpu in zip(items, are_on_gpu, strict=True):
        split[not is_on_gpu].append(item)
    return split


# ---- what NCCL calls dtypes and operations, and in which dtype it reduces
#
# Cached: names of dtypes and attributes of a C module are slow to look up at each step.


@functools.cache
def _type(dtype: np.dtype[Any]) -> int:
    return getattr(nccl_start.load_nccl(), _TYPES[dtype.name])


@functools.cache
def _operation(op: ReduceOp) -> int:
    return getattr(nccl_start.load_nccl(), REDUCTIONS[op].nccl)


@functools.cache
def _dtype_to_reduce(dtype: np.dtype[Any], op: ReduceOp) -> np.dtype[Any]:
    """The dtype in which NCCL reduces `dtype`; the result is cast back."""
    # NCCL does not have these. A sum that is cast back is the same modulo 2**16.
    if dtype.kind in "iu" and dtype.itemsize == 2:
        return np.dtype(np.int32)
    # The sum of 16-bit floats may overflow where their mean does not.
    return accumulator(dtype) if REDUCTIONS[op].is_mean else dtype
