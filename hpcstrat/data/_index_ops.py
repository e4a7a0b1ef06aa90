"""Stages that choose elements or change their order, and touch none: take, skip, shard, repeat, shuffle, prefetch."""

from __future__ import annotations

import abc
import sys
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np

from hpcstrat import _nest
from hpcstrat._types import TensorSpec
from hpcstrat.data import _elements
from hpcstrat.data._node import INFINITE, UNKNOWN, Chunk, EpochPass, Keys, Node, ShuffleState, first, join

_EMPTY_ROUNDS = 10_000  # in a row, after which there will hardly be elements again


class Choosing(Node):
    """A stage whose items are some of its input's items.

    Args:
        source: the input.
        call: the method that made this stage and its arguments, for `repr`, by which ranks compare pipelines.
        inputs_per_element: see `Node`.
    """

    def __init__(self, source: Node, call: str, inputs_per_element: int | None = None) -> None:
        super().__init__(
            source,
            width=source.width,
            user_code=source.user_code,
            batch_sizes=source.batch_sizes,
            rows=source.rows,
            inputs_per_element=inputs_per_element,
        )
        self._source = source
        self._call = call

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

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        if self._count < 0:
            yield from self._source.chunks(epoch)
            return
        left = self._count
        if left == 0:
            return
        for chunk in self._source.chunks(epoch):
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

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        if self._count < 0:
            return
        left = self._count
        for chunk in self._source.chunks(epoch):
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

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        ahead = self._index
        for chunk in self._source.chunks(epoch):
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

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        done = given = empty = 0
        while done != self._count:
            before = given
            for chunk in self._source.chunks(epoch):
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
        super().__init__(source, f"prefetch({buffer_size})", inputs_per_element=1)

    def _chosen(self, size: int) -> int:
        return size

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        return self._source.chunks(epoch)


@final
class Shuffle(Choosing):
    """All elements; the next is drawn at random from a buffer of those that come next."""

    def __init__(self, source: Node, buffer_size: int, seed: int | None, reshuffle: bool) -> None:
        super().__init__(source, f"shuffle({buffer_size}, {seed}, {reshuffle})")
        self._buffer_size = sys.maxsize if buffer_size == UNKNOWN else buffer_size
        self._shuffle = ShuffleState(seed, reshuffle)

    def own_shuffles(self) -> Sequence[ShuffleState]:
        return (self._shuffle,)

    def _chosen(self, size: int) -> int:
        return size

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        random = epoch.generator(self._shuffle)
        return (_shuffled_items if self.width is None else _shuffled_keys)(
            self._source.chunks(epoch), self._buffer_size, random
        )


@final
class Zip(Node):
    """Elements of several stages side by side, until one of them ends."""

    def __init__(self, nodes: Sequence[Node], structure: _nest.Structure) -> None:
        super().__init__(
            *nodes,
            width=None if any(node.width is None for node in nodes) else sum(node.width or 0 for node in nodes),
            user_code=any(node.user_code for node in nodes),
            batch_sizes=_common_batch_sizes(nodes),
            rows=None,
            inputs_per_element=None,
        )
        self._structure = structure

    def __repr__(self) -> str:
        return f"Dataset.zip({self._structure.unflatten(self.inputs)})"

    def spec(self) -> Any:
        return self._structure.unflatten(node.spec() for node in self.inputs)

    def cardinality(self) -> int:
        sizes = [node.cardinality() for node in self.inputs]
        if UNKNOWN in sizes:
            return UNKNOWN
        return min((size for size in sizes if size != INFINITE), default=INFINITE)

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        for parts in _side_by_side([node.chunks(epoch) for node in self.inputs]):
            yield list(zip(*parts, strict=True)) if self.width is None else np.concatenate(parts, axis=1)

    def load(self, item: Any) -> Any:
        if self.width is not None:
            return first(self.fetch(item[np.newaxis]))
        return self._structure.unflatten(node.load(part) for node, part in zip(self.inputs, item, strict=True))

    def fetch(self, chunk: Chunk) -> Any:
        if self.width is None:
            return _elements.stack([self.load(item) for item in chunk])
        parts, start = [], 0
        for node in self.inputs:
            assert node.width is not None
            parts.append(node.fetch(chunk[:, start : start + node.width]))
            start += node.width
        return self._structure.unflatten(parts)


