"""Sums of the rows that occur several times in a sparse gradient."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from hpcstrat import _gpu
from hpcstrat._communicators.reduction import accumulator
from hpcstrat._types import Array

_SUM = """
const long long segment = i / columns, column = i % columns;
const long long stop = segment + 1 < segments ? starts[segment + 1] : rows;
{sum} total = 0;
for (long long row = starts[segment]; row < stop; ++row)
    total += ({sum})values[order[row] * columns + column];
sum = (T)total;
"""


def sum_rows(indices: Array, values: Array) -> tuple[Array, Array]:
    """The rows that occur, each once and ascending, and for each the sum of its values, in the order in which they lie.

    CuPy's own `add.reduceat` subtracts prefix sums: it loses digits in long arrays, and spreads a NaN to all rows.

    Args:
        indices: integers of shape `(k,)`, none of them negative.
        values: of shape `(k, ...)`, C-contiguous, on the same device. 16-bit floats are summed in `float32`.
    """
    xp = _gpu.array_module(indices)
    order = xp.argsort(indices, kind="stable")
    indices = indices[order]
    starts = xp.flatnonzero(xp.diff(indices, prepend=-1))
    rows = indices[starts]
    if xp is np:
        if not rows.size:
            return rows, values
        with np.errstate(all="ignore"):  # as in the update
            sums = np.add.reduceat(values[order], starts, axis=0, dtype=accumulator(values.dtype))
            return rows, sums.astype(values.dtype, copy=False)
    sums = xp.empty((rows.size, *values.shape[1:]), values.dtype)
    columns = sums.size // max(rows.size, 1)
    _kernel(accumulator(values.dtype) != values.dtype)(values, order, starts, columns, rows.size, indices.size, sums)
    return rows, sums


@functools.cache
def _kernel(is_short: bool) -> Any:
    """A thread for each element of the result: the same bits in every run, and on every rank."""
    return _gpu.load_cupy("a sparse gradient").ElementwiseKernel(
        "raw T values, raw int64 order, raw int64 starts, int64 columns, int64 segments, int64 rows",
        "T sum",
        _SUM.format(sum="float" if is_short else "T"),
        "hpcstrat_sum_rows",
        no_return=True,
    )
