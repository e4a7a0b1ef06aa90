"""How NumPy arrays move: as messages, one a rank. Alone, a rank has nothing to move."""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from hpcstrat._communicators.base import Communicator, Write, check_gatherable
from hpcstrat._communicators.packing import Layout, layout_of
from hpcstrat._communicators.protocol import CallSignature, signature
from hpcstrat._communicators.reduction import reduce_flat
from hpcstrat._edge import current_call
from hpcstrat._memory.allocator import RangeAllocator
from hpcstrat._memory.segment import Segment
from hpcstrat._spans import COMMUNICATION, Details, span
from hpcstrat._types import Array, Bytes, ReduceOp

SMALL_MESSAGE_BYTES = 1 << 15
"""Bytes up to which every rank reduces the whole message itself: cheaper than a second barrier."""


def describe_message(_: Communicator, agreed: CallSignature, layout: Layout, *__: Any, **___: Any) -> Details:
    """The span of `HostCommunicator.reduce_message`."""
    return Details(agreed.call, layout.nbytes)


class HostCommunicator(Communicator):
    """Moves NumPy arrays as messages, which a transport exchanges or reduces."""

    @abc.abstractmethod
    def reduce_message(self, agreed: CallSignature, layout: Layout, write: Write, op: ReduceOp, out: Bytes) -> None:
        """Reduces the ranks' messages of this layout, elementwise in rank order, into `out`, on every rank."""

    def _reduce_arrays(self, must_match: tuple[Any, ...], arrays: Sequence[Array], op: ReduceOp) -> list[Array]:
        _check_on_host(arrays)
        layout, agreed = _agreed(
            current_call(),
            must_match,
            tuple([array.shape for array in arrays]),
            tuple([array.dtype for array in arrays]),
        )
        out = np.empty(layout.nbytes, np.uint8)
        try:
            self.reduce_message(agreed, layout, lambda message: layout.write(message, arrays), op, out)
        except BaseException as error:  # a signal's, say: the others may wait for this rank's part
            self.tear(error)
            raise
        return layout.views(out)

    def _reduce_by_all(self, messages: Sequence[Bytes], layout: Layout, op: ReduceOp, out: Bytes) -> None:
        for group in layout.groups:
            reduce_flat(group.of(out), [group.of(message) for message in messages], op)

    def _gather_arrays(self, must_match: Sequence[Any], arrays: Sequence[Array], axis: int) -> list[Array]:
        _check_on_host(arrays)
        layout = layout_of(tuple([array.shape for array in arrays]), tuple([array.dtype for array in arrays]))
        shapes = pack_shapes(arrays)
        start = -(-shapes.nbytes // 16) * 16

        def write(message: Bytes) -> None:
            message[: shapes.nbytes] = shapes.view(np.uint8)
            for view, array in zip(layout.views(message[start:]), arrays, strict=True):
                view[...] = array

        kinds = [array.dtype for array in arrays]
        messages = self.exchange(signature(current_call(), *must_match, *kinds), start + layout.nbytes, write)
        parts = [_parse(message, kinds) for message in messages]
        for i in range(len(arrays)):
            check_gatherable([part[i].shape for part in parts], axis)
        return [np.concatenate([part[i] for part in parts], axis) for i in range(len(arrays))]


class MemorySharingCommunicator(HostCommunicator):
    """Ranks that share memory, in which variables can be once for all of them.

    Attributes:
        segment: the memory.
        heap: which of its bytes are free for variables; all ranks allocate alike.
    """

    segment: Segment
    heap: RangeAllocator

    @abc.abstractmethod
    def sync(self) -> None:
        """Waits for all ranks. What they wrote to the segment before is readable afterwards."""


def _check_on_host(arrays: Sequence[Array]) -> None:
    for array in arrays:
        if not isinstance(array, np.ndarray):
            raise TypeError(
                f"{current_call()}: an array is on a GPU, and this strategy's replicas compute on the CPU; pass "
                "hs.asnumpy(array)"
            )


@functools.lru_cache(maxsize=1024)
def _agreed(
    call: str, must_match: tuple[Any, ...], shapes: tuple[tuple[int, ...], ...], dtypes: tuple[np.dtype[Any], ...]
) -> tuple[Layout, CallSignature]:
    """The layout of these arrays in a message, and what the ranks must agree on to reduce them."""
    return layout_of(shapes, dtypes), signature(call, *must_match, *zip(dtypes, shapes, strict=True))


def pack_shapes(arrays: Sequence[Array]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """For each array its number of dimensions and its shape."""
    return np.array([n for array in arrays for n in (array.ndim, *array.shape)], np.int64)


def unpack_shapes(message: Bytes, count: int) -> tuple[list[tuple[int, ...]], int]:
    """The shapes of `count` arrays at the beginning of a message, and the bytes that they take there."""
    shapes: list[tuple[int, ...]] = []
    offset = 0
    for _ in range(count):
        (ndim,) = message[offset : offset + 8].view(np.int64)
        shapes.append(tuple(message[offset + 8 : offset + 8 * (1 + ndim)].view(np.int64).tolist()))
        offset += 8 * (1 + int(ndim))
    return shapes, offset


def _parse(message: Bytes, kinds: Sequence[np.dtype[Any]]) -> list[np.ndarray[Any, Any]]:
    """The arrays of one rank's message to `all_gather`: their shapes first, then the arrays."""
    shapes, offset = unpack_shapes(message, len(kinds))
    return layout_of(tuple(shapes), tuple(kinds)).views(message[-(-offset // 16) * 16 :])


@final
class SoloCommunicator(HostCommunicator):
    """One rank alone, with or without MPI."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)

    def _count(self, agreed: CallSignature) -> None:
        # Several threads may be here at once: nobody waits for them.
        if self.calls.barred:
            self.calls.refuse(agreed.call)
        self.calls.number += 1
        self.calls.agreed = agreed

    def _post(self, record: bytes, nbytes: int, write: Write | None) -> list[memoryview]:
        return [memoryview(record)]

    def _messages(self, sizes: Sequence[int], write: Write | None) -> list[Bytes]:
        message = np.empty(sizes[0], np.uint8)  # a fresh one, because several threads may each be here
        if write is not None:
            write(message)
        return [message]

    @span(COMMUNICATION, describe_message)
    def reduce_message(self, agreed: CallSignature, layout: Layout, write: Write, op: ReduceOp, out: Bytes) -> None:
        """The message is the result."""
        self._count(agreed)
        write(out)
