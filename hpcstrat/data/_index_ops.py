"""Nodes that select or reorder elements without touching them: take, skip, repeat, shuffle ..."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np

from hpcstrat._memory.intervals import divide_up
from hpcstrat.data._epoch import EpochPass, ShuffleState
from hpcstrat.data._node import INFINITE, UNKNOWN, Chunk, Keys, Node, Transformation, join
from hpcstrat.data._options import Options
from hpcstrat.data._sources import Indexed
from hpcstrat.data._threads import map_in_threads

_PREFETCHED = 2  # elements, if the program leaves the number to the library
_EMPTY_ROUNDS = 10_000  # in a row; after these, a generator counts as exhausted


class Choosing(Transformation):
    """A node whose items are some of its input's items, so `load` and `fetch` are the input's."""

    def __init__(self, source: Node, call: str) -> None:
        super().__init__(source, call)
        self.width, self.rows = source.width, source.rows

    def load(self, item: Any) -> Any:
        return self._source.load(item)

    def fetch(self, chunk: Chunk) -> Any:
        return self._source.fetch(chunk)

    @property
    def threads(self) -> int:
        return self._source.threads

    def elements(self, epoch: EpochPass) -> Iterator[Any]:
        if self.threads < 2:
            return super().elements(epoch)
        return map_in_threads(
            self.load, itertools.chain.from_iterable(self.chunks(epoch)), self.threads
        )

    def cardinality(self) -> int:
        size = self._source.cardinality()
        if size == INFINITE:
            return self._infinite()
        return size if size == UNKNOWN else self._count_chosen(size)

    def _count_chosen(self, size: int) -> int:
        """The number of elements chosen from `size`; all by default."""
        return size

    def _infinite(self) -> int:
        """The number of elements chosen from infinitely many."""
        return INFINITE


@final
class Take(Choosing):
    """The first `count` elements; all if `count` is negative."""

    def __init__(self, source: Node, count: int) -> None:
        super().__init__(source, f"take({count})")
        self._count = count

    def _count_chosen(self, size: int) -> int:
        return size if self._count < 0 else min(size, self._count)

    def _infinite(self) -> int:
        return INFINITE if self._count < 0 else self._count

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        if self._count < 0:
            yield from self._source.chunks(epoch)
            return
        left = self._count
        if left == 0:
            return
        # It ends with the last element and does not ask for the next: that may run user code, or
        # never return.
        for chunk in self._source.chunks(epoch):
            yield chunk[:left]
            left -= min(left, len(chunk))
            if left == 0:
                return


@final
class Skip(Choosing):
    """All but the first `count` elements; none if `count` is negative."""

    def __init__(self, source: Node, count: int) -> None:
        super().__init__(source, f"skip({count})")
        self._count = count

    def _count_chosen(self, size: int) -> int:
        return 0 if self._count < 0 else max(0, size - self._count)

    def _infinite(self) -> int:
        return 0 if self._count < 0 else INFINITE

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        if self._count < 0:
            return
        left = self._count
        for chunk in self._source.chunks(epoch):
            if left < len(chunk):
                yield chunk[left:]
            left -= min(left, len(chunk))


@final
class DatasetShard(Choosing):
    """Every `num_shards`-th element, starting at `index`."""

    def __init__(self, source: Node, num_shards: int, index: int) -> None:
        super().__init__(source, f"shard({num_shards}, {index})")
        self._num_shards = num_shards
        self._index = index

    def _count_chosen(self, size: int) -> int:
        return max(0, divide_up(size - self._index, self._num_shards))

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        ahead = self._index
        for chunk in self._source.chunks(epoch):
            if ahead < len(chunk):
                yield chunk[ahead :: self._num_shards]
            ahead = (
                (ahead - len(chunk)) % self._num_shards
                if ahead < len(chunk)
                else ahead - len(chunk)
            )


@final
class Repeat(Choosing):
    """All elements, `count` times; without end if `count` is negative."""

    def __init__(self, source: Node, count: int) -> None:
        super().__init__(source, f"repeat({count})")
        self._count = count

    def cardinality(self) -> int:
        size = self._source.cardinality()
        if size == 0 or self._count == 0:
            return 0
        return INFINITE if self._count < 0 else super().cardinality()

    def _count_chosen(self, size: int) -> int:
        return size * self._count

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        done = given = empty = 0
        while done != self._count:
            before = given
            for chunk in self._source.chunks(epoch):
                given += len(chunk)
                yield chunk
            done += 1
            empty = empty + 1 if given == before else 0
            if empty and (
                self._source.cardinality() == 0 or (self._count < 0 and self._ends(given, empty))
            ):
                return

    def _ends(self, given: int, empty: int) -> bool:
        """Whether an empty round ends a `repeat` without a count, as in TensorFlow.

        It does, except directly after a shuffle if an earlier round had elements: then empty rounds
        are skipped.
        """
        if empty == _EMPTY_ROUNDS:
            raise RuntimeError(
                f"Dataset.repeat: after {given} elements came {empty} empty rounds in a row; a "
                "generator function must return a new iterator in each round; correct it, or pass "
                "a count"
            )
        return given == 0 or not isinstance(self._source, Shuffle)


@final
class Prefetch(Choosing):
    """All elements; as a pipeline's last node, prepared by a thread (see `prefetch` in `_pass`)."""

    def __init__(self, source: Node, buffer_size: int) -> None:
        super().__init__(source, f"prefetch({buffer_size})")
        self.inputs_per_element = 1
        self.size: int = _PREFETCHED if buffer_size < 0 else buffer_size

    def elements(self, epoch: EpochPass) -> Iterator[Any]:
        return self._source.elements(epoch)


