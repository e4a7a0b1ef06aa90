"""Updates on a GPU: one kernel per run of elements, on the current stream."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from hpcstrat._core import gpu
from hpcstrat._core.types import Array, ReduceOp
from hpcstrat._memory.intervals import Shard
from hpcstrat._update.rule import Kernel, UpdateRule
from hpcstrat._update.update import Chunk, InPlace, Update, keep_per_message


@final
class DeviceUpdate(Update):
    """An update on a GPU, by the only message, which has the reduced gradients."""

    def _with(self, chunks: Sequence[Chunk], shard: Shard) -> DeviceUpdate:
        return DeviceUpdate(chunks, [shard])

    def apply(
        self,
        rule: UpdateRule,
        messages: Sequence[Array],
        op: ReduceOp,
        in_place: InPlace,
        out: Array | None = None,
    ) -> None:
        """See `Update.apply`."""
        all_parts = keep_per_message(self._parts, messages, self._parts_of)
        for (_, value, slots), (gradient,) in zip(self._chunks, all_parts, strict=True):
            apply_on_gpu(rule, value, gradient, slots, out)


def apply_on_gpu(
    rule: UpdateRule,
    value: Array,
    gradient: Array,
    slots: Sequence[Array],
    out: Array | None = None,
) -> None:
    """Applies a rule that takes no norms to flat CuPy arrays, on the current stream.

    It may overwrite the gradient. The first pass for norms writes its sums of squares to `out`.
    """
    if rule.kernel is None:
        # An assignment has no constants and uses no scratch array: large variables need no
        # additional memory.
        xp = gpu.array_module(gradient)
        rule.apply(value, gradient, slots, xp.empty_like(gradient) if rule.constants else gradient)
        return
    kernel, kind = rule.kernel, value.dtype.kind
    compiled = _compile(kernel, value.dtype.itemsize == 2, kind == "c")
    if out is None:
        compiled(gradient, *rule.kernel_constants, value, *slots)
        return
    xp = gpu.array_module(gradient)
    dtype = value.dtype if kind == "c" else np.dtype(np.float64)
    terms = [xp.empty(value.shape, dtype) for _ in kernel.terms]
    compiled(gradient, *rule.kernel_constants, value, *slots, *terms)
    for i, term in enumerate(terms):
        out[i] = (xp.abs(term).astype(np.float64) ** 2 if kind == "c" else term).sum()


@functools.cache
def _compile(kernel: Kernel, is_short: bool, is_complex: bool = False) -> Any:
    """The kernel for CuPy; for norms it writes the terms' squares, or the terms if complex."""
    computed = "float" if is_short else "T"
    changed = ("value", *kernel.slots)
    body = [
        f"{computed} {name} = ({computed})given_{name};"
        for name in ("gradient", *kernel.constants, *changed)
    ]
    taken = ["T given_gradient", *(f"float64 given_{name}" for name in kernel.constants)]
    arrays = [f"T given_{name}" for name in changed]
    if kernel.terms:
        terms = range(len(kernel.terms))
        taken += arrays
        arrays = [f"{'T' if is_complex else 'float64'} found_{i}" for i in terms]
        square = (
            "found_{0} = term_{0};"
            if is_complex
            else ("found_{0} = (double)term_{0} * (double)term_{0};")
        )
        body += [f"{computed} term_{i};" for i in terms]
        after = [square.format(i) for i in terms]
    else:
        after = [f"given_{name} = (T){name};" for name in changed]
    return gpu.load_cupy("an update").ElementwiseKernel(
        ", ".join(taken),
        ", ".join(arrays),
        "\n".join([*body, kernel.body, *after]),
        f"hpcstrat_{kernel.name}",
        no_return=True,
    )
