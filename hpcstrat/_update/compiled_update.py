"""Updates in one pass over memory, by compiled loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from hpcstrat._core.types import Array, ReduceOp
from hpcstrat._memory.intervals import Interval, Shard
from hpcstrat._update import compiled
from hpcstrat._update.chunks import Chunk
from hpcstrat._update.numpy_update import NumpyUpdate, Scratch
from hpcstrat._update.rule import Norms, UpdateRule
from hpcstrat._update.update import InPlace


@final
class CompiledUpdate(NumpyUpdate):
    """An update in host memory by compiled loops; by NumPy where a rule or a dtype has none.

    For the arguments see `NumpyUpdate`.
    """

    def __init__(
        self, chunks: Sequence[Chunk], shards: Sequence[Shard], scratch: Scratch, rank: int = 0
    ) -> None:
        super().__init__(chunks, shards, scratch, rank)
        # Addresses in storage never change; a step fills in only those of the messages.
        self._fixed = compiled.table([(chunk.value, *chunk.slots) for chunk in chunks])
        own = [chunk.shard for chunk in chunks]
        self._starts = np.array([shard.message.start for shard in own], np.int64)
        # Where they start in a gradient that is read in place, in bytes.
        self._starts_in_gradient = np.array(
            [shard.elements.start * shard.dtype.itemsize for shard in own], np.int64
        )
        self._variables = np.array([shard.variable for shard in own], np.intp)
        self._dtypes: list[tuple[np.dtype[Any], Interval]] = []
        stop = 0
        for dtype in dict.fromkeys(shard.dtype for shard in shards):
            start, stop = stop, stop + sum(shard.dtype == dtype for shard in own)
            self._dtypes.append((dtype, Interval(start, stop)))

    def apply(
        self, rule: UpdateRule, messages: Sequence[Array], op: ReduceOp, in_place: InPlace
    ) -> None:
        """See `Update.apply`."""
        loops = self._loops(lambda dtype: compiled.loop(rule, dtype), op)
        if not loops:
            super().apply(rule, messages, op, in_place)
            return
        table = self._table(messages, in_place)
        for loop, chunks in loops:
            loop(table[chunks.slice], len(messages), rule.kernel_constants)

    def add_squares(
        self,
        norms: Norms,
        messages: Sequence[Array],
        op: ReduceOp,
        in_place: InPlace,
        out: Array,
    ) -> None:
        """See `Update.add_squares`."""
        loops = self._loops(lambda dtype: compiled.norm_loop(norms, dtype), op)
        if not loops:
            super().add_squares(norms, messages, op, in_place, out)
            return
        table = self._table(messages, in_place)
        for loop, chunks in loops:
            # One by one: NumPy's sum has another order.
            for of_chunk in loop(table[chunks.slice], len(messages), norms.kernel_constants):
                out += of_chunk

    def _loops(
        self, loop_of: Callable[[np.dtype[Any]], Any], op: ReduceOp
    ) -> list[tuple[Any, Interval]]:
        """The loop of each dtype, and its chunks; empty unless all of them have one."""
        # Loops sum in rank order, like NumPy. Other operations are rare, on small variables.
        if op is not ReduceOp.SUM:
            return []
        # All or none: half an update in C and half in NumPy would need the bookkeeping of both, for
        # a rare case.
        loops = [(loop_of(dtype), chunks) for dtype, chunks in self._dtypes]
        return loops if all(loop is not None for loop, _ in loops) else []

    def _table(self, messages: Sequence[Array], in_place: InPlace) -> compiled.Table:
        """The chunks with these messages, as the loops take them."""
        addresses = np.array([message.ctypes.data for message in messages], np.int64)
        table = np.concatenate([self._fixed, addresses + self._starts[:, None]], axis=1)
        column = self._fixed.shape[1] + self._rank  # messages come last in a row
        for variable, (_, gradient) in in_place.items():
            here = self._variables == variable
            table[here, column] = gradient.ctypes.data + self._starts_in_gradient[here]
        return table
