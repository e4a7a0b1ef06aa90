"""Nodes that make other elements: map, filter, batch, unbatch; and the cache that keeps them."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, final

import numpy as np

from hpcstrat._core.types import TensorSpec
from hpcstrat._memory.intervals import divide_up
from hpcstrat.data import _elements
from hpcstrat.data._arguments import call_count, function_of, positive
from hpcstrat.data._node import (
    UNKNOWN,
    Choosing,
    Chunk,
    EpochPass,
    Keys,
    Node,
    PipelineChecksum,
    Transformation,
    in_pieces,
    join,
    load_apart,
)
from hpcstrat.data._sources import name_of
from hpcstrat.data._threads import map_in_threads

# ---- map, filter


@final
class Map(Transformation):
    """The result of a function for each element.

    The function runs when an element is loaded, so each replica runs it only for its own elements.
    """

    def __init__(self, source: Node, function: Any, num_parallel_calls: Any) -> None:
        self._function = function_of(function, "Dataset.map", "map_func")
        self._calls = call_count(num_parallel_calls, "Dataset.map")
        super().__init__(source, f"map({name_of(function)})")
        self.keys, self.user_code = source.keys, True
        self._spec: Any = None

    def spec(self) -> Any:
        """See `Node`. Calls the function on the first element, or else on zeros.

        A size of the result that is equal to one of the input on the same axis is unknown if that
        one is.
        """
        if self._spec is None:
            example, inner = self._source.first(), self._source.spec()
            if example is None:
                example = _elements.map_leaves(
                    lambda leaf: np.zeros([n or 2 for n in leaf.shape], leaf.dtype)[()], inner
                )
            pairs = zip(_elements.flatten(example)[0], _elements.flatten(inner)[0], strict=True)
            unknown = {
                (axis, size)
                for leaf, spec in pairs
                for axis, size in enumerate(leaf.shape)
                if spec.shape[axis] is None
            }

            def spec_of(leaf: Any) -> TensorSpec:
                shape = [None if place in unknown else place[1] for place in enumerate(leaf.shape)]
                return TensorSpec(shape, leaf.dtype)

            self._spec = _elements.map_leaves(spec_of, self._apply(example))
        return self._spec

    def load(self, chunks: Iterator[Chunk]) -> Iterator[Any]:
        return map_in_threads(self._apply, self._source.load(chunks), self._calls)

    def _apply(self, element: Any) -> Any:
        result = _call(self._function, element, "Dataset.map: map_func")
        return _elements.as_element(tuple(result) if type(result) is list else result)


@final
class Filter(Transformation):
    """The elements for which a function is true; each must be loaded to call it."""

    def __init__(self, source: Node, predicate: Any) -> None:
        self._predicate = function_of(predicate, "Dataset.filter", "predicate")
        super().__init__(source, f"filter({name_of(predicate)})")
        self.user_code = True

    def cardinality(self) -> int:
        return UNKNOWN

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        return ([element] for element in self._source.elements(epoch) if self._keeps(element))

    def _keeps(self, element: Any) -> bool:
        kept = _call(self._predicate, element, "Dataset.filter: predicate")
        if kept is None or math.prod(getattr(kept, "shape", ())) != 1:
            raise TypeError(
                f"Dataset.filter: predicate returned {kept!r}; it must return True or False"
            )
        return bool(kept)


def _call(function: Callable[..., Any], element: Any, what: str) -> Any:
    """Calls `function` as `tf.data` does: the members of a tuple are separate arguments."""
    try:
        return function(*element) if type(element) is tuple else function(element)
    except StopIteration as error:  # it would look like the end of the dataset
        raise RuntimeError(
            f"{what} raised StopIteration, which cannot end the dataset; catch it in the function, "
            "or raise another exception"
        ) from error


# ---- batch, unbatch


@final
class Batch(Transformation):
    """Consecutive elements, stacked.

    An item is a chunk of the input's items, so batching touches no data.

    Attributes:
        size: the size of each batch; the last may be shorter.
    """

    def __init__(self, source: Node, batch_size: Any, drop_remainder: bool) -> None:
        self.size: int = positive(batch_size, "Dataset.batch", "batch_size")
        super().__init__(source, f"batch({self.size}, {drop_remainder})")
        self._drop_remainder = drop_remainder
        self.batched += 1
        self.rows = source
        # Rows of different shapes fail only on the replica that has them, so steps are compared as
        # if the rows came from user code. Asking user code for its spec would run it.
        self.user_code = source.user_code or any(
            None in leaf.shape for leaf in _elements.flatten(source.spec())[0]
        )

    def spec(self) -> Any:
        size = self.size if self._drop_remainder else None
        return _elements.map_leaves(
            lambda leaf: TensorSpec((size, *leaf.shape), leaf.dtype), self._source.spec()
        )

    def cardinality(self) -> int:
        rows = self._source.cardinality()
        if rows < 0:
            return rows
        return rows // self.size if self._drop_remainder else divide_up(rows, self.size)

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        waiting, missing = [], self.size
        for chunk in self._source.chunks(epoch):
            start, stop = 0, len(chunk)
            while stop - start >= missing:
                if self._source.keys is not None and not waiting:
                    # All whole batches of the chunk at once, as a view.
                    rows = (stop - start) // missing * missing
                    yield chunk[start : start + rows].reshape(-1, missing)
                    start += rows
                    continue
                waiting.append(chunk[start : start + missing])
                start += missing
                yield [join(waiting)]
                waiting, missing = [], self.size
            if start < stop:
                waiting.append(chunk[start:])
                missing -= stop - start
        if waiting and not self._drop_remainder:
            yield [join(waiting)]

    def load(self, chunks: Iterator[Chunk]) -> Iterator[Any]:
        batches = itertools.chain.from_iterable(chunks)
        return map(self._source.fetch, batches) if self._source.gathers else self._stack(batches)

    def _stack(self, batches: Iterator[Chunk]) -> Iterator[Any]:
        sizes: deque[int] = deque()  # of the batches whose rows are being loaded

        def noted() -> Iterator[Chunk]:
            for batch in batches:
                sizes.append(len(batch))
                yield batch

        rows = self._source.load(noted())  # threads work on the rows of several batches
        for first in rows:
            rest = itertools.islice(rows, sizes.popleft() - 1)
            yield _elements.stack([first, *rest])


@final
class Unbatch(Transformation):
    """The rows of elements.

    Directly after `batch` it splits the items again, and nothing is ever stacked.
    """

    def __init__(self, source: Node) -> None:
        super().__init__(source, "unbatch()")
        self.batched = max(0, source.batched - 1)
        self._rows = source.rows
        if self._rows is not None:
            self.keys, self.gathers = self._rows.keys, self._rows.gathers
            self.rows = self._rows.rows

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
        if self._rows is not None:
            return self._source.items(epoch)
        batches = self._source.elements(epoch)
        return ([*_elements.unstack(batch, "Dataset.unbatch")] for batch in batches)

    def load(self, chunks: Iterator[Chunk]) -> Iterator[Any]:
        return super().load(chunks) if self._rows is None else self._rows.load(chunks)

    def fetch(self, keys: Chunk) -> Any:
        return super().fetch(keys) if self._rows is None else self._rows.fetch(keys)


# ---- cache


def cache(source: Node) -> Node:
    """The node that keeps the results of `source`.

    It stores no order: walking it again as pass 0 gives the same order. Without user code it stores
    nothing at all: the arrays are in memory already.
    """
    if not source.user_code:
        return _SameOrder(source)
    return _ByPosition(source) if source.keys is None else _ByKey(source)


class _SameOrder(Choosing):
    """Keeps the order alone."""

    def __init__(self, source: Node) -> None:
        super().__init__(source, "cache()")

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        return self._source.chunks(EpochPass(checksum=epoch.checksum))


@final
class _ByKey(_SameOrder):
    """Keeps each element when it is first loaded, so each replica keeps only its own."""

    def __init__(self, source: Node) -> None:
        super().__init__(source)
        self.gathers = False
        self._kept: dict[int, Any] = {}

    def load(self, chunks: Iterator[Chunk]) -> Iterator[Any]:
        asked: set[int] = set()

        def is_new(key: int) -> bool:
            if key in self._kept or key in asked:
                return False
            asked.add(key)
            return True

        def kinds_of(chunk: Keys) -> list[bool]:
            return [is_new(key) for key in chunk.tolist()]

        return map(_elements.copy_of, load_apart(in_pieces(chunks), kinds_of, self._keep))

    def _keep(self, new: bool, chunks: Iterator[Keys]) -> Iterator[Any]:
        if not new:
            yield from (self._kept[key] for chunk in chunks for key in map(int, chunk))
            return
        chunks, ahead = itertools.tee(chunks)
        keys = map(int, itertools.chain.from_iterable(chunks))
        for key, element in zip(keys, self._source.load(ahead), strict=True):
            yield self._kept.setdefault(key, element)


@final
class _ByPosition(_SameOrder):
    """Keeps the elements of the first pass that reaches the end."""

    def __init__(self, source: Node) -> None:
        super().__init__(source)
        # Items are elements here, not keys or the chunks of a batch.
        self.gathers, self.rows = False, None
        # Each element, and the checksum of what user code had yielded by then.
        self._kept: list[tuple[Any, int]] | None = None

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        for element, checksum in self._first_pass() if self._kept is None else self._kept:
            epoch.checksum.add_text(f"{checksum}")
            yield [element]

    def _first_pass(self) -> Iterator[tuple[Any, int]]:
        # On, because passes of all ranks may come later, some of them of kept elements.
        checksum, kept = PipelineChecksum(True), []
        for element in self._source.elements(EpochPass(checksum=checksum)):
            kept.append((element, checksum.value))
            yield kept[-1]
        self._kept = kept

    def load(self, chunks: Iterator[Chunk]) -> Iterator[Any]:
        # Copies, because the caller may write to them.
        return map(_elements.copy_of, itertools.chain.from_iterable(chunks))
