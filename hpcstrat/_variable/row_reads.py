"""Reads rows and elements of a variable by their indices, without copying all of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hpcstrat._core.arrays import as_read_only
from hpcstrat._core.call_name import call_named, current_call
from hpcstrat._core.types import Array
from hpcstrat._update.rows import row_view
from hpcstrat._variable.array_methods import HasArrayMethods


class ReadableByRows(HasArrayMethods):
    """The part of `Variable` that reads its rows."""

    __slots__ = ()

    def sparse_read(self, indices: Any, name: str | None = None) -> Any:
        """A copy of the rows at these indices. Never communicates.

        Args:
            indices: integers of any shape, each in `0..shape[0]-1`.
            name: ignored; accepted for compatibility with TensorFlow.

        Returns:
            An array with a row for each index, of shape
            `(*indices.shape, *shape[1:])`.

        Raises:
            ValueError: an index is out of range, or is not an integer.
            RuntimeError: the variable is `ON_READ`, and this is the cross-replica context of
                several replicas.

        Examples:
            >>> table = hs.Variable(np.array([[1, 2], [3, 4], [5, 6]]))
            >>> table.sparse_read([2, 0, 2])
            array([[5, 6],
                   [1, 2],
                   [5, 6]])
        """
        del name
        with call_named(f"Variable.sparse_read of {self.name!r}"):
            return self._take(self._as_indices(indices)[..., None])

    def gather_nd(self, indices: Any, name: str | None = None) -> Any:
        """A copy of the elements, or parts, at these indices. Never communicates.

        Args:
            indices: integers of shape `(..., k)`; each row is an index into the first k dimensions.
            name: ignored; accepted for compatibility with TensorFlow.

        Returns:
            An array with an entry for each index, of shape
            `(*indices.shape[:-1], *shape[k:])`.

        Raises:
            ValueError: an index is out of range or is not an integer, or k is more than the number
                of dimensions.
            RuntimeError: the variable is `ON_READ`, and this is the cross-replica context of
                several replicas.

        Examples:
            >>> table = hs.Variable(np.array([[1, 2], [3, 4], [5, 6]]))
            >>> table.gather_nd([[2, 0], [0, 1]])  # elements
            array([5, 2])
            >>> table.gather_nd([[2]])  # a row
            array([[5, 6]])
        """
        del name
        with call_named(f"Variable.gather_nd of {self.name!r}"):
            return self._take(self._as_indices(indices))

    def _take(self, indices: Array) -> Any:
        array = self._read_in_place()
        with self._state.group.on_stream():
            rows, shape = self._rows(indices)
            return row_view(array, len(shape))[rows].reshape((*indices.shape[:-1], *shape))[()]

    # ---- arguments

    def _as_indices(self, indices: Any) -> Array:
        """`indices` as an array of `int64` on the variable's device."""
        group = self._state.group
        array = as_read_only(current_call(), indices, group.stream is not None)
        if array.dtype.kind not in "iu" and array.size:
            raise ValueError(
                f"{current_call()}: the indices are of dtype {array.dtype}; pass integers"
            )
        with group.on_stream():
            return (array if group.stream is None else group.stream.here(array)).astype(np.int64)

    def _rows(self, indices: Array) -> tuple[Array, tuple[int, ...]]:
        """The flat row numbers of indices of shape `(..., k)`, and the shape of a row.

        A row number counts over the first k dimensions, flattened into one.
        """
        shape, depth = self.shape, indices.shape[-1]
        if depth > len(shape):
            raise ValueError(
                f"{current_call()}: indices of {depth} dimensions, and the variable has shape "
                f"{shape}; pass at most {len(shape)}"
            )
        count = math.prod(indices.shape[:-1])
        rows = self._state.group.xp.zeros(count, np.int64)
        for index, size in zip(indices.reshape(count, depth).T, shape, strict=False):
            if count and not 0 <= int(index.min()) <= int(index.max()) < size:
                raise ValueError(
                    f"{current_call()}: an index is not in 0..{size - 1}; all must be, because the "
                    f"variable has shape {shape}"
                )
            rows = rows * size + index
        return rows, shape[depth:]
