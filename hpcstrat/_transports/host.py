"""How NumPy arrays move: as messages, one per rank. A single rank moves nothing."""

from __future__ import annotations

import abc
import functools
import mmap
import operator
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from hpcstrat._agreement.records import CallSignature, signature_of
from hpcstrat._core.call_name import current_call
from hpcstrat._core.timeline import COMMUNICATION, span
from hpcstrat._core.types import Array, Bytes, ReduceOp
from hpcstrat._memory.host_limits import LARGE, check_available
from hpcstrat._memory.intervals import round_up
from hpcstrat._memory.layout import GROUP_ALIGNMENT, Layout, layout_of, layout_of_sections
from hpcstrat._process import worlds
from hpcstrat._transports.reduction import reduce_in_chunks
from hpcstrat._transports.verbs import Communicator, Outgoing, Write, check_gatherable

SMALL_MESSAGE_BYTES = 1 << 15
"""Up to this size every rank reduces the whole message itself: cheaper than a second barrier."""


def describe_message(
    _: Communicator, signature: CallSignature, layout: Layout, *__: Any, **___: Any
) -> tuple[str, int]:
    """The span of `HostCommunicator.reduce_message`."""
    return signature.call, layout.nbytes


class HostCommunicator(Communicator):
    """Moves NumPy arrays as messages, which a transport exchanges or reduces.

    A reduction goes down four levels: `all_reduce` checks and names it, `reduce_arrays` packs a
    message, `reduce_message` moves it, and `reduction.reduce_in_chunks` adds.

    Attributes:
        hosts: the number of hosts.
        slices: how many ranks of each host, its first, reduce a slice of a message.
    """

    hosts: int = 1
    slices: int = 1
    _largest_buffer = LARGE - 1  # bytes of the largest that `new_buffer` has made

    @abc.abstractmethod
    def reduce_message(
        self,
        signature: CallSignature,
        layout: Layout,
        write: Write,
        op: ReduceOp,
        out: Bytes,
    ) -> None:
        """Reduces the ranks' messages of this layout, elementwise, into `out`, on every rank.

        Sums are in rank order or, between hosts, in that of `reduction.reduce_by_hosts`.
        """

    def exchange_slices(
        self,
        signature: CallSignature,
        layout: Layout,
        op: ReduceOp,
        write: Write,
        shared: Sequence[Bytes] = (),
    ) -> Sequence[Bytes]:
        """Messages whose reduction has this rank's slice of all ranks' reduced messages.

        The slice is `part_of_rank(..., rank, slices)` of the elements of each dtype, of this rank
        of its host; the rest may be anything. Messages are valid until the next call; a single one
        is this rank's. The ranks of a host `sync` after they have read them. Collective.

        Args:
            signature: what all ranks agree on.
            layout: the layout of the messages; equal on all ranks.
            op: how they are reduced.
            write: writes this rank's message.
            shared: the messages of the ranks of this host, if they are in shared memory already;
                this may overwrite them.
        """
        raise NotImplementedError

    def add_up(self, own: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, Any]:
        """The arrays of all ranks of this host added up in rank order, the same on all hosts.

        Collective; the ranks `sync` before they call it again. All pass the same size.
        """
        return own

    def sync(self) -> None:
        """Waits for the ranks of this host, and what they wrote to shared memory. Collective."""

    def highest(self, number: int) -> int:
        """The highest of the ranks' numbers, each of 0 to 255. Collective."""
        if self.has_many_ranks:
            (highest,) = self.reduce_arrays((), [np.array([number], np.uint8)], ReduceOp.MAX)
            return int(highest[0])

        def write(message: Bytes) -> None:
            message[0] = number

        messages = self.exchange(signature_of(current_call()), 1, write)
        return max([int(message[0]) for message in messages])

    def require_memory(self, nbytes: int, signature: CallSignature) -> None:
        """Checks that each host has this much memory for each of its ranks.

        Collective.

        Args:
            nbytes: the same on all ranks.
            signature: what all ranks agree on.

        Raises:
            MemoryError: a host has less; on all ranks.
        """
        # The same on all ranks, however many ranks their hosts have.
        if self.size == 1 or self.size * nbytes < LARGE:
            return
        world = worlds.find()
        # No rank takes memory before all have found enough for all: a late rank would find less.
        with self.raise_together():
            check_available(
                nbytes, self.size if world is None else min(self.size, world.local_size)
            )
            self.exchange(signature)

    def new_buffer(self, nbytes: int, signature: CallSignature) -> Bytes:
        """Allocates memory of this rank, in a call of all ranks.

        Collective; the arguments are those of `require_memory`.

        Raises:
            MemoryError: a rank cannot allocate it; on all ranks, in a block of `raise_together`.
        """
        buffer = np.empty(nbytes, np.uint8)
        self.require_memory(nbytes, signature)
        if nbytes > self._largest_buffer:
            # Makes the pages now, because mailboxes that grow next are compared with free memory.
            self._largest_buffer = nbytes
            buffer[:: mmap.PAGESIZE] = 0
        return buffer

    def reduce_arrays(
        self, must_match: tuple[Any, ...], arrays: Sequence[Array], op: ReduceOp
    ) -> list[Array]:
        _check_on_host(arrays)
        layout, signature = layout_and_signature_of(must_match, arrays)
        out = self.new_buffer(layout.nbytes, signature)
        try:
            self.reduce_message(
                signature, layout, lambda message: layout.write(message, arrays), op, out
            )
        except BaseException as error:  # such as a signal's: the others may wait for this rank
            self.calls.mark_interrupted(error)
            raise
        return layout.views(out)

    def gather_arrays(
        self, must_match: Sequence[Any], arrays: Sequence[Array], axis: int
    ) -> list[Array]:
        _check_on_host(arrays)
        kinds = [array.dtype for array in arrays]
        # Shapes travel in the message and not in the signature: they may differ along the axis, and
        # are compared when all are here.
        messages = self.exchange(
            signature_of(current_call(), *must_match, *kinds), *pack_arrays(arrays)
        )
        parts = [parse_arrays(message, kinds) for message in messages]
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
        layout, signature = layout_and_signature_of(must_match, arrays)
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
        """Arrays of `nbytes` bytes that each rank copies from the messages of the last exchange.

        Collective.
        """
        if self.size == 1 or self.size * nbytes < LARGE:
            return copy()
        signature = signature_of(f"{current_call()}: memory")
        self.require_memory(nbytes, signature)
        # Messages are valid until the next call, which that was. The call after it waits until all
        # ranks have read them.
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
        for received in self._receive(must_match, outgoing):
            out = np.empty_like(received[self.rank])
            reduce_in_chunks(out.reshape(-1), [received[rank].reshape(-1) for rank in everyone], op)
            results.append(out)
        return results

    def exchange_parts(
        self, must_match: tuple[Any, ...], outgoing: Sequence[Outgoing]
    ) -> list[dict[int, Array]]:
        return [
            {source: array.copy() for source, array in received.items()}
            for received in self._receive(must_match, outgoing)
        ]

    def _receive(
        self, must_match: tuple[Any, ...], outgoing: Sequence[Outgoing]
    ) -> list[dict[int, Array]]:
        """The arrays that other ranks send to this rank, by rank, valid until the next call."""
        everyone = range(self.size)
        sections = [
            pack_arrays([item.to[rank] for item in outgoing if rank in item.to])
            for rank in everyone
        ]
        for item in outgoing:
            _check_on_host(list(item.to.values()))
        received = self.exchange_sections(
            signature_of(current_call(), *must_match),
            [nbytes for nbytes, _ in sections],
            lambda rank, section: sections[rank][1](section),
        )
        results: list[dict[int, Array]] = [{} for _ in outgoing]
        for source, section in enumerate(received):
            here = [i for i, item in enumerate(outgoing) if source in item.sources]
            for i, array in zip(
                here, parse_arrays(section, [outgoing[i].dtype for i in here]), strict=True
            ):
                results[i][source] = array
        return results

    def exchange_sections(
        self, signature: CallSignature, sizes: Sequence[int], write: Callable[[int, Bytes], None]
    ) -> list[Bytes]:
        """The section that each rank sends to this rank, valid until the next call. Collective.

        Args:
            signature: what all ranks agree on.
            sizes: bytes of this rank's section for each rank; they may differ between ranks.
            write: writes a section, given the rank that it is for, and the memory.
        """
        # One message for all ranks; a table at its start says where each rank's section is.
        layout = layout_of_sections([16 * self.size, *sizes])

        def table_of(message: Bytes) -> np.ndarray[Any, np.dtype[np.int64]]:
            return message[: 16 * self.size].view(np.int64).reshape(2, self.size)

        def write_all(message: Bytes) -> None:
            table_of(message)[:] = layout.starts[1:], sizes
            for rank, section in enumerate(layout.views(message)[1:]):
                write(rank, section)

        messages = self.exchange(signature, layout.nbytes, write_all)
        places = [table_of(message)[:, self.rank].tolist() for message in messages]
        return [
            message[start : start + size]
            for message, (start, size) in zip(messages, places, strict=True)
        ]


