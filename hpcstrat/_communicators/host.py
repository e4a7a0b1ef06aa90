"""How NumPy arrays move: as messages, one per rank. A single rank has nothing to move."""

from __future__ import annotations

import abc
import functools
import mmap
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from hpcstrat._calls.records import CallSignature, signature_of
from hpcstrat._communicators.background import Background
from hpcstrat._communicators.base import Communicator, Outgoing, check_gatherable
from hpcstrat._communicators.checked_exchange import Write
from hpcstrat._communicators.reduction import reduce_flat
from hpcstrat._core.call_name import current_call
from hpcstrat._core.span import COMMUNICATION, Details, span
from hpcstrat._core.types import Array, Bytes, ReduceOp
from hpcstrat._memory.allocator import RangeAllocator
from hpcstrat._memory.layout import Layout, layout_of
from hpcstrat._memory.segment import LARGE, Segment, check_available
from hpcstrat._process import worlds

SMALL_MESSAGE_BYTES = 1 << 15
"""Bytes up to which every rank reduces the whole message itself: cheaper than a second barrier."""


def describe_message(
    _: Communicator, signature: CallSignature, layout: Layout, *__: Any, **___: Any
) -> Details:
    """The span of `HostCommunicator.reduce_message`."""
    return Details(signature.call, layout.nbytes)


