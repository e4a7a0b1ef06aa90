"""Updates in host memory: by NumPy's operations on chunks that fit in cache, or compiled loops.

An update is one pass over all elements, or several if it takes norms:

    HostUpdate              makes the passes, over all variables or over each
      HostRuns              the elements of a pass: those of one dtype, in runs
        Gradients           what it reads of some messages, prepared once for these
        NumpyPass, or       what it does by a kernel, prepared once for this
        CompiledPass
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
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
    AddUp,
    GradientInPlace,
    InPlace,
    KeptByMessage,
    Run,
    Update,
    gradients_of,
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
        rank: which of the messages is this rank's, if there is more than one.
        messages: all ranks' messages, or one.
        in_place: gradients of this rank that are not in its message.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        rank: int,
        messages: Sequence[Array],
        in_place: InPlace = NOTHING_IN_PLACE,
    ) -> None:
        self._runs = runs
        self._of_runs = gradients_of(runs, messages)
        for run, of_run in zip(runs, self._of_runs, strict=True):
            # Only large shards are read in place, and these are runs of their own.
            if run.shard.variable in in_place:
                own = in_place[run.shard.variable].gradient
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
    def table(self) -> compiled.Table:
        """The runs, with their gradients."""
        pairs = zip(self._runs, self._of_runs, strict=True)
        rows = [[run.value, *run.slots, *of_run] for run, of_run in pairs]
        return compiled.table(rows, len(self._of_runs[0]))


class _BoundChunk(NamedTuple):
    """What a pass by NumPy does to a chunk of a run.

    Attributes:
        gradient: gets the reduced gradient.
        calls: those of the kernel.
        terms: if it is for norms, the arrays that have its terms then.
        arrays: without a kernel, the arguments of `UpdateRule.apply`.
    """

    gradient: Array
    calls: Sequence[Callable[[], Any]] = ()
    terms: Sequence[Array] = ()
    arrays: tuple[Any, ...] = ()


@final
class NumpyPass:
    """A pass by NumPy's operations, which go over each chunk a dozen times.

    Args:
        rule: the first rule that it applies; all have the same kernel.
        runs: the runs, of one dtype.
        scratch: memory to work in.
    """

    def __init__(self, rule: UpdateRule, runs: Sequence[Run], scratch: Scratch) -> None:
        self._rule = rule  # the last, and its constants
        self._numbers = np.array(rule.kernel_constants, accumulator(runs[0].value.dtype))
        self._scratch = scratch
        self._chunks = [self._bind(run, chunk) for run in runs for chunk in _chunks_of(run)]

    def run(self, rule: UpdateRule, gradients: Gradients, op: ReduceOp, out: Array | None) -> None:
        """Reduces the gradients, and applies the rule; adds the squares of each term to `out`."""
        if rule is not self._rule:
            self._numbers[:], self._rule = rule.kernel_constants, rule
        all_parts = gradients.of_chunks
        # Fields by name, and `zip`, would make a small update 2 % slower.
        for k, (gradient, calls, terms, arrays) in enumerate(self._chunks):
            reduce_chunk(gradient, all_parts[k], op)
            for call in calls:
                call()
            if arrays:
                rule.apply(*arrays)
            if out is not None:
                out += sums_of_squares(terms)

    def _bind(self, run: Run, chunk: slice) -> _BoundChunk:
        value, slots = run.value[chunk], [slot[chunk] for slot in run.slots]
        gradient, scratch = self._arrays(value.dtype, 2, value.size)
        kernel = self._rule.kernel
        if kernel is None:
            return _BoundChunk(gradient, arrays=(value, gradient, slots, scratch))

        def take(dtype: np.dtype[Any], count: int) -> list[Array]:
            return self._arrays(dtype, 1 + count, value.size)[1:]  # the first is the gradient's

        return _BoundChunk(
            gradient, *kernel.bind(value, gradient, slots, scalars(self._numbers), take)
        )

    def _arrays(self, dtype: np.dtype[Any], count: int, size: int) -> list[Array]:
        """This many arrays from the scratch memory."""
        arrays = self._scratch.setdefault(dtype, [])
        arrays += [np.empty(CHUNK, dtype) for _ in range(count - len(arrays))]
        return [array[:size] for array in arrays[:count]]


@final
class CompiledPass:
    """A pass by a compiled loop.

    Args:
        rule: see `NumpyPass`.
        bind: the loop of its kernel.
        terms: how many terms the kernel has.
    """

    def __init__(self, rule: UpdateRule, bind: compiled.Loop, terms: int) -> None:
        self._rule = rule  # the last, and its constants
        self._numbers = np.array(rule.kernel_constants)
        self._sums = np.empty(terms)
        self._call = bind(self._numbers, self._sums)

    def run(self, rule: UpdateRule, gradients: Gradients, op: ReduceOp, out: Array | None) -> None:
        """See `NumpyPass.run`; the operation is SUM, in rank order as NumPy's."""
        if rule is not self._rule:
            self._numbers[:], self._rule = rule.kernel_constants, rule
        if out is not None:
            self._sums[:] = out
        self._call(*gradients.table)
        if out is not None:
            out[:] = self._sums


