"""Nodes that make or split batches: batch, padded_batch, unbatch, window."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import numpy as np

from hpcstrat._core import nests
from hpcstrat._core.types import TensorSpec
from hpcstrat._memory.intervals import divide_up
from hpcstrat.data import _elements
from hpcstrat.data._elements import FailedElement, attempt, unwrap, with_failures
from hpcstrat.data._indexing import Choosing, cache
from hpcstrat.data._node import (
    UNKNOWN,
    Chunk,
    EpochPass,
    Node,
    Transformation,
    join,
    only_row,
)


@final
class Batch(Transformation):
    """Consecutive elements, stacked, in batches whose `sizes` repeat in turn.

    An item is a chunk of the input's items, so batching touches no data. `padding` has the shapes
    and the values of `padded_batch`.

    Attributes:
        size: the size of each batch but the last; `None` if several sizes take turns.
    """

    def __init__(
        self,
        source: Node,
        sizes: Sequence[int],
        drop_remainder: bool,
        padding: tuple[Any, Any] | None = None,
    ) -> None:
        if padding is None:
            call = f"batch({sizes[0] if len(sizes) == 1 else list(sizes)}, {drop_remainder})"
        else:
            call = f"padded_batch({sizes[0]}, {padding[0]}, {padding[1]}, {drop_remainder})"
        super().__init__(source, call)
        self.size: int | None = sizes[0] if len(set(sizes)) == 1 else None
        self.batch_sizes = (*source.batch_sizes, self.size or 0)
        self._sizes = tuple(sizes)
        self._drop_remainder = drop_remainder
        self._are_uniform_keys = self.size is not None and source.width is not None
        self._rows = source if padding is None else _Padded(source, *padding)
        if isinstance(self._rows, _Padded):
            # If the largest element decides on a size, a replica must load the whole batch.
            if self._rows.has_all_sizes:
                self.rows, self.user_code = self._rows, True  # as of `_Padded`
        else:
            self.rows = source
            # Rows of different shapes fail only on the replica that has them, so steps are compared
            # as if the rows came from user code. Asking user code for its spec would run it.
            self.user_code = source.user_code or any(
                None in leaf.shape for leaf in _elements.flatten(source.spec())[0]
            )

    def spec(self) -> Any:
        size = self.size if self._drop_remainder else None
        return _elements.map_leaves(
            lambda leaf: TensorSpec((size, *leaf.shape), leaf.dtype), self._rows.spec()
        )

    def cardinality(self) -> int:
        rows = self._source.cardinality()
        if rows < 0:
            return rows
        turns, left = divmod(rows, sum(self._sizes))
        ends = [*itertools.accumulate(self._sizes)]  # of a turn's batches, in rows
        short = left not in (0, *ends) and not self._drop_remainder
        return turns * len(ends) + sum(end <= left for end in ends) + short

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        sizes = itertools.cycle(self._sizes)
        waiting, missing = [], next(sizes)
        for chunk in self._source.chunks(epoch):
            start, stop = 0, len(chunk)
            while stop - start >= missing:
                if self._are_uniform_keys and not waiting:
                    # All whole batches of the chunk at once, as a view.
                    rows = (stop - start) // missing * missing
                    yield chunk[start : start + rows].reshape(-1, missing, chunk.shape[1])
                    start += rows
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

    @property
    def threads(self) -> int:
        # Threads that make rows work within one batch.
        return 1 if self._source.threads else 0

    def load(self, item: Any) -> Any:
        return self._rows.fetch(item)


@final
class _Padded(Choosing):
    """The elements, each padded at the ends of its dimensions; see `Dataset.padded_batch`.

    Attributes:
        has_all_sizes: whether no size depends on the elements of a batch.
    """

    def __init__(self, source: Node, shapes: Any, values: Any) -> None:
        super().__init__(source, f"padded to {shapes}")
        # An element that is too large fails only on the replica that loads it, so steps are
        # compared as if this node ran user code.
        self.user_code = True
        self._shapes, self._values = shapes, values
        self.has_all_sizes: bool = shapes is not None and all(
            size is not None and size >= 0 for size in nests.flatten(shapes)[0]
        )

    def spec(self) -> Any:
        specs, structure = _elements.flatten(self._source.spec())
        shapes = self._shapes_for(structure, [leaf.shape for leaf in specs])
        return structure.unflatten(
            TensorSpec([None if size is None or size < 0 else size for size in shape], leaf.dtype)
            for shape, leaf in zip(shapes, specs, strict=True)
        )

    def load(self, item: Any) -> Any:
        return only_row(self.fetch([item]))

    def fetch(self, chunk: Chunk) -> Any:
        rows, structures = zip(
            *[_elements.flatten(self._source.load(item)) for item in chunk], strict=True
        )
        structure = structures[0]
        for other in structures:
            if other != structure:
                raise ValueError(
                    "Dataset.padded_batch: the elements of a batch must be nests of the same "
                    f"structure; they are {structure} and {other}"
                )
        shapes = self._shapes_for(structure, [leaf.shape for leaf in rows[0]])
        values = self._values_for(structure, rows[0])
        return structure.unflatten(map(_pad, zip(*rows, strict=True), shapes, values))

    def _shapes_for(
        self, structure: nests.Structure, actual: Sequence[Any]
    ) -> list[tuple[int | None, ...]]:
        """The shape that each leaf is padded to; `None` or -1 for the largest leaf's size."""
        if self._shapes is None:
            return [(None,) * len(own) for own in actual]
        given = _like(structure, self._shapes, "padded_shapes", "a", "shape")
        shapes = []
        for shape, own in zip(given, actual, strict=True):
            if shape is None:
                shape = (None,) * len(own)
            wanted = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
            if len(wanted) != len(own):
                raise ValueError(
                    f"Dataset.padded_batch: the padded shape {list(wanted)} does not match an "
                    f"element of shape {list(own)}; pass as many sizes as it has, with None for "
                    "the size of the largest element"
                )
            shapes.append(wanted)
        return shapes

    def _values_for(self, structure: nests.Structure, leaves: Sequence[Any]) -> list[Any]:
        """The value that each leaf is padded with; `None` for zeros or empty strings."""
        given = [self._values] * len(leaves)
        if isinstance(self._values, (tuple, list, dict)):
            given = _like(structure, self._values, "padding_values", "one value, or a", "value")
        for value, leaf in zip(given, leaves, strict=True):
            if value is not None and not _becomes(np.asarray(value), leaf.dtype):
                raise TypeError(
                    f"Dataset.padded_batch: padding_values has {value!r} for a leaf of dtype "
                    f"{leaf.dtype}; pass a value of that dtype"
                )
        return given