class HostCommunicator(Communicator):
    """Moves NumPy arrays as messages, which a transport exchanges or reduces."""

    _largest_buffer = LARGE - 1  # bytes, of those that `new_buffer` has made

    @abc.abstractmethod
    def reduce_message(
        self,
        signature: CallSignature,
        layout: Layout,
        write: Write,
        op: ReduceOp,
        out: Bytes,
        whole: Layout | None = None,
    ) -> None:
        """Reduces the ranks' messages of this layout, elementwise, into `out`, on every rank.

        Sums are in rank order or, between hosts, in an order that depends on the layout. A part of
        a message is summed in the order of the whole, whose layout it names.
        """

    def background(self) -> Background[HostCommunicator] | None:
        """What makes exchanges while the program computes; `None` where that gains nothing.

        Collective at first.
        """
        return None

    def require_memory(self, nbytes: int, signature: CallSignature) -> None:
        """Checks that the host has memory for its ranks, each of which is about to take this much.

        Collective.

        Args:
            nbytes: the same on all ranks.
            signature: what all ranks agree on.

        Raises:
            MemoryError: it has not, on any rank.
        """
        if (
            self.size == 1 or self.size * nbytes < LARGE
        ):  # the same on all ranks, however many their hosts have
            return
        world = worlds.started()
        # No rank takes memory before all have found enough for all: one that comes late would find
        # less.
        with self.raise_together():
            check_available(
                nbytes, self.size if world is None else min(self.size, world.local_size)
            )
            self.exchange(signature)

    def new_buffer(self, nbytes: int, signature: CallSignature) -> Bytes:
        """Memory that each rank makes for itself in one call.

        Collective; the arguments are those of `require_memory`.

        Raises:
            MemoryError: a rank cannot have it; on all ranks, in a block of `raise_together`.
        """
        buffer = np.empty(nbytes, np.uint8)
        self.require_memory(nbytes, signature)
        if nbytes > self._largest_buffer:
            # Makes its pages now: mailboxes that grow to this size next are compared with what is
            # left.
            self._largest_buffer = nbytes
            buffer[:: mmap.PAGESIZE] = 0
        return buffer

    def reduce_arrays(
        self, must_match: tuple[Any, ...], arrays: Sequence[Array], op: ReduceOp
    ) -> list[Array]:
        _check_on_host(arrays)
        layout, signature = _layout_and_signature_of(must_match, arrays)
        out = self.new_buffer(layout.nbytes, signature)
        try:
            self.reduce_message(
                signature, layout, lambda message: layout.write(message, arrays), op, out
            )
        except BaseException as error:  # a signal's, say: the others may wait for this rank's part
            self.mark_interrupted(error)
            raise
        return layout.views(out)

    def _reduce_by_all(
        self, messages: Sequence[Bytes], layout: Layout, op: ReduceOp, out: Bytes
    ) -> None:
        for group in layout.groups:
            reduce_flat(group.of(out), [group.of(message) for message in messages], op)

    def gather_arrays(
        self, must_match: Sequence[Any], arrays: Sequence[Array], axis: int
    ) -> list[Array]:
        _check_on_host(arrays)
        kinds = [array.dtype for array in arrays]
        # Shapes travel in the message and not in the signature: they may differ along the axis, so
        # all must be here to be compared.
        messages = self.exchange(
            signature_of(current_call(), *must_match, *kinds), *_packed(arrays)
        )
        parts = [_parse(message, kinds) for message in messages]
        for i in range(len(arrays)):
            check_gatherable([part[i].shape for part in parts], axis)
        nbytes = sum(array.nbytes for part in parts for array in part)
        return self._read(
            nbytes,
            lambda: [np.concatenate([part[i] for part in parts], axis) for i in range(len(arrays))],
        )

    def broadcast_arrays(
        self, must_match: tuple[Any, ...], arrays: Sequence[Array], root: int
    ) -> list[Array]:
        _check_on_host(arrays)
        layout, signature = _layout_and_signature_of(must_match, arrays)
        if self.rank == root:
            messages = self.exchange(
                signature, layout.nbytes, lambda message: layout.write(message, arrays)
            )
        else:
            messages = self.exchange(signature)
        return self._read(
            layout.nbytes, lambda: layout.views(messages[root][: layout.nbytes].copy())
        )

    def _read(self, nbytes: int, copy: Callable[[], list[Array]]) -> list[Array]:
        """Arrays of so many bytes that each rank copies from the messages of the last exchange.

        Collective.
        """
        if self.size == 1 or self.size * nbytes < LARGE:
            return copy()
        signature = signature_of(f"{current_call()}: memory")
        self.require_memory(nbytes, signature)
        # Messages are valid until the next call, which that was: the one after it waits until all
        # have read them.
        with self.raise_together():
            arrays = copy()
            self.exchange(signature)
        return arrays

    def reduce_parts(
        self, must_match: tuple[Any, ...], parts: Sequence[Sequence[Array]], op: ReduceOp
    ) -> list[Array]:
        everyone = range(self.size)
        outgoing = [
            Outgoing(leaf[0].dtype, dict(enumerate(leaf)), everyone, is_on_gpu=False)
            for leaf in parts
        ]
        results = []
        for received in self._received(must_match, outgoing):
            out = np.empty_like(received[self.rank])
            reduce_flat(out.reshape(-1), [received[rank].reshape(-1) for rank in everyone], op)
            results.append(out)
        return results

    def exchange_parts(
        self, must_match: tuple[Any, ...], outgoing: Sequence[Outgoing]
    ) -> list[dict[int, Array]]:
        return [
            {source: array.copy() for source, array in received.items()}
            for received in self._received(must_match, outgoing)
        ]

    def _received(
        self, must_match: tuple[Any, ...], outgoing: Sequence[Outgoing]
    ) -> list[dict[int, Array]]:
        """What comes, valid until the next call."""
        everyone = range(self.size)
        sections = [
            _packed([one.to[rank] for one in outgoing if rank in one.to]) for rank in everyone
        ]
        for one in outgoing:
            _check_on_host(list(one.to.values()))
        received = self.exchange_sections(
            signature_of(current_call(), *must_match),
            [nbytes for nbytes, _ in sections],
            lambda rank, section: sections[rank][1](section),
        )
        results: list[dict[int, Array]] = [{} for _ in outgoing]
        for source, section in enumerate(received):
            here = [i for i, one in enumerate(outgoing) if source in one.sources]
            for i, array in zip(
                here, _parse(section, [outgoing[i].dtype for i in here]), strict=True
            ):
                results[i][source] = array
        return results

    def exchange_sections(
        self, signature: CallSignature, sizes: Sequence[int], write: Callable[[int, Bytes], None]
    ) -> list[Bytes]:
        """What every rank has for this one, valid until the next call. Collective.

        Args:
            signature: what all ranks agree on.
            sizes: for each rank, bytes of what this one has for it; they may differ from rank to
                rank.
            write: writes what is for a rank, given that rank and the memory.
        """
        # One message for all, in which each rank finds its section by a table at the beginning.
        table = np.zeros((self.size, 2), np.int64)
        start = _aligned(table.nbytes)
        for rank, size in enumerate(sizes):
            table[rank] = start, start + size
            start = _aligned(start + size)

        def write_all(message: Bytes) -> None:
            message[: table.nbytes] = table.reshape(-1).view(np.uint8)
            for rank, (begin, end) in enumerate(table.tolist()):
                write(rank, message[begin:end])

        messages = self.exchange(signature, start, write_all)
        places = [
            message[16 * self.rank : 16 * (self.rank + 1)].view(np.int64).tolist()
            for message in messages
        ]
        return [message[begin:end] for message, (begin, end) in zip(messages, places, strict=True)]

    def sum_sections(
        self,
        signature: CallSignature,
        layouts: Sequence[Layout],
        whole: Layout,
        write: Callable[[int, Bytes], None],
    ) -> list[Bytes]:
        """Messages whose sum, in this order, is that of what all ranks have for this one; valid until the next call.

        It is what `reduce_message` sums, bit for bit. Collective.

        Args:
            signature: what all ranks agree on.
            layouts: for each rank, of what this one has for it; equal on all ranks.
            whole: of all that a rank sums at once, of which this may be a part.
            write: as of `exchange_sections`.
        """
        return self.exchange_sections(signature, [layout.nbytes for layout in layouts], write)

    def gather_sections(
        self, signature: CallSignature, sizes: Sequence[int], write: Write
    ) -> list[Bytes]:
        """Every rank's section, on every rank, valid until the next call; `sizes` are their bytes. Collective."""
        return self.exchange(signature, sizes[self.rank], write)


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
                f"{current_call()}: an array is on a GPU, and this strategy's replicas compute on "
                "the CPU; pass hs.asnumpy(array)"
            )


