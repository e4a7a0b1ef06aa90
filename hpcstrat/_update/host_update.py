"""Updates in host memory: by NumPy's operations on chunks that fit in cache, or compiled loops.

HostUpdate   what depends on norms: one pass after another, over all runs or each variable's
HostRuns     the runs of some shards, for which it chooses:
NumpyPass    one pass over them with one kernel, chunk by chunk
CompiledPass the same as one call per dtype
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np

from hpcstrat._communicators.reduction import CHUNK, accumulator, reduce_chunk
from hpcstrat._core.types import Array, ReduceOp
from hpcstrat._memory.intervals import Interval, Shard
from hpcstrat._update import compiled
from hpcstrat._update.kernel import Kernel, scalars
from hpcstrat._update.rule import UpdateRule, sums_of_squares
from hpcstrat._update.update import (
    NOTHING_IN_PLACE,
    InPlace,
    PerMessage,
    Run,
    Update,
    gradients_of,
    keep_per_message,
    runs_in_memory,
)

Scratch: TypeAlias = "dict[np.dtype[Any], list[Array]]"
"""Memory to work in, the same for all updates of a storage. Of each dtype of variables, the first
array is for reduced gradients. Allocated once: new arrays for each chunk would not be in cache, and
cost page faults."""


def _chunks_of(run: Run) -> list[slice]:
    """The elements of a run, in chunks."""
    return [chunk.slice for chunk in Interval(0, run.value.size).split(CHUNK)]


@final
class Gradients:
    """The gradients of some runs, in the forms in which passes take them; each is made once.

    Args:
        runs: the runs.
        messages: all ranks' messages, or one.
        rank: which of them is this rank's.
        in_place: gradients of this rank that are not in its message.
    """

    def __init__(
        self, runs: Sequence[Run], messages: Sequence[Array], rank: int, in_place: InPlace
    ) -> None:
        self._runs = runs
        self._of_runs = gradients_of(runs, messages)
        for run, of_run in zip(runs, self._of_runs, strict=True):
            # Only large shards are read in place, and these are runs of their own.
            if run.shard.variable in in_place:
                _, own = in_place[run.shard.variable]
                of_run[rank] = own[run.shard.elements.slice]

    @functools.cached_property
    def of_chunks(self) -> list[list[Array]]:
        """For each chunk of each run, its gradient in each message."""
        return [
            [gradient[chunk] for gradient in of_run]
            for run, of_run in zip(self._runs, self._of_runs, strict=True)
            for chunk in _chunks_of(run)
        ]

    @functools.cached_property
    def tables(self) -> list[tuple[np.dtype[Any], compiled.Table]]:
        """For each dtype its runs, with their gradients."""
        arrays: dict[np.dtype[Any], list[list[Array]]] = {}
        for run, of_run in zip(self._runs, self._of_runs, strict=True):
            arrays.setdefault(run.shard.dtype, []).append([run.value, *run.slots, *of_run])
        count = len(self._of_runs[0]) if self._of_runs else 0
        return [(dtype, compiled.table(of_dtype, count)) for dtype, of_dtype in arrays.items()]


class _BoundChunk(NamedTuple):
    gradient: Array  # the reduced gradient
    calls: Sequence[Callable[[], Any]] = ()  # of the kernel
    terms: Sequence[Array] = ()  # what they leave for norms
    arrays: tuple[Any, ...] = ()  # without a kernel, the arguments of `UpdateRule.apply`


@final
class NumpyPass:
    """A pass by NumPy's operations, which go over each chunk a dozen times.

    Args:
        kernel: the kernel; `None` for rules without one, which are functions.
        runs: the runs.
        scratch: memory to work in.
    """

    def __init__(self, kernel: Kernel | None, runs: Sequence[Run], scratch: Scratch) -> None:
        self._kernel = kernel
        self._scratch = scratch
        self._rule: UpdateRule | None = None  # the last
        self._numbers: dict[np.dtype[Any], Array] = {}  # its constants, which calls read
        self._chunks = [self._bind(run, chunk) for run in runs for chunk in _chunks_of(run)]

    def run(self, rule: UpdateRule, gradients: Gradients, op: ReduceOp, out: Array | None) -> None:
        """Reduces the gradients, and applies the rule; adds the squares of each term to `out`."""
        if rule is not self._rule:
            for numbers in self._numbers.values():
                numbers[:] = rule.kernel_constants
            self._rule = rule
        all_parts = gradients.of_chunks
        for k, (gradient, calls, terms, arrays) in enumerate(self._chunks):
            reduce_chunk(gradient, all_parts[k], op)
            for call in calls:
                call()
            if arrays:
                rule.apply(*arrays)
            if out is not None:
                out += sums_of_squares(terms)

    def _bind(self, run: Run, chunk: slice) -> _BoundChunk:
        """Prepares the kernel for a chunk, with its numbers, which change from step to step."""
        value, slots = run.value[chunk], tuple([slot[chunk] for slot in run.slots])
        gradient, scratch = self._arrays(value.dtype, 2, value.size)
        if self._kernel is None:
            return _BoundChunk(gradient, arrays=(value, gradient, slots, scratch))
        wide = accumulator(value.dtype)
        if wide not in self._numbers:
            self._numbers[wide] = np.empty(len(self._kernel.constants), wide)

        def take(dtype: np.dtype[Any], count: int) -> list[Array]:
            return self._arrays(dtype, 1 + count, value.size)[1:]  # the first is the gradient's

        numbers = scalars(self._numbers[wide])
        calls, terms = self._kernel.bind(value, gradient, slots, numbers, take)
        return _BoundChunk(gradient, calls, terms)

    def _arrays(self, dtype: np.dtype[Any], count: int, size: int) -> list[Array]:
        """This many arrays from the scratch memory."""
        arrays = self._scratch.setdefault(dtype, [])
        arrays += [np.empty(CHUNK, dtype) for _ in range(count - len(arrays))]
        return [array[:size] for array in arrays[:count]]


@final
class CompiledPass:
    """A pass by compiled loops.

    Args:
        kernel: the kernel.
        loops: its loop for each dtype.
    """

    def __init__(self, kernel: Kernel, loops: Mapping[np.dtype[Any], compiled.Loop]) -> None:
        self._rule: UpdateRule | None = None  # the last
        self._numbers = np.empty(len(kernel.constants))  # its constants
        self._sums = np.empty(len(kernel.terms))
        self._calls = {dtype: bind(self._numbers, self._sums) for dtype, bind in loops.items()}

    def run(self, rule: UpdateRule, gradients: Gradients, op: ReduceOp, out: Array | None) -> None:
        """See `NumpyPass.run`; the operation is SUM, in rank order as NumPy's."""
        if rule is not self._rule:
            self._numbers[:], self._rule = rule.kernel_constants, rule
        if out is not None:
            self._sums.fill(0)
        for dtype, table in gradients.tables:
            self._calls[dtype](*table)
        if out is not None:
            out += self._sums