def _like(structure: nests.Structure, nest: Any, name: str, a: str, what: str) -> list[Any]:
    """The leaves of an argument of `padded_batch`, which must have the elements' structure."""
    try:
        return structure.flatten_up_to(nest)
    except ValueError as error:
        raise ValueError(
            f"Dataset.padded_batch: {name} is {nest}; it must be {a} nest with the elements' "
            f"structure, {structure}, and a {what} for each leaf"
        ) from error


def _pad(leaves: Sequence[Any], wanted: Sequence[int | None], value: Any) -> Any:
    """The leaves, padded and stacked."""
    if len(_elements.dtypes_of(leaves)) > 1 or len({leaf.ndim for leaf in leaves}) > 1:
        kinds = sorted({f"{leaf.dtype.name}{list(leaf.shape)}" for leaf in leaves})
        raise ValueError(
            "Dataset.padded_batch: the elements of a batch must have the same dtype and number of "
            f"dimensions; they have {', '.join(kinds)}"
        )
    largest = np.max([leaf.shape for leaf in leaves], axis=0).astype(np.int64).tolist()
    shape = [
        most if size is None or size < 0 else size
        for size, most in zip(wanted, largest, strict=True)
    ]
    if any(most > size for most, size in zip(largest, shape, strict=True)):
        raise ValueError(
            f"Dataset.padded_batch: an element is larger than the padded shape {shape}: the "
            f"largest sizes in its batch are {largest}; pad to a larger shape, or to None, which "
            "means the largest element's"
        )
    dtype = np.result_type(*leaves)
    if not shape:
        return np.array(leaves, dtype)
    column = np.full((len(leaves), *shape), np.zeros((), dtype) if value is None else value, dtype)
    for row, leaf in zip(column, leaves, strict=True):
        row[tuple(map(slice, leaf.shape))] = leaf
    return column


