"""Stages that put streams together: zip, concatenate, enumerate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np

from hpcstrat import _nest
from hpcstrat._types import TensorSpec
from hpcstrat.data import _elements
from hpcstrat.data._node import INFINITE, UNKNOWN, Chunk, Node, first
from hpcstrat.data._walk import Walk


@final
class Zip(Node):
    """Elements of several stages side by side, until one of them ends."""

    def __init__(self, nodes: Sequence[Node], structure: _nest.Structure) -> None:
        self.inputs = tuple(nodes)
        self._structure = structure
        self.width = None if any(node.width is None for node in nodes) else sum(node.width or 0 for node in nodes)
        self.user_code = any(node.user_code for node in nodes)
        self.batch_sizes = _common_batch_sizes(self.inputs)
        self.rows = None

    def __repr__(self) -> str:
        return f"Dataset.zip({self._structure.unflatten(self.inputs)})"

    def spec(self) -> Any:
        return self._structure.unflatten(node.spec() for node in self.inputs)

    def cardinality(self) -> int:
        sizes = [node.cardinality() for node in self.inputs]
        if UNKNOWN in sizes:
            return UNKNOWN
        return min((size for size in sizes if size != INFINITE), default=INFINITE)

    def chunks(self, walk: Walk) -> Iterator[Chunk]:
        for parts in _side_by_side([node.chunks(walk) for node in self.inputs]):
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
        self.inputs = (source, other)
        keyed = source.width is not None and other.width is not None
        self.width = 1 + max(source.width or 0, other.width or 0) if keyed else None
        self.user_code = source.user_code or other.user_code
        self.batch_sizes = _common_batch_sizes(self.inputs)
        self.rows = None

    def __repr__(self) -> str:
        return "{!r}.concatenate({!r})".format(*self.inputs)

    def spec(self) -> Any:
        return _elements.common_spec(*(node.spec() for node in self.inputs))

    def cardinality(self) -> int:
        sizes = [node.cardinality() for node in self.inputs]
        return INFINITE if INFINITE in sizes else UNKNOWN if UNKNOWN in sizes else sum(sizes)

    def chunks(self, walk: Walk) -> Iterator[Chunk]:
        for which, node in enumerate(self.inputs):
            for chunk in node.chunks(walk):
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
        self._source = source
        self._start = start
        self.inputs = (source,)
        self.width = None if source.width is None else 1 + source.width
        self.user_code = source.user_code
        self.batch_sizes = ()
        self.rows = None

    def __repr__(self) -> str:
        return f"{self._source!r}.enumerate({self._start})"

    def spec(self) -> Any:
        return TensorSpec((), np.int64), self._source.spec()

    def cardinality(self) -> int:
        return self._source.cardinality()

    def chunks(self, walk: Walk) -> Iterator[Chunk]:
        count = self._start
        for chunk in self._source.chunks(walk):
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
