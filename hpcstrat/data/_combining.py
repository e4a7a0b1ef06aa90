"""Nodes that combine: zip, enumerate, concatenate, choose_from_datasets, sample_..."""

from __future__ import annotations

import abc
import functools
import itertools
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
    Transformation,
    common_batch_sizes,
    join,
    only_row,
)

_CHOICES = 1024  # drawn at once


@final
class Zip(Node):
    """Elements of several nodes side by side, until one node ends.

    An item has the items of all nodes: as a key with the columns of all, or as a tuple.
    """

    def __init__(self, nodes: Sequence[Node], structure: nests.Structure) -> None:
        super().__init__(*nodes)
        widths = _widths_of(nodes)
        self.width = sum(widths) if widths else None
        stops = itertools.accumulate(widths)
        self._columns = [
            slice(stop - width, stop) for width, stop in zip(widths, stops, strict=True)
        ]
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
        sources = [_SourceCursor(node.chunks(epoch)) for node in self.inputs]
        # When a source has ended, those after it are not asked.
        while all(source.pull() for source in sources):
            size = min([len(source.held) for source in sources])
            chunks = [source.take(size) for source in sources]
            if self.width is None:
                yield list(zip(*chunks, strict=True))
            else:
                yield np.concatenate(chunks, axis=1)

    def load(self, item: Any) -> Any:
        if self.width is not None:
            return only_row(self.fetch(item[np.newaxis]))
        return self._structure.unflatten(
            [node.load(inner) for node, inner in zip(self.inputs, item, strict=True)]
        )

    def fetch(self, chunk: Chunk) -> Any:
        if self.width is None:
            return super().fetch(chunk)
        parts = zip(self.inputs, self._columns, strict=True)
        return self._structure.unflatten([node.fetch(chunk[:, columns]) for node, columns in parts])


@final
class Enumerate(Transformation):
    """Pairs of a count and an element. The count is the first column of a key."""

    def __init__(self, source: Node, start: int) -> None:
        super().__init__(source, f"enumerate({start})")
        self.width = None if source.width is None else 1 + source.width
        self.batch_sizes = ()
        self._start = start

    def spec(self) -> Any:
        return TensorSpec((), np.int64), self._source.spec()

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        count = self._start
        for chunk in self._source.chunks(epoch):
            if self.width is None:
                yield list(enumerate(chunk, count))
            else:
                yield np.column_stack((np.arange(count, count + len(chunk), dtype=np.int64), chunk))
            count += len(chunk)

    def load(self, item: Any) -> Any:
        count, inner = item if self.width is None else (item[0], item[1:])
        return np.int64(count), self._source.load(inner)

    def fetch(self, chunk: Chunk) -> Any:
        if self.width is None:
            return super().fetch(chunk)
        return chunk[:, 0].copy(), self._source.fetch(chunk[:, 1:])


