"""Updates of some rows of a variable; rows that occur several times are combined."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat._core import gpu
from hpcstrat._core.types import Array
from hpcstrat._transports.reduction import accumulator
from hpcstrat._update.device_update import apply_on_gpu
from hpcstrat._update.rule import UpdateRule

# One thread per element of the result: the same bits in every run, and on every rank. `WIDE` stands
# for the type of `total`, such as `float`, and `COMBINED` for a text of `IN_CUDA`.
_COMBINE = """
const long long segment = i / columns, column = i % columns;
const long long stop = segment + 1 < segments ? starts[segment + 1] : rows;
long long row = starts[segment];
WIDE total = (WIDE)values[order[row] * columns + column];
while (++row < stop) {
    const WIDE next = (WIDE)values[order[row] * columns + column];
    total = COMBINED;
}
result = (T)total;
"""
IN_CUDA: dict[np.ufunc | None, str] = {
    np.add: "total + next",
    None: "next",
}
"""How two values of a row are combined, in CUDA C++; `None` takes the last."""


def combine_rows(
    indices: Array, values: Array, combination: np.ufunc | None = np.add
) -> tuple[Array, Array]:
    """The distinct rows, ascending, and for each row its values, combined in their order.

        indices   7  2  7      the values of rows 7, 2 and 7
        values    a  b  c
        order     1  0  2      of the values, by row: b, a, c
        starts    0  1         where each row starts in this order
        rows      2  7
        result    b  a + c

    Args:
        indices: integers of shape `(k,)`, not negative.
        values: of shape `(k, ...)`, C-contiguous, on the same device. 16-bit floats are combined in
            `float32`.
        combination: how several values of a row are combined; see `IN_CUDA`.
    """
    xp = gpu.array_module(indices)
    # Stable, so that equal rows keep their order, and the results have the same bits on every rank
    # and in every run.
    order = xp.argsort(indices, kind="stable")
    indices = indices[order]
    # No index is negative, so -1 makes the first row a new one.
    starts = xp.flatnonzero(xp.diff(indices, prepend=-1))
    rows = indices[starts]
    if xp is np:
        if not rows.size:
            return rows, values
        if combination is None:
            return rows, values[order[np.append(starts[1:], order.size) - 1]]
        with np.errstate(all="ignore"):  # as in the update
            reduced = combination.reduceat(
                values[order], starts, axis=0, dtype=accumulator(values.dtype)
            )
            return rows, reduced.astype(values.dtype, copy=False)
    # CuPy's `add.reduceat` subtracts prefix sums: it loses digits in long arrays, and spreads a NaN
    # to all rows.
    combined = xp.empty((rows.size, *values.shape[1:]), values.dtype)
    columns = combined.size // max(rows.size, 1)
    kernel = _kernel(combination, accumulator(values.dtype) != values.dtype)
    kernel(values, order, starts, columns, rows.size, indices.size, combined)
    return rows, combined


@functools.cache
def _kernel(combination: np.ufunc | None, is_short: bool) -> Any:
    wide = "float" if is_short else "T"
    return gpu.load_cupy("a sparse gradient").ElementwiseKernel(
        "raw T values, raw int64 order, raw int64 starts, int64 columns, int64 segments, int64 "
        "rows",
        "T result",
        _COMBINE.replace("WIDE", wide).replace("COMBINED", IN_CUDA[combination]),
        "hpcstrat_combine_rows",
        no_return=True,
    )


def update_rows(arrays: Sequence[Array], rows: Array, gradient: Array, rule: UpdateRule) -> None:
    """Applies a rule to some rows of a variable (the first array) and its slots, on this rank."""
    values = [array[rows] for array in arrays]
    value, *slots = [value.reshape(-1) for value in values]
    gradient = gradient.reshape(-1)
    if gpu.is_on_gpu(value):
        apply_on_gpu(rule, rule.numbers, value, gradient, slots)
    elif rule.kernel is not None:
        rule.kernel.run(rule.numbers, value, gradient, slots)
    else:
        rule.assign(value, gradient)
    for array, new in zip(arrays, values, strict=True):
        array[rows] = new
