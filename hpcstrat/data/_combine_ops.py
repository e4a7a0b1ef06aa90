"""Nodes that put elements side by side: zip, enumerate."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np

from hpcstrat._core import nests
from hpcstrat._core.types import TensorSpec
from hpcstrat.data._epoch import EpochPass
from hpcstrat.data._node import INFINITE, UNKNOWN, Chunk, Keys, Node, join, only_row


class Combining(Node):
    """A node whose items combine its inputs' items: as keys with more columns, or as tuples.

    The items are keys only if all inputs have keys; if one input has Python objects, they are
    Python objects.
    """

    def load(self, item: Any) -> Any:
        if self.width is None:
            return self._load_object(item)
        return only_row(self._fetch_keys(item[np.newaxis]))

    def fetch(self, chunk: Chunk) -> Any:
        return super().fetch(chunk) if self.width is None else self._fetch_keys(chunk)

    @abc.abstractmethod
    def _load_object(self, item: Any) -> Any:
        """`load` of a Python object."""

    @abc.abstractmethod
    def _fetch_keys(self, keys: Keys) -> Any:
        """`fetch` of keys."""


@final
class Zip(Combining):
    """Elements of several nodes side by side, until one node ends."""

    def __init__(self, nodes: Sequence[Node], structure: nests.Structure) -> None:
        super().__init__(*nodes)
        self._widths = widths_of(nodes)
        self.width = sum(self._widths) if self._widths else None
        self.batch_sizes = common_batch_sizes(nodes)
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
        sources = [SourceCursor(node.chunks(epoch)) for node in self.inputs]
        # When a source has ended, those after it are not asked.
        while all(source.pull() for source in sources):
            size = min([len(source.held) for source in sources])
            chunks = [source.take(size) for source in sources]
            if self.width is None:
                yield list(zip(*chunks, strict=True))
            else:
                yield np.concatenate(chunks, axis=1)

    def _load_object(self, item: Any) -> Any:
        return self._structure.unflatten(
            node.load(inner) for node, inner in zip(self.inputs, item, strict=True)
        )

    def _fetch_keys(self, keys: Keys) -> Any:
        batches, start = [], 0
        for node, width in zip(self.inputs, self._widths, strict=True):
            batches.append(node.fetch(keys[:, start : start + width]))
            start += width
        return self._structure.unflatten(batches)


@final
class Enumerate(Combining):
    """Pairs of a count and an element. The count is the first column of a key."""

    def __init__(self, source: Node, start: int) -> None:
        super().__init__(source)
        self.width = None if source.width is None else 1 + source.width
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

    def _load_object(self, item: Any) -> Any:
        count, inner = item
        return np.int64(count), self._source.load(inner)

    def _fetch_keys(self, keys: Keys) -> Any:
        return keys[:, 0].copy(), self._source.fetch(keys[:, 1:])


class SourceCursor:
    """Takes items from a stream of chunks.

    Attributes:
        held: the items at hand.
    """

    def __init__(self, chunks: Iterator[Chunk]) -> None:
        self._chunks = chunks
        self.held: Chunk = []

    def pull(self, count: int = 1) -> bool:
        """Whether there are `count` more items; they are then at hand."""
        while len(self.held) < count:
            chunk = next(self._chunks, None)
            if chunk is None:
                return False
            self.held = join([self.held, chunk]) if len(self.held) else chunk
        return True

    def take(self, count: int) -> Chunk:
        """The next `count` items; fewer at the end."""
        self.pull(count)
        taken, self.held = self.held[:count], self.held[count:]
        return taken


def widths_of(nodes: Sequence[Node]) -> list[int]:
    """The widths of the nodes' keys; empty if the items of a node are Python objects."""
    widths = [node.width for node in nodes if node.width is not None]
    return widths if len(widths) == len(nodes) else []


def common_batch_sizes(nodes: Sequence[Node]) -> tuple[int, ...]:
    """The batch sizes of all nodes; one unknown size (0) if all have batches but they differ."""
    sizes = {node.batch_sizes for node in nodes}
    if len(sizes) == 1:
        return sizes.pop()
    return () if () in sizes else (0,)