def _becomes(value: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> bool:
    """Whether a value can be converted to this dtype: integers exactly, floats with rounding."""
    if value.ndim or value.dtype.kind not in "biufc" or dtype.kind not in "biufc":
        return value.ndim == 0 and value.dtype.kind == dtype.kind
    if dtype.kind == "b" or value.dtype.kind == "b":
        return value.dtype.kind == dtype.kind
    if value.dtype.kind in "iu" and dtype.kind in "iu":
        return np.iinfo(dtype).min <= int(value) <= np.iinfo(dtype).max
    return np.can_cast(value.dtype, dtype, "same_kind")


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

        return _elements.map_leaves(row, self._source.spec())

    def cardinality(self) -> int:
        size = self._source.cardinality()
        if size <= 0 or self._source.user_code:  # asking for the spec would call functions
            return UNKNOWN if size > 0 else size
        specs, _ = _elements.flatten(self._source.spec())
        rows, *others = {leaf.shape[0] if leaf.shape else None for leaf in specs} or {None}
        return UNKNOWN if rows is None or others else size * rows

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        if self._source.rows is not None:
            for chunk in self._source.chunks(epoch):
                yield from chunk
        else:
            for batch in with_failures(self._source.elements(epoch)):
                rows = attempt(lambda batch: [*_elements.unstack(batch)], batch)
                yield [rows] if isinstance(rows, FailedElement) else rows

    def load(self, item: Any) -> Any:
        return unwrap(item) if self._source.rows is None else self._source.rows.load(item)

    def fetch(self, chunk: Chunk) -> Any:
        return super().fetch(chunk) if self._source.rows is None else self._source.rows.fetch(chunk)


@final
class Window(Transformation):
    """Datasets of `size` elements; each starts `shift` elements after the previous one.

    An item is a chunk of the input's items, so a window touches no data until its datasets, which
    `dataset_of` makes of nodes, are iterated over. See `Dataset.window` for the other arguments.
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
        self._span, self._shift, self._stride = (size - 1) * stride + 1, shift, stride
        self._drop_remainder = drop_remainder
        self._dataset_of = dataset_of
        self._structure: nests.Structure | None = None

    def spec(self) -> Any:
        return _elements.map_leaves(_elements.DatasetSpec, self._source.spec())

    def cardinality(self) -> int:
        size = self._source.cardinality()
        if size < 0:
            return size
        return max(0, divide_up(size - (self._span - 1) * self._drop_remainder, self._shift))

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        held: Chunk = []
        start = 0  # of the next window, in `held` or beyond it
        for chunk in self._source.chunks(epoch):
            held = join([held, chunk]) if len(held) else chunk
            while start + self._span <= len(held):
                yield [held[start : start + self._span : self._stride]]
                start += self._shift
            gone = min(start, len(held))
            held, start = held[gone:], start - gone
        while start < len(held) and not self._drop_remainder:
            yield [held[start : start + self._span : self._stride]]
            start += self._shift

    def load(self, item: Any) -> Any:
        elements = _Picked(self._source, item)
        if self._structure is None:
            _, self._structure = _elements.flatten(self._source.load(item[0]))
        count = self._structure.num_leaves
        if self._structure.num_nodes == 1:
            return self._dataset_of(elements)
        # Several datasets load each element once.
        kept = cache(elements) if count > 1 else elements
        return self._structure.unflatten(self._dataset_of(_Leaf(kept, i)) for i in range(count))


@final
class _Picked(Choosing):
    """The elements of a chunk of a node's items."""

    def __init__(self, source: Node, chunk: Chunk) -> None:
        super().__init__(source, "window")
        self.inputs = ()  # a pass over it meets no shuffle and no array of the pipeline around it
        self._chunk = chunk

    def __repr__(self) -> str:
        return f"window of {self._source!r}"

    def cardinality(self) -> int:
        return len(self._chunk)

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        yield self._chunk


@final
class _Leaf(Choosing):
    """One leaf of each element."""

    def __init__(self, source: Node, index: int) -> None:
        super().__init__(source, f"leaf {index}")
        self.rows = None
        self._index = index

    def spec(self) -> Any:
        return _elements.flatten(self._source.spec())[0][self._index]

    def load(self, item: Any) -> Any:
        return _elements.flatten(self._source.load(item))[0][self._index]

    def fetch(self, chunk: Chunk) -> Any:
        return _elements.flatten(self._source.fetch(chunk))[0][self._index]
