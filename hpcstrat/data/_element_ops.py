"""Stages that make new elements: batch, unbatch, map, filter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, final

import numpy as np

from hpcstrat import _nest
from hpcstrat._types import TensorSpec
from hpcstrat.data import _elements
from hpcstrat.data._index_ops import Choosing
from hpcstrat.data._node import INFINITE, UNKNOWN, Chunk, EpochPass, Failure, Node, caught, join, opened
from hpcstrat.data._sources import name_of


@final
class Batch(Node):
    """Several consecutive elements, stacked. An item is a chunk of the input's."""

    def __init__(self, source: Node, batch_size: int, drop_remainder: bool) -> None:
        super().__init__(
            source,
            width=None,
            user_code=source.user_code,
            batch_sizes=(*source.batch_sizes, batch_size),
            rows=source,
            inputs_per_element=batch_size,
        )
        self._source = source
        self._size = batch_size
        self._drop_remainder = drop_remainder

    def __repr__(self) -> str:
        return f"{self._source!r}.batch({self._size}, {self._drop_remainder})"

    def spec(self) -> Any:
        size = self._size if self._drop_remainder else None
        return _nest.map_leaves(lambda leaf: TensorSpec((size, *leaf.shape), leaf.dtype), self._source.spec())

    def cardinality(self) -> int:
        size = self._source.cardinality()
        if size < 0:
            return size
        return size // self._size if self._drop_remainder else -(-size // self._size)

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        size = self._size
        waiting, missing = [], size
        for chunk in self._source.chunks(epoch):
            start, stop = 0, len(chunk)
            while stop - start >= missing:
                waiting.append(chunk[start : start + missing])
                start += missing
                yield [join(waiting)]
                waiting, missing = [], size
            if start < stop:
                waiting.append(chunk[start:])
                missing -= stop - start
        if waiting and not self._drop_remainder:
            yield [join(waiting)]

    def load(self, item: Any) -> Any:
        return self._source.fetch(item)

    def fetch(self, chunk: Chunk) -> Any:
        return _elements.stack([self.load(item) for item in chunk])


@final
class Unbatch(Node):
    """The rows of elements."""

    def __init__(self, source: Node) -> None:
        super().__init__(
            source,
            width=None if source.rows is None else source.rows.width,
            user_code=source.user_code,
            batch_sizes=source.batch_sizes[:-1],
            rows=None if source.rows is None else source.rows.rows,
            inputs_per_element=None,
        )
        self._source = source

    def __repr__(self) -> str:
        return f"{self._source!r}.unbatch()"

    def spec(self) -> Any:
        def row(leaf: TensorSpec) -> TensorSpec:
            if not leaf.shape:
                raise ValueError(
                    f"Dataset.unbatch: elements must have a first dimension; they are {self._source.spec()}"
                )
            return TensorSpec(leaf.shape[1:], leaf.dtype)

        return _nest.map_leaves(row, self._source.spec())

    def cardinality(self) -> int:
        size = self._source.cardinality()
        return INFINITE if size == INFINITE else UNKNOWN

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        if self._source.rows is not None:
            for chunk in self._source.chunks(epoch):
                yield from chunk
        else:
            for batch in caught(self._source.elements(epoch)):
                yield [batch] if isinstance(batch, Failure) else list(_elements.unstack(batch))

    def load(self, item: Any) -> Any:
        return opened(item) if self._source.rows is None else self._source.rows.load(item)

    def fetch(self, chunk: Chunk) -> Any:
        if self._source.rows is None:
            return _elements.stack([opened(item) for item in chunk])
        return self._source.rows.fetch(chunk)


@final
class Map(Node):
    """What a function makes of each element; it is called when an element is loaded, for that one only."""

    def __init__(self, source: Node, function: Callable[..., Any]) -> None:
        super().__init__(
            source,
            width=source.width,
            user_code=True,
            batch_sizes=source.batch_sizes,
            rows=None,
            inputs_per_element=None,
        )
        self._source = source
        self._function = function
        self._spec: Any = None

    def __repr__(self) -> str:
        return f"{self._source!r}.map({name_of(self._function)})"

    def spec(self) -> Any:
        """Found by calling the function on the first element.

        Where a size of the input is not known, it is called on the element with another such size, too: sizes of
        the result that change with it are not known either.
        """
        if self._spec is None:
            inner = self._source.spec()
            example = next(self._source.elements(EpochPass(frozen=True)), None)
            if example is None:
                example = _nest.map_leaves(lambda leaf: np.zeros([n or 2 for n in leaf.shape], leaf.dtype)[()], inner)
            resized = _resized(example, inner)
            found = _elements.spec_of(self._call(example))
            if resized is not None:
                try:
                    found = _elements.common_spec(found, _elements.spec_of(self._call(resized)))
                except Exception:  # The function takes this one size only.
                    pass
            self._spec = found
        return self._spec

    def cardinality(self) -> int:
        return self._source.cardinality()

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        return self._source.chunks(epoch)

    def load(self, item: Any) -> Any:
        return self._call(self._source.load(item))

    def fetch(self, chunk: Chunk) -> Any:
        if self.width is None:
            return _elements.stack([self.load(item) for item in chunk])
        return _elements.stack([self._call(element) for element in _elements.unstack(self._source.fetch(chunk))])

    def _call(self, element: Any) -> Any:
        result = call_on(self._function, element, "Dataset.map", "map_func")
        return _elements.as_element(tuple(result) if type(result) is list else result)


