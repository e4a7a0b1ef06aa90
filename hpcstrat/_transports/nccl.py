"""The communicator of replicas that all compute on GPUs: NCCL through CuPy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from hpcstrat._agreement.records import signature_of
from hpcstrat._core import gpu
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import Array, ReduceOp
from hpcstrat._memory.layout import layout_of
from hpcstrat._memory.packing import packings_of
from hpcstrat._transports.device import DeviceCommunicator, Move
from hpcstrat._transports.host import (
    HostCommunicator,
    layout_and_signature_of,
    pack_shapes,
    unpack_shapes,
)
from hpcstrat._transports.nccl_collectives import NcclCollectives, dtype_to_reduce
from hpcstrat._transports.verbs import check_gatherable


@final
class NcclCommunicator(DeviceCommunicator):
    """All ranks on GPUs. GPU arrays move on the strategy's stream; the host runs a little ahead.

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

    stream: gpu.Stream
    can_capture = True

    def __init__(self, control: HostCommunicator, stream: gpu.Stream) -> None:
        super().__init__(control, stream)
        self._collectives = NcclCollectives(control, stream)
        self._packings_of = functools.lru_cache(maxsize=8)(packings_of)

    # ---- arrays on the GPU and on the host

    def _move_by_place(
        self,
        move_on_gpu: Callable[..., list[Any]],
        move_on_host: Callable[..., list[Any]],
        must_match: Sequence[Any],
        items: Sequence[Any],
        *options: Any,
        is_on_gpu: Callable[[Any], bool] = gpu.is_on_gpu,
    ) -> list[Any]:
        """Moves the items on the GPU, then those on the host, which may be none at all.

        In the same order on all ranks: a rank that moves arrays on its GPU and a rank in a call of
        the host would wait for each other.
        """
        on_gpu = [i for i, item in enumerate(items) if is_on_gpu(item)]
        on_host = [i for i in range(len(items)) if i not in on_gpu]
        results: dict[int, Any] = {}
        if on_gpu:
            must_match, number = (*must_match, f"on the GPU {on_gpu}"), self.calls.number
            try:
                moved = move_on_gpu(must_match, [items[i] for i in on_gpu], *options)
            except Exception:
                raise
            except BaseException as error:  # a signal's: in NCCL the others wait for this rank
                if self.calls.number != number:
                    self.calls.mark_interrupted(error)
                raise
            results.update(zip(on_gpu, moved, strict=True))
        if on_host or not items:  # of no items, the ranks still meet
            with self.raise_together():  # the ranks may have met, on the GPU
                moved = move_on_host(must_match, [items[i] for i in on_host], *options)
            results.update(zip(on_host, moved, strict=True))
        return [results[i] for i in range(len(items))]

    def reduce_arrays(
        self, must_match: tuple[Any, ...], arrays: Sequence[Array], op: ReduceOp
    ) -> list[Array]:
        return self._move_by_place(
            self._reduce_on_gpu, self.control.reduce_arrays, must_match, arrays, op
        )

    def gather_arrays(
        self, must_match: Sequence[Any], arrays: Sequence[Array], axis: int
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

    def reduce_parts(
        self, must_match: tuple[Any, ...], parts: Sequence[Sequence[Array]], op: ReduceOp
    ) -> list[Array]:
        return self._move_by_place(
            self._reduce_parts_on_gpu,
            self.control.reduce_parts,
            must_match,
            parts,
            op,
            is_on_gpu=lambda leaf: gpu.is_on_gpu(leaf[0]),
        )

    def exchange_parts(
        self, must_match: tuple[Any, ...], outgoing: Sequence[Outgoing]
    ) -> list[dict[int, Array]]:
        return self._move_by_place(
            self._exchange_on_gpu,
            self.control.exchange_parts,
            must_match,
            outgoing,
            is_on_gpu=lambda item: item.is_on_gpu,
        )

    # ---- arrays on the GPU: allocate, agree, move
    #
    # The ranks agree only when each has the memory: a rank without it stops the others in the
    # exchange. In NCCL they would wait for it.

    def _reduce_on_gpu(
        self, must_match: tuple[Any, ...], arrays: Sequence[Array], op: ReduceOp
    ) -> list[Array]:
        layout, signature = layout_and_signature_of(must_match, arrays)
        with self.stream.current():
            arrays = [self.stream.here(array) for array in arrays]
            out = self.stream.xp.empty(layout.nbytes, np.uint8)
            sources = []
            for group, pack in zip(layout.groups, self._packings_of(layout), strict=True):
                if len(group.members) == 1:  # NCCL takes it from where it is
                    source = self.stream.xp.ascontiguousarray(arrays[group.members[0]])
                else:
                    pack(arrays, out)
                    source = group.of(out)
                sources.append(source.astype(dtype_to_reduce(group.dtype, op), copy=False))
            self.exchange(signature)
            for group, source in zip(layout.groups, sources, strict=True):
                self._collectives.reduce(current_call(), source, group.of(out), op)
            return layout.views(out)

    def _gather_on_gpu(
        self, must_match: tuple[Any, ...], arrays: Sequence[Array], axis: int
    ) -> list[Array]:
        # The shapes first, through the host: before a call of NCCL a rank must know what it
        # receives.
        messages = self.exchange(
            signature_of(current_call(), *must_match, *[array.dtype for array in arrays]),
            *pack_shapes(arrays),
        )
        by_rank = [unpack_shapes(message, len(arrays))[0] for message in messages]
        shapes_of = [*zip(*by_rank, strict=True)]  # of each array, on all ranks
        for shapes in shapes_of:
            check_gatherable(shapes, axis)
        layouts = [
            layout_of(shapes, (array.dtype,) * self.size)
            for shapes, array in zip(shapes_of, arrays, strict=True)
        ]
        xp = self.stream.xp
        with self.stream.current():
            with self.raise_together():
                arrays = [xp.ascontiguousarray(self.stream.here(array)) for array in arrays]
                messages = [xp.empty(layout.nbytes, np.uint8) for layout in layouts]
                self.exchange(signature_of(current_call(), "memory"))
            moves = self._collectives.bind_all_gather(arrays, messages, layouts)
            self.launch(current_call(), moves)
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
            self.exchange(signature)
            for array in copies:
                self.launch(current_call(), self.prepare_broadcast(array, root))
            return copies

    def _reduce_parts_on_gpu(
        self, must_match: tuple[Any, ...], parts: Sequence[Sequence[Array]], op: ReduceOp
    ) -> list[Array]:
        xp = self.stream.xp
        with self.stream.current():
            flat = [
                xp.concatenate([self.stream.here(part).reshape(-1) for part in leaf]).astype(
                    dtype_to_reduce(leaf[0].dtype, op), copy=False
                )
                for leaf in parts
            ]
            own = [
                xp.empty(leaf[self.rank].size, array.dtype)
                for leaf, array in zip(parts, flat, strict=True)
            ]
            self.exchange(signature_of(current_call(), *must_match))
            sizes = [[part.size for part in leaf] for leaf in parts]
            self._collectives.reduce_scatter(current_call(), flat, own, sizes, op)
            return [
                array.reshape(leaf[self.rank].shape).astype(leaf[0].dtype, copy=False)
                for leaf, array in zip(parts, own, strict=True)
            ]

    def _exchange_on_gpu(
        self, must_match: tuple[Any, ...], outgoing: Sequence[Outgoing]
    ) -> list[dict[int, Array]]:
        # The shapes first, through the host, as in `_gather_on_gpu`.
        shapes = self.control.exchange_parts(
            must_match,
            [
                Outgoing(
                    np.dtype(np.int64),
                    {rank: np.array(array.shape, np.int64) for rank, array in item.to.items()},
                    item.sources,
                    is_on_gpu=False,
                )
                for item in outgoing
            ],
        )
        xp = self.stream.xp
        with self.stream.current():
            with self.raise_together():
                sent = [
                    (rank, xp.ascontiguousarray(self.stream.here(array)))
                    for item in outgoing
                    for rank, array in item.to.items()
                ]
                received = [
                    {source: xp.empty(shape.tolist(), item.dtype) for source, shape in of.items()}
                    for item, of in zip(outgoing, shapes, strict=True)
                ]
                self.exchange(signature_of(current_call(), "memory"))
            from_ranks = [pair for of in received for pair in of.items()]
            moves = self._collectives.bind_messages(sent, from_ranks)
            self.launch(current_call(), moves)
        return received

    # ---- flat arrays, for storage

    def reduce_flat(self, array: Array, out: Array, op: ReduceOp, root: int | None = None) -> None:
        """See `DeviceCommunicator.reduce_flat`."""
        self._collectives.reduce("the sum of gradients", array, out, op, root)

    def prepare_reduce(self, array: Array, op: ReduceOp, root: int | None) -> list[Move]:
        """See `DeviceCommunicator.prepare_reduce`."""
        return self._collectives.bind_reduce(array, array, op, root)

    def prepare_broadcast(self, array: Array, root: int) -> list[Move]:
        """See `DeviceCommunicator.prepare_broadcast`."""
        return self._collectives.bind_broadcast(array, root)

    def launch(self, what: str, moves: Sequence[Move]) -> None:
        """See `DeviceCommunicator.launch`."""
        self._collectives.launch(what, moves)

    def launch_graph(self, graph: Any) -> None:
        """See `DeviceCommunicator.launch_graph`."""
        self._collectives.launch_graph(graph)

    def close(self) -> None:
        """See `DeviceCommunicator.close`."""
        self._collectives.close()