@final
class HostRuns:
    """Runs in host memory, and what has been prepared for passes over them.

    Args:
        part_of_memory: see `runs_in_memory`.
        shards: see `HostUpdate`.
        scratch: memory to work in.
        rank: which of the messages is this rank's.
    """

    def __init__(
        self,
        part_of_memory: Callable[[int, int], Array],
        shards: Sequence[Shard],
        scratch: Scratch,
        rank: int,
    ) -> None:
        self._runs = runs_in_memory(part_of_memory, shards, CHUNK)
        self._dtypes = dict.fromkeys(shard.dtype for shard in shards)
        self._scratch = scratch
        self._rank = rank
        self._gradients: PerMessage[Gradients] = {}
        # By whether they may be compiled, then by kernel.
        self._passes: dict[bool, dict[Kernel | None, NumpyPass | CompiledPass]]
        self._passes = {False: {}, True: {}}

    def forget_messages(self) -> None:
        """See `Update.forget_messages`."""
        self._gradients.clear()

    def one_pass(
        self,
        rule: UpdateRule,
        messages: Sequence[Array],
        op: ReduceOp,
        in_place: InPlace,
        compiles: bool,
        out: Array | None = None,
    ) -> None:
        """Reduces the messages, and applies a rule that takes no norms.

        A pass for norms adds the sum of squares of each term to `out`.
        """
        if in_place:
            gradients = Gradients(self._runs, messages, self._rank, in_place)
        else:
            gradients = keep_per_message(self._gradients, messages, self._gradients_in)
        kernel, passes = rule.kernel, self._passes[compiles]
        if kernel not in passes:
            passes[kernel] = self._prepare(rule, compiles)
        passes[kernel].run(rule, gradients, op, out)

    def _gradients_in(self, messages: Sequence[Array]) -> Gradients:
        return Gradients(self._runs, messages, self._rank, NOTHING_IN_PLACE)

    def _prepare(self, rule: UpdateRule, compiles: bool) -> NumpyPass | CompiledPass:
        kernel = rule.kernel
        if compiles and kernel is not None:
            # All or none: half an update in C and half in NumPy would need the bookkeeping of both,
            # for a rare case.
            found = {dtype: compiled.loop(rule, dtype) for dtype in self._dtypes}
            loops = {dtype: loop for dtype, loop in found.items() if loop is not None}
            if len(loops) == len(found):
                return CompiledPass(kernel, loops)
        return NumpyPass(kernel, self._runs, self._scratch)


