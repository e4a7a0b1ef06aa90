"""Updates in one pass over memory, by compiled loops."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import numpy as np

from hpcstrat._core.types import Array, ReduceOp
from hpcstrat._memory.intervals import Interval, Shard
from hpcstrat._update import compiled
from hpcstrat._update.chunks import Chunk, Memory, chunks_within
from hpcstrat._update.numpy_backend import ScratchBuffers, numpy_update
from hpcstrat._update.rule import Norms, UpdateRule
from hpcstrat._update.update import NONE_IN_PLACE, Backend, InPlace, Update


@final
class CompiledBackend(Backend):
    """Updates chunks in host memory by the compiled loops of a rule, which must exist.

    Args:
        chunks: the chunks.
        local: see `Update`.
        rank: which of the messages is this rank's.
    """

    def __init__(self, chunks: Sequence[Chunk], local: Mapping[int, Shard], rank: int) -> None:
        self._rank = rank
        # Addresses in storage never change; a step fills in only those of the messages.
        self._fixed = compiled.table([(chunk.value, *chunk.slots) for chunk in chunks])
        shards = [chunk.shard for chunk in chunks]
        self._starts = np.array([shard.message.start for shard in shards], np.int64)
        self._dtypes: list[tuple[np.dtype[Any], Interval]] = []
        stop = 0
        for dtype, of_dtype in itertools.groupby(shard.dtype for shard in shards):
            start, stop = stop, stop + len(list(of_dtype))
            self._dtypes.append((dtype, Interval(start, stop)))
        # By variable, its local chunks, and where each starts in its gradient, in bytes.
        self._local: dict[int, tuple[slice, Array]] = {}
        for variable, shard in local.items():
            inside = chunks_within(shards, shard)
            chosen = slice(inside.start, inside.stop)
            first = shard.elements.start * shard.dtype.itemsize - shard.message.start
            self._local[variable] = chosen, self._starts[chosen] + first

    def bind(self, messages: Sequence[Array], in_place: Mapping[int, InPlace]) -> Array:
        """The table of the chunks, for the loops."""
        addresses = np.array([message.ctypes.data for message in messages], np.int64)
        bound = np.concatenate([self._fixed, addresses + self._starts[:, None]], axis=1)
        own = self._fixed.shape[1] + self._rank
        for variable, (_, gradient) in in_place.items():
            chunks, starts = self._local[variable]
            bound[chunks, own] = gradient.ctypes.data + starts
        return bound

    def apply(self, rule: UpdateRule, bound: Array, chunks: Interval, op: ReduceOp) -> None:
        """See `Backend.apply`."""
        for dtype, of_dtype in self._dtypes:
            if here := of_dtype & chunks:
                loop = compiled.loop(rule, dtype)
                assert loop is not None
                loop(bound[here.slice], self._messages_of(bound), rule.kernel_constants)

    def sums(self, norms: Norms, bound: Array, op: ReduceOp) -> Array:
        """See `Backend.sums`."""
        sums = [np.empty((0, norms.size))]
        for dtype, of_dtype in self._dtypes:
            loop = compiled.norm_loop(norms, dtype)
            assert loop is not None
            sums.append(
                loop(bound[of_dtype.slice], self._messages_of(bound), norms.kernel_constants)
            )
        return np.concatenate(sums)

    def _messages_of(self, bound: Array) -> int:
        return bound.shape[1] - self._fixed.shape[1]

    def forget_messages(self) -> None:
        """Does nothing: tables are made for each update."""


@final
class CompiledUpdate(Update):
    """An update in host memory by compiled loops; by NumPy where a rule or a dtype has none.

    Args:
        memory: see `Update`.
        shards: see `Update`.
        scratch: memory for NumPy to work in.
        rank: which of the messages is this rank's.
    """

    def __init__(
        self, memory: Memory, shards: Sequence[Shard], scratch: ScratchBuffers, rank: int
    ) -> None:
        super().__init__(memory, shards, lambda chunks, local: CompiledBackend(chunks, local, rank))
        self._by_numpy = numpy_update(memory, shards, scratch, rank)

    def run(
        self,
        rule: UpdateRule,
        messages: Sequence[Array],
        op: ReduceOp = ReduceOp.SUM,
        in_place: Mapping[int, InPlace] = NONE_IN_PLACE,
        add_up: Callable[[Array], Array] | None = None,
    ) -> None:
        """See `Update.run`."""
        # Loops sum in rank order, like NumPy. Other operations are rare, on small variables.
        is_compiled = op is ReduceOp.SUM and all(
            compiled.loop(rule, dtype) is not None
            and (rule.norms is None or compiled.norm_loop(rule.norms, dtype) is not None)
            for dtype in self._dtypes
        )
        run = super().run if is_compiled else self._by_numpy.run
        run(rule, messages, op, in_place, add_up)

    @functools.cached_property
    def _dtypes(self) -> set[np.dtype[Any]]:
        return {shard.dtype for shard in self._shards}

    def forget_messages(self) -> None:
        """See `Backend.forget_messages`."""
        super().forget_messages()
        self._by_numpy.forget_messages()