class _Merging(Node):
    """The elements of several nodes in some order.

    The first column of a key is the index of the node, the others are that node's own key:

        node 0, keys of width 1:   [0, position, 0]     <- padded with zeros
        node 1, keys of width 2:   [1, count, position]

    If a node has Python objects, an item is a pair: the index and the node's item. `call` is the
    public name of the method, and `others` are further nodes that it reads.
    """

    def __init__(self, nodes: Sequence[Node], call: str, *others: Node) -> None:
        super().__init__(*nodes, *others)
        self._widths = _widths_of(nodes)
        # All keys of a stream have the same width: narrower keys are padded with zeros.
        self.width = 1 + max(self._widths) if self._widths else None
        self.batch_sizes = common_batch_sizes(nodes)  # `others` have no part in the elements
        self._nodes = tuple(nodes)
        self._name = call
        # The nodes whose elements have not been compared yet, and the spec of the other nodes'.
        self._unmet = set(range(len(nodes)))
        self._met: Any = None
        if not any(node.user_code for node in nodes):
            self.spec()  # raises an error if the nodes' specs differ
            self._unmet.clear()

    def spec(self) -> Any:
        return functools.reduce(_elements.common_spec, [node.spec() for node in self._nodes])

    def _tag(self, which: int, chunk: Chunk) -> Chunk:
        """Turns items of a node into items of this node."""
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
        User code thus runs for it here, and once more in its turn.
        """
        for item in chunk:
            try:
                spec = _elements.spec_of(self._nodes[which].load(item))
            except Exception:  # raised when the element's turn comes; compare the next element
                continue
            self._met = spec if self._met is None else _elements.common_spec(self._met, spec)
            self._unmet.discard(which)
            return

    def load(self, item: Any) -> Any:
        which, inner = item[0], item[1]
        if self.width is not None:
            inner = item[1 : 1 + self._widths[which]]
        return self._nodes[which].load(inner)

    def fetch(self, chunk: Chunk) -> Any:
        if self.width is None:
            return super().fetch(chunk)
        which = chunk[:, 0]
        present = np.unique(which).tolist() or [0]  # an empty batch is any node's
        if len(present) == 1:
            return self._fetch_from(present[0], chunk)
        # A batch from several nodes, in any order after a shuffle: fetch once from each node, then
        # restore the order.
        batches = [self._fetch_from(node, chunk[which == node]) for node in present]
        if len({_elements.kinds_of_rows(batch) for batch in batches}) > 1:
            raise ValueError(
                f"{self._name}: the elements of a batch must have the same structure, shape and "
                f"dtype; those of {self!r} do not"
            )
        # The inverse of the permutation that sorts by node.
        rows = np.argsort(np.argsort(which, kind="stable"))
        leaves, structures = zip(*map(_elements.flatten, batches), strict=True)
        columns = zip(*leaves, strict=True)
        return structures[0].unflatten([np.concatenate(column).take(rows, 0) for column in columns])

    def _fetch_from(self, which: int, keys: Keys) -> Any:
        return self._nodes[which].fetch(keys[:, 1 : 1 + self._widths[which]])


@final
class Concatenate(_Merging):
    """The elements of one node, then the elements of another."""

    def __init__(self, source: Node, other: Node) -> None:
        super().__init__((source, other), "Dataset.concatenate")

    def __repr__(self) -> str:
        return "{!r}.concatenate({!r})".format(*self.inputs)

    def cardinality(self) -> int:
        sizes = [node.cardinality() for node in self.inputs]
        if INFINITE in sizes:
            return INFINITE
        return UNKNOWN if UNKNOWN in sizes else sum(sizes)

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        for which, node in enumerate(self.inputs):
            for chunk in node.chunks(epoch):
                yield self._tag(which, chunk)


class _Chosen(_Merging):
    """The elements of several nodes; a stream of indices chooses the node of each.

    If `stops`, it ends when an exhausted node is chosen; if not, such choices are skipped.
    """

    def __init__(self, nodes: Sequence[Node], stops: bool, call: str, *others: Node) -> None:
        super().__init__(nodes, call, *others)
        self._stops = stops
        self._never_chosen = np.zeros(len(nodes), bool)

    @abc.abstractmethod
    def _choices(self, epoch: EpochPass) -> Iterator[Keys]:
        """The indices of the chosen nodes, as many at once as elements may be taken at once."""

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        sources = [_SourceCursor(node.chunks(epoch)) for node in self._nodes]
        ended = self._never_chosen.copy()
        for choices in self._choices(epoch):
            if not self._stops:
                choices = choices[~ended[choices]]
            places, items, end = [], [], len(choices)
            for which in np.unique(choices).tolist():
                wanted = np.flatnonzero(choices == which)
                taken = sources[which].take(len(wanted))
                if len(taken):
                    places.append(wanted[: len(taken)])
                    items.append(self._tag(which, taken))
                if len(taken) < len(wanted):
                    ended[which] = True
                    if self._stops:
                        end = min(end, int(wanted[len(taken)]))
            # All positions before `end` were taken, so the first `end` in order are theirs.
            if places and end:
                order, joined = np.argsort(np.concatenate(places))[:end], join(items)
                yield joined[order] if self.width is not None else [joined[i] for i in order]
            if end < len(choices) or ended.all():
                return


@final
class Sample(_Chosen):
    """The next element of a node drawn at random."""

    def __init__(
        self, nodes: Sequence[Node], weights: list[float] | None, shuffle: ShuffleState, stops: bool
    ) -> None:
        super().__init__(nodes, stops, "Dataset.sample_from_datasets")
        self._weights = weights or [1.0] * len(nodes)
        self._never_chosen = np.array(self._weights) == 0
        self._shuffle = shuffle

    def shuffles(self) -> list[ShuffleState]:
        return [*super().shuffles(), self._shuffle]

    def __repr__(self) -> str:
        # Ranks compare this text. For datasets that a function makes, nothing else compares seeds.
        return (
            f"{self._name}({list(self._nodes)}, {self._weights}, {self._shuffle.own_seed}, "
            f"{self._stops})"
        )

    def cardinality(self) -> int:
        chosen = np.flatnonzero(~self._never_chosen).tolist()
        sizes = [self._nodes[which].cardinality() for which in chosen]
        if len(sizes) == 1:
            return sizes[0]
        return INFINITE if INFINITE in sizes else UNKNOWN

    def _choices(self, epoch: EpochPass) -> Iterator[Keys]:
        random, total = epoch.generator(self._shuffle), sum(self._weights)
        shares = [weight / total for weight in self._weights]
        # Elements of user code are taken one by one, so that the code runs no sooner than needed.
        together = 1 if self.user_code else _CHOICES
        while True:
            drawn = random.choice(len(self._nodes), _CHOICES, p=shares)
            yield from drawn.reshape(-1, together)


@final
class Choose(_Chosen):
    """The next element of the node whose index another node yields."""

    def __init__(self, nodes: Sequence[Node], choice: Node, stops: bool) -> None:
        super().__init__(nodes, stops, "Dataset.choose_from_datasets", choice)
        self._choice = choice

    def __repr__(self) -> str:
        return f"{self._name}({list(self._nodes)}, {self._choice!r}, {self._stops})"

    def cardinality(self) -> int:
        return INFINITE if INFINITE in [node.cardinality() for node in self._nodes] else UNKNOWN

    def _choices(self, epoch: EpochPass) -> Iterator[Keys]:
        count = len(self._nodes)
        for choice in self._choice.elements(epoch):
            is_integer = np.ndim(choice) == 0 and isinstance(choice, np.integer)
            if not (is_integer and 0 <= choice < count):
                raise ValueError(
                    f"{self._name}: choice_dataset has an element {choice!r}; it must be an "
                    f"integer in [0, {count}), the index of a dataset"
                )
            yield np.array([choice], np.int64)


class _SourceCursor:
    """Takes items from a stream of chunks; those at hand are `held`."""

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


def _widths_of(nodes: Sequence[Node]) -> list[int]:
    """The widths of the nodes' keys; empty if the items of a node are Python objects."""
    widths = [node.width for node in nodes if node.width is not None]
    return widths if len(widths) == len(nodes) else []
