"""The kernels of formulas on a GPU."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from hpcstrat._core import gpu
from hpcstrat._update.rule import Kernel

LANES = 32
"""Threads per strip of a variable, which read neighbouring elements."""

_FIND_ROW = """
ptrdiff_t low = 0, high = variables - 1;
while (low < high) {  // the last variable that starts at this element or before
    const ptrdiff_t middle = (low + high + 1) / 2;
    if (starts[2 * middle] <= i) low = middle; else high = middle - 1;
}
const ptrdiff_t row = starts[2 * low + 1];
"""
_ADD_SQUARES = """
const ptrdiff_t row = strips[i / {lanes} * 3 + 2];
{constants}
{zeros}
const ptrdiff_t stop = strips[i / {lanes} * 3 + 1];
for (ptrdiff_t k = strips[i / {lanes} * 3] + i % {lanes}; k < stop; k += {lanes}) {{
    {body}
}}
{results}
"""


def _taken(
    kernel: Kernel, dtype: np.dtype[Any], has_rows: bool
) -> tuple[str, list[str], list[str]]:
    """What it computes with, the parameters of its constants, and what reads these.

    They are passed, or in `numbers`, a row for each variable.
    """
    computed, constants = "float" if dtype.itemsize == 2 else "T", kernel.constants
    places = [f"given_{name}" for name in constants]
    if has_rows:
        places = [f"numbers[row * {len(constants)} + {k}]" for k in range(len(constants))]
    reads = [
        f"const {computed} {name} = ({computed}){place};"
        for name, place in zip(constants, places, strict=True)
    ]
    return computed, [] if has_rows else [f"float64 given_{name}" for name in constants], reads


@functools.cache
def update_kernel(kernel: Kernel, dtype: np.dtype[Any], has_rows: bool = False) -> Any:
    """The update of each element."""
    computed, parameters, reads = _taken(kernel, dtype, has_rows)
    changed = ("value", *kernel.slots)
    body = [f"{computed} {name} = ({computed})given_{name};" for name in ("gradient", *changed)]
    after = [f"given_{name} = (T){name};" for name in changed]
    rows = "raw float64 numbers, raw int64 starts, int64 variables" if has_rows else ""
    return gpu.load_cupy("an update").ElementwiseKernel(
        ", ".join(filter(None, ["T given_gradient", *parameters, rows])),
        ", ".join(f"T given_{name}" for name in changed),
        "\n".join([_FIND_ROW if has_rows else "", *reads, *body, kernel.body, *after]),
        f"hpcstrat_{kernel.name}",
        no_return=True,
    )


@functools.cache
def squares_kernel(kernel: Kernel, dtype: np.dtype[Any], has_rows: bool) -> Any:
    """The sums of the squares of each term, of some elements of a strip."""
    computed, parameters, reads = _taken(kernel, dtype, has_rows)
    arrays, terms = ("gradient", "value", *kernel.slots), range(len(kernel.terms))
    square = "(double)term_{0} * (double)term_{0}"
    if dtype.kind == "c":
        parts = [f"(double)term_{{0}}.{part}() * term_{{0}}.{part}()" for part in ("real", "imag")]
        square = " + ".join(parts)
    body = [
        *[f"{computed} {name} = ({computed})given_{name}[k];" for name in arrays],
        *[f"{computed} term_{j};" for j in terms],
        kernel.body,
        *[f"sum_{j} += {square.format(j)};" for j in terms],
    ]
    taken = ["raw T given_gradient", *parameters, *["raw float64 numbers"][:has_rows]]
    taken += [f"raw T given_{name}" for name in arrays[1:]]
    return gpu.load_cupy("an update").ElementwiseKernel(
        ", ".join([*taken, "raw int64 strips"]),
        "raw float64 sums",
        _ADD_SQUARES.format(
            lanes=LANES,
            constants="\n".join(reads),
            zeros="\n".join(f"double sum_{j} = 0;" for j in terms),
            body="\n".join(body),
            results="\n".join(f"sums[i * {len(terms)} + {j}] = sum_{j};" for j in terms),
        ),
        f"hpcstrat_{kernel.name}",
        no_return=True,
    )