@final
class WithOptions(Choosing):
    """All elements, with the user's options, which saved positions do not include."""

    def __init__(self, source: Node, options: Options) -> None:
        super().__init__(source, f"with_options({options})")
        self.inputs_per_element = 1
        self.options: Options = options

    def elements(self, epoch: EpochPass) -> Iterator[Any]:
        return self._source.elements(epoch)


def options_of(node: Node) -> Options:
    """The options of a pipeline; if an option is set several times, the last setting counts."""
    options = Options()
    for source in node.inputs:
        options = options.merge(options_of(source))
    return options.merge(node.options) if isinstance(node, WithOptions) else options


@final
class Shuffle(Choosing):
    """All elements, each drawn at random from a buffer of the next elements."""

    def __init__(self, source: Node, buffer_size: int, seed: int | None, reshuffle: bool) -> None:
        super().__init__(source, f"shuffle({buffer_size}, {seed}, {reshuffle})")
        self._buffer_size = sys.maxsize if buffer_size == UNKNOWN else buffer_size
        self._shuffle = ShuffleState(seed, reshuffle)

    def own_shuffles(self) -> Sequence[ShuffleState]:
        return (self._shuffle,)

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        random = epoch.generator(self._shuffle)
        if isinstance(self._source, Indexed) and self._source.cardinality() <= self._buffer_size:
            return _shuffle_positions(self._source.cardinality(), random)
        shuffle = _shuffle_items if self.width is None else _shuffle_keys
        return shuffle(self._source.chunks(epoch), self._buffer_size, random)


def _shuffle_positions(size: int, random: np.random.Generator) -> Iterator[Keys]:
    """The order of `_shuffle_keys` if the buffer holds all positions, without copying keys."""
    if size:
        yield random.permutation(size)[:, np.newaxis]


def _shuffle_items(
    stream: Iterator[list[Any]], size: int, random: np.random.Generator
) -> Iterator[list[Any]]:
    """Draws from a buffer of `size` items; each new item replaces the one just drawn."""
    buffer, slots = [], iter(())
    for chunk in stream:
        for item in chunk:
            if len(buffer) < size:
                buffer.append(item)
                continue
            slot = next(slots, None)
            if slot is None:
                # Many per call, because a call takes microseconds.
                slots = iter(random.integers(size, size=1024).tolist())
                slot = next(slots)
            yield [buffer[slot]]
            buffer[slot] = item
    for slot in random.permutation(len(buffer)).tolist():
        yield [buffer[slot]]


def _shuffle_keys(stream: Iterator[Keys], size: int, random: np.random.Generator) -> Iterator[Keys]:
    """As `_shuffle_items`, but a whole chunk at a time.

    If the buffer holds the whole dataset, this is a single permutation.
    """
    waiting, held = [], 0
    for chunk in stream:
        waiting.append(chunk)
        held += len(chunk)
        if held > size:
            pool = join(waiting)
            leaving, staying = _exchange(size, held - size, random)
            yield pool.take(leaving, 0)
            waiting, held = [pool.take(staying, 0)], size
    if held:
        keys = join(waiting)
        if keys.shape[1] == 1:
            yield random.permutation(keys[:, 0])[:, np.newaxis]
        else:
            yield keys.take(random.permutation(held), 0)


def _exchange(size: int, steps: int, random: np.random.Generator) -> tuple[Keys, Keys]:
    """Simulates `steps` draws from a buffer, without a loop.

    The pool is the buffer (places 0 to `size`), followed by the new items, one per draw:

        place:   0 ... size - 1 | size   size + 1   ...
        holds:   the buffer     | new item of step 0, of step 1, ...

    Returns:
        The place in the pool of the item that leaves at each step, and of each item that is in the
        buffer afterwards.
    """
    # uint16 if it suffices: NumPy's stable sort of 16 bits is a radix sort, several times faster.
    slots = random.integers(size, size=steps, dtype=np.uint16 if size <= 1 << 16 else np.int64)
    # Step t takes the item in its slot and puts item `size + t` there. So the item that leaves is
    # the buffer's own if the slot is drawn for the first time, else the item of the previous step
    # that drew the slot. After a stable sort by slot, that previous step is the neighbour.
    order = np.argsort(slots, kind="stable")
    ordered = slots[order]
    again = np.flatnonzero(ordered[1:] == ordered[:-1]) + 1
    leaving = slots.astype(np.int64)
    leaving[order[again]] = order[again - 1] + size
    staying = np.arange(size)
    # If a slot was drawn several times, the last assignment counts, as it should.
    staying[slots] = np.arange(size, size + steps)
    return leaving, staying
