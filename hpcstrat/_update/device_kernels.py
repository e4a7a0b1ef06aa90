"""The CUDA kernels of an update, whose text is made from the kernels of its passes.

update_kernel   changes the elements, one in each thread
squares_kernel  for norms: adds up squares over strips, each of them some elements of one variable
add_kernel      adds up these sums over the strips of a variable, or of all
norms_kernel    takes the roots, and computes the constants of the next pass with them

`device_update.py` launches them, and has a picture of the sums.

After a pass for norms, the next one has constants for each variable: a row of an array `numbers`.
Which row an element needs is in an array `owners`: 256 bytes, from a multiple of 256 on, have
elements of one variable only.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat._core import gpu
from hpcstrat._memory.allocator import ALIGNMENT
from hpcstrat._update.kernel import Kernel

THREADS = 256
"""Threads per strip, which read neighbouring elements."""

_UNROLL = "#pragma unroll 16"  # a thread then waits for 16 reads at once
_SQUARE = """
__device__ inline double square_of(double x) { return x * x; }
template <class Real> __device__ double square_of(complex<Real> x) {
    return (double)x.real() * x.real() + (double)x.imag() * x.imag();
}
"""


def _elementwise(
    inputs: Sequence[str], outputs: Sequence[str], lines: Sequence[str], name: str
) -> Any:
    """A kernel with these parameters, which runs these lines of CUDA C++ in each thread `i`."""
    return gpu.load_cupy("an update").ElementwiseKernel(
        ", ".join(inputs),
        ", ".join(outputs),
        "\n".join(lines),
        f"hpcstrat_{name}",
        preamble=_SQUARE,
        no_return=True,
    )


def _computed(dtype: np.dtype[Any]) -> str:
    """The type that a kernel computes with."""
    return "float" if dtype.itemsize == 2 else "T"


def _constants(
    kernel: Kernel, dtype: np.dtype[Any], by_variable: bool, element: str
) -> tuple[list[str], list[str]]:
    """The parameters that have a kernel's constants, and the lines that read them.

    Args:
        kernel: the kernel.
        dtype: the variables'.
        by_variable: whether they are rows of `numbers`; else each is a parameter.
        element: where the element is for which they are read.
    """
    names = kernel.constants
    if by_variable:
        parameters = ["raw float64 numbers", "raw int32 owners"]
        lines = [f"const long long variable = owners[{element} / {ALIGNMENT // dtype.itemsize}];"]
        places = [f"numbers[variable * {len(names)} + {k}]" for k in range(len(names))]
    else:
        parameters, lines = [f"float64 given_{name}" for name in names], []
        places = [f"given_{name}" for name in names]
    computed = _computed(dtype)
    for name, place in zip(names, places, strict=True):
        lines.append(f"const {computed} {name} = ({computed}){place};")
    return parameters, lines


@functools.cache
def update_kernel(kernel: Kernel, dtype: np.dtype[Any], by_variable: bool = False) -> Any:
    """The update of each element.

    SGD, for example, is in CUDA C++:

        const T number_0 = (T)given_number_0;
        T gradient = (T)given_gradient;
        T value = (T)given_value;
        const auto step_0 = number_0 * gradient;
        const auto step_1 = value - step_0;
        value = step_1;
        given_value = (T)value;

    With constants for each variable it starts with:

        const long long variable = owners[i / 64];
        const T number_0 = (T)numbers[variable * 1 + 0];
    """
    computed, changed = _computed(dtype), ("value", *kernel.slots)
    parameters, constants = _constants(kernel, dtype, by_variable, "i")
    return _elementwise(
        [*parameters, "T given_gradient"],
        [f"T given_{name}" for name in changed],
        [
            *constants,
            *[f"{computed} {name} = ({computed})given_{name};" for name in ("gradient", *changed)],
            kernel.body,
            *[f"given_{name} = (T){name};" for name in changed],
        ],
        kernel.name,
    )


@functools.cache
def squares_kernel(kernel: Kernel, dtype: np.dtype[Any], by_variable: bool) -> Any:
    """The sum of the squares of each term, over what each thread has of a strip.

    The norm of a gradient, for example, is in CUDA C++:

        const long long strip = i / 256, thread = i % 256;
        double sum_0 = 0;
        for (long long k = starts[strip] + thread; k < stops[strip]; k += 256) {
            T gradient = (T)given_gradient[k];
            T value = (T)given_value[k];
            T term_0;
            term_0 = gradient;
            sum_0 += square_of(term_0);
        }
        sums[((first + strip) * 256 + thread) * 1 + 0] = sum_0;
    """
    computed, arrays = _computed(dtype), ("gradient", "value", *kernel.slots)
    parameters, constants = _constants(kernel, dtype, by_variable, "starts[strip]")
    count = len(kernel.terms)
    terms = range(count)
    return _elementwise(
        [
            *parameters,
            *[f"raw T given_{name}" for name in arrays],
            *["raw int64 starts", "raw int64 stops", "int64 first"],
        ],
        ["raw float64 sums"],
        [
            f"const long long strip = i / {THREADS}, thread = i % {THREADS};",
            *constants,
            *[f"double sum_{j} = 0;" for j in terms],
            f"for (long long k = starts[strip] + thread; k < stops[strip]; k += {THREADS}) {{",
            *[f"{computed} {name} = ({computed})given_{name}[k];" for name in arrays],
            *[f"{computed} term_{j};" for j in terms],
            kernel.body,
            *[f"sum_{j} += square_of(term_{j});" for j in terms],
            "}",
            *[
                f"sums[((first + strip) * {THREADS} + thread) * {count} + {j}] = sum_{j};"
                for j in terms
            ],
        ],
        kernel.name,
    )


@functools.cache
def add_kernel(terms: int) -> Any:
    """The sums of some strips by thread and term: of strips `starts[j]` to `stops[j]` to `j`."""
    columns = THREADS * terms
    return _elementwise(
        ["raw float64 sums", "raw int64 starts", "raw int64 stops"],
        ["raw float64 added"],
        [
            f"const long long j = i / {columns}, column = i % {columns};",
            "double sum = 0;",
            _UNROLL,
            "for (long long k = starts[j]; k < stops[j]; ++k)",
            f"sum += sums[k * {columns} + column];",
            "added[i] = sum;",
        ],
        "add",
    )


@functools.cache
def norms_kernel(earlier: int, are_global: tuple[bool, ...], code: str, given: int) -> Any:
    """The norms of a pass for variable `i`, and the constants of the next pass.

    It takes sums by variable, thread and term; the first are of all variables together, if there
    is such a norm.

    For an update by `learning_rate / max(norm, least)`, for example, it is in CUDA C++:

        double sum_0 = 0;
        #pragma unroll 16
        for (long long k = 0; k < threads; ++k) sum_0 += sums[((0 + i) * threads + k) * 1 + 0];
        norm_0 = sqrt(sum_0);
        const auto late_0 = norm_0 > given_0 || norm_0 != norm_0 ? norm_0 : given_0;
        const auto late_1 = given_1 / late_0;
        numbers[i * 1 + 0] = late_1;

    Args:
        earlier: how many norms passes before have found, which it takes too.
        are_global: see `Pass`.
        code: of the next pass; see `Pass`.
        given: how many numbers `code` takes beside norms.
    """
    lines = []
    for j, is_global in enumerate(are_global):
        row = "0" if is_global else f"({int(any(are_global))} + i)"
        place = f"({row} * threads + k) * {len(are_global)} + {j}"
        lines += [
            f"double sum_{j} = 0;",
            _UNROLL,
            f"for (long long k = 0; k < threads; ++k) sum_{j} += sums[{place}];",
            f"norm_{earlier + j} = sqrt(sum_{j});",
        ]
    norms = [f"float64 norm_{j}" for j in range(earlier + len(are_global))]
    numbers = [f"float64 given_{j}" for j in range(given)]
    return _elementwise(
        ["raw float64 sums", "int64 threads", *numbers, *norms[:earlier]],
        [*norms[earlier:], "raw float64 numbers"],
        [*lines, code],
        "norms",
    )


@functools.cache
def numbers_kernel(count: int) -> Any:
    """Writes its parameters to an array, from which the kernels of a graph take them."""
    return _elementwise(
        [f"float64 given_{k}" for k in range(count)],
        ["raw float64 numbers"],
        [f"numbers[{k}] = given_{k};" for k in range(count)],
        "numbers",
    )
