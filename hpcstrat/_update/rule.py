"""How an update changes a variable and its slots."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hpcstrat._core import gpu
from hpcstrat._core.types import Array

NO_CONSTANTS: Mapping[str, float] = MappingProxyType({})

Apply: TypeAlias = Callable[[Array, Array, Sequence[Array], Array], None]


class Kernel(NamedTuple):
    """An update as one elementwise kernel.

    Attributes:
        name: the kernel's name in profilers.
        slots: names of the slots in `body`.
        constants: names of the constants in `body`.
        body: statements of CUDA C++ that change `value` and the slots by `gradient`, for one
            element. All have the variable's dtype; where that has 16 bits, `float`. Statements for
            norms change nothing and assign to `term_0` and so on.
    """

    name: str
    slots: tuple[str, ...]
    constants: tuple[str, ...]
    body: str


class UpdateRule(NamedTuple):
    """One step of an optimizer: how a gradient changes a variable and its slots.

    `apply(value, gradient, slots, scratch)` changes `value` and `slots` in place and may overwrite
    `gradient` and `scratch`. All are flat arrays of one length and dtype, NumPy's or CuPy's. The
    update must be elementwise: an element may depend on the same element of the other arrays and on
    nothing else, because `apply` is called on one range of elements at a time, on any rank.

    Attributes:
        apply: the function. NumPy's functions work on both kinds of array.
        constants: the numbers in `apply`, by name; the learning rate at least. Ranks whose
            constants differ raise `ReplicaMismatchError`, which names them.
        kernel: the same update as one GPU kernel; without it `apply` runs on CuPy arrays.
        kernel_constants: the constants of the kernel, in its order.
        norms: the norms of whole variables that it needs. Then `apply` takes a whole variable, and
            the kernel's constants are those of `norms.rule_with`.
    """

    apply: Apply
    constants: Mapping[str, float] = NO_CONSTANTS
    kernel: Kernel | None = None
    kernel_constants: tuple[float, ...] = ()
    norms: Norms | None = None

    def on_gpu(self, value: Array, gradient: Array, slots: Sequence[Array]) -> None:
        """Updates flat CuPy arrays, on the current stream; `gradient` may be overwritten."""
        if self.kernel is not None:
            compiled = _compile(self.kernel, value.dtype.itemsize == 2)
            compiled(gradient, *self.kernel_constants, value, *slots)
        else:
            # An assignment has no constants and uses no scratch array: large variables need no
            # additional memory.
            scratch = (
                gpu.array_module(gradient).empty_like(gradient) if self.constants else gradient
            )
            self.apply(value, gradient, slots, scratch)


LANES = 16
"""Sums of squares that are kept in parallel, so that a compiler can use vectors in one order."""


class Norms(NamedTuple):
    """The norms over a variable that an update of its elements depends on.

    They take a first pass over all elements, which changes nothing. A rank that has only a part of
    the elements sums its own, and the ranks add their sums. Squares are summed in float64.

    Attributes:
        size: the number of norms.
        kernel: assigns the term of each norm; changes nothing.
        terms: the same by NumPy's operations, from a value, a gradient and slots.
        kernel_constants: the constants of the kernel, in its order.
        rule_with: returns the update of a variable that has these norms.
    """

    size: int
    kernel: Kernel
    terms: Callable[[Array, Array, Sequence[Array]], Sequence[Array]]
    kernel_constants: tuple[float, ...]
    rule_with: Callable[[Sequence[float]], UpdateRule]

    def rule(self) -> UpdateRule:
        """The update of variables whose norms are not known yet."""
        return self.rule_with([1.0] * self.size)._replace(
            apply=self._apply, kernel_constants=(), norms=self
        )

    def _apply(self, value: Array, gradient: Array, slots: Sequence[Array], scratch: Array) -> None:
        self.rule_with(np.sqrt(self.sums(value, gradient, slots)).tolist()).apply(
            value, gradient, slots, scratch
        )

    def sums(self, value: Array, gradient: Array, slots: Sequence[Array]) -> Array:
        """The sum of the squares of each term, from NumPy arrays."""
        return np.array([sum_of_squares(term) for term in self.terms(value, gradient, slots)])

    def sums_on_gpu(
        self, value: Array, gradient: Array, slots: Sequence[Array], out: Array
    ) -> None:
        """Writes the same sums, from flat CuPy arrays, to `out`, on the current stream."""
        xp = gpu.array_module(gradient)
        if value.dtype.kind == "c":
            squares = [
                xp.abs(term).astype(np.float64) ** 2 for term in self.terms(value, gradient, slots)
            ]
        else:
            squares = [xp.empty(value.shape, np.float64) for _ in range(self.size)]
            compiled = _compile_norms(self.kernel, self.size, value.dtype.itemsize == 2)
            compiled(gradient, *self.kernel_constants, value, *slots, *squares)
        for i, array in enumerate(squares):
            out[i] = array.sum()


def sum_of_squares(term: Array) -> float:
    """The sum of a flat array's squares, in float64 and in the order of a compiled loop."""
    squares = np.abs(term).astype(np.float64)
    squares *= squares
    whole = squares.size // LANES * LANES
    lanes = np.zeros(LANES)
    lanes += np.add.reduce(squares[:whole].reshape(-1, LANES), axis=0)
    lanes[: squares.size - whole] += squares[whole:]
    # Not `sum`, which compensates rounding errors from Python 3.12 on.
    return functools.reduce(operator.add, lanes.tolist())


@functools.cache
def _compile(kernel: Kernel, is_short: bool) -> Any:
    computed = "float" if is_short else "T"
    changed = ("value", *kernel.slots)
    before = [
        f"{computed} {name} = ({computed})given_{name};"
        for name in ("gradient", *kernel.constants, *changed)
    ]
    after = [f"given_{name} = (T){name};" for name in changed]
    return gpu.load_cupy("an update").ElementwiseKernel(
        ", ".join(["T given_gradient", *(f"float64 given_{name}" for name in kernel.constants)]),
        ", ".join(f"T given_{name}" for name in changed),
        "\n".join([*before, kernel.body, *after]),
        f"hpcstrat_{kernel.name}",
        no_return=True,
    )


@functools.cache
def _compile_norms(kernel: Kernel, count: int, is_short: bool) -> Any:
    computed = "float" if is_short else "T"
    taken = ("gradient", *kernel.constants, "value", *kernel.slots)
    before = [f"const {computed} {name} = ({computed})given_{name};" for name in taken]
    terms = [f"{computed} term_{i};" for i in range(count)]
    after = [f"square_{i} = (double)term_{i} * (double)term_{i};" for i in range(count)]
    return gpu.load_cupy("an update").ElementwiseKernel(
        ", ".join(
            f"{'float64' if name in kernel.constants else 'T'} given_{name}" for name in taken
        ),
        ", ".join(f"float64 square_{i}" for i in range(count)),
        "\n".join([*before, *terms, kernel.body, *after]),
        f"hpcstrat_{kernel.name}",
        no_return=True,
    )