def _check_on_host(arrays: Sequence[Array]) -> None:
    for array in arrays:
        if not isinstance(array, np.ndarray):
            raise TypeError(
                f"{current_call()}: an array is on a GPU, and this strategy's replicas compute on "
                "the CPU; pass hs.asnumpy(array)"
            )


_SHAPE, _DTYPE = operator.attrgetter("shape"), operator.attrgetter("dtype")


def layout_and_signature_of(
    must_match: tuple[Any, ...], arrays: Sequence[Array]
) -> tuple[Layout, CallSignature]:
    """The layout of these arrays in a message, and what the ranks must agree on to move them."""
    shapes, dtypes = tuple(map(_SHAPE, arrays)), tuple(map(_DTYPE, arrays))
    return _layout_and_signature(current_call(), must_match, shapes, dtypes)


# Kept: a loop reduces the same shapes at every step, and to describe a few numbers again would cost
# more than to sum them.
@functools.lru_cache(maxsize=1024)
def _layout_and_signature(
    call: str,
    must_match: tuple[Any, ...],
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[np.dtype[Any], ...],
) -> tuple[Layout, CallSignature]:
    return layout_of(shapes, dtypes), signature_of(
        call, *must_match, *zip(dtypes, shapes, strict=True)
    )


# ---- messages of arrays whose shapes the receiver does not know: shapes first, then the arrays


