"""Nodes that make or split batches: batch, padded_batch, unbatch, window."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

from hpcstrat._core import nests
from hpcstrat._core.types import TensorSpec
from hpcstrat._memory.intervals import divide_up
from hpcstrat.data import _elements
from hpcstrat.data._element_ops import cache
from hpcstrat.data._epoch import EpochPass
from hpcstrat.data._index_ops import Choosing
from hpcstrat.data._node import (
    UNKNOWN,
    Chunk,
    FailedElement,
    Node,
    Transformation,
    join,
    unwrap,
    with_failures,
)
from hpcstrat.data._padding import mark_unknown, pad_together, shapes_for


class _Batching(Transformation):
    """Groups consecutive elements.

    An item is a chunk of the input's items, so batching touches no data.

    Args:
        source: the input.
        sizes: the sizes of the batches, repeated in turn.
        drop_remainder: whether to drop a last batch that is shorter.
        call: see `Transformation`.
    """

    def __init__(self, source: Node, sizes: Sequence[int], drop_remainder: bool, call: str) -> None:
        super().__init__(source, call)
        size = sizes[0] if len(set(sizes)) == 1 else None
        self.batch_sizes = (*source.batch_sizes, size or 0)
        self.inputs_per_element = size
        self._sizes = tuple(sizes)
        self._drop_remainder = drop_remainder
        self._are_uniform_keys = size is not None and source.width is not None

    def cardinality(self) -> int:
        rows = self._source.cardinality()
        if rows < 0:
            return rows
        turns, left = divmod(rows, sum(self._sizes))
        count = turns * len(self._sizes)
        for size in self._sizes:
            if left < size:
                break
            left -= size
            count += 1
        return count + (left > 0 and not self._drop_remainder)

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        sizes = itertools.cycle(self._sizes)
        waiting, missing = [], next(sizes)
        for chunk in self._source.chunks(epoch):
            start, stop = 0, len(chunk)
            while stop - start >= missing:
                if self._are_uniform_keys and not waiting:
                    # All whole batches of the chunk at once, as a view.
                    count = (stop - start) // missing
                    yield chunk[start : start + count * missing].reshape(
                        count, missing, chunk.shape[1]
                    )
                    start += count * missing
                    continue
                waiting.append(chunk[start : start + missing])
                start += missing
                yield [join(waiting)]
                waiting, missing = [], next(sizes)
            if start < stop:
                waiting.append(chunk[start:])
                missing -= stop - start
        if waiting and not self._drop_remainder:
            yield [join(waiting)]

    def first_size(self) -> int | None:
        """The number of rows of every batch; `None` if batches can differ."""
        return self.inputs_per_element if self._drop_remainder else None


@final
class Batch(_Batching):
    """Consecutive elements, stacked."""

    def __init__(self, source: Node, sizes: Sequence[int], drop_remainder: bool) -> None:
        call = f"batch({sizes[0] if len(sizes) == 1 else list(sizes)}, {drop_remainder})"
        super().__init__(source, sizes, drop_remainder, call)
        self.rows = source
        # Rows of different shapes fail only on the replica that has them, so steps are compared as
        # if the rows came from user code. Asking user code for its spec would run it.
        self.user_code = source.user_code or any(
            None in leaf.shape for leaf in nests.flatten(source.spec())[0]
        )

    def spec(self) -> Any:
        size = self.first_size()
        return nests.map_leaves(
            lambda leaf: TensorSpec((size, *leaf.shape), leaf.dtype), self._source.spec()
        )

    @property
    def threads(self) -> int:
        # Threads that make rows work within one batch.
        return 1 if self._source.threads else 0

    def load(self, item: Any) -> Any:
        return self._source.fetch(item)


@final
class PaddedBatch(_Batching):
    """Consecutive elements, padded to one shape and stacked.

    If all sizes are given, a replica loads only its own rows. Otherwise it must load the whole
    batch to find the largest element.
    """

    def __init__(
        self, source: Node, size: int, shapes: Any, values: Any, drop_remainder: bool
    ) -> None:
        call = f"padded_batch({size}, {shapes}, {values}, {drop_remainder})"
        super().__init__(source, (size,), drop_remainder, call)
        if shapes is not None and all(
            length is not None and length >= 0 for length in nests.flatten(shapes)[0]
        ):
            self.rows = _Padded(source, shapes, values)
            self.user_code = True  # as of `_Padded`
        self._shapes, self._values = shapes, values

    def spec(self) -> Any:
        size = self.first_size()
        specs, structure = nests.flatten(self._source.spec())
        shapes = shapes_for(self._shapes, structure, [leaf.shape for leaf in specs])
        padded = [
            mark_unknown(shape or (-1,) * len(leaf.shape))
            for shape, leaf in zip(shapes, specs, strict=True)
        ]
        return structure.unflatten(
            TensorSpec((size, *shape), leaf.dtype)
            for shape, leaf in zip(padded, specs, strict=True)
        )

    def load(self, item: Any) -> Any:
        if self.rows is not None:
            return self.rows.fetch(item)
        return pad_together([self._source.load(row) for row in item], self._shapes, self._values)


@final
class _Padded(Choosing):
    """The elements, each padded to a given shape."""

    def __init__(self, source: Node, shapes: Any, values: Any) -> None:
        super().__init__(source, f"padded to {shapes}")
        # An element that is too large fails only on the replica that loads it, so steps are
        # compared as if this node ran user code.
        self.user_code = True
        self._shapes, self._values = shapes, values

    def load(self, item: Any) -> Any:
        return nests.map_leaves(lambda leaf: leaf[0], self.fetch([item]))

    def fetch(self, chunk: Chunk) -> Any:
        return pad_together([self._source.load(item) for item in chunk], self._shapes, self._values)


@final
class Unbatch(Transformation):
    """The rows of elements.

    Directly after `batch` it splits the items again, and nothing is ever stacked.
    """

    def __init__(self, source: Node) -> None:
        super().__init__(source, "unbatch()")
        if source.rows is not None:
            self.width, self.rows = source.rows.width, source.rows.rows
        self.batch_sizes = source.batch_sizes[:-1]

    def spec(self) -> Any:
        def row(leaf: TensorSpec) -> TensorSpec:
            if not leaf.shape:
                raise ValueError(
                    "Dataset.unbatch: elements must have a first dimension; they are "
                    f"{self._source.spec()}"
                )
            return TensorSpec(leaf.shape[1:], leaf.dtype)

        return nests.map_leaves(row, self._source.spec())

    def cardinality(self) -> int:
        size = self._source.cardinality()
        if size <= 0 or self._source.user_code:  # asking for the spec would call functions
            return UNKNOWN if size > 0 else size
        sizes = {
            leaf.shape[0] if leaf.shape else None for leaf in nests.flatten(self._source.spec())[0]
        }
        rows = sizes.pop() if len(sizes) == 1 else None
        return UNKNOWN if rows is None else size * rows

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        if self._source.rows is not None:
            for chunk in self._source.chunks(epoch):
                yield from chunk
        else:
            for batch in with_failures(self._source.elements(epoch)):
                yield (
                    [batch] if isinstance(batch, FailedElement) else list(_elements.unstack(batch))
                )

    def load(self, item: Any) -> Any:
        return unwrap(item) if self._source.rows is None else self._source.rows.load(item)

    def fetch(self, chunk: Chunk) -> Any:
        return super().fetch(chunk) if self._source.rows is None else self._source.rows.fetch(chunk)


@final
class Window(Transformation):
    """Datasets of `size` elements; each starts `shift` elements after the previous one.

    An item is a chunk of the input's items, so a window touches no data until its datasets are
    iterated over.

    Args:
        source: the input.
        size: the number of elements of a window.
        shift: the number of elements from the start of one window to the start of the next.
        stride: the number of input elements from one element of a window to the next.
        drop_remainder: whether to drop windows that are shorter.
        dataset_of: makes a dataset of a node.
    """

    def __init__(
        self,
        source: Node,
        size: int,
        shift: int,
        stride: int,
        drop_remainder: bool,
        dataset_of: Callable[[Node], Any],
    ) -> None:
        super().__init__(source, f"window({size}, {shift}, {stride}, {drop_remainder})")
        self.batch_sizes = ()
        self._size, self._shift, self._stride = size, shift, stride
        self._drop_remainder = drop_remainder
        self._dataset_of = dataset_of
        self._structure: nests.Structure | None = None

    def spec(self) -> Any:
        return nests.map_leaves(_elements.DatasetSpec, self._source.spec())

    def cardinality(self) -> int:
        size = self._source.cardinality()
        if size < 0:
            return size
        starts = size - (self._size - 1) * self._stride if self._drop_remainder else size
        return max(0, divide_up(starts, self._shift))

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        span = (self._size - 1) * self._stride + 1
        held: Chunk = []
        start = 0  # of the next window, in `held` or beyond it
        for chunk in self._source.chunks(epoch):
            held = join([held, chunk]) if len(held) else chunk
            while start + span <= len(held):
                yield [held[start : start + span : self._stride]]
                start += self._shift
            gone = min(start, len(held))
            held, start = held[gone:], start - gone
        while start < len(held) and not self._drop_remainder:
            yield [held[start : start + span : self._stride]]
            start += self._shift

    def load(self, item: Any) -> Any:
        elements = _Picked(self._source, item)
        if self._structure is None:
            _, self._structure = nests.flatten(self._source.load(item[0]))
        count = self._structure.num_leaves
        if count == 1:
            columns = [_Leaf(elements, 0) if self._structure.num_nodes > 1 else elements]
        else:  # load each element once, not once per dataset
            kept = cache(elements)
            columns = [_Leaf(kept, i) for i in range(count)]
        return self._structure.unflatten(map(self._dataset_of, columns))


@final
class _Picked(Node):
    """The elements of a chunk of a node's items."""

    def __init__(self, source: Node, chunk: Chunk) -> None:
        super().__init__()
        self.width, self.user_code = source.width, source.user_code
        self.batch_sizes, self.rows = source.batch_sizes, source.rows
        self._source = source
        self._chunk = chunk

    def __repr__(self) -> str:
        return f"window of {self._source!r}"

    def spec(self) -> Any:
        return self._source.spec()

    def cardinality(self) -> int:
        return len(self._chunk)

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        yield self._chunk

    def load(self, item: Any) -> Any:
        return self._source.load(item)

    def fetch(self, chunk: Chunk) -> Any:
        return self._source.fetch(chunk)


@final
class _Leaf(Choosing):
    """One leaf of each element."""

    def __init__(self, source: Node, index: int) -> None:
        super().__init__(source, f"leaf {index}")
        self.rows = None
        self._index = index

    def spec(self) -> Any:
        return nests.flatten(self._source.spec())[0][self._index]

    def load(self, item: Any) -> Any:
        return nests.flatten(self._source.load(item))[0][self._index]

    def fetch(self, chunk: Chunk) -> Any:
        return nests.flatten(self._source.fetch(chunk))[0][self._index]