@final
class Filter(Node):
    """The elements that a function says yes to. All must be loaded to know, so an item is the element."""

    def __init__(self, source: Node, predicate: Callable[..., Any]) -> None:
        super().__init__(
            source,
            width=None,
            user_code=True,
            batch_sizes=source.batch_sizes,
            rows=None,
            inputs_per_element=None,
        )
        self._source = source
        self._predicate = predicate

    def __repr__(self) -> str:
        return f"{self._source!r}.filter({name_of(self._predicate)})"

    def spec(self) -> Any:
        return self._source.spec()

    def cardinality(self) -> int:
        return UNKNOWN

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        for found in caught(map(self._judged, self._source.elements(epoch))):
            if isinstance(found, Failure):
                yield [found]
            elif found[0]:
                yield [found[1]]

    def _judged(self, element: Any) -> tuple[bool, Any]:
        return bool(call_on(self._predicate, element, "Dataset.filter", "predicate")), element

    def load(self, item: Any) -> Any:
        return opened(item)

    def fetch(self, chunk: Chunk) -> Any:
        return _elements.stack([opened(item) for item in chunk])


def cache(source: Node) -> Node:
    """The stage that keeps what `source` computes.

    Orders are kept by walking them again. Where no code of the user's runs there is nothing else to keep: the arrays
    are in memory as it is.
    """
    if not source.user_code:
        return _SameOrder(source)
    return _ByPosition(source) if source.width is None else _ByKey(source)


class _Cache(Choosing):
    def __init__(self, source: Node) -> None:
        super().__init__(source, "cache()")

    def _chosen(self, size: int) -> int:
        return size


@final
class _SameOrder(_Cache):
    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        return self._source.chunks(epoch.frozen())


@final
class _ByKey(_Cache):
    """Keeps the elements that were asked for, so each replica keeps its own."""

    def __init__(self, source: Node) -> None:
        super().__init__(source)
        self._kept: dict[bytes, Any] = {}

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        return self._source.chunks(epoch.frozen())

    def load(self, item: Any) -> Any:
        return _elements.copied(self._keep(item))

    def fetch(self, chunk: Chunk) -> Any:
        return _elements.stack([self._keep(item) for item in chunk])

    def _keep(self, item: Any) -> Any:
        key = item.tobytes()
        if key not in self._kept:
            self._kept[key] = self._source.load(item)
        return self._kept[key]


@final
class _ByPosition(_Cache):
    """Keeps the elements of the first pass that reached the end, in which none failed."""

    def __init__(self, source: Node) -> None:
        super().__init__(source)
        self.rows = None
        self._kept: list[Any] | None = None

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        if self._kept is not None:
            for element in self._kept:
                yield [element]
            return
        kept = []
        for element in caught(self._source.elements(epoch.frozen())):
            kept.append(element)
            yield [element]
        if not any(isinstance(element, Failure) for element in kept):
            self._kept = kept

    def load(self, item: Any) -> Any:
        return _elements.copied(opened(item))

    def fetch(self, chunk: Chunk) -> Any:
        return _elements.stack([opened(item) for item in chunk])


def call_on(function: Callable[..., Any], element: Any, call: str, argument: str) -> Any:
    """Calls `function` as `tf.data` does: the parts of a tuple are arguments of their own.

    Raises:
        RuntimeError: it raised `StopIteration`, which would pass for the end of the elements.
    """
    try:
        return function(*element) if type(element) is tuple else function(element)
    except StopIteration as error:
        raise RuntimeError(
            f"{call}: {argument} raised StopIteration, which does not end the elements; it must catch it, or raise "
            "another exception"
        ) from error


def _resized(example: Any, spec: Any) -> Any:
    """`example` with one row more, or less, in all sizes that `spec` does not know; `None` if it knows all."""
    leaves, structure = _nest.flatten(example)
    specs, _ = _nest.flatten(spec)
    if all(None not in leaf.shape for leaf in specs):
        return None
    resized = []
    for leaf, known in zip(leaves, specs, strict=True):
        for axis, size in enumerate(known.shape):
            if size is None:
                there = leaf.shape[axis]
                leaf = leaf.take(np.arange(there - 1) if there > 1 else np.zeros(2 * there, np.int64), axis)
        resized.append(leaf)
    return structure.unflatten(resized)