@final
class HostUpdate(Update):
    """An update in host memory.

    Args:
        part_of_memory: see `runs_in_memory`.
        shards: for each variable this rank's part, in the order of the message.
        scratch: memory to work in.
        rank: which of the messages is this rank's.
        compile_after: updates since messages were last forgotten until loops are compiled, where
            the rule and all dtypes have one.
    """

    def __init__(
        self,
        part_of_memory: Callable[[int, int], Array],
        shards: Sequence[Shard],
        scratch: Scratch,
        rank: int = 0,
        compile_after: float = math.inf,
    ) -> None:
        self._shards = shards
        self._runs_of = functools.partial(HostRuns, part_of_memory, scratch=scratch, rank=rank)
        self._all = self._runs_of(shards)
        self._of_variables: dict[int, HostRuns] = {}
        self._compile_after = compile_after
        self._updates = 0
        # A small gradient costs less to copy than to read in place.
        self._large = [shard for shard in shards if shard.elements.size >= CHUNK]
        self.may_be_in_place = bool(self._large)

    def in_place(self, gradients: Sequence[Array]) -> InPlace:
        """Large gradients that are as the messages would have them."""
        in_place = {}
        for shard in self._large:
            gradient = gradients[shard.variable]
            # A strided or cast gradient has to be copied in any case, so it goes through the
            # message. A read-only array may be a variable, which other ranks update meanwhile.
            flags = gradient.flags
            if flags.c_contiguous and flags.writeable and gradient.dtype == shard.dtype:
                in_place[shard.variable] = shard.elements, gradient.reshape(-1)
        return in_place

    def forget_messages(self) -> None:
        """See `Update.forget_messages`."""
        self._updates = 0  # tables for loops cost more than NumPy's calls take
        for of_shards in (self._all, *self._of_variables.values()):
            of_shards.forget_messages()

    def run(
        self,
        rule: UpdateRule,
        messages: Sequence[Array],
        op: ReduceOp = ReduceOp.SUM,
        in_place: InPlace = NOTHING_IN_PLACE,
        add_up: Callable[[Array], Array] | None = None,
    ) -> None:
        """See `Update.run`."""
        self._updates += 1
        # Other operations than sums are rare, on small variables.
        compiles = self._updates > self._compile_after and op is ReduceOp.SUM
        norms = rule.norms
        if norms is None:
            self._all.one_pass(rule, messages, op, in_place, compiles)
            return
        # For norms over all variables, runs need not end where variables do.
        parts: Mapping[int, HostRuns] = {0: self._all}
        found: list[list[float]] = [[]]  # of each part, its norms so far
        for k, one in enumerate(norms.passes[:-1]):
            are_global = one.are_global
            if len(found) == 1 and not all(are_global):
                parts, found = self._of_each_variable(), found * len(self._shards)
            # As many columns in every pass, as a shared array of central storage has.
            squares, count = np.zeros((len(self._shards), norms.most)), len(are_global)
            for i, part in parts.items():
                before = norms.rule_of(k, found[i])
                part.one_pass(before, messages, op, in_place, compiles, squares[i, :count])
            # A norm needs all elements of a variable, some of them on other ranks, so nothing can
            # be updated before. The gradients are reduced again: a copy would cost as much memory.
            sums = (squares if add_up is None else add_up(squares))[:, :count]
            sums = np.where(are_global, sums.sum(axis=0), sums)
            roots = np.sqrt(sums[: len(found)]).tolist()
            found = [before + own for before, own in zip(found, roots, strict=True)]
        for i, part in parts.items():
            part.one_pass(norms.rule_of(-1, found[i]), messages, op, in_place, compiles)

    def _of_each_variable(self) -> dict[int, HostRuns]:
        """The runs of each variable of which this rank has a shard."""
        if not self._of_variables:
            self._of_variables = {
                shard.variable: self._runs_of([shard]) for shard in self._shards if shard.elements
            }
        return self._of_variables
