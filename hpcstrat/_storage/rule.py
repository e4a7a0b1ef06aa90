"""How an update changes a variable and its slots."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from hpcstrat import _gpu
from hpcstrat._types import Array

NO_CONSTANTS: Mapping[str, float] = MappingProxyType({})

Apply: TypeAlias = Callable[[Array, Array, Sequence[Array], Array], None]


class Kernel(NamedTuple):
    """An update as one elementwise kernel.

    Attributes:
        name: the kernel's name in profilers.
        slots: names of the slots in `body`.
        constants: names of the constants in `body`.
        body: statements of CUDA C++ that change `value` and the slots by `gradient`, one element of each. All have the
            variable's dtype; where that has 16 bits, `float`.
    """

    name: str
    slots: tuple[str, ...]
    constants: tuple[str, ...]
    body: str


class UpdateRule(NamedTuple):
    """One step of an optimizer: how a gradient changes a variable and its slots.

    `apply(value, gradient, slots, scratch)` changes `value` and `slots` in place and may overwrite `gradient` and
    `scratch`. All are flat arrays of one length and dtype, NumPy's or CuPy's. The update must be elementwise: an
    element may depend on the same element of the other arrays and on nothing else, because `apply` is called on one
    range of elements at a time, on any rank.

    Attributes:
        apply: the function. NumPy's functions work on both kinds of array.
        constants: the numbers in `apply`, by name; the learning rate at least. Ranks whose constants differ raise
            `ReplicaMismatchError`, which names them.
        kernel: the same update as one GPU kernel; without it `apply` runs on CuPy arrays.
        kernel_constants: the constants of the kernel, in its order.
    """

    apply: Apply
    constants: Mapping[str, float] = NO_CONSTANTS
    kernel: Kernel | None = None
    kernel_constants: tuple[float, ...] = ()

    def on_gpu(self, value: Array, gradient: Array, slots: Sequence[Array]) -> None:
        """Updates flat CuPy arrays, on the current stream; `gradient` may be overwritten."""
        if self.kernel is not None:
            compiled = _compiled(self.kernel, value.dtype.itemsize == 2)
            compiled(gradient, *self.kernel_constants, value, *slots)
        else:
            # An assignment has no constants and uses no scratch: large variables need no memory beside them.
            scratch = _gpu.array_module(gradient).empty_like(gradient) if self.constants else gradient
            self.apply(value, gradient, slots, scratch)


@functools.cache
def _compiled(kernel: Kernel, is_short: bool) -> Any:
    computed = "float" if is_short else "T"
    changed = ("value", *kernel.slots)
    before = [f"{computed} {one} = ({computed})given_{one};" for one in ("gradient", *kernel.constants, *changed)]
    after = [f"given_{one} = (T){one};" for one in changed]
    return _gpu.load_cupy("an update").ElementwiseKernel(
        ", ".join(["T given_gradient", *(f"float64 given_{one}" for one in kernel.constants)]),
        ", ".join(f"T given_{one}" for one in changed),
        "\n".join([*before, kernel.body, *after]),
        f"hpcstrat_{kernel.name}",
        no_return=True,
    )
