"""How NumPy arrays move: as messages, one per rank. A single rank moves nothing."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from hpcstrat._agreement import records
from hpcstrat._agreement.agreement import Write
from hpcstrat._agreement.records import CallSignature, signature_of
from hpcstrat._core.call_name import current_call
from hpcstrat._core.timeline import COMMUNICATION, span
from hpcstrat._core.types import Array, Bytes, ReduceOp
from hpcstrat._memory.intervals import round_up
from hpcstrat._memory.layout import (
    GROUP_ALIGNMENT,
    Layout,
    layout_of,
    layout_of_arrays,
    layout_of_sections,
)
from hpcstrat._transports.verbs import Communicator, check_gatherable


class HostCommunicator(Communicator):
    """Moves NumPy arrays as messages, which a transport exchanges or reduces."""

    def gather_arrays(
        self, must_match: tuple[Any, ...], arrays: Sequence[Array], axis: int
    ) -> list[Array]:
        check_on_host(arrays)
        dtypes = [array.dtype for array in arrays]
        # Shapes travel in the message and not in the signature: they may differ along the axis, and
        # are compared when all are here.
        messages = self.exchange(
            signature_of(current_call(), *must_match, *dtypes), *pack_arrays(arrays)
        )
        by_rank = [parse_arrays(message, dtypes) for message in messages]
        for parts in zip(*by_rank, strict=True):
            check_gatherable([part.shape for part in parts], axis)
        return [np.concatenate(parts, axis) for parts in zip(*by_rank, strict=True)]

    def broadcast_arrays(
        self, must_match: tuple[Any, ...], arrays: Sequence[Array], root: int
    ) -> list[Array]:
        check_on_host(arrays)
        layout, signature = layout_and_signature_of(must_match, arrays)
        if self.rank == root:
            messages = self.exchange(
                signature, layout.nbytes, lambda message: layout.write(message, arrays)
            )
        else:
            messages = self.exchange(signature)
        return layout.views(messages[root][: layout.nbytes].copy())

    def send_arrays(
        self,
        must_match: tuple[Any, ...],
        sent: Sequence[tuple[int, Array]],
        expected: Sequence[tuple[int, Array]],
    ) -> list[Array]:
        check_on_host([array for _, array in (*sent, *expected)])
        sections = self._exchange_sections(
            signature_of(current_call(), *must_match),
            [pack_arrays(arrays) for arrays in _by_rank(sent, self.size)],
        )
        arrays_of = [
            iter(parse_arrays(section, [array.dtype for array in arrays]))
            for section, arrays in zip(sections, _by_rank(expected, self.size), strict=True)
        ]
        return [next(arrays_of[source]).copy() for source, _ in expected]

    def exchange_shapes(
        self,
        signature: CallSignature,
        sent: Sequence[tuple[int, Array]],
        expected: Sequence[tuple[int, Array]],
    ) -> list[tuple[int, ...]]:
        """The shapes of the arrays that `send_arrays` will return. Collective."""
        sections = self._exchange_sections(
            signature,
            [
                records.pack_object([array.shape for array in arrays])
                for arrays in _by_rank(sent, self.size)
            ],
        )
        shapes_of = [iter(records.load_object(section)) for section in sections]
        return [next(shapes_of[source]) for source, _ in expected]

    def _exchange_sections(
        self, signature: CallSignature, sections: Sequence[tuple[int, Write]]
    ) -> list[Bytes]:
        """What each rank has written for this rank, valid until the next call. Collective.

        Args:
            signature: what all ranks agree on.
            sections: for each rank, the size of what this rank has for it, and what writes it.
        """
        # One message for all ranks, with a table of their sections at its start.
        layout = layout_of_sections([8 * self.size, *[nbytes for nbytes, _ in sections]])

        def write(message: Bytes) -> None:
            table, *views = layout.views(message)
            table.view(np.int64)[:] = layout.starts[1:]
            for (_, write_section), view in zip(sections, views, strict=True):
                write_section(view)

        messages = self.exchange(signature, layout.nbytes, write)
        return [
            message[message[8 * self.rank : 8 * self.rank + 8].view(np.int64)[0] :]
            for message in messages
        ]


def _by_rank(pairs: Sequence[tuple[int, Array]], size: int) -> list[list[Array]]:
    """The arrays of each rank, in their order."""
    by_rank: list[list[Array]] = [[] for _ in range(size)]
    for rank, array in pairs:
        by_rank[rank].append(array)
    return by_rank


@final
class SoloCommunicator(HostCommunicator):
    """One rank alone, with or without MPI."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)

    @span(COMMUNICATION, lambda _, signature, nbytes=0, *__, **___: (signature.call, nbytes))
    def exchange(
        self, signature: CallSignature, nbytes: int = 0, write: Write | None = None
    ) -> list[Bytes]:
        """There is no other rank to agree with: no record is made, and none is read."""
        self.calls.count(signature)
        return self.collect_messages([nbytes], write)

    def exchange_records(self, record: bytes, nbytes: int, write: Write | None) -> list[memoryview]:
        return [memoryview(record)]

    def collect_messages(self, sizes: Sequence[int], write: Write | None) -> list[Bytes]:
        message = np.empty(sizes[0], np.uint8)  # a new one: several threads may be here at once
        if write is not None:
            write(message)
        return [message]

    def reduce_arrays(
        self, must_match: tuple[Any, ...], arrays: Sequence[Array], op: ReduceOp
    ) -> list[Array]:
        check_on_host(arrays)
        self.exchange(signature_of(current_call(), *must_match))
        return [np.array(array, order="C") for array in arrays]


def check_on_host(arrays: Sequence[Array]) -> None:
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


def pack_arrays(arrays: Sequence[Array]) -> tuple[int, Write]:
    """The size of a message of these arrays, and a function that writes it; see `parse_arrays`."""
    layout = layout_of_arrays(arrays)
    # Each array's number of dimensions and shape.
    numbers = [n for array in arrays for n in (array.ndim, *array.shape)]
    shapes = np.array(numbers, np.int64).view(np.uint8)
    start = round_up(shapes.size, GROUP_ALIGNMENT)

    def write(message: Bytes) -> None:
        message[: shapes.size] = shapes
        layout.write(message[start:], arrays)

    return start + layout.nbytes, write


def parse_arrays(message: Bytes, dtypes: Sequence[np.dtype[Any]]) -> list[np.ndarray[Any, Any]]:
    """The arrays, of these dtypes, in a message that `pack_arrays` wrote."""
    shapes: list[tuple[int, ...]] = []
    offset = 0
    for _ in dtypes:
        (ndim,) = message[offset : offset + 8].view(np.int64)
        shapes.append(tuple(message[offset + 8 : offset + 8 * (1 + ndim)].view(np.int64).tolist()))
        offset += 8 * (1 + int(ndim))
    start = round_up(offset, GROUP_ALIGNMENT)
    return layout_of(tuple(shapes), tuple(dtypes)).views(message[start:])
