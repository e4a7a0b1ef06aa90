"""Nodes that combine elements: zip, concatenate, sample_from_datasets, choose_from_datasets, enumerate."""

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
    ShuffleState,
    first,
    join,
)

_CHOICES = 1024


class _Combination(Node):
    """A node whose items combine those of its inputs: as keys with further columns, or as tuples.

    Keys stay keys only while all inputs have them; a single input of Python objects makes the items
    objects.
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


class _OneAfterAnother(_Combination):
    """The elements of several nodes in some order. The first column of a key says of which node.

    Args:
        nodes: the nodes whose elements they are.
        call: the user's name of the method.
        *others: further nodes that it reads.
    """

    def __init__(self, nodes: Sequence[Node], call: str, *others: Node) -> None:
        lazy = any(node.user_code for node in nodes)
        if not lazy:
            functools.reduce(_elements.common_spec, [node.spec() for node in nodes])
        # Keys of one stream have one width: the narrower nodes' columns are padded with zeros.
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
        self._unmet = (
            set(range(len(nodes))) if lazy else set[int]()
        )  # nodes whose elements have not been compared
        self._met: Any = None  # the spec of the others' elements

    def spec(self) -> Any:
        return functools.reduce(_elements.common_spec, [node.spec() for node in self._nodes])

    def _tagged(self, which: int, chunk: Chunk) -> Chunk:
        """Items of a node as those of this one."""
        if which in self._unmet:
            self._meet(which, chunk)
        if self.width is None:
            return [(which, item) for item in chunk]
        keys = np.zeros((len(chunk), self.width), np.int64)
        keys[:, 0] = which
        keys[:, 1 : 1 + chunk.shape[1]] = chunk
        return keys

    def _meet(self, which: int, chunk: Chunk) -> None:
        """Compares the first element of a node with the others'.

        Every rank loads it, so that all raise: the elements of a rank's own may all be of one node.
        """
        for item in chunk:
            try:
                spec = _elements.spec_of(self._nodes[which].load(item))
            except Exception:  # raised when the element's turn comes; the next one is compared
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
        # A batch of several nodes, in any order after a shuffle: fetch from each at once, then
        # restore the order.
        parts = [nests.flatten(self._fetch_from(node, keys[which == node])) for node in present]
        (first_leaves, structure), *rest = parts
        if any(
            other != structure
            or any(
                not _elements.are_alike(a.dtype, b.dtype) or a.shape[1:] != b.shape[1:]
                for a, b in zip(first_leaves, leaves, strict=True)
            )
            for leaves, other in rest
        ):
            raise ValueError(
                f"{self._name}: the elements of a batch must be alike in structure, shape and "
                f"dtype; those of {self!r} are not"
            )
        rows = np.argsort(
            np.argsort(which, kind="stable")
        )  # the inverse of the permutation that sorts by node
        columns = zip(*[leaves for leaves, _ in parts], strict=True)
        return structure.unflatten([np.concatenate(column).take(rows, 0) for column in columns])

    def _fetch_from(self, which: int, keys: Keys) -> Any:
        node = self._nodes[which]
        return node.fetch(keys[:, 1 : 1 + (node.width or 0)])


@final
class Concatenate(_OneAfterAnother):
    """The elements of one node, then those of another."""

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
                yield self._tagged(which, chunk)


class _Chosen(_OneAfterAnother):
    """The next element of one node or another, as numbers say.

    Args:
        nodes: the nodes.
        stop_on_empty: whether the end of a node that is chosen ends all; else its choices are
            passed over.
        call: the user's name of the method.
        *others: further nodes that it reads.
    """

    def __init__(
        self, nodes: Sequence[Node], stop_on_empty: bool, call: str, *others: Node
    ) -> None:
        super().__init__(nodes, call, *others)
        self._stops = stop_on_empty
        # How many are chosen at once. What user code makes is taken one by one: no sooner than
        # needed.
        self._together = 1 if self.user_code else _CHOICES

    @abc.abstractmethod
    def _choices(self, epoch: EpochPass) -> Iterator[Keys]:
        """Chunks of the numbers of nodes, of any length."""

    def _can_follow(self, ended: Sequence[bool]) -> bool:
        """Whether a node that has not ended may still be chosen."""
        return not all(ended)

    def cardinality(self) -> int:
        return INFINITE if INFINITE in [node.cardinality() for node in self._nodes] else UNKNOWN

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        streams = [_SourceCursor(node.chunks(epoch)) for node in self._nodes]
        ended = np.zeros(len(streams), bool)
        for chunk in self._choices(epoch):
            for start in range(0, len(chunk), self._together):
                chosen = chunk[start : start + self._together]
                if not self._stops:
                    chosen = chosen[~ended[chosen]]
                found, end = [], len(chosen)
                for which in np.unique(chosen).tolist():
                    places = np.flatnonzero(chosen == which)
                    items = streams[which].take(len(places))
                    if len(items) < len(places):
                        ended[which] = True
                        if self._stops:
                            end = min(end, int(places[len(items)]))
                    found.append(
                        (places[: len(items)], self._tagged(which, items) if len(items) else ())
                    )
                yield from self._in_order(found, end)
                if end < len(chosen) or not (self._stops or self._can_follow(ended.tolist())):
                    return

    def _in_order(self, found: list[tuple[Keys, Chunk]], end: int) -> Iterator[Chunk]:
        """The items at their places, as one chunk: those before the place `end`."""
        found = [(places, items) for places, items in found if len(items)]
        if not found:
            return
        places = np.concatenate([places for places, _ in found])
        order = np.argsort(places)[: int((places < end).sum())]
        if len(order):
            items = join([items for _, items in found])
            yield items[order] if isinstance(items, np.ndarray) else [items[i] for i in order]


@final
class Sample(_Chosen):
    """The next element of a node that is drawn at random."""

    def __init__(
        self,
        nodes: Sequence[Node],
        weights: Sequence[float] | None,
        seed: int | None,
        reshuffle: bool,
        stops: bool,
    ) -> None:
        super().__init__(nodes, stops, "Dataset.sample_from_datasets")
        self._weights = [1.0] * len(nodes) if weights is None else list(weights)
        self._shuffle = ShuffleState(seed, reshuffle)

    def __repr__(self) -> str:
        seed = (
            self._shuffle.own_seed
        )  # ranks compare texts, and seeds of datasets that a function makes only so
        return f"Dataset.sample_from_datasets({list(self._nodes)}, {self._weights}, {seed}, {self._stops})"

    def cardinality(self) -> int:
        sizes = [
            node.cardinality()
            for node, weight in zip(self._nodes, self._weights, strict=True)
            if weight > 0
        ]
        return sizes[0] if len(sizes) == 1 else INFINITE if INFINITE in sizes else UNKNOWN

    def own_shuffles(self) -> Sequence[ShuffleState]:
        return (self._shuffle,)

    def _choices(self, epoch: EpochPass) -> Iterator[Keys]:
        random, total = epoch.generator(self._shuffle), sum(self._weights)
        while True:
            yield random.choice(
                len(self._nodes), _CHOICES, p=[weight / total for weight in self._weights]
            )

    def _can_follow(self, ended: Sequence[bool]) -> bool:
        return any(
            weight > 0 and not over for weight, over in zip(self._weights, ended, strict=True)
        )


@final
class Choose(_Chosen):
    """The next element of the node whose number another node gives."""

    def __init__(self, nodes: Sequence[Node], choice: Node, stops: bool) -> None:
        super().__init__(nodes, stops, "Dataset.choose_from_datasets", choice)
        self._choice = choice

    def __repr__(self) -> str:
        return f"Dataset.choose_from_datasets({list(self._nodes)}, {self._choice!r}, {self._stops})"

    def _choices(self, epoch: EpochPass) -> Iterator[Keys]:
        for choice in self._choice.elements(epoch):
            if not (
                np.ndim(choice) == 0
                and isinstance(choice, np.integer)
                and 0 <= choice < len(self._nodes)
            ):
                raise ValueError(
                    f"{self._name}: choice_dataset has an element {choice!r}; it must be an "
                    f"integer of [0, {len(self._nodes)}), the number of a dataset"
                )
            yield np.array([choice], np.int64)


class _SourceCursor:
    """Takes items from a stream of chunks."""

    def __init__(self, chunks: Iterator[Chunk]) -> None:
        self._chunks = chunks
        self._head: Chunk = []

    def take(self, count: int) -> Chunk:
        """The next `count` items, or as many as there are."""
        while len(self._head) < count:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            self._head = join([self._head, chunk]) if len(self._head) else chunk
        taken, self._head = self._head[:count], self._head[count:]
        return taken


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
