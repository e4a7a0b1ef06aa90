"""Stages that choose elements or change their order, and touch none: take, skip, shard, repeat, shuffle, prefetch."""

from __future__ import annotations

import abc
import sys
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np

from hpcstrat.data._node import INFINITE, UNKNOWN, Chunk, Keys, Node, join
from hpcstrat.data._walk import Shuffler, Walk

_EMPTY_ROUNDS = 10_000  # in a row, after which there will hardly be elements again


class Choosing(Node):
    """A stage whose items are some of its input's items."""

    def __init__(self, source: Node, call: str) -> None:
        self._source = source
        self._call = call
        self.inputs = (source,)
        self.width = source.width
        self.user_code = source.user_code
        self.batch_sizes = source.batch_sizes
        self.rows = source.rows

    def __repr__(self) -> str:
        return f"{self._source!r}.{self._call}"

    def spec(self) -> Any:
        return self._source.spec()

    def load(self, item: Any) -> Any:
        return self._source.load(item)

    def fetch(self, chunk: Chunk) -> Any:
        return self._source.fetch(chunk)

    def cardinality(self) -> int:
        size = self._source.cardinality()
        return self._infinite() if size == INFINITE else size if size == UNKNOWN else self._chosen(size)

    @abc.abstractmethod
    def _chosen(self, size: int) -> int:
        """How many of `size` elements are chosen."""

    def _infinite(self) -> int:
        return INFINITE


@final
class Take(Choosing):
    """The first `count` elements; all of them where it is negative."""

    def __init__(self, source: Node, count: int) -> None:
        super().__init__(source, f"take({count})")
        self._count = count

    def _chosen(self, size: int) -> int:
        return size if self._count < 0 else min(size, self._count)

    def _infinite(self) -> int:
        return INFINITE if self._count < 0 else self._count

    def chunks(self, walk: Walk) -> Iterator[Chunk]:
        if self._count < 0:
            yield from self._source.chunks(walk)
            return
        left = self._count
        if left == 0:
            return
        for chunk in self._source.chunks(walk):
            yield chunk[:left]
            left -= min(left, len(chunk))
            if left == 0:
                return


@final
class Skip(Choosing):
    """All but the first `count` elements; none where it is negative."""

    def __init__(self, source: Node, count: int) -> None:
        super().__init__(source, f"skip({count})")
        self._count = count

    def _chosen(self, size: int) -> int:
        return 0 if self._count < 0 else max(0, size - self._count)

    def _infinite(self) -> int:
        return 0 if self._count < 0 else INFINITE

    def chunks(self, walk: Walk) -> Iterator[Chunk]:
        if self._count < 0:
            return
        left = self._count
        for chunk in self._source.chunks(walk):
            if left < len(chunk):
                yield chunk[left:]
            left -= min(left, len(chunk))


@final
class Shard(Choosing):
    """Every `num_shards`-th element, from the one at `index` on."""

    def __init__(self, source: Node, num_shards: int, index: int) -> None:
        super().__init__(source, f"shard({num_shards}, {index})")
        self._num_shards = num_shards
        self._index = index

    def _chosen(self, size: int) -> int:
        return max(0, -(-(size - self._index) // self._num_shards))

    def chunks(self, walk: Walk) -> Iterator[Chunk]:
        ahead = self._index
        for chunk in self._source.chunks(walk):
            if ahead < len(chunk):
                yield chunk[ahead :: self._num_shards]
            ahead = (ahead - len(chunk)) % self._num_shards if ahead < len(chunk) else ahead - len(chunk)


@final
class Repeat(Choosing):
    """All elements, `count` times over; without end where it is negative."""

    def __init__(self, source: Node, count: int) -> None:
        super().__init__(source, f"repeat({count})")
        self._count = count

    def cardinality(self) -> int:
        size = self._source.cardinality()
        if size == 0 or self._count == 0:
            return 0
        return INFINITE if self._count < 0 else super().cardinality()

    def _chosen(self, size: int) -> int:
        return size * self._count

    def chunks(self, walk: Walk) -> Iterator[Chunk]:
        done = given = empty = 0
        while done != self._count:
            before = given
            for chunk in self._source.chunks(walk):
                given += len(chunk)
                yield chunk
            done += 1
            empty = empty + 1 if given == before else 0
            if empty and (self._source.cardinality() == 0 or (self._count < 0 and self._ends(given, empty))):
                return

    def _ends(self, given: int, empty: int) -> bool:
        """Whether endless rounds end with one without elements: as in TensorFlow, but not behind a shuffle.

        There the elements of further rounds go on, once there were any.
        """
        if empty == _EMPTY_ROUNDS:
            raise RuntimeError(
                f"Dataset.repeat: after {given} elements there were {empty} rounds in a row without any; a generator "
                "function must return a new iterator in each round, or give the number of rounds"
            )
        return given == 0 or not isinstance(self._source, Shuffle)


@final
class Prefetch(Choosing):
    """All elements: a hint to have some ready."""

    def __init__(self, source: Node, buffer_size: int) -> None:
        super().__init__(source, f"prefetch({buffer_size})")

    def _chosen(self, size: int) -> int:
        return size

    def chunks(self, walk: Walk) -> Iterator[Chunk]:
        return self._source.chunks(walk)


@final
class Shuffle(Choosing):
    """All elements; the next is drawn at random from a buffer of those that come next."""

    def __init__(self, source: Node, buffer_size: int, seed: int | None, reshuffle: bool) -> None:
        super().__init__(source, f"shuffle({buffer_size}, {seed}, {reshuffle})")
        self._buffer_size = sys.maxsize if buffer_size == UNKNOWN else buffer_size
        self._shuffler = Shuffler(seed, reshuffle)

    def own_shufflers(self) -> Sequence[Shuffler]:
        return (self._shuffler,)

    def _chosen(self, size: int) -> int:
        return size

    def chunks(self, walk: Walk) -> Iterator[Chunk]:
        random = walk.generator(self._shuffler)
        return (_shuffled_items if self.width is None else _shuffled_keys)(
            self._source.chunks(walk), self._buffer_size, random
        )


def _shuffled_items(stream: Iterator[list[Any]], size: int, random: np.random.Generator) -> Iterator[list[Any]]:
    """Draws from a buffer of `size` items; each that comes takes the place of the one drawn."""
    buffer, slots = [], iter(())
    for chunk in stream:
        for item in chunk:
            if len(buffer) < size:
                buffer.append(item)
                continue
            slot = next(slots, None)
            if slot is None:
                slots = iter(random.integers(size, size=1024).tolist())
                slot = next(slots)
            yield [buffer[slot]]
            buffer[slot] = item
    for slot in random.permutation(len(buffer)).tolist():
        yield [buffer[slot]]


def _shuffled_keys(stream: Iterator[Keys], size: int, random: np.random.Generator) -> Iterator[Keys]:
    """As `_shuffled_items`, a chunk at a time. A buffer that holds all is one permutation."""
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
    """Which place of a pool, the buffer and then what comes, leaves at each step, and which are in the buffer after.

    What leaves a slot is what the last step that drew the same slot has put there.
    """
    # 16 bits where they do: the stable sort of those is a radix sort.
    slots = random.integers(size, size=steps, dtype=np.uint16 if size <= 1 << 16 else np.int64)
    order = np.argsort(slots, kind="stable")
    ordered = slots[order]
    again = np.flatnonzero(ordered[1:] == ordered[:-1]) + 1
    leaving = slots.astype(np.int64)
    leaving[order[again]] = order[again - 1] + size
    staying = np.arange(size)
    staying[slots] = np.arange(size, size + steps)
    return leaving, staying
