"""The node of flat_map and interleave: elements of datasets that a function makes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import numpy as np

from hpcstrat.data import _elements
from hpcstrat.data._epoch import EpochPass, ShuffleState
from hpcstrat.data._node import (
    UNKNOWN,
    Chunk,
    FailedElement,
    Node,
    Transformation,
    unwrap,
    with_failures,
)
from hpcstrat.data._threads import blocks_ahead, threads_of

# Datasets per pass whose text and arrays the ranks compare: a single one may be equal by chance.
_COMPARED = 32
_END = object()


@final
class Interleave(Transformation):
    """Elements of the datasets that a function makes from elements: `block_length` of each in turn.

    An item is a pair of a node and an item of it, so every rank makes all datasets but loads only
    its own elements. With a cycle length of 2 and a block length of 1:

        dataset of element 0:   a0   a1   a2
        dataset of element 1:     b0   b1
        dataset of element 2:                  c0   c1     (replaces an ended dataset)

    Args:
        source: the input.
        call: see `Transformation`.
        function: makes a node from an element.
        cycle_length: the number of datasets that take turns.
        block_length: the number of elements per turn.
        threads: the number of threads that read the datasets, or 0.
    """

    def __init__(
        self,
        source: Node,
        call: str,
        function: Callable[[Any], Node],
        cycle_length: int,
        block_length: int,
        threads: int,
    ) -> None:
        super().__init__(source, call)
        self.user_code, self.batch_sizes = True, ()
        self._function = function
        self._cycle_length = cycle_length
        self._block_length = block_length
        self._threads = threads
        # The seeds of the datasets' own shuffles derive from this one.
        self._shuffle = ShuffleState(None, True)

    def own_shuffles(self) -> Sequence[ShuffleState]:
        return (self._shuffle,)

    def spec(self) -> Any:
        """See `Node`.

        The function is called on the first two elements: sizes in which the results differ are
        unknown.
        """
        elements = itertools.islice(self._source.elements(EpochPass(frozen=True)), 2)
        specs = [self._function(element).spec() for element in elements]
        if not specs:
            raise ValueError(
                f"Dataset.element_spec: {self!r} has no elements, so the shapes and dtypes that "
                "its function would return are unknown"
            )
        return specs[0] if len(specs) == 1 else _elements.common_spec(*specs)

    def cardinality(self) -> int:
        return UNKNOWN

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        opened = self._open(epoch)
        if not self._threads:
            yield from self._in_turn(items for _, items in opened)
            return
        count = min(self._threads, self._cycle_length)
        with threads_of(count) as submit:
            yield from self._in_turn(blocks_ahead(opened, self._block_length, count, submit, epoch))

    def _in_turn(self, opened: Iterator[Iterator[Any]]) -> Iterator[Chunk]:
        slots: list[Iterator[Any] | None] = [None] * self._cycle_length
        index = given = 0
        while True:
            slot = slots[index]
            if slot is None:
                slot = slots[index] = next(opened, None)
            if slot is None and not any(slots):
                return
            item = _END if slot is None else next(slot, _END)
            if item is _END:
                slots[index] = None
            else:
                yield [item]
                given += 1
            if item is _END or given == self._block_length:
                index, given = (index + 1) % self._cycle_length, 0

    def _open(self, epoch: EpochPass) -> Iterator[tuple[EpochPass, Iterator[Any]]]:
        """For each element of the input, a pass over its dataset and the items of that pass."""
        passes = epoch.inner_passes(self._shuffle)
        for number, element in enumerate(with_failures(self._source.elements(epoch))):
            inner = next(passes)
            try:
                node = self._function(unwrap(element))
            except Exception as error:
                yield inner, iter([(None, FailedElement(error))])
                continue
            if epoch.checksum.takes(number, _COMPARED):
                epoch.checksum.add_text(f"{node!r} {node.cardinality()} {node.checksums(False)}")
            yield inner, _items(node, inner)

    def load(self, item: Any) -> Any:
        node, inner = item
        return unwrap(inner) if node is None else node.load(inner)

    def fetch(self, chunk: Chunk) -> Any:
        parts = []
        for node, group in itertools.groupby(chunk, key=lambda item: item[0]):
            inner = [item for _, item in group]
            if node is None:
                raise inner[0].error
            parts.append(node.fetch(inner if node.width is None else np.stack(inner)))
        if len(parts) == 1:
            return parts[0]
        return _elements.stack([row for part in parts for row in _elements.unstack(part)])


def _items(node: Node, epoch: EpochPass) -> Iterator[tuple[Node | None, Any]]:
    for chunk in with_failures(node.chunks(epoch)):
        if isinstance(chunk, FailedElement):
            yield None, chunk
        else:
            for item in chunk:
                yield node, item
