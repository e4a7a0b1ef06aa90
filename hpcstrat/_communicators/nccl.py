"""The communicator of replicas that all compute on GPUs: NCCL through CuPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import numpy as np

from hpcstrat import _gpu
from hpcstrat._communicators.base import check_gatherable
from hpcstrat._communicators.device import DeviceCommunicator, on_stream
from hpcstrat._communicators.host import HostCommunicator, pack_shapes, unpack_shapes
from hpcstrat._communicators.nccl_start import describe, load_nccl, start
from hpcstrat._communicators.packing import PackKernel, layout_of
from hpcstrat._communicators.protocol import signature
from hpcstrat._communicators.reduction import REDUCTIONS, accumulator
from hpcstrat._edge import current_call
from hpcstrat._spans import COMMUNICATION, Details, span
from hpcstrat._types import Array, ReduceOp

_TYPES = {
    **{name: f"NCCL_{name.upper()}" for name in ("int8", "int32", "int64", "uint8", "uint32", "uint64")},
    **{name: f"NCCL_{name.upper()}" for name in ("float16", "bfloat16", "float32", "float64")},
    # What NCCL does not know goes as what it does: booleans as bytes, complex numbers as twice as many reals.
    "bool": "NCCL_UINT8",
    "complex64": "NCCL_FLOAT32",
    "complex128": "NCCL_FLOAT64",
}


@final
class NcclCommunicator(DeviceCommunicator):
    """Every rank on a GPU. GPU arrays move on the strategy's stream; the host never waits for them.

    Every call begins with a record, as on the host, so that a mismatch is an error on all ranks before NCCL sees it.
    Sums are the same on every rank, but their order, and so their last bits, is NCCL's; a NaN does not win a minimum.

    Making one is collective.

    Args:
        control: moves records, objects and host arrays of the same ranks.
        stream: this rank's.

    Raises:
        RuntimeError: NCCL does not start, on any rank.
    """

    stream: _gpu.Stream

    def __init__(self, control: HostCommunicator, stream: _gpu.Stream) -> None:
        super().__init__(control, stream)
        self._nccl = load_nccl()
        self._comm: Any = start(control, stream)
        with stream.current():
            self._done: Any = stream.xp.cuda.Event(disable_timing=True)  # what NCCL was last asked for
        if self.watchdog is not None:
            self.watchdog.add_check(self._failure, self._is_pending)
        self._types: dict[np.dtype[Any], int] = {}  # the names of dtypes, which those of NCCL's types go by, are slow
        self._operations = {op: getattr(self._nccl, reduction.nccl) for op, reduction in REDUCTIONS.items()}

    # ---- arrays

    def _reduce_arrays(self, must_match: tuple[Any, ...], arrays: Sequence[Array], op: ReduceOp) -> list[Array]:
        def move(arrays: Sequence[Array], must_match: tuple[Any, ...]) -> list[Array]:
            layout = layout_of(tuple([array.shape for array in arrays]), tuple([array.dtype for array in arrays]))
            with self.stream.current():
                arrays = [self.stream.here(array) for array in arrays]
                out = self.stream.xp.empty(layout.nbytes, np.uint8)
                parts = []
                for group in layout.groups:
                    if len(group.members) == 1:  # NCCL takes it from where it is
                        parts.append(self.stream.xp.ascontiguousarray(arrays[group.members[0]]))
                    else:
                        PackKernel(layout, group, out)(arrays)
                        parts.append(group.of(out))
                # Only now: a rank without the memory for all this stops the others, which would wait in NCCL for it.
                self.exchange(signature(current_call(), *must_match, *[(array.dtype, array.shape) for array in arrays]))
                for group, part in zip(layout.groups, parts, strict=True):
                    self._all_reduce(current_call(), part, group.of(out), op)
                return layout.views(out)

        return self._apart(
            must_match, arrays, move, lambda hosts, must_match: self._control._reduce_arrays(must_match, hosts, op)
        )

    def _gather_arrays(self, must_match: Sequence[Any], arrays: Sequence[Array], axis: int) -> list[Array]:
        def move(arrays: Sequence[Array], must_match: tuple[Any, ...]) -> list[Array]:
            shapes = pack_shapes(arrays).view(np.uint8)

            def write(message: Any) -> None:
                message[: shapes.size] = shapes

            messages = self.exchange(
                signature(current_call(), *must_match, *[a.dtype for a in arrays]), shapes.size, write
            )
            everyones = [unpack_shapes(message, len(arrays))[0] for message in messages]
            for i in range(len(arrays)):
                check_gatherable([shapes[i] for shapes in everyones], axis)
            with self.stream.current():
                with self.raise_together():
                    arrays = [self.stream.here(array) for array in arrays]
                    parts = [_Parts.of(self.stream.xp, a, [one[i] for one in everyones]) for i, a in enumerate(arrays)]
                    self.exchange(
                        signature(current_call(), "memory")
                    )  # a rank that lacks it stops those that would wait for it
                return self._gather(parts, axis)

        return self._apart(
            must_match, arrays, move, lambda hosts, must_match: self._control._gather_arrays(must_match, hosts, axis)
        )

    def _apart(
        self,
        must_match: Sequence[Any],
        arrays: Sequence[Array],
        move: Callable[[Sequence[Array], tuple[Any, ...]], list[Array]],
        move_on_host: Callable[[Sequence[Array], tuple[Any, ...]], list[Array]],
    ) -> list[Array]:
        """Moves the arrays on the GPU and those on the host, each their own way; which are which must agree."""
        on_gpu = [i for i, array in enumerate(arrays) if _gpu.is_on_gpu(array)]
        on_host = [i for i in range(len(arrays)) if i not in on_gpu]
        on_which = [f"on the GPU {on_gpu}"] if on_gpu else []
        results: list[Array] = [None] * len(arrays)
        for indices, way in ((on_gpu, move), (on_host, move_on_host)):
            if indices or (way is move_on_host and not arrays):
                with self.raise_together():  # the second way has one of its own
                    found = way([arrays[i] for i in indices], (*must_match, *on_which))
                for i, result in zip(indices, found, strict=True):
                    results[i] = result
        return results

    @span(COMMUNICATION, lambda self, parts, *_: Details(current_call(), sum(p.own.nbytes for p in parts), self.stream))
    def _gather(self, gathered: Sequence[_Parts], axis: int) -> list[Array]:
        """All arrays in one group of messages: parts of one size by all-gather, others from each rank to each."""
        stream, kind = self.stream.raw.ptr, self._nccl.NCCL_UINT8
        with self._guarded(current_call()):
            # NCCL starts the calls of a group together. One by one, two ranks that both send first would wait for ever.
            self._nccl.groupStart()
            try:
                for own, whole, sizes, starts, _ in gathered:
                    if not whole.size:
                        continue
                    source, target = own.data.ptr, whole.data.ptr
                    if len(set(sizes)) == 1:
                        self._comm.allGather(source, target, sizes[0], kind, stream)
                        continue
                    for peer in range(self.size):  # this rank itself too: NCCL copies
                        if sizes[self.rank]:
                            self._comm.send(source, sizes[self.rank], kind, peer, stream)
                        if sizes[peer]:
                            self._comm.recv(target + starts[peer], sizes[peer], kind, peer, stream)
            finally:  # after an error too: an open group would hold back every later call
                self._nccl.groupEnd()
        return [parts.along(self.stream.xp, axis) for parts in gathered]

    # ---- for storage

    def all_reduce_flat(self, array: Array, out: Array, op: ReduceOp) -> None:
        """See `DeviceCommunicator.all_reduce_flat`."""
        self._all_reduce("the sum of gradients", array, out, op)

    @span(COMMUNICATION, lambda self, what, array, *_, **__: Details(what, array.nbytes, self.stream))
    def _all_reduce(self, what: str, array: Array, out: Array, op: ReduceOp) -> None:
        if REDUCTIONS[op].is_mean and _is_short(out):
            wide = array.reshape(-1).astype(
                np.float32
            )  # the sum of 16-bit floats may overflow where their mean does not
            self._all_reduce(what, wide, wide, op)
            out[...] = wide
        elif array.size:
            target, count, kind = self._flat(out)
            with self._guarded(what):
                self._comm.allReduce(array.data.ptr, target, count, kind, self._operations[op], self.stream.raw.ptr)
            self._divide(out, op)

    @span(COMMUNICATION, on_stream("reduce"))
    def reduce_flat(self, array: Array, out: Array, op: ReduceOp, root: int) -> None:
        """See `DeviceCommunicator.reduce_flat`."""
        if REDUCTIONS[op].is_mean and _is_short(array):
            wide = array.reshape(-1).astype(np.float32)
            self.reduce_flat(wide, wide, op, root)
            out[...] = wide
        elif out.size:
            target, count, kind = self._flat(out)
            with self._guarded("the sum of gradients"):
                self._comm.reduce(array.data.ptr, target, count, kind, self._operations[op], root, self.stream.raw.ptr)
            if self.rank == root:
                self._divide(out, op)

    @span(COMMUNICATION, on_stream("broadcast"))
    def broadcast_flat(self, array: Array, root: int) -> None:
        """See `DeviceCommunicator.broadcast_flat`."""
        if array.size:
            address = array.data.ptr
            with self._guarded("the broadcast of new values"):
                self._comm.broadcast(address, address, array.nbytes, self._nccl.NCCL_UINT8, root, self.stream.raw.ptr)

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
            self.stream.synchronize()  # NCCL's communicator must not be destroyed before its work is done
            self._forget().destroy()

    def _guarded(self, what: str) -> _Guard:
        if self._comm is None:
            raise RuntimeError(f"{what}: the strategy's NCCL communicator is closed; make another strategy")
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
            return (
                f"hpcstrat: the job ends: NCCL failed on rank {self.rank} of {self.size}: {error!r} "
                f"({describe(self.stream.xp)}). Start with NCCL_DEBUG=INFO to see why"
            )
        return ""

    def _is_pending(self) -> bool:
        """Whether the GPU has not come to the end of what NCCL was last asked for.

        A host that waits for that GPU, and so for the other ranks, is in the program, or in CuPy.
        """
        self.stream.xp.cuda.Device(self.stream.ordinal).use()  # the watchdog's thread has made none current
        return not self._done.done

    def _forget(self) -> Any:
        """NCCL's communicator, which from now on nobody uses and nobody watches."""
        comm, self._comm = self._comm, None
        if self.watchdog is not None and comm is not None:
            self.watchdog.remove_check(self._failure, self._is_pending)
        return comm

    def _abort(self) -> None:
        comm = self._forget()
        if comm is not None:
            comm.abort()  # destroying would wait for what will never be done


