"""Messages of arrays whose shapes the receiver does not know: the shapes first, then the arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcstrat._core.types import Array, Bytes
from hpcstrat._memory.intervals import round_up
from hpcstrat._memory.layout import GROUP_ALIGNMENT, layout_of


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
