"""Nodes that select or reorder elements without touching them, and the cache that keeps them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, final

import numpy as np

from hpcstrat._memory.intervals import divide_up
from hpcstrat._process import settings
from hpcstrat.data import _elements
from hpcstrat.data._arguments import Options
from hpcstrat.data._elements import FailedElement, unwrap, with_failures
from hpcstrat.data._node import (
    INFINITE,
    UNKNOWN,
    Chunk,
    EpochPass,
    Keys,
    Node,
    PipelineChecksum,
    ShuffleState,
    Transformation,
    join,
)
from hpcstrat.data._sources import Indexed

PREFETCHED = 2  # elements, if the program leaves the number to the library
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


@final
class Slice(Choosing):
    """The elements in a slice of the input's: take, skip, shard."""

    def __init__(
        self, source: Node, call: str, start: int = 0, stop: int | None = None, step: int = 1
    ) -> None:
        super().__init__(source, call)
        self._start, self._stop, self._step = start, stop, step

    def cardinality(self) -> int:
        size = super().cardinality()
        if size == UNKNOWN or (size == INFINITE and self._stop is None):
            return size
        stops = [stop for stop in (size, self._stop) if stop is not None and stop != INFINITE]
        return max(0, divide_up(min(stops) - self._start, self._step))

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        start, stop = self._start, self._stop  # counted from the first item of the chunk
        if stop == 0:
            return
        for chunk in self._source.chunks(epoch):
            size = len(chunk)
            if start < size:
                yield chunk[start : stop : self._step]
            start = start - size if start >= size else (start - size) % self._step
            if stop is not None:
                stop -= size
                # Asking for an item after the last may run user code, or never return.
                if stop <= 0:
                    return


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
        if self._count < 0:
            return INFINITE
        return size if size < 0 else size * self._count

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        done = given = empty = 0
        while done != self._count:
            before = given
            for chunk in self._source.chunks(epoch):
                given += len(chunk)
                yield chunk
            done += 1
            empty = empty + 1 if given == before else 0
            if not empty:
                continue
            if self._source.cardinality() == 0:
                return
            if self._count < 0:
                if empty == _EMPTY_ROUNDS:
                    raise RuntimeError(
                        f"Dataset.repeat: after {given} elements came {empty} empty rounds in a "
                        "row; a generator function must return a new iterator in each round; "
                        "correct it, or pass a count"
                    )
                # As in TensorFlow, an empty round ends it, except directly after a shuffle if an
                # earlier round had elements.
                if given == 0 or not isinstance(self._source, Shuffle):
                    return


@final
class Annotated(Choosing):
    """All elements, with the user's options, a number of elements to prefetch, or batch sizes."""

    def __init__(
        self,
        source: Node,
        call: str,
        options: Options | None = None,
        prefetched: int = 0,
        batch_sizes: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(source, call)
        self.batch_sizes = source.batch_sizes if batch_sizes is None else batch_sizes
        self.options, self.prefetched = options, prefetched

    def elements(self, epoch: EpochPass) -> Iterator[Any]:
        return self._source.elements(epoch)


@final
class Counted(Choosing):
    """All elements, of which there must be `count`; see `assert_cardinality`."""

    def __init__(self, source: Node, count: int) -> None:
        super().__init__(source, f"assert_cardinality({count})")
        self._count = count

    def cardinality(self) -> int:
        return self._count

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        given, limit = 0, self._count if self._count >= 0 else sys.maxsize
        for chunk in self._source.chunks(epoch):
            if given < limit:  # the elements that were announced come before the error
                yield chunk[: limit - given]
            given += len(chunk)
            if given > limit:
                break
        if given != self._count:
            wanted = "infinitely many" if self._count < 0 else self._count
            raise ValueError(
                f"assert_cardinality: the dataset has {'at least ' * (given > limit)}"
                f"{min(given, limit + 1)} elements, and {wanted} were announced; correct the number"
            )


def options_of(node: Node) -> Options:
    """The options of a pipeline; if an option is set several times, the last setting counts."""
    options = Options()
    for source in node.inputs:
        options = options.merge(options_of(source))
    if isinstance(node, Annotated) and node.options is not None:
        return options.merge(node.options)
    return options


def prefetched_at_end(node: Node) -> int:
    """How many elements a thread prepares ahead, because the pipeline ends with `prefetch`."""
    while isinstance(node, Annotated) and node.options is not None:
        (node,) = node.inputs
    return node.prefetched if isinstance(node, Annotated) else 0


@final
class Shuffle(Choosing):
    """All elements, each drawn at random from a buffer of the next elements."""

    def __init__(self, source: Node, buffer_size: int, seed: int | None, reshuffle: bool) -> None:
        super().__init__(source, f"shuffle({buffer_size}, {seed}, {reshuffle})")
        self._buffer_size = sys.maxsize if buffer_size == UNKNOWN else buffer_size
        self._shuffle = ShuffleState(seed, reshuffle)

    def shuffles(self) -> list[ShuffleState]:
        return [*super().shuffles(), self._shuffle]

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        random = epoch.generator(self._shuffle)
        size = self._source.cardinality()
        if isinstance(self._source, Indexed) and 0 <= size <= self._buffer_size:
            return _shuffle_positions(size, random)
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


def cache(source: Node) -> Node:
    """The node that keeps the results of `source`.

    It stores no order: an order is a function of seed and round, so walking it again gives the same
    order. Without user code it stores nothing at all: the arrays are in memory already.
    """
    if not source.user_code:
        return _SameOrder(source)
    return _ByPosition(source) if source.width is None else _ByKey(source)


class _SameOrder(Choosing):
    """Keeps the order alone."""

    def __init__(self, source: Node) -> None:
        super().__init__(source, "cache()")

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        return self._source.chunks(epoch.freeze())


@final
class _ByKey(_SameOrder):
    """Keeps each element when it is first loaded, so each replica keeps only its own."""

    def __init__(self, source: Node) -> None:
        super().__init__(source)
        self._kept: dict[bytes, Any] = {}

    def load(self, item: Any) -> Any:
        return _elements.copy_of(self._keep(item))

    def fetch(self, chunk: Chunk) -> Any:
        return _elements.stack([self._keep(item) for item in chunk])

    def _keep(self, item: Any) -> Any:
        key = item.tobytes()
        if key not in self._kept:
            self._kept[key] = self._source.load(item)
        return self._kept[key]


@final
class _ByPosition(_SameOrder):
    """Keeps the elements of the first pass that ends without a failed element."""

    def __init__(self, source: Node) -> None:
        super().__init__(source)
        self.rows = None  # items are elements here, not the chunks of a batch
        # Each element, and the checksum of what user code had yielded by then.
        self._kept: list[tuple[Any, int]] | None = None

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        for element, checksum in self._first_pass(epoch) if self._kept is None else self._kept:
            epoch.checksum.add_text(f"{checksum}")
            yield [element]

    def _first_pass(self, epoch: EpochPass) -> Iterator[tuple[Any, int]]:
        inner, kept = epoch.freeze(), []
        # On, because passes of all ranks may come later, some of them of kept elements.
        inner.checksum = PipelineChecksum(True, every=settings.is_on("HPCSTRAT_CHECK"))
        for element in with_failures(self._source.elements(inner)):
            kept.append((element, inner.checksum.value))
            yield kept[-1]
        if not any(isinstance(element, FailedElement) for element, _ in kept):
            self._kept = kept

    def load(self, item: Any) -> Any:
        return _elements.copy_of(unwrap(item))  # the caller may write to it

    def fetch(self, chunk: Chunk) -> Any:
        return _elements.stack([unwrap(item) for item in chunk])
