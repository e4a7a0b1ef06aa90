"""Messages of arrays whose shapes the receiver does not know: the shapes first, then the arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcstrat._core.types import Array, Bytes
from hpcstrat._memory.intervals import round_up
from hpcstrat._memory.layout import ALIGNMENT, layout_of


def pack_arrays(arrays: Sequence[Array]) -> tuple[int, Callable[[Bytes], None]]:
    """The size of a message of these arrays, and a function that writes it; see `parse_arrays`."""
    layout = layout_of(
        tuple([array.shape for array in arrays]), tuple([array.dtype for array in arrays])
    )
    shapes = pack_shapes(arrays)
    start = round_up(shapes.nbytes, ALIGNMENT)

    def write(message: Bytes) -> None:
        message[: shapes.nbytes] = shapes.view(np.uint8)
        layout.write(message[start:], arrays)

    return start + layout.nbytes, write


def parse_arrays(message: Bytes, dtypes: Sequence[np.dtype[Any]]) -> list[np.ndarray[Any, Any]]:
    """The arrays, of these dtypes, in a message that `pack_arrays` wrote."""
    shapes, offset = unpack_shapes(message, len(dtypes))
    return layout_of(tuple(shapes), tuple(dtypes)).views(message[round_up(offset, ALIGNMENT) :])


def pack_shapes(arrays: Sequence[Array]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Each array's number of dimensions and shape."""
    return np.array([n for array in arrays for n in (array.ndim, *array.shape)], np.int64)


def unpack_shapes(message: Bytes, count: int) -> tuple[list[tuple[int, ...]], int]:
    """The shapes of `count` arrays at the start of a message, and how many bytes they take."""
    shapes: list[tuple[int, ...]] = []
    offset = 0
    for _ in range(count):
        (ndim,) = message[offset : offset + 8].view(np.int64)
        shapes.append(tuple(message[offset + 8 : offset + 8 * (1 + ndim)].view(np.int64).tolist()))
        offset += 8 * (1 + int(ndim))
    return shapes, offset