class _Parts(NamedTuple):
    """All ranks' parts of an array that is gathered, and the memory for them.

    Attributes:
        own: this rank's, C-contiguous.
        whole: all of them, one behind the other, as bytes.
        sizes: bytes of each rank's.
        starts: where each begins.
        shapes: each rank's.
    """

    own: Array
    whole: Array
    sizes: list[int]
    starts: list[int]
    shapes: list[tuple[int, ...]]

    @classmethod
    def of(cls, xp: Any, array: Array, shapes: list[tuple[int, ...]]) -> _Parts:
        sizes = [int(np.prod(shape, dtype=np.int64)) * array.dtype.itemsize for shape in shapes]
        starts = [0, *np.cumsum(sizes).tolist()]
        return cls(xp.ascontiguousarray(array), xp.empty(starts[-1], np.uint8), sizes, starts, shapes)

    def along(self, xp: Any, axis: int) -> Array:
        """The parts concatenated along an axis."""
        dtype, shape = self.own.dtype, self.shapes[0]
        if axis % len(shape) == 0:  # they lie one behind the other already
            rows = sum(shape[0] for shape in self.shapes)
            return self.whole.view(dtype).reshape(rows, *shape[1:])
        ends = zip(self.starts, self.starts[1:], self.shapes, strict=False)
        return xp.concatenate([self.whole[a:b].view(dtype).reshape(shape) for a, b, shape in ends], axis)


def _is_short(array: Array) -> bool:
    return accumulator(array.dtype) != array.dtype


class _Guard:
    """Notes when NCCL is done. Makes an error of its one that says what to do, and ends the use of the communicator."""

    __slots__ = ("_communicator", "_what")

    def __init__(self, communicator: NcclCommunicator, what: str) -> None:
        self._communicator = communicator
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        communicator = self._communicator
        if error is None:
            communicator._done.record(communicator.stream.raw)
        elif not isinstance(error, Exception):
            communicator.tear(error, self._what)
        else:  # CuPy has no name for NCCL's newer results: they are a KeyError
            communicator._abort()
            raise RuntimeError(
                f"{self._what}: NCCL failed on rank {communicator.rank} of {communicator.size}: {error!r} "
                f"({describe(communicator.stream.xp)}). Start with NCCL_DEBUG=INFO to see why; after this the GPUs are "
                "no longer connected"
            ) from error
