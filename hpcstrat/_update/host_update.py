"""Updates in host memory: by NumPy's calls on chunks that fit in cache, or by compiled loops.

HostUpdate  an update of some shards
HostRuns    elements of one dtype, in runs: those that change together, or whose norm is sought
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, final

import numpy as np

from hpcstrat._core.types import Array, ReduceOp
from hpcstrat._memory.intervals import ElementRange
from hpcstrat._memory.shards import Shard, runs
from hpcstrat._transports.reduction import CHUNK, reduce_chunk
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
"""A chunk of each dtype for gradients, the same for all updates of a storage. Allocated once: new
arrays for each chunk would not be in cache, and cost page faults."""


@final
class HostRuns:
    """Runs of one dtype in host memory, and what has been prepared for them.

    Args:
        shards: the runs.
        arrays: of each the value and the slots, flat; nothing if only norms are sought.
        scratch: memory to work in.
        rank: which of the messages is this rank's, if there is more than one.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        arrays: Sequence[Sequence[Array]],
        scratch: Scratch,
        rank: int,
    ) -> None:
        self._shards = shards
        self._arrays = arrays
        self._dtype = shards[0].dtype
        self._gradient = scratch.setdefault(self._dtype, np.empty(CHUNK, self._dtype))
        self._rank = rank
        self._chunks = KeptByMessage(self._chunks_of)
        self._table = KeptByMessage(self._table_of)
        # Of each kernel its loop, and the memory from which that reads its numbers.
        self._bound: dict[Kernel, tuple[compiled.Call, Array]] = {}
        self._written: Sequence[float] | None = None  # the last numbers, of one of them
        self._squares = np.empty(len(shards))

    def forget_messages(self) -> None:
        """See `Update.forget_messages`."""
        self._chunks.clear()
        self._table.clear()

    # Gradients are reduced by `op` from all ranks' messages, or from the only one that counts. Some
    # of this rank's may be `in_place`, and not, or not wholly, in its message.

    def apply(
        self,
        rule: UpdateRule,
        numbers: Sequence[float],
        messages: Sequence[Array],
        op: ReduceOp,
        in_place: InPlace,
        compiles: bool,
    ) -> None:
        """Applies a rule with these numbers, by a compiled loop if it `compiles` and has one."""
        kernel = rule.kernel
        if kernel is None:
            for _, (value,), gradient in self._reduced(messages, op, in_place):
                rule.assign(value, gradient)
        elif compiles and (bound := self._bound.get(kernel) or self._bind(kernel)):
            loop, memory = bound
            if numbers is not self._written:
                memory[:] = self._written = numbers
            loop(*self._table.of(messages, in_place))
        else:
            for _, (value, *slots), gradient in self._reduced(messages, op, in_place):
                kernel.run(numbers, value, gradient, slots)

    def squares(
        self,
        kernel: Kernel,
        messages: Sequence[Array],
        op: ReduceOp,
        in_place: InPlace,
        compiles: bool,
    ) -> Array:
        """The sum of the squares of each run's gradient, in float64, valid until the next call."""
        if compiles and (bound := self._bound.get(kernel) or self._bind(kernel, self._squares)):
            loop, _ = bound
            loop(*self._table.of(messages, in_place))
        else:
            self._squares[:] = 0
            for i, _, gradient in self._reduced(messages, op, in_place):
                self._squares[i] += compiled.sum_of_squares(gradient)
        return self._squares

    def _bind(
        self, kernel: Kernel, squares: Array | None = None
    ) -> tuple[compiled.Call, Array] | None:
        """The loop of a kernel, or of squares, if there is one."""
        loops = compiled.loops(kernel, self._dtype)
        if loops is None:
            return None
        memory = np.empty(kernel.numbers) if squares is None else squares
        bind = loops.update if squares is None else loops.squares
        self._bound[kernel] = bind(memory), memory
        return self._bound[kernel]

    def _reduced(
        self, messages: Sequence[Array], op: ReduceOp, in_place: InPlace
    ) -> Iterator[tuple[int, Sequence[Array], Array]]:
        """Of each chunk its run, its part of the run's arrays, and the reduced gradient."""
        for i, arrays, parts in self._chunks.of(messages, in_place):
            gradient = parts[0]
            if len(parts) > 1:
                gradient = self._gradient[: gradient.size]
                reduce_chunk(gradient, parts, op)
            yield i, arrays, gradient

    def _chunks_of(
        self, messages: Sequence[Array], in_place: InPlace = NOTHING_IN_PLACE
    ) -> list[tuple[int, list[Array], list[Array]]]:
        rows = self._rows_of(messages, in_place)
        return [
            (i, [one[chunk.slice] for one in arrays], [one[chunk.slice] for one in gradients])
            for i, (arrays, gradients) in enumerate(rows)
            for chunk in ElementRange(0, gradients[0].size).split(CHUNK)
        ]

    def _table_of(
        self, messages: Sequence[Array], in_place: InPlace = NOTHING_IN_PLACE
    ) -> compiled.Table:
        rows = self._rows_of(messages, in_place)
        return compiled.table([[*arrays, *of_run] for arrays, of_run in rows], len(messages))

    def _rows_of(
        self, messages: Sequence[Array], in_place: InPlace
    ) -> Iterator[tuple[Sequence[Array], Sequence[Array]]]:
        gradients = gradients_of(self._shards, messages, self._rank, in_place)
        return zip(self._arrays, gradients, strict=True)


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
        alignment: see `shards.runs`.

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
        alignment: int = 1,
    ) -> None:
        self._shards = shards
        self._dtypes = [*dict.fromkeys(shard.dtype for shard in shards)]
        self._part_of_memory = part_of_memory
        self._scratch, self._rank = scratch, rank
        self._compile_after, self._is_shared = compile_after, is_shared
        self._alignment = alignment
        self._updates = 0
        self._uses: dict[Kernel, int] = {}
        self._ready: Kernel | None = None  # the last that needs no `prepare` any more
        # A small gradient costs less to copy than to read in place.
        self._large = [shard for shard in shards if shard.elements.size >= CHUNK]
        self.may_be_in_place: bool = bool(self._large)

    # The runs of all variables, and for norms what is next to each other in the message, if all are
    # clipped together; or both of each variable, if each is clipped alone. The order of squares
    # depends on the message only, and not on where slots are in memory, or a restored program would
    # not go on bit for bit.

    @functools.cached_property
    def _all(self) -> list[HostRuns]:
        return [self._runs_of(shards) for shards in self._by_dtype(self._shards)]

    @functools.cached_property
    def _in_message(self) -> list[HostRuns]:
        found = runs([shard._replace(memory=()) for shard in self._shards], alone=CHUNK)
        return [self._norms_of(shards) for shards in self._by_dtype(found)]

    def _by_dtype(self, shards: Sequence[Shard]) -> list[list[Shard]]:
        present = [shard for shard in shards if shard.elements]
        of_dtypes = [[one for one in present if one.dtype == dtype] for dtype in self._dtypes]
        return [*filter(None, of_dtypes)]

    @functools.cached_property
    def _of_variables(self) -> list[tuple[int, HostRuns, HostRuns]]:
        present = [shard for shard in self._shards if shard.elements]
        return [(one.variable, self._norms_of([one]), self._runs_of([one])) for one in present]

    def _runs_of(self, shards: Sequence[Shard]) -> HostRuns:
        found = runs_in_memory(self._part_of_memory, shards, CHUNK, self._alignment)
        arrays = [(run.value, *run.slots) for run in found]
        return HostRuns([run.shard for run in found], arrays, self._scratch, self._rank)

    def _norms_of(self, shards: Sequence[Shard]) -> HostRuns:
        return HostRuns(shards, [()] * len(shards), self._scratch, self._rank)

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
        own = vars(self)
        of_variables = [one for _, *both in own.get("_of_variables", ()) for one in both]
        for one in (*own.get("_all", ()), *own.get("_in_message", ()), *of_variables):
            one.forget_messages()

    def _prepare_loops(self, kernel: Kernel) -> None:
        use = self._uses.get(kernel, 0) + 1
        if use > compiled.USES:
            self._ready = kernel
            return
        self._uses[kernel] = use
        for dtype in self._dtypes:
            compiled.prepare(kernel, dtype, use, self._is_shared)

    def run(
        self,
        rule: UpdateRule,
        messages: Sequence[Array],
        op: ReduceOp = ReduceOp.SUM,
        in_place: InPlace = NOTHING_IN_PLACE,
        *,
        add_up: Callable[[Array], Array] | None = None,
    ) -> None:
        """See `Update.run`. The messages are reduced by `op`.

        Gradients that are `in_place` are not, or not wholly, in this rank's message. `add_up` adds
        up the ranks' sums of squares, if each has other shards.
        """
        self._updates += 1
        kernel, clip = rule.kernel, rule.clip
        compiles = self._updates > self._compile_after
        if compiles and kernel is not None and kernel is not self._ready:
            self._prepare_loops(kernel)
        compiles = compiles and op is ReduceOp.SUM  # others are rare, on small variables
        if kernel is None or clip is None:
            for one in self._all:
                one.apply(rule, rule.numbers, messages, op, in_place, compiles)
            return
        given = messages, op, in_place, compiles
        squares = np.zeros(1 if clip.is_global else len(self._shards))
        if clip.is_global:
            for norms in self._in_message:
                squares += norms.squares(kernel, *given).sum()
        else:
            for variable, norms, _ in self._of_variables:
                squares[variable] = norms.squares(kernel, *given)[0]
        if add_up is not None:
            squares = add_up(squares)
        scales = [clip.scale(squared) for squared in squares.tolist()]
        if clip.is_global:
            for one in self._all:
                one.apply(rule, (*scales, *rule.numbers), *given)
        else:
            for variable, _, one in self._of_variables:
                one.apply(rule, (scales[variable], *rule.numbers), *given)
