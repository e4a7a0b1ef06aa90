"""Nodes that select, reorder and combine elements without touching them."""

from __future__ import annotations

import copy
import functools
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np

from hpcstrat._core import nests
from hpcstrat._memory.intervals import divide_up
from hpcstrat.data import _elements
from hpcstrat.data._arguments import AUTOTUNE, whole
from hpcstrat.data._node import (
    INFINITE,
    UNKNOWN,
    Choosing,
    Chunk,
    EpochPass,
    Keys,
    Node,
    ShuffleState,
    in_pieces,
    join,
    load_apart,
)
from hpcstrat.data._sources import Indexed, Integers

_PREFETCHED = 2  # elements, if the program leaves the number to the library
_EMPTY_ROUNDS = 10_000  # in a row; after these, a generator counts as exhausted

# ---- take, skip, shard


def take(source: Node, count: Any) -> Node:
    """See `Dataset.take`."""
    count = whole(count, "Dataset.take", "count")
    return Slice(source, f"take({count})", stop=count if count >= 0 else None)


def skip(source: Node, count: Any) -> Node:
    """See `Dataset.skip`."""
    count = whole(count, "Dataset.skip", "count")
    return Slice(source, f"skip({count})", max(0, count), None if count >= 0 else 0)


def shard(source: Node, num_shards: Any, index: Any) -> Node:
    """See `Dataset.shard`."""
    call = "Dataset.shard"
    num_shards, index = whole(num_shards, call, "num_shards"), whole(index, call, "index")
    if not 0 <= index < num_shards:
        raise ValueError(
            f"{call}: index is {index}; it must be in [0, {num_shards}), below num_shards"
        )
    return Slice(source, f"shard({num_shards}, {index})", index, step=num_shards)


@final
class Slice(Choosing):
    """The elements in a slice of the input's, which must have `least` elements."""

    def __init__(
        self,
        source: Node,
        call: str,
        start: int = 0,
        stop: int | None = None,
        step: int = 1,
        least: int = 0,
    ) -> None:
        super().__init__(source, call)
        self._start, self._stop, self._step, self._least = start, stop, step, least

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
        if 0 <= (found := self._start - start) < self._least:
            raise ValueError(
                f"Dataset: a pass is resumed after {self._start} elements, but "
                f"{self._source!r} has only {found} now; give it the elements that it had when "
                "the checkpoint was saved"
            )


# ---- repeat


@final
class Repeat(Choosing):
    """All elements, `count` times; without end if `count` is `None` or negative."""

    def __init__(self, source: Node, count: Any) -> None:
        self._count = -1 if count is None else max(-1, whole(count, "Dataset.repeat", "count"))
        super().__init__(source, f"repeat({self._count})")

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


# ---- prefetch


@final
class Prefetch(Choosing):
    """All elements.

    Attributes:
        ahead: how many a thread prepares ahead, if this is the last node of a pipeline.
    """

    def __init__(self, source: Node, buffer_size: Any) -> None:
        size = AUTOTUNE if buffer_size is None else buffer_size
        size = whole(size, "Dataset.prefetch", "buffer_size")
        if size < AUTOTUNE:
            raise ValueError(
                f"Dataset.prefetch: buffer_size is {size}; it must be at least 0, or AUTOTUNE, "
                "which is -1"
            )
        super().__init__(source, f"prefetch({size})")
        self.ahead: int = _PREFETCHED if size < 0 else size


# ---- shuffle


