"""How an update changes a variable and its slots."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from hpcstrat import _gpu
from hpcstrat._communicators.base import Array
from hpcstrat._communicators.dtypes import accumulator

Apply: TypeAlias = Callable[[Array, Array, Sequence[Array], Array], None]
"""`apply(value, gradient, slots, work)` updates `value` and `slots` in place, flat arrays of one length and dtype.

It may overwrite `gradient` and `work`, and must work elementwise, because storage calls it chunk by chunk.
"""


class Kernel(NamedTuple):
    """An update as one elementwise kernel.

    Attributes:
        name: of the kernel, for profilers.
        slots: the names of the slots in `body`.
        numbers: the names of further numbers in `body`, and their values.
        body: statements of CUDA C++ that change `value` and the slots by `gradient`, one element of each. All are of
            the variable's dtype, but of `float` where that has 16 bits.
    """

    name: str
    slots: tuple[str, ...]
    numbers: dict[str, float]
    body: str


class Rule(NamedTuple):
    """An update, for host memory and for a GPU.

    Attributes:
        apply: as array operations, for either.
        kernel: gives the same as one kernel; `None` where `apply` is one operation anyway.
    """

    apply: Apply
    kernel: Callable[[], Kernel] | None = None

    def on_gpu(self, value: Array, gradient: Array, slots: Sequence[Array]) -> None:
        """Updates flat CuPy arrays, on the current stream; `gradient` may be overwritten."""
        if self.kernel is None:
            self.apply(value, gradient, slots, gradient)
        else:
            name, slot_names, numbers, body = self.kernel()
            kernel = _compiled(name, slot_names, tuple(numbers), body, accumulator(value.dtype) != value.dtype)
            kernel(gradient, *numbers.values(), value, *slots)


@functools.cache
def _compiled(name: str, slots: tuple[str, ...], numbers: tuple[str, ...], body: str, is_short: bool) -> Any:
    computed = "float" if is_short else "T"
    changed = ("value", *slots)
    before = [f"{computed} {one} = ({computed})given_{one};" for one in ("gradient", *numbers, *changed)]
    after = [f"given_{one} = (T){one};" for one in changed]
    return _gpu.load_cupy("an update").ElementwiseKernel(
        ", ".join(["T given_gradient", *(f"float64 given_{one}" for one in numbers)]),
        ", ".join(f"T given_{one}" for one in changed),
        "\n".join([*before, body, *after]),
        f"hpcstrat_{name}",
        no_return=True,
    )
