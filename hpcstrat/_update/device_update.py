"""Updates on a GPU: one kernel per run of elements, on the current stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

from hpcstrat._core import gpu
from hpcstrat._core.types import Array, ReduceOp
from hpcstrat._memory.intervals import Shard
from hpcstrat._update.device_kernels import update_kernel
from hpcstrat._update.device_norms import DeviceNorms, passes_of
from hpcstrat._update.rule import UpdateRule
from hpcstrat._update.update import NOTHING_IN_PLACE, Chunk, InPlace, Update, keep_per_message


@final
class DeviceUpdate(Update):
    """An update on a GPU, by the only message, which has the reduced gradients."""

    def __init__(self, chunks: Sequence[Chunk], shards: Sequence[Shard]) -> None:
        super().__init__(chunks, shards)
        self._norms: dict[Any, DeviceNorms] = {}

    def run(
        self,
        rule: UpdateRule,
        messages: Sequence[Array],
        op: ReduceOp = ReduceOp.SUM,
        in_place: InPlace = NOTHING_IN_PLACE,
        add_up: Callable[[Array], Array] | None = None,
    ) -> None:
        """See `Update.run`."""
        all_parts = keep_per_message(self._parts, messages, self._parts_of)
        operands = [
            (gradient, value, slots)
            for (_, value, slots), (gradient,) in zip(self._chunks, all_parts, strict=True)
        ]
        if rule.norms is None:
            for gradient, value, slots in operands:
                apply_on_gpu(rule, value, gradient, slots)
            return
        passes, last = passes_of(rule)
        # All but the numbers that change from step to step.
        key = last.kernel, *[(each.first.kernel, *each[:2], each.numbers.code) for each in passes]
        if key not in self._norms:
            self._norms[key] = DeviceNorms(
                self._chunks, self._shards, passes, last, add_up is not None
            )
        self._norms[key].run(passes, operands, add_up)


def apply_on_gpu(rule: UpdateRule, value: Array, gradient: Array, slots: Sequence[Array]) -> None:
    """Applies a rule that takes no norms to flat CuPy arrays, on the current stream.

    It may overwrite the gradient.
    """
    if rule.kernel is None:
        # An assignment has no constants and uses no scratch array: large variables need no
        # additional memory.
        xp = gpu.array_module(gradient)
        rule.apply(value, gradient, slots, xp.empty_like(gradient) if rule.constants else gradient)
        return
    update_kernel(rule.kernel, value.dtype)(gradient, *rule.kernel_constants, value, *slots)