@final
class Shuffle(Choosing):
    """All elements, each drawn at random from a buffer of the next elements."""

    def __init__(self, source: Node, buffer_size: Any, seed: Any, reshuffle: bool) -> None:
        call = "Dataset.shuffle"
        size = whole(buffer_size, call, "buffer_size")
        if size < 1 and size != UNKNOWN:
            raise ValueError(
                f"{call}: buffer_size is {size}; it must be at least 1, or UNKNOWN_CARDINALITY for "
                "all"
            )
        if size == UNKNOWN and source.cardinality() == INFINITE:
            raise ValueError(
                f"{call}: buffer_size is UNKNOWN_CARDINALITY, which means all elements, but the "
                "dataset is infinite; give a size, or shuffle before Dataset.repeat"
            )
        seed = None if seed is None else whole(seed, call, "seed")
        super().__init__(source, f"shuffle({size}, {seed}, {reshuffle})")
        self._buffer_size = sys.maxsize if size == UNKNOWN else size
        self._shuffle = ShuffleState(seed, reshuffle)

    def shuffles(self) -> list[ShuffleState]:
        return [*super().shuffles(), self._shuffle]

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        random = epoch.generator(self._shuffle)
        size = self._source.cardinality()
        if isinstance(self._source, Indexed) and size <= self._buffer_size:
            # The order of `_shuffle_keys` if the buffer holds all keys, without making them.
            return iter([random.permutation(size)] if size else [])
        shuffle = _shuffle_items if self.keys is None else _shuffle_keys
        return shuffle(self._source.chunks(epoch), self._buffer_size, random)


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
            yield pool.take(leaving)
            waiting, held = [pool.take(staying)], size
    if held:
        yield random.permutation(join(waiting))


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


# ---- zip, enumerate


def zipped(nodes: Sequence[Node], structure: nests.Structure, text: str | None = None) -> Node:
    """See `Dataset.zip`."""
    kind = ZipOfSources if all(isinstance(node, Indexed) for node in nodes) else Zip
    return kind(nodes, structure, text or f"Dataset.zip({structure.unflatten(nodes)})")


def enumerated(source: Node, start: Any) -> Node:
    """See `Dataset.enumerate`."""
    start = whole(start, "Dataset.enumerate", "start")
    counts = Integers(range(start, start + sys.maxsize), np.dtype(np.int64))
    _, pair = _elements.flatten((0, 0))
    return zipped((counts, source), pair, f"{source!r}.enumerate({start})")


@final
class ZipOfSources(Indexed):
    """Elements of several sources side by side: one source, whose keys are positions in all."""

    def __init__(self, nodes: Sequence[Node], structure: nests.Structure, text: str) -> None:
        super().__init__(min(node.cardinality() for node in nodes), *nodes)
        self._structure, self._text = structure, text

    def __repr__(self) -> str:
        return self._text

    def spec(self) -> Any:
        return self._structure.unflatten(node.spec() for node in self.inputs)

    def fetch(self, keys: Keys) -> Any:
        return self._structure.unflatten([node.fetch(keys) for node in self.inputs])


@final
class Zip(Node):
    """Elements of several nodes side by side, until one node ends. An item has one of each node."""

    def __init__(self, nodes: Sequence[Node], structure: nests.Structure, text: str) -> None:
        super().__init__(*nodes)
        self.gathers = all(node.gathers for node in nodes)
        self._structure, self._text = structure, text

    def __repr__(self) -> str:
        return self._text

    def spec(self) -> Any:
        return self._structure.unflatten(node.spec() for node in self.inputs)

    def cardinality(self) -> int:
        sizes = [node.cardinality() for node in self.inputs]
        if UNKNOWN in sizes:
            return UNKNOWN
        # The counts of `enumerate` have no end.
        finite = (size for size in sizes if size not in (INFINITE, sys.maxsize))
        return min(finite, default=INFINITE)

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        # When a node has ended, those after it are not asked.
        items = zip(*[node.items(epoch) for node in self.inputs], strict=False)
        # What comes of user code is not taken ahead.
        is_free = all(node.keys is not None or not node.user_code for node in self.inputs)
        size = 1024 if is_free else 1
        return iter(lambda: [*itertools.islice(items, size)], [])

    def load(self, chunks: Iterator[Chunk]) -> Iterator[Any]:
        if self.gathers:
            return super().load(chunks)
        columns = _columns(chunks, len(self.inputs))
        loaded = [node.load(column) for node, column in zip(self.inputs, columns, strict=True)]
        return map(self._structure.unflatten, zip(*loaded, strict=True))

    def fetch(self, keys: Chunk) -> Any:
        columns = [*zip(*keys, strict=True)] or [()] * len(self.inputs)
        pairs = zip(self.inputs, columns, strict=True)
        return self._structure.unflatten([node.fetch(node.as_chunk(own)) for node, own in pairs])


