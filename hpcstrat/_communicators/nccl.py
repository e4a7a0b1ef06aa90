"""The communicator of replicas that all compute on GPUs: NCCL through CuPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, final

import numpy as np

from hpcstrat._calls.records import signature_of
from hpcstrat._communicators.array_messages import pack_shapes, unpack_shapes
from hpcstrat._communicators.base import Outgoing, check_gatherable
from hpcstrat._communicators.nccl_link import NcclLink, dtype_to_reduce
from hpcstrat._core import gpu
from hpcstrat._core.call_name import current_call
from hpcstrat._core.span import COMMUNICATION, Details, span
from hpcstrat._core.types import Array, ReduceOp
from hpcstrat._memory.layout import PackKernel, layout_of

_Given = TypeVar("_Given")


@final
class NcclCommunicator(NcclLink):
    """All ranks on GPUs. GPU arrays move on the strategy's stream; the host never waits for them.

    Every call starts with a record, as on the host, so that a mismatch is an error on all ranks
    before NCCL sees it. Sums are equal on all ranks, but NCCL chooses their order, and so their
    last bits. A minimum may ignore a NaN.

    The constructor is collective.

    Args:
        control: moves records, objects and host arrays of the same ranks.
        stream: this rank's stream.

    Raises:
        RuntimeError: NCCL does not start, on any rank.
    """

    # ---- arrays

    def reduce_arrays(
        self, must_match: tuple[Any, ...], arrays: Sequence[Array], op: ReduceOp
    ) -> list[Array]:
        def move(arrays: Sequence[Array], must_match: tuple[Any, ...]) -> list[Array]:
            layout = layout_of(
                tuple([array.shape for array in arrays]), tuple([array.dtype for array in arrays])
            )
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
                # Only now: a rank without the memory stops the others here, which would wait for it
                # in NCCL.
                self.exchange(
                    signature_of(
                        current_call(),
                        *must_match,
                        *[(array.dtype, array.shape) for array in arrays],
                    )
                )
                for group, part in zip(layout.groups, parts, strict=True):
                    self._all_reduce(current_call(), part, group.of(out), op)
                return layout.views(out)

        return self._move_separately(
            must_match,
            arrays,
            move,
            lambda hosts, must_match: self._control.reduce_arrays(must_match, hosts, op),
        )

    def gather_arrays(
        self, must_match: Sequence[Any], arrays: Sequence[Array], axis: int
    ) -> list[Array]:
        def move(arrays: Sequence[Array], must_match: tuple[Any, ...]) -> list[Array]:
            shapes = pack_shapes(arrays).view(np.uint8)

            def write(message: Any) -> None:
                message[: shapes.size] = shapes

            # The shapes first, through the host: before a call of NCCL a rank must know what it
            # receives.
            messages = self.exchange(
                signature_of(current_call(), *must_match, *[a.dtype for a in arrays]),
                shapes.size,
                write,
            )
            by_rank = [unpack_shapes(message, len(arrays))[0] for message in messages]
            for i in range(len(arrays)):
                check_gatherable([shapes[i] for shapes in by_rank], axis)
            with self.stream.current():
                with self.raise_together():
                    arrays = [self.stream.here(array) for array in arrays]
                    parts = [
                        _Parts.of(self.stream.xp, array, [shapes[i] for shapes in by_rank])
                        for i, array in enumerate(arrays)
                    ]
                    # A rank without the memory stops the others, which would wait for it in NCCL.
                    self.exchange(signature_of(current_call(), "memory"))
                return self._gather(parts, axis)

        return self._move_separately(
            must_match,
            arrays,
            move,
            lambda hosts, must_match: self._control.gather_arrays(must_match, hosts, axis),
        )

    def broadcast_arrays(
        self, must_match: tuple[Any, ...], arrays: Sequence[Array], root: int
    ) -> list[Array]:
        def move(arrays: Sequence[Array], must_match: tuple[Any, ...]) -> list[Array]:
            with self.stream.current():
                copies = [self.stream.here(array).copy("C") for array in arrays]
                self.exchange(
                    signature_of(
                        current_call(),
                        *must_match,
                        *[(array.dtype, array.shape) for array in arrays],
                    )
                )
                for array in copies:
                    self.broadcast_flat(array.reshape(-1), root)
                return copies

        return self._move_separately(
            must_match,
            arrays,
            move,
            lambda hosts, must_match: self._control.broadcast_arrays(must_match, hosts, root),
        )

    def reduce_parts(
        self, must_match: tuple[Any, ...], parts: Sequence[Sequence[Array]], op: ReduceOp
    ) -> list[Array]:
        def move(parts: Sequence[Sequence[Array]], must_match: tuple[Any, ...]) -> list[Array]:
            xp = self.stream.xp
            with self.stream.current():
                flat = [
                    xp.concatenate([self.stream.here(part).reshape(-1) for part in leaf])
                    for leaf in parts
                ]
                flat = [
                    array.astype(dtype_to_reduce(array.dtype, op), copy=False) for array in flat
                ]
                out = [
                    xp.empty(leaf[self.rank].shape, array.dtype)
                    for leaf, array in zip(parts, flat, strict=True)
                ]
                self.exchange(signature_of(current_call(), *must_match))
                self._reduce_scatter(
                    flat, [[part.size for part in leaf] for leaf in parts], out, op
                )
                return [
                    array.astype(leaf[0].dtype, copy=False)
                    for leaf, array in zip(parts, out, strict=True)
                ]

        return self._move_separately(
            must_match,
            parts,
            move,
            lambda hosts, must_match: self._control.reduce_parts(must_match, hosts, op),
            lambda leaf: gpu.is_on_gpu(leaf[0]),
        )

    @span(
        COMMUNICATION,
        lambda self, flat, *_: Details(current_call(), sum(a.nbytes for a in flat), self.stream),
    )
    def _reduce_scatter(
        self,
        flat: Sequence[Array],
        sizes: Sequence[Sequence[int]],
        out: Sequence[Array],
        op: ReduceOp,
    ) -> None:
        """Reduces flat arrays; of array i the next `sizes[i][r]` elements go to each rank r."""
        operation, stream = self._operations[op], self.stream.raw.ptr
        with self._start_group(current_call()):
            for source, counts, target in zip(flat, sizes, out, strict=True):
                address, total, kind = self._flat(source)
                factor = total // max(source.size, 1)  # a complex number counts as two
                if len(set(counts)) == 1 and total:
                    self._comm.reduceScatter(
                        address, target.data.ptr, factor * counts[0], kind, operation, stream
                    )
                    continue
                # NCCL's reduce-scatter takes equal parts only.
                for root, count in enumerate(counts):
                    if count:
                        into = target.data.ptr if root == self.rank else address
                        self._comm.reduce(
                            address, into, factor * count, kind, operation, root, stream
                        )
                        address += count * source.dtype.itemsize
        for target in out:
            self._divide(target, op)

    def exchange_parts(
        self, must_match: tuple[Any, ...], outgoing: Sequence[Outgoing]
    ) -> list[dict[int, Array]]:
        def move(
            outgoing: Sequence[Outgoing], must_match: tuple[Any, ...]
        ) -> list[dict[int, Array]]:
            # The shapes first, through the host, as in `gather_arrays`.
            shapes = [
                {
                    rank: np.array([array.ndim, *array.shape], np.int64)
                    for rank, array in item.to.items()
                }
                for item in outgoing
            ]
            own_shapes = [
                Outgoing(np.dtype(np.int64), to, item.sources, is_on_gpu=False)
                for to, item in zip(shapes, outgoing, strict=True)
            ]
            shapes_here = self._control.exchange_parts(must_match, own_shapes)
            with self.stream.current():
                with self.raise_together():
                    sent = [
                        {
                            rank: self.stream.xp.ascontiguousarray(self.stream.here(array))
                            for rank, array in item.to.items()
                        }
                        for item in outgoing
                    ]
                    received = [
                        {
                            source: self.stream.xp.empty(tuple(shape[1:].tolist()), item.dtype)
                            for source, shape in of.items()
                        }
                        for item, of in zip(outgoing, shapes_here, strict=True)
                    ]
                    self.exchange(signature_of(current_call(), "memory"))
                self._send_and_receive(sent, received)
            return received

        return self._move_separately(
            must_match,
            outgoing,
            move,
            lambda hosts, must_match: self._control.exchange_parts(must_match, hosts),
            lambda item: item.is_on_gpu,
        )

    @span(
        COMMUNICATION, lambda self, sent, _: Details(current_call(), _bytes_in(sent), self.stream)
    )
    def _send_and_receive(
        self, sent: Sequence[dict[int, Array]], received: Sequence[dict[int, Array]]
    ) -> None:
        stream, kind = self.stream.raw.ptr, self._nccl.NCCL_UINT8
        with self._start_group(current_call()):
            # What two ranks send each other pairs up in the order of these calls, which is that of
            # the arguments.
            for to, of in zip(sent, received, strict=True):
                for rank, array in to.items():
                    if array.nbytes:
                        self._comm.send(array.data.ptr, array.nbytes, kind, rank, stream)
                for rank, array in of.items():
                    if array.nbytes:
                        self._comm.recv(array.data.ptr, array.nbytes, kind, rank, stream)

    def _move_separately(
        self,
        must_match: Sequence[Any],
        given: Sequence[_Given],
        move: Callable[[Sequence[_Given], tuple[Any, ...]], list[Any]],
        move_on_host: Callable[[Sequence[_Given], tuple[Any, ...]], list[Any]],
        is_on_gpu: Callable[[_Given], bool] = gpu.is_on_gpu,
    ) -> list[Any]:
        """Moves GPU arrays with `move` and host arrays with `move_on_host`; ranks must agree."""
        on_gpu = [i for i, item in enumerate(given) if is_on_gpu(item)]
        on_host = [i for i in range(len(given)) if i not in on_gpu]
        # Part of what must match. Without GPU arrays it is left out of the messages.
        on_which = [f"on the GPU {on_gpu}"] if on_gpu else []
        results: list[Any] = [None] * len(given)
        # In the same order on all ranks: a rank in NCCL and a rank in a call of the host would wait
        # for each other.
        for indices, way in ((on_gpu, move), (on_host, move_on_host)):
            if indices or (way is move_on_host and not given):
                with self.raise_together():  # the second way has its own
                    moved = way([given[i] for i in indices], (*must_match, *on_which))
                for i, result in zip(indices, moved, strict=True):
                    results[i] = result
        return results

    @span(
        COMMUNICATION,
        lambda self, parts, *_: Details(
            current_call(), sum(p.own.nbytes for p in parts), self.stream
        ),
    )
    def _gather(self, gathered: Sequence[_Parts], axis: int) -> list[Array]:
        """Gathers all arrays in one group: equal parts by all-gather, others from rank to rank."""
        stream, kind = self.stream.raw.ptr, self._nccl.NCCL_UINT8
        with self._start_group(current_call()):
            for own, whole, sizes, starts, _ in gathered:
                if not whole.size:
                    continue
                source, target = own.data.ptr, whole.data.ptr
                if len(set(sizes)) == 1:
                    self._comm.allGather(source, target, sizes[0], kind, stream)
                    continue
                # NCCL's all-gather takes equal parts only.
                for peer in range(self.size):  # this rank itself too: NCCL copies
                    if sizes[self.rank]:
                        self._comm.send(source, sizes[self.rank], kind, peer, stream)
                    if sizes[peer]:
                        self._comm.recv(target + starts[peer], sizes[peer], kind, peer, stream)
        return [parts.along(self.stream.xp, axis) for parts in gathered]


class _Parts(NamedTuple):
    """All ranks' parts of an array that is gathered, and the memory for them.

    Attributes:
        own: this rank's part, C-contiguous.
        whole: memory for all parts, one after the other, as bytes.
        sizes: the bytes of each rank's part.
        starts: where each part starts.
        shapes: each part's shape.
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
        return cls(
            xp.ascontiguousarray(array), xp.empty(starts[-1], np.uint8), sizes, starts, shapes
        )

    def along(self, xp: Any, axis: int) -> Array:
        """The parts concatenated along an axis."""
        dtype, shape = self.own.dtype, self.shapes[0]
        if axis % len(shape) == 0:  # they are one after the other already
            rows = sum(shape[0] for shape in self.shapes)
            return self.whole.view(dtype).reshape(rows, *shape[1:])
        ends = zip(self.starts, self.starts[1:], self.shapes, strict=False)
        return xp.concatenate(
            [self.whole[a:b].view(dtype).reshape(shape) for a, b, shape in ends], axis
        )


def _bytes_in(sent: Sequence[dict[int, Array]]) -> int:
    return sum(array.nbytes for to in sent for array in to.values())
