"""Nodes that combine elements of their inputs: zip, concatenate, enumerate."""

from __future__ import annotations

import abc
import functools
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np

from hpcstrat._core import nests
from hpcstrat._core.types import TensorSpec
from hpcstrat.data import _elements
from hpcstrat.data._node import (
    INFINITE,
    UNKNOWN,
    Chunk,
    EpochPass,
    Keys,
    Node,
    first,
)


class _Combination(Node):
    """A node whose items combine its inputs' items: as keys with more columns, or as tuples.

    The items are keys only if all inputs have keys; if one input has Python objects, they are
    Python objects.
    """

    def load(self, item: Any) -> Any:
        return (
            self._load_object(item)
            if self.width is None
            else first(self._fetch_keys(item[np.newaxis]))
        )

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

    def __init__(self, nodes: Sequence[Node], structure: nests.Structure) -> None:
        super().__init__(
            *nodes,
            width=None
            if any(node.width is None for node in nodes)
            else sum(node.width or 0 for node in nodes),
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
            yield (
                list(zip(*chunks, strict=True))
                if self.width is None
                else np.concatenate(chunks, axis=1)
            )

    def _load_object(self, item: Any) -> Any:
        return self._structure.unflatten(
            node.load(inner) for node, inner in zip(self.inputs, item, strict=True)
        )

    def _fetch_keys(self, keys: Keys) -> Any:
        batches, start = [], 0
        for node in self.inputs:
            assert node.width is not None
            batches.append(node.fetch(keys[:, start : start + node.width]))
            start += node.width
        return self._structure.unflatten(batches)


class Merging(_Combination):
    """The elements of several nodes in some order.

    The first column of a key is the index of the node, the others are that node's own key:

        node 0, keys of width 1:   [0, position, 0]     <- padded with zeros
        node 1, keys of width 2:   [1, count, position]

    Args:
        nodes: the nodes whose elements they are.
        call: the public name of the method.
        *others: further nodes that it reads.
    """

    def __init__(self, nodes: Sequence[Node], call: str, *others: Node) -> None:
        lazy = any(node.user_code for node in nodes)
        if not lazy:
            functools.reduce(_elements.common_spec, [node.spec() for node in nodes])
        # All keys of a stream have the same width: narrower keys are padded with zeros.
        keyed = all(node.width is not None for node in nodes)
        super().__init__(
            *nodes,
            *others,
            width=1 + max(node.width or 0 for node in nodes) if keyed else None,
            user_code=any(node.user_code for node in (*nodes, *others)),
            batch_sizes=_common_batch_sizes(nodes),
            rows=None,
            inputs_per_element=None,
        )
        self._nodes = tuple(nodes)
        self._name = call
        # The nodes whose elements have not been compared yet, and the spec of the other nodes'.
        self._unmet = set(range(len(nodes))) if lazy else set[int]()
        self._met: Any = None

    def spec(self) -> Any:
        return functools.reduce(_elements.common_spec, [node.spec() for node in self._nodes])

    def _tag(self, which: int, chunk: Chunk) -> Chunk:
        """Turns items of an input into items of this node."""
        if which in self._unmet:
            self._meet(which, chunk)
        if self.width is None:
            return [(which, item) for item in chunk]
        keys = np.zeros((len(chunk), self.width), np.int64)
        keys[:, 0] = which
        keys[:, 1 : 1 + chunk.shape[1]] = chunk
        return keys

    def _meet(self, which: int, chunk: Chunk) -> None:
        """Compares the first element of a node with the other nodes' elements.

        Every rank loads it, so all ranks raise: a rank's own elements may all come from one node.
        """
        for item in chunk:
            try:
                spec = _elements.spec_of(self._nodes[which].load(item))
            except Exception:  # raised when the element's turn comes; compare the next element
                continue
            self._met = spec if self._met is None else _elements.common_spec(self._met, spec)
            self._unmet.discard(which)
            return

    def _load_object(self, item: Any) -> Any:
        which, inner = item
        return self._nodes[which].load(inner)

    def _fetch_keys(self, keys: Keys) -> Any:
        which = keys[:, 0]
        present = np.unique(which).tolist() or [0]
        if len(present) == 1:
            return self._fetch_from(present[0], keys)
        # A batch from several nodes, in any order after a shuffle: fetch once from each node, then
        # restore the order.
        parts = [nests.flatten(self._fetch_from(node, keys[which == node])) for node in present]
        (first_leaves, structure), *rest = parts
        if any(
            other != structure
            or any(
                not _elements.are_compatible(a.dtype, b.dtype) or a.shape[1:] != b.shape[1:]
                for a, b in zip(first_leaves, leaves, strict=True)
            )
            for leaves, other in rest
        ):
            raise ValueError(
                f"{self._name}: the elements of a batch must have the same structure, shape and "
                f"dtype; those of {self!r} do not"
            )
        # The inverse of the permutation that sorts by node.
        rows = np.argsort(np.argsort(which, kind="stable"))
        columns = zip(*[leaves for leaves, _ in parts], strict=True)
        return structure.unflatten([np.concatenate(column).take(rows, 0) for column in columns])

    def _fetch_from(self, which: int, keys: Keys) -> Any:
        node = self._nodes[which]
        return node.fetch(keys[:, 1 : 1 + (node.width or 0)])


@final
class Concatenate(Merging):
    """The elements of one node, then the elements of another."""

    def __init__(self, source: Node, other: Node) -> None:
        super().__init__((source, other), "Dataset.concatenate")

    def __repr__(self) -> str:
        return "{!r}.concatenate({!r})".format(*self.inputs)

    def cardinality(self) -> int:
        sizes = [node.cardinality() for node in self.inputs]
        return INFINITE if INFINITE in sizes else UNKNOWN if UNKNOWN in sizes else sum(sizes)

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        for which, node in enumerate(self.inputs):
            for chunk in node.chunks(epoch):
                yield self._tag(which, chunk)


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
    """The batch sizes of all nodes; one unknown size (0) if all have batches but they differ."""
    sizes = {node.batch_sizes for node in nodes}
    if len(sizes) == 1:
        return sizes.pop()
    return () if () in sizes else (0,)