def pack_arrays(arrays: Sequence[Array]) -> tuple[int, Callable[[Bytes], None]]:
    """The size of a message of these arrays, and a function that writes it; see `parse_arrays`."""
    layout = layout_of(
        tuple([array.shape for array in arrays]), tuple([array.dtype for array in arrays])
    )
    shapes = _shapes(arrays)
    start = round_up(shapes.size, GROUP_ALIGNMENT)

    def write(message: Bytes) -> None:
        message[: shapes.size] = shapes
        layout.write(message[start:], arrays)

    return start + layout.nbytes, write


def parse_arrays(message: Bytes, dtypes: Sequence[np.dtype[Any]]) -> list[np.ndarray[Any, Any]]:
    """The arrays, of these dtypes, in a message that `pack_arrays` wrote."""
    shapes, offset = unpack_shapes(message, len(dtypes))
    return layout_of(tuple(shapes), tuple(dtypes)).views(
        message[round_up(offset, GROUP_ALIGNMENT) :]
    )


def pack_shapes(arrays: Sequence[Array]) -> tuple[int, Callable[[Bytes], None]]:
    """The size of a message of the arrays' shapes, and a function that writes it."""
    shapes = _shapes(arrays)

    def write(message: Bytes) -> None:
        message[: shapes.size] = shapes

    return shapes.size, write


def _shapes(arrays: Sequence[Array]) -> Bytes:
    """Each array's number of dimensions and shape."""
    numbers = [n for array in arrays for n in (array.ndim, *array.shape)]
    return np.array(numbers, np.int64).view(np.uint8)


def unpack_shapes(message: Bytes, count: int) -> tuple[list[tuple[int, ...]], int]:
    """The shapes of `count` arrays at the start of a message, and how many bytes they take."""
    shapes: list[tuple[int, ...]] = []
    offset = 0
    for _ in range(count):
        (ndim,) = message[offset : offset + 8].view(np.int64)
        shapes.append(tuple(message[offset + 8 : offset + 8 * (1 + ndim)].view(np.int64).tolist()))
        offset += 8 * (1 + int(ndim))
    return shapes, offset


@final
class SoloCommunicator(HostCommunicator):
    """One rank alone, with or without MPI."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)

    def _count(self, signature: CallSignature) -> None:
        # Several threads may be here at once: no rank waits for them.
        if self.calls.barred:
            self.calls.refuse(signature.call)
        self.calls.number += 1
        self.calls.last_signature = signature

    @span(COMMUNICATION, lambda _, signature, nbytes=0, *__, **___: (signature.call, nbytes))
    def exchange(
        self, signature: CallSignature, nbytes: int = 0, write: Write | None = None
    ) -> list[Bytes]:
        """There is no other rank to agree with: no record is made, and none is read."""
        self._count(signature)
        return self.collect_messages([nbytes], write)

    def exchange_records(self, record: bytes, nbytes: int, write: Write | None) -> list[memoryview]:
        return [memoryview(record)]

    def collect_messages(self, sizes: Sequence[int], write: Write | None) -> list[Bytes]:
        message = np.empty(sizes[0], np.uint8)  # a new one: several threads may be here at once
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
    ) -> None:
        """The message is the result."""
        self._count(signature)
        write(out)
