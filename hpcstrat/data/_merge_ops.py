"""Nodes whose elements are those of several nodes, one by one: the base of all, and concatenate."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np

from hpcstrat._core import nests
from hpcstrat.data import _elements
from hpcstrat.data._combine_ops import Combining, common_batch_sizes, widths_of
from hpcstrat.data._epoch import EpochPass
from hpcstrat.data._node import INFINITE, UNKNOWN, Chunk, Keys, Node


class Merging(Combining):
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
        super().__init__(*nodes, *others)
        self._widths = widths_of(nodes)
        # All keys of a stream have the same width: narrower keys are padded with zeros.
        self.width = 1 + max(self._widths) if self._widths else None
        self.batch_sizes = common_batch_sizes(nodes)
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

    def _load_object(self, item: Any) -> Any:
        which, inner = item
        return self._nodes[which].load(inner)

    def _fetch_keys(self, keys: Keys) -> Any:
        which = keys[:, 0]
        present = np.unique(which).tolist() or [0]  # an empty batch is any node's
        if len(present) == 1:
            return self._fetch_from(present[0], keys)
        # A batch from several nodes, in any order after a shuffle: fetch once from each node, then
        # restore the order.
        batches = [self._fetch_from(node, keys[which == node]) for node in present]
        if len({_elements.kinds_of_rows(batch) for batch in batches}) > 1:
            raise ValueError(
                f"{self._name}: the elements of a batch must have the same structure, shape and "
                f"dtype; those of {self!r} do not"
            )
        # The inverse of the permutation that sorts by node.
        rows = np.argsort(np.argsort(which, kind="stable"))
        leaves, structures = zip(*map(nests.flatten, batches), strict=True)
        columns = zip(*leaves, strict=True)
        return structures[0].unflatten([np.concatenate(column).take(rows, 0) for column in columns])

    def _fetch_from(self, which: int, keys: Keys) -> Any:
        return self._nodes[which].fetch(keys[:, 1 : 1 + self._widths[which]])


@final
class Concatenate(Merging):
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