@final
class HostRuns:
    """Runs of one dtype in host memory, and what has been prepared for passes over them.

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
        self._scratch = scratch
        self._gradients_in = functools.partial(Gradients, self._runs, rank)
        self._gradients = KeptByMessage(self._gradients_in)
        # By kernel, and whether they may be compiled.
        self._passes: dict[tuple[Kernel | None, bool], NumpyPass | CompiledPass] = {}

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
            gradients = self._gradients_in(messages, in_place)
        else:
            gradients = self._gradients.of(messages)
        key = rule.kernel, compiles
        if key not in self._passes:
            self._passes[key] = self._prepare(rule, compiles)
        self._passes[key].run(rule, gradients, op, out)

    def _prepare(self, rule: UpdateRule, compiles: bool) -> NumpyPass | CompiledPass:
        kernel = rule.kernel
        if compiles and kernel is not None:
            loop = compiled.loop(rule, self._runs[0].shard.dtype)
            if loop is not None:
                return CompiledPass(rule, loop, len(kernel.terms))
        return NumpyPass(rule, self._runs, self._scratch)


@final
class HostUpdate(Update):
    """An update in host memory.

    Args:
        part_of_memory: see `runs_in_memory`.
        shards: for each variable this rank's part, in the order of the message.
        scratch: memory to work in.
        rank: which of the messages is this rank's, if there is more than one.
        compile_after: updates since messages were last forgotten until loops are compiled.

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
    ) -> None:
        self._count = len(shards)  # of the variables
        self._shards = [shard for shard in shards if shard.elements]
        self._runs_of = functools.partial(HostRuns, part_of_memory, scratch=scratch, rank=rank)
        of_dtypes: dict[np.dtype[Any], list[Shard]] = {}
        for shard in self._shards:
            of_dtypes.setdefault(shard.dtype, []).append(shard)
        self._all = [self._runs_of(of_dtype) for of_dtype in of_dtypes.values()]
        self._of_variables: dict[int, HostRuns] = {}
        self._compile_after = compile_after
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
        add_up: AddUp | None = None,
        op: ReduceOp = ReduceOp.SUM,
        in_place: InPlace = NOTHING_IN_PLACE,
    ) -> None:
        """See `Update.run`. The messages are reduced by `op`.

        Gradients that are `in_place` are not, or not wholly, in this rank's message.
        """
        self._updates += 1
        # Other operations than sums are rare, on small variables.
        compiles = self._updates > self._compile_after and op is ReduceOp.SUM
        norms = rule.norms
        if norms is None:
            for runs in self._all:
                runs.one_pass(rule, messages, op, in_place, compiles)
            return
        # For norms over all variables, runs need not end where variables do.
        parts = [(0, runs) for runs in self._all]
        found: list[list[float]] = [[]] * self._count  # of each variable, its norms so far
        for k, each in enumerate(norms.passes[:-1]):
            if not all(each.are_global):
                parts = self._of_each_variable()
            squares = np.zeros((self._count, len(each.are_global)))
            for i, runs in parts:
                before = norms.rule_of(k, found[i])
                runs.one_pass(before, messages, op, in_place, compiles, squares[i])
            # A norm needs all elements of a variable, some of them on other ranks, so nothing can
            # be updated before. The gradients are reduced again: a copy would cost as much memory.
            if add_up is not None:
                squares = add_up(squares, each.are_global)
            roots = np.sqrt(np.where(each.are_global, squares.sum(axis=0), squares)).tolist()
            found = [earlier + own for earlier, own in zip(found, roots, strict=True)]
        for i, runs in parts:
            runs.one_pass(norms.rule_of(-1, found[i]), messages, op, in_place, compiles)

    def _of_each_variable(self) -> list[tuple[int, HostRuns]]:
        """The runs of each variable of which this rank has a shard."""
        if not self._of_variables:
            self._of_variables = {shard.variable: self._runs_of([shard]) for shard in self._shards}
        return [*self._of_variables.items()]
