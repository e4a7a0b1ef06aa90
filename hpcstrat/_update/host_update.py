"""Updates in host memory: by NumPy's calls on chunks that fit in cache, or by compiled loops.

HostUpdate    an update of shards of several dtypes, and the norms of their gradients
HostRuns      the elements of one dtype, or of one variable, in runs
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np

from hpcstrat._communicators.reduction import CHUNK, reduce_chunk
from hpcstrat._core.types import Array, ReduceOp
from hpcstrat._memory.intervals import Interval, Shard
from hpcstrat._update import compiled
from hpcstrat._update.formula import Kernel
from hpcstrat._update.rule import UpdateRule
from hpcstrat._update.update import (
    NOTHING_IN_PLACE,
    GradientInPlace,
    InPlace,
    KeptByMessage,
    Update,
    gradients_of,
    runs_in_memory,
)

Scratch: TypeAlias = "dict[np.dtype[Any], Array]"
"""A chunk of each dtype for sums of gradients, the same for all updates of a storage. Allocated
once: new arrays for each chunk would not be in cache, and cost page faults."""


@final
class HostRuns:
    """Runs of one dtype in host memory, and what has been prepared for them.

    Args:
        part_of_memory: see `runs_in_memory`.
        shards: likewise; at least one, and all have elements.
        scratch: memory to work in.
        rank: which of the messages is this rank's, if there is more than one.
    """

    def __init__(
        self,
        part_of_memory: Callable[[int, int], Array],
        shards: Sequence[Shard],
        scratch: Scratch,
        rank: int,
    ) -> None:
        self._runs = runs_in_memory(part_of_memory, shards, CHUNK)
        self._dtype = shards[0].dtype
        self._sum = scratch_of(scratch, self._dtype)
        self._rank = rank
        self._chunks = KeptByMessage(self._chunks_of)
        self._table = KeptByMessage(self._table_of)
        # The loop of each kernel, the memory from which it reads numbers, and whose these are.
        self._bound: dict[Kernel, tuple[Callable[..., object], Array]] = {}

    def forget_messages(self) -> None:
        """See `Update.forget_messages`."""
        self._chunks.clear()
        self._table.clear()

    def run(
        self,
        rule: UpdateRule,
        numbers: Sequence[float],
        messages: Sequence[Array],
        op: ReduceOp,
        in_place: InPlace,
        compiles: bool,
    ) -> None:
        """Reduces the messages, and applies a rule with these numbers."""
        kernel = rule.kernel
        # Other operations than sums are rare, on small variables.
        if compiles and kernel is not None and op is ReduceOp.SUM:
            bound = self._bound.get(kernel) or self._bind(kernel)
            if bound is not None:
                loop, memory = bound
                memory[:] = numbers
                loop(
                    *(self._table_of(messages, in_place) if in_place else self._table.of(messages))
                )
                return
        chunks = self._chunks_of(messages, in_place) if in_place else self._chunks.of(messages)
        for value, slots, parts in chunks:
            gradient = parts[0]
            if len(parts) > 1:
                gradient = self._sum[: value.size]
                reduce_chunk(gradient, parts, op)
            if kernel is not None:
                kernel.run(numbers, value, gradient, slots)
            else:
                rule.assign(value, gradient)

    def _bind(self, kernel: Kernel) -> tuple[Callable[..., object], Array] | None:
        loop = compiled.loop(kernel, self._dtype)
        if loop is not None:
            memory = np.empty(kernel.numbers)
            self._bound[kernel] = loop(memory), memory
        return self._bound.get(kernel)

    def _gradients(self, messages: Sequence[Array], in_place: InPlace) -> list[list[Array]]:
        """For each run its gradient in each message."""
        found = gradients_of(self._runs, messages)
        for run, of_run in zip(self._runs, found, strict=True):
            # Only large shards are read in place, and these are runs of their own.
            if run.shard.variable in in_place:
                own = in_place[run.shard.variable].gradient
                of_run[self._rank] = own[run.shard.elements.slice]
        return found

    def _chunks_of(
        self, messages: Sequence[Array], in_place: InPlace = NOTHING_IN_PLACE
    ) -> list[tuple[Array, list[Array], list[Array]]]:
        """For each chunk of each run the value, the slots, and the gradient in each message."""
        return [
            (
                run.value[chunk.slice],
                [slot[chunk.slice] for slot in run.slots],
                [gradient[chunk.slice] for gradient in of_run],
            )
            for run, of_run in zip(self._runs, self._gradients(messages, in_place), strict=True)
            for chunk in Interval(0, run.value.size).split(CHUNK)
        ]

    def _table_of(
        self, messages: Sequence[Array], in_place: InPlace = NOTHING_IN_PLACE
    ) -> compiled.Table:
        pairs = zip(self._runs, self._gradients(messages, in_place), strict=True)
        rows = [[run.value, *run.slots, *of_run] for run, of_run in pairs]
        return compiled.table(rows, len(messages))


class NormChunk(NamedTuple):
    """At most `CHUNK` neighbouring elements of a message, whose squares are summed together.

    Attributes:
        shards: which elements of which variables they are.
        starts: where each shard starts in the chunk.
    """

    shards: list[Shard]
    starts: list[int]


@final
class HostUpdate(Update):
    """An update in host memory.

    Args:
        part_of_memory: see `runs_in_memory`.
        shards: for each variable this rank's part, in the order of the message.
        scratch: memory to work in.
        rank: which of the messages is this rank's, if there is more than one.
        compile_after: updates since messages were last forgotten until loops are compiled.
        is_shared: whether all ranks of this host make such an update at the same time.

    Attributes:
        may_be_in_place: whether `in_place` may find gradients; to ask this costs no call.
    """

    def __init__(
        self,
        part_of_memory: Callable[[int, int], Array],
        shards: Sequence[Shard],
        scratch: Scratch,
        rank: int = 0,
        compile_after: float = math.inf,
        is_shared: bool = False,
    ) -> None:
        self._count = len(shards)  # of the variables
        self._dtypes = [*dict.fromkeys(shard.dtype for shard in shards)]
        self._shards = [shard for shard in shards if shard.elements]
        self._scratch, self._rank = scratch, rank
        self._runs_of = functools.partial(HostRuns, part_of_memory, scratch=scratch, rank=rank)
        of_dtypes: dict[np.dtype[Any], list[Shard]] = {}
        for shard in self._shards:
            of_dtypes.setdefault(shard.dtype, []).append(shard)
        self._all = [self._runs_of(of_dtype) for of_dtype in of_dtypes.values()]
        self._of_variables: dict[int, HostRuns] = {}
        self._compile_after = compile_after
        self._is_shared = is_shared
        self._updates = 0
        # A small gradient costs less to copy than to read in place.
        self._large = [shard for shard in self._shards if shard.elements.size >= CHUNK]
        self.may_be_in_place: bool = bool(self._large)

    def in_place(self, gradients: Sequence[Array]) -> InPlace:
        """Large gradients that are as the messages would have them: these are read in place.

        This requires that no other rank needs this rank's gradients of its own shards.
        """
        in_place = {}
        for shard in self._large:
            gradient = gradients[shard.variable]
            # A strided or cast gradient has to be copied in any case, so it goes through the
            # message. A read-only array may be a variable, which other ranks update meanwhile.
            flags = gradient.flags
            if flags.c_contiguous and flags.writeable and gradient.dtype == shard.dtype:
                in_place[shard.variable] = GradientInPlace(shard.elements, gradient.reshape(-1))
        return in_place

    def forget_messages(self) -> None:
        """See `Update.forget_messages`."""
        # Counted anew: for each new message a loop needs a table, which costs more than NumPy's
        # calls take.
        self._updates = 0
        for runs in (*self._all, *self._of_variables.values()):
            runs.forget_messages()

    def run(
        self,
        rule: UpdateRule,
        messages: Sequence[Array],
        op: ReduceOp = ReduceOp.SUM,
        in_place: InPlace = NOTHING_IN_PLACE,
        add_up: Callable[[Array], Array] | None = None,
    ) -> None:
        """See `Update.run`. The messages are reduced by `op`.

        Gradients that are `in_place` are not, or not wholly, in this rank's message. `add_up` adds
        up the ranks' arrays if each has other shards.
        """
        self._updates += 1
        update = self._updates - self._compile_after
        if rule.kernel is not None and 0 < update <= compiled.UPDATES:
            for dtype in self._dtypes:
                compiled.prepare(rule.kernel, dtype, int(update), self._is_shared)
        clip = rule.clip
        if clip is None:
            for runs in self._all:
                runs.run(rule, rule.numbers, messages, op, in_place, update > 0)
            return
        squares = self._squares(messages, op, in_place)
        if add_up is not None:
            squares = add_up(squares)
        if clip.is_global:
            parts = [(float(squares.sum()), runs) for runs in self._all]
        else:
            if not self._of_variables:
                self._of_variables = {one.variable: self._runs_of([one]) for one in self._shards}
            parts = [(float(squares[i]), runs) for i, runs in self._of_variables.items()]
        for squared, runs in parts:
            numbers = (clip.scale(squared), *rule.numbers)
            runs.run(rule, numbers, messages, op, in_place, update > 0)

    def _squares(self, messages: Sequence[Array], op: ReduceOp, in_place: InPlace) -> Array:
        """The sum of the squares of each gradient's elements that this rank has, in float64.

        The bits depend on the messages only, and not on where slots are in memory.
        """
        squares = np.zeros(self._count)
        for shards, starts in self._norm_chunks:
            first, last = shards[0], shards[-1]
            place = slice(first.message.start, last.message.stop)
            parts = [message[place].view(first.dtype) for message in messages]
            if first.variable in in_place:
                own = in_place[first.variable].gradient
                parts[self._rank] = own[first.elements.slice]
            total = parts[0]
            if len(parts) > 1:
                total = scratch_of(self._scratch, first.dtype)[: total.size]
                reduce_chunk(total, parts, op)
            wide = np.abs(total).astype(np.float64)
            wide *= wide
            squares[[shard.variable for shard in shards]] += np.add.reduceat(wide, starts)
        return squares

    @functools.cached_property
    def _norm_chunks(self) -> list[NormChunk]:
        chunks: list[NormChunk] = []
        before: Shard | None = None
        for shard in self._shards:
            is_small = shard.elements.size < CHUNK
            for part in shard.split(CHUNK):
                if (
                    before is not None
                    and is_small
                    and before.elements.size < CHUNK
                    and before.dtype == part.dtype
                    and before.message.stop == part.message.start
                ):
                    shards, starts = chunks[-1]
                    first = shards[0].message.start
                    if part.message.stop - first <= CHUNK * part.dtype.itemsize:
                        shards.append(part)
                        starts.append((part.message.start - first) // part.dtype.itemsize)
                        continue
                chunks.append(NormChunk([part], [0]))
            before = shard
        return chunks


def scratch_of(scratch: Scratch, dtype: np.dtype[Any]) -> Array:
    """A chunk of a dtype."""
    if dtype not in scratch:
        scratch[dtype] = np.empty(CHUNK, dtype)
    return scratch[dtype]
