"""How an update changes a variable and its slots."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from hpcstrat import _gpu
from hpcstrat._communicators.base import Array

Apply: TypeAlias = Callable[[Array, Array, Sequence[Array], Array], None]
"""`apply(value, gradient, slots, work)` updates `value` and `slots` in place, flat arrays of one length and dtype.

It may overwrite `gradient` and `work`, and must work elementwise, because storage calls it chunk by chunk.
"""


class Kernel(NamedTuple):
    """An update as one elementwise kernel.

    Attributes:
        name: of the kernel, for profilers.
        slots: the names of the slots in `body`.
        numbers: the names of further numbers in `body`.
        body: statements of CUDA C++ that change `value` and the slots by `gradient`, one element of each. All are of
            the variable's dtype, but of `float` where that has 16 bits.
    """

    name: str
    slots: tuple[str, ...]
    numbers: tuple[str, ...]
    body: str


class Rule(NamedTuple):
    """An update, for host memory and for a GPU.

    Attributes:
        apply: as array operations, for either.
        kernel: the same as one kernel; `None` where `apply` is one operation anyway.
        numbers: those of the kernel.
        names: of the numbers on which the ranks agree.
    """

    apply: Apply
    kernel: Kernel | None = None
    numbers: tuple[float, ...] = ()
    names: tuple[str, ...] = ()

    def on_gpu(self, value: Array, gradient: Array, slots: Sequence[Array]) -> None:
        """Updates flat CuPy arrays, on the current stream; `gradient` may be overwritten."""
        if self.kernel is None:
            self.apply(value, gradient, slots, gradient)
        else:
            _compiled(self.kernel, value.dtype.itemsize == 2)(gradient, *self.numbers, value, *slots)


@functools.cache
def _compiled(kernel: Kernel, is_short: bool) -> Any:
    computed = "float" if is_short else "T"
    changed = ("value", *kernel.slots)
    before = [f"{computed} {one} = ({computed})given_{one};" for one in ("gradient", *kernel.numbers, *changed)]
    after = [f"given_{one} = (T){one};" for one in changed]
    return _gpu.load_cupy("an update").ElementwiseKernel(
        ", ".join(["T given_gradient", *(f"float64 given_{one}" for one in kernel.numbers)]),
        ", ".join(f"T given_{one}" for one in changed),
        "\n".join([*before, kernel.body, *after]),
        f"hpcstrat_{kernel.name}",
        no_return=True,
    )
