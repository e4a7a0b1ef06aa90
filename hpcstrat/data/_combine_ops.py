"""Nodes that combine elements: zip, concatenate, enumerate."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np

from hpcstrat import _nest
from hpcstrat._types import TensorSpec
from hpcstrat.data import _elements
from hpcstrat.data._node import INFINITE, UNKNOWN, Chunk, EpochPass, Keys, Node, first


class _Combination(Node):
    """A node whose items combine those of its inputs: as keys with further columns, or as tuples.

    Keys stay keys only while all inputs have them; a single input of Python objects makes the items objects.
    """

    def load(self, item: Any) -> Any:
        return self._load_object(item) if self.width is None else first(self._fetch_keys(item[np.newaxis]))

    def fetch(self, chunk: Chunk) -> Any:
        return super().fetch(chunk) if self.width is None else self._fetch_keys(chunk)

    @abc.abstractmethod
    def _load_object(self, item: Any) -> Any:
        """`load` of a Python object."""

    @abc.abstractmethod
    def _fetch_keys(self, keys: Keys) -> Any:
        """`fetch` of keys."""


@final
class Zip(_Combination):
    """Elements of several nodes side by side, until one node ends."""

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
        for chunks in _side_by_side([node.chunks(epoch) for node in self.inputs]):
            yield list(zip(*chunks, strict=True)) if self.width is None else np.concatenate(chunks, axis=1)

    def _load_object(self, item: Any) -> Any:
        return self._structure.unflatten(node.load(inner) for node, inner in zip(self.inputs, item, strict=True))

    def _fetch_keys(self, keys: Keys) -> Any:
        batches, start = [], 0
        for node in self.inputs:
            assert node.width is not None
            batches.append(node.fetch(keys[:, start : start + node.width]))
            start += node.width
        return self._structure.unflatten(batches)


@final
class Concatenate(_Combination):
    """The elements of one node, then those of another. The first column of a key says which node."""

    def __init__(self, source: Node, other: Node) -> None:
        if not (source.user_code or other.user_code):
            _elements.common_spec(source.spec(), other.spec())
        # Keys of one stream have one width: the narrower node's columns are padded with zeros.
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

    def _load_object(self, item: Any) -> Any:
        which, inner = item
        return self.inputs[which].load(inner)

    def _fetch_keys(self, keys: Keys) -> Any:
        second = keys[:, 0] == 1
        if second.all() and len(keys):
            return self._fetch_from(1, keys)
        if not second.any():
            return self._fetch_from(0, keys)
        # A batch of both nodes, in any order after a shuffle: fetch from each at once, then restore the order.
        ours, structure = _nest.flatten(self._fetch_from(0, keys[~second]))
        theirs, other = _nest.flatten(self._fetch_from(1, keys[second]))
        if structure != other or any(
            a.dtype != b.dtype or a.shape[1:] != b.shape[1:] for a, b in zip(ours, theirs, strict=True)
        ):
            raise ValueError(
                "Dataset.concatenate: the elements of a batch must be alike in structure, shape and dtype; those of "
                f"{self!r} are not"
            )
        rows = np.argsort(np.argsort(second, kind="stable"))  # the inverse of the permutation that sorts by node
        return structure.unflatten([np.concatenate((a, b)).take(rows, 0) for a, b in zip(ours, theirs, strict=True)])

    def _fetch_from(self, which: int, keys: Keys) -> Any:
        node = self.inputs[which]
        return node.fetch(keys[:, 1 : 1 + (node.width or 0)])


@final
class Enumerate(_Combination):
    """Pairs of a count and an element. The count is the first column of a key."""

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

    def _load_object(self, item: Any) -> Any:
        count, inner = item
        return np.int64(count), self._source.load(inner)

    def _fetch_keys(self, keys: Keys) -> Any:
        return keys[:, 0].copy(), self._source.fetch(keys[:, 1:])


def _side_by_side(streams: Sequence[Iterator[Chunk]]) -> Iterator[list[Chunk]]:
    """Chunks of the same length from all streams, until one stream ends."""
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
    """The batches that hold for all nodes; of unknown size where nodes differ."""
    found = {node.batch_sizes for node in nodes}
    if len(found) == 1:
        return found.pop()
    return () if () in found else (0,)
