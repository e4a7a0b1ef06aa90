"""What an update does to this rank's shards of the variables, once the gradients are there.

It goes through *chunks*: shards with their memory, which fit in cache on a host. A chunk is a range
of elements of one dtype, of a large shard or of several small ones:

    variables  |     w      |b |        v         |c|d|   u    |
    ranks      |    rank 0     |    rank 1     |    rank 2     |
    chunks     |------|-----|--|------|------|-|------|------|-|

Here each rank has an equal share of all elements, which it cuts into its own chunks: equal work,
although one variable may be larger than all others together. Small shards that follow each other,
such as the end of v, c and d, are in one chunk: they cost no calls of their own. This is right
because rules are elementwise. Norms of variables need to know where these end, so chunks are cut
there.
"""

from __future__ import annotations

import abc
import bisect
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar, final

import numpy as np

from hpcstrat._communicators.reduction import CHUNK, accumulator, reduce_chunk
from hpcstrat._core.types import Array, ReduceOp
from hpcstrat._memory.intervals import Interval, Shard, runs
from hpcstrat._update import compiled
from hpcstrat._update.kernel import Kernel, scalars
from hpcstrat._update.rule import UpdateRule, sums_of_squares

T = TypeVar("T")
InPlace: TypeAlias = Mapping[int, tuple[Interval, Array]]
"""Gradients that this rank reads where they are, by variable: the elements that are therefore not
in its message, and the whole gradient, flat."""
NOTHING_IN_PLACE: InPlace = MappingProxyType({})


Chunk: TypeAlias = tuple[Shard, Array, tuple[Array, ...]]
"""Elements that are updated together: which, and where they are in storage: of the variables, and
of each slot."""


def chunks_of(
    part_of_memory: Callable[[int, int], Array],
    shards: Sequence[Shard],
    count: int = CHUNK,
    alignment: int = 1,
) -> list[Chunk]:
    """The chunks of some shards. No chunk has elements of a large shard and of another one.

    Args:
        part_of_memory: returns the bytes between two addresses as a flat array.
        shards: in the order of the message.
        count: the most elements of a chunk; a shard that has as many is large.
        alignment: see `runs`.
    """
    chunks: list[Chunk] = []
    for run in runs(shards, alignment, count):
        for shard in run.split(count):
            value, *slots = [part_of_memory(*place).view(shard.dtype) for place in shard.memory]
            chunks.append((shard, value, tuple(slots)))
    return chunks


PerMessage: TypeAlias = dict[tuple[int, int], tuple[Sequence[Array], T]]


def keep_per_message(
    kept: PerMessage[T],
    messages: Sequence[Array],
    make: Callable[[Sequence[Array]], T],
) -> T:
    """What is made once per message. An update's messages are mostly the same few arrays.

    Args:
        kept: what was made before, by message.
        messages: of all ranks; the first one stands for all.
        make: makes it.
    """
    # By id, because arrays have no hash; messages are kept, so that no other gets their ids.
    key = id(messages[0]), len(messages)
    if key not in kept:
        if len(kept) == 3:  # `SharedMemoryCommunicator`: two records, a mailbox before it grew
            kept.clear()
        kept[key] = messages, make(messages)
    return kept[key][1]


class Update(abc.ABC):
    """The update of this rank's shards of some variables.

    Args:
        chunks: the chunks of the shards.
        shards: for each variable this rank's part, in the order of the message.

    Attributes:
        may_be_in_place: whether `in_place` may find gradients; asked first, as it costs no call.
    """

    def __init__(self, chunks: Sequence[Chunk], shards: Sequence[Shard]) -> None:
        self._chunks = chunks
        self._shards = shards
        self._parts: PerMessage[list[list[Array]]] = {}
        self.may_be_in_place: bool = False

    def forget_messages(self) -> None:
        """Drops what it keeps for the next update with the same messages, and so the messages."""
        self._parts.clear()

    def in_place(self, gradients: Sequence[Array]) -> InPlace:
        """Those of this rank's gradients that are read in place; here there are none.

        This requires that no other rank needs this rank's gradients of its own shards.
        """
        return NOTHING_IN_PLACE

    @abc.abstractmethod
    def run(
        self,
        rule: UpdateRule,
        messages: Sequence[Array],
        op: ReduceOp = ReduceOp.SUM,
        in_place: InPlace = NOTHING_IN_PLACE,
        add_up: Callable[[Array], Array] | None = None,
    ) -> None:
        """Reduces the messages, and updates the variables and slots.

        Args:
            rule: the update.
            messages: all ranks', or the only one that counts.
            op: how the messages are reduced.
            in_place: gradients of this rank that are not, or not wholly, in its message.
            add_up: adds up an array of float64 over the ranks that have the other shards; `None` if
                this rank has all.
        """

    def _parts_of(self, messages: Sequence[Array]) -> list[list[Array]]:
        """For each chunk its gradient in each message."""
        return [
            [message[shard.message.slice].view(shard.dtype) for message in messages]
            for shard, _, _ in self._chunks
        ]