@final
class Concatenate(Node):
    """The elements of one stage, then those of another. The first column of a key says of which."""

    def __init__(self, source: Node, other: Node) -> None:
        if not (source.user_code or other.user_code):
            _elements.common_spec(source.spec(), other.spec())
        keyed = source.width is not None and other.width is not None
        super().__init__(
            source,
            other,
            width=1 + max(source.width or 0, other.width or 0) if keyed else None,
            user_code=source.user_code or other.user_code,
            batch_sizes=_common_batch_sizes((source, other)),
            rows=None,
            inputs_per_element=None,
        )

    def __repr__(self) -> str:
        return "{!r}.concatenate({!r})".format(*self.inputs)

    def spec(self) -> Any:
        return _elements.common_spec(*(node.spec() for node in self.inputs))

    def cardinality(self) -> int:
        sizes = [node.cardinality() for node in self.inputs]
        return INFINITE if INFINITE in sizes else UNKNOWN if UNKNOWN in sizes else sum(sizes)

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        for which, node in enumerate(self.inputs):
            for chunk in node.chunks(epoch):
                if self.width is None:
                    yield [(which, item) for item in chunk]
                else:
                    keys = np.zeros((len(chunk), self.width), np.int64)
                    keys[:, 0] = which
                    keys[:, 1 : 1 + chunk.shape[1]] = chunk
                    yield keys

    def load(self, item: Any) -> Any:
        if self.width is not None:
            return first(self.fetch(item[np.newaxis]))
        which, inner = item
        return self.inputs[which].load(inner)

    def fetch(self, chunk: Chunk) -> Any:
        if self.width is None:
            return _elements.stack([self.load(item) for item in chunk])
        second = chunk[:, 0] == 1
        if second.all() and len(chunk):
            return self._fetch(1, chunk)
        if not second.any():
            return self._fetch(0, chunk)
        # Rows of both: put together, then each to its place.
        ours, structure = _nest.flatten(self._fetch(0, chunk[~second]))
        theirs, other = _nest.flatten(self._fetch(1, chunk[second]))
        if structure != other or any(
            a.dtype != b.dtype or a.shape[1:] != b.shape[1:] for a, b in zip(ours, theirs, strict=True)
        ):
            raise ValueError(
                f"Dataset.concatenate: elements of one batch must be of one kind; in {self!r} they are not"
            )
        places = np.argsort(np.argsort(second, kind="stable"))
        return structure.unflatten([np.concatenate((a, b)).take(places, 0) for a, b in zip(ours, theirs, strict=True)])

    def _fetch(self, which: int, chunk: Chunk) -> Any:
        node = self.inputs[which]
        return node.fetch(chunk[:, 1 : 1 + (node.width or 0)])


@final
class Enumerate(Node):
    """Elements with a count before them, which is the first column of a key."""

    def __init__(self, source: Node, start: int) -> None:
        super().__init__(
            source,
            width=None if source.width is None else 1 + source.width,
            user_code=source.user_code,
            batch_sizes=(),
            rows=None,
            inputs_per_element=None,
        )
        self._source = source
        self._start = start

    def __repr__(self) -> str:
        return f"{self._source!r}.enumerate({self._start})"

    def spec(self) -> Any:
        return TensorSpec((), np.int64), self._source.spec()

    def cardinality(self) -> int:
        return self._source.cardinality()

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        count = self._start
        for chunk in self._source.chunks(epoch):
            if self.width is None:
                yield list(enumerate(chunk, count))
            else:
                yield np.column_stack((np.arange(count, count + len(chunk), dtype=np.int64), chunk))
            count += len(chunk)

    def load(self, item: Any) -> Any:
        if self.width is not None:
            return first(self.fetch(item[np.newaxis]))
        count, inner = item
        return np.int64(count), self._source.load(inner)

    def fetch(self, chunk: Chunk) -> Any:
        if self.width is None:
            return _elements.stack([self.load(item) for item in chunk])
        return chunk[:, 0].copy(), self._source.fetch(chunk[:, 1:])


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


def _side_by_side(streams: Sequence[Iterator[Chunk]]) -> Iterator[list[Chunk]]:
    """Chunks of the same length of all streams, until one ends."""
    heads: list[Chunk] = [[] for _ in streams]
    while True:
        for i, stream in enumerate(streams):
            while len(heads[i]) == 0:
                try:
                    heads[i] = next(stream)
                except StopIteration:
                    return
        size = min(len(head) for head in heads)
        yield [head[:size] for head in heads]
        heads = [head[size:] for head in heads]


def _common_batch_sizes(nodes: Sequence[Node]) -> tuple[int, ...]:
    """The batches that all nodes are in; of unknown size where they differ."""
    found = {node.batch_sizes for node in nodes}
    if len(found) == 1:
        return found.pop()
    return () if () in found else (0,)