def _aligned(nbytes: int) -> int:
    """The next multiple of 16 bytes, where the groups of a layout start."""
    return -(-nbytes // 16) * 16


def _packed(arrays: Sequence[Array]) -> tuple[int, Write]:
    """Bytes of a message of arrays with their shapes in front, which `_parse` reads; and what writes it."""
    layout = layout_of(
        tuple([array.shape for array in arrays]), tuple([array.dtype for array in arrays])
    )
    shapes = pack_shapes(arrays)
    start = _aligned(shapes.nbytes)

    def write(message: Bytes) -> None:
        message[: shapes.nbytes] = shapes.view(np.uint8)
        layout.write(message[start:], arrays)

    return start + layout.nbytes, write


def _layout_and_signature_of(
    must_match: tuple[Any, ...], arrays: Sequence[Array]
) -> tuple[Layout, CallSignature]:
    shapes, dtypes = (
        tuple([array.shape for array in arrays]),
        tuple([array.dtype for array in arrays]),
    )
    return _layout_and_signature(current_call(), must_match, shapes, dtypes)


# Made together and kept: a loop reduces the same shapes at every step, and for a few numbers
# describing them anew would cost more than their sum.
@functools.lru_cache(maxsize=1024)
def _layout_and_signature(
    call: str,
    must_match: tuple[Any, ...],
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[np.dtype[Any], ...],
) -> tuple[Layout, CallSignature]:
    """The layout of these arrays in a message, and what the ranks must agree on to reduce them."""
    return layout_of(shapes, dtypes), signature_of(
        call, *must_match, *zip(dtypes, shapes, strict=True)
    )


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
    return layout_of(tuple(shapes), tuple(kinds)).views(message[_aligned(offset) :])


@final
class SoloCommunicator(HostCommunicator):
    """One rank alone, with or without MPI."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)

    def _count(self, signature: CallSignature) -> None:
        # Several threads may be here at once: nobody waits for them.
        if self.calls.barred:
            self.calls.refuse(signature.call)
        self.calls.number += 1
        self.calls.last_signature = signature

    @span(COMMUNICATION, lambda _, signature, nbytes=0, *__, **___: Details(signature.call, nbytes))
    def exchange(
        self, signature: CallSignature, nbytes: int = 0, write: Write | None = None
    ) -> list[Bytes]:
        """There is nobody to agree with: no record is made, and none is read."""
        self._count(signature)
        return self.collect_messages([nbytes], write)

    def exchange_records(self, record: bytes, nbytes: int, write: Write | None) -> list[memoryview]:
        return [memoryview(record)]

    def collect_messages(self, sizes: Sequence[int], write: Write | None) -> list[Bytes]:
        message = np.empty(
            sizes[0], np.uint8
        )  # a fresh one, because several threads may each be here
        if write is not None:
            write(message)
        return [message]

    @span(COMMUNICATION, describe_message)
    def reduce_message(
        self,
        signature: CallSignature,
        layout: Layout,
        write: Write,
        op: ReduceOp,
        out: Bytes,
        whole: Layout | None = None,
    ) -> None:
        """The message is the result."""
        self._count(signature)
        write(out)