def _columns(chunks: Iterator[Chunk], count: int) -> list[Iterator[Chunk]]:
    """The members of items that are tuples: for each place the chunks of its members."""

    def column(place: int, copy: Iterator[Chunk]) -> Iterator[Chunk]:
        return ([item[place] for item in chunk] for chunk in copy)

    return [column(place, copy) for place, copy in enumerate(itertools.tee(chunks, count))]


# ---- concatenate


@final
class Concatenate(Node):
    """The elements of one node, then those of another, whose keys follow the first one's.

    If a node has other items than keys, an item is a pair: the index of the node, and its item.
    """

    def __init__(self, first: Node, second: Node) -> None:
        super().__init__(first, second)
        self._offset = 0
        if first.keys is not None and second.keys is not None:
            self._offset, self.keys = first.keys, first.keys + second.keys
            # One gather of many rows, even if they are not for one batch, needs equal shapes.
            gathers = first.gathers and second.gathers
            self.gathers = gathers and _row_shapes(first) == _row_shapes(second)
        # Those of nodes with functions are found when their first element comes.
        self._specs = [None if node.user_code else node.spec() for node in self.inputs]
        if None not in self._specs:
            self.spec()  # raises an error if they differ

    def __repr__(self) -> str:
        return "{!r}.concatenate({!r})".format(*self.inputs)

    def spec(self) -> Any:
        return _common_spec(*[node.spec() for node in self.inputs])

    def cardinality(self) -> int:
        sizes = [node.cardinality() for node in self.inputs]
        if INFINITE in sizes:
            return INFINITE
        return UNKNOWN if UNKNOWN in sizes else sum(sizes)

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        for which, node in enumerate(self.inputs):
            for chunk in node.chunks(epoch):
                if self._specs[which] is None and len(chunk):
                    self._compare(which, chunk[:1])
                if self.keys is None:
                    yield [(which, item) for item in chunk]
                else:
                    yield chunk + self._offset if which else chunk

    def _compare(self, which: int, chunk: Chunk) -> None:
        """Compares the first element of a node with the other node's.

        Every rank loads it, so all ranks raise: a rank's own elements may all come from one node.
        User code thus runs for it here, and once more in its turn.
        """
        try:
            # Of a copy, because a function may write to its argument.
            (element,) = self.inputs[which].load(iter([copy.deepcopy(chunk)]))
        except Exception:  # raised when the element's turn comes; the next chunk is compared
            return
        spec, other = _elements.spec_of(element), self._specs[1 - which]
        if other is not None:
            _common_spec(*((spec, other) if which == 0 else (other, spec)))
        self._specs[which] = spec

    def load(self, chunks: Iterator[Chunk]) -> Iterator[Any]:
        return super().load(chunks) if self.gathers else self._load_apart(chunks)

    def _load_apart(self, chunks: Iterator[Chunk]) -> Iterator[Any]:
        if self.keys is None:
            return load_apart(chunks, lambda pairs: [which for which, _ in pairs], self._load_from)
        offset = self._offset
        return load_apart(
            in_pieces(chunks), lambda keys: (keys >= offset).tolist(), self._load_from
        )

    def _load_from(self, which: int, chunks: Iterator[Chunk]) -> Iterator[Any]:
        if self.keys is None:
            own = ([item for _, item in pairs] for pairs in chunks)
        else:
            own = (np.asarray(keys) - which * self._offset for keys in chunks)
        return self.inputs[which].load(own)

    def fetch(self, keys: Keys) -> Any:
        first, second = self.inputs
        is_second = keys >= self._offset
        if not is_second.any():
            return first.fetch(keys)
        if is_second.all():
            return second.fetch(keys - self._offset)
        # From both, in any order after a shuffle: one gather from each, then the order is restored.
        parts = first.fetch(keys[~is_second]), second.fetch(keys[is_second] - self._offset)
        places = np.argsort(np.argsort(is_second, kind="stable"))
        (ours, structure), (theirs, _) = map(_elements.flatten, parts)
        joined = map(np.concatenate, zip(ours, theirs, strict=True))
        return structure.unflatten([column.take(places, 0) for column in joined])


def _row_shapes(node: Node) -> list[tuple[int | None, ...]]:
    return [leaf.shape for leaf in _elements.flatten(node.spec())[0]]


_common_spec = functools.partial(_elements.common_spec, call="Dataset.concatenate")