Scratch: TypeAlias = "dict[np.dtype[Any], list[Array]]"
"""Memory to work in, the same for all updates of a storage. Of each dtype, the first array is for
reduced gradients. Allocated once: new arrays for each chunk would not be in cache, and cost page
faults."""
BoundLoops: TypeAlias = "tuple[list[compiled.Loop], Array, PerMessage[list[compiled.Bound]]]"
"""Of a kernel, the loop of each dtype; their numbers; the loops bound to messages."""
BoundChunk: TypeAlias = tuple[Array, list[Callable[[], Any]], list[Array]]
"""Of a chunk, the array for its reduced gradient; calls that apply a rule; the terms of norms."""


@final
class HostUpdate(Update):
    """An update in host memory.

    Args:
        chunks: of at most `CHUNK` elements; see `chunks_of`.
        shards: see `Update`.
        scratch: memory to work in.
        rank: which of the messages is this rank's.
        compile_after: passes since messages were last forgotten until loops are compiled, where the
            rule and all dtypes have one.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        shards: Sequence[Shard],
        scratch: Scratch,
        rank: int = 0,
        compile_after: float = math.inf,
    ) -> None:
        super().__init__(chunks, shards)
        self._of_variables: dict[int, HostUpdate] = {}
        self._scratch = scratch
        self._rank = rank
        self._compile_after = compile_after
        self._passes = 0
        self._loops: CompiledChunks | None = None
        # These have chunks of their own. A small gradient costs less to copy than to read in place.
        self._large = [shard for shard in shards if shard.elements.size >= CHUNK]
        self.may_be_in_place = bool(self._large)
        # Of the last rule: its calls, and the numbers that they read in place, which each step
        # overwrites. They are kept by kernel.
        self._rule: UpdateRule | None = None
        self._bound: list[BoundChunk] = []
        self._numbers: dict[np.dtype[Any], Array] = {}
        self._kept: dict[Kernel | None, tuple[list[BoundChunk], dict[np.dtype[Any], Array]]] = {}

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
        super().forget_messages()
        self._passes = 0  # to bind loops to messages costs more than NumPy's calls take
        if self._loops is not None:
            self._loops.forget_messages()
        for update in self._of_variables.values():
            update.forget_messages()

    def run(
        self,
        rule: UpdateRule,
        messages: Sequence[Array],
        op: ReduceOp = ReduceOp.SUM,
        in_place: InPlace = NOTHING_IN_PLACE,
        add_up: Callable[[Array], Array] | None = None,
    ) -> None:
        """See `Update.run`."""
        norms = rule.norms
        if norms is None:
            self.one_pass(rule, messages, op, in_place)
            return
        # For norms over all variables, chunks need not end where variables do.
        updates: Mapping[int, HostUpdate] = {0: self}
        found: list[list[float]] = [[]]  # of each update, its norms so far
        for k, one in enumerate(norms.passes[:-1]):
            are_global = one.are_global
            if len(found) == 1 and not all(are_global):
                updates, found = self._of_each_variable(), found * len(self._shards)
            # As many columns in every pass, as a shared array of central storage has.
            squares, count = np.zeros((len(self._shards), norms.most)), len(are_global)
            for i, update in updates.items():
                before = norms.rule_of(k, found[i])
                update.one_pass(before, messages, op, in_place, squares[i, :count])
            # A norm needs all elements of a variable, some of them on other ranks, so nothing can
            # be updated before. The gradients are reduced again: a copy would cost as much memory.
            sums = (squares if add_up is None else add_up(squares))[:, :count]
            sums = np.where(are_global, sums.sum(axis=0), sums)
            roots = np.sqrt(sums[: len(found)]).tolist()
            found = [before + own for before, own in zip(found, roots, strict=True)]
        for i, update in updates.items():
            update.one_pass(norms.rule_of(-1, found[i]), messages, op, in_place)

    def _of_each_variable(self) -> dict[int, HostUpdate]:
        """The update of each variable of which this rank has a shard."""
        if not self._of_variables:
            self._of_variables = {
                shard.variable: HostUpdate(
                    _chunks_in(shard, self._chunks),
                    [shard],
                    self._scratch,
                    self._rank,
                    self._compile_after,
                )
                for shard in self._shards
                if shard.elements
            }
        return self._of_variables

    def one_pass(
        self,
        rule: UpdateRule,
        messages: Sequence[Array],
        op: ReduceOp,
        in_place: InPlace,
        out: Array | None = None,
    ) -> None:
        """Reduces the messages, and applies a rule that takes no norms.

        A pass for norms adds the sum of squares of each term to `out`.
        """
        self._passes += 1
        # Loops sum in rank order, like NumPy. Other operations are rare, on small variables.
        if self._passes > self._compile_after and op is ReduceOp.SUM:
            if self._loops is None:
                self._loops = CompiledChunks(self._chunks, self._shards, self._rank)
            if self._loops.run(rule, messages, in_place, out):
                return
        if rule is not self._rule:
            self._bind(rule)
        all_parts = keep_per_message(self._parts, messages, self._parts_of)
        if in_place:
            all_parts = self._with_in_place(all_parts, in_place)
        for k, (gradient, calls, terms) in enumerate(self._bound):
            reduce_chunk(gradient, all_parts[k], op)
            for call in calls:
                call()
            if out is not None:
                out += sums_of_squares(terms)

    def _bind(self, rule: UpdateRule) -> None:
        """Prepares a rule for each chunk, unless only its numbers differ from an earlier one."""
        kernel = rule.kernel
        if kernel is None or kernel not in self._kept:
            self._numbers = {}
            self._bound = [self._bind_chunk(rule, value, slots) for _, value, slots in self._chunks]
            self._kept[kernel] = self._bound, self._numbers
        self._bound, self._numbers = self._kept[kernel]
        for numbers in self._numbers.values():
            numbers[:] = rule.kernel_constants
        self._rule = rule

    def _bind_chunk(self, rule: UpdateRule, value: Array, slots: tuple[Array, ...]) -> BoundChunk:
        kernel, wide = rule.kernel, accumulator(value.dtype)
        gradient, scratch = self._arrays(value.dtype, 2, value.size)
        if kernel is None:
            call = functools.partial(rule.apply, value, gradient, slots, scratch)
            return gradient, [call], []
        if wide not in self._numbers:
            self._numbers[wide] = np.empty(len(kernel.constants), wide)

        def take(dtype: np.dtype[Any], count: int) -> list[Array]:
            return self._arrays(dtype, 1 + count, value.size)[1:]  # the first is the gradient's

        numbers = scalars(self._numbers[wide])
        return gradient, *kernel.bind(value, gradient, slots, numbers, take)

    def _arrays(self, dtype: np.dtype[Any], count: int, size: int) -> list[Array]:
        """This many arrays from the scratch memory."""
        arrays = self._scratch.setdefault(dtype, [])
        arrays += [np.empty(CHUNK, dtype) for _ in range(count - len(arrays))]
        return [array[:size] for array in arrays[:count]]

    def _with_in_place(self, all_parts: list[list[Array]], in_place: InPlace) -> list[list[Array]]:
        """The chunks' gradients, this rank's own from where they are."""
        all_parts = list(all_parts)
        for k, (shard, _, _) in enumerate(self._chunks):
            if shard.variable in in_place:
                _, own = in_place[shard.variable]
                all_parts[k] = list(all_parts[k])
                all_parts[k][self._rank] = own[shard.elements.slice]
        return all_parts


@final
class CompiledChunks:
    """Compiled loops over the chunks of an update, bound to their addresses.

    Args:
        chunks: see `HostUpdate`.
        shards: see `Update`.
        rank: which of the messages is this rank's.
    """

    def __init__(self, chunks: Sequence[Chunk], shards: Sequence[Shard], rank: int) -> None:
        self._fixed = compiled.table([(value, *slots) for _, value, slots in chunks])
        self._column = self._fixed.shape[1] + rank  # messages come last in a row
        in_chunks = [shard for shard, _, _ in chunks]
        self._starts = np.array([shard.message.start for shard in in_chunks], np.int64)
        # Where they start in a gradient that is read in place, in bytes.
        self._starts_in_gradient = np.array(
            [shard.elements.start * shard.dtype.itemsize for shard in in_chunks], np.int64
        )
        self._variables = np.array([shard.variable for shard in in_chunks], np.intp)
        self._dtypes: list[tuple[np.dtype[Any], Interval]] = []
        stop = 0
        for dtype in dict.fromkeys(shard.dtype for shard in shards):
            start, stop = stop, stop + sum(shard.dtype == dtype for shard in in_chunks)
            self._dtypes.append((dtype, Interval(start, stop)))
        self._rule: UpdateRule | None = None  # the last
        self._of_kernels: dict[Kernel | None, BoundLoops | None] = {}

    def run(
        self, rule: UpdateRule, messages: Sequence[Array], in_place: InPlace, out: Array | None
    ) -> bool:
        """See `HostUpdate.one_pass`. Returns `False`, having done nothing, if a loop is missing."""
        if rule.kernel not in self._of_kernels:
            # All or none: half an update in C and half in NumPy would need the bookkeeping of both,
            # for a rare case.
            found = [compiled.loop(rule, dtype) for dtype, _ in self._dtypes]
            loops = [loop for loop in found if loop is not None]
            numbers = np.empty(len(rule.kernel_constants))
            bound = (loops, numbers, {}) if len(loops) == len(found) else None
            self._of_kernels[rule.kernel] = bound
        of_kernel = self._of_kernels[rule.kernel]
        if of_kernel is None:
            return False
        loops, numbers, kept = of_kernel
        if rule is not self._rule:
            numbers[:], self._rule = rule.kernel_constants, rule

        def bind(messages: Sequence[Array]) -> list[compiled.Bound]:
            table = self._table(messages, in_place)
            return [
                loop(table[chunks.slice], len(messages), numbers)
                for loop, (_, chunks) in zip(loops, self._dtypes, strict=True)
            ]

        for call, sums in bind(messages) if in_place else keep_per_message(kept, messages, bind):
            call()
            if out is not None:
                for of_chunk in sums:  # one by one: NumPy's sum has another order
                    out += of_chunk
        return True

    def forget_messages(self) -> None:
        """See `Update.forget_messages`."""
        for of_kernel in self._of_kernels.values():
            if of_kernel is not None:
                of_kernel[2].clear()

    def _table(self, messages: Sequence[Array], in_place: InPlace) -> compiled.Table:
        """The chunks with these messages, as the loops take them."""
        addresses = np.array([message.ctypes.data for message in messages], np.int64)
        table = np.concatenate([self._fixed, addresses + self._starts[:, None]], axis=1)
        for variable, (_, gradient) in in_place.items():
            here = self._variables == variable
            table[here, self._column] = gradient.ctypes.data + self._starts_in_gradient[here]
        return table


def _chunks_in(shard: Shard, chunks: Sequence[Chunk]) -> list[Chunk]:
    """The chunks of a shard, cut where other variables end and start."""

    def start_of(chunk: Chunk) -> int:
        return chunk[0].message.start

    # Its first chunk may have started before it.
    first = bisect.bisect_right(chunks, shard.message.start, key=start_of) - 1
    stop = bisect.bisect_left(chunks, shard.message.stop, key=start_of)
    cut = []
    for whole, value, slots in chunks[first:stop]:
        both = shard.within(whole.message)
        start = (both.message.start - whole.message.start) // both.dtype.itemsize
        here = slice(start, start + both.elements.size)
        cut.append((both, value[here], tuple([slot[here] for slot in slots])))
    return cut
