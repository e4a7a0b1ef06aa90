"""Nodes that compute elements, and the cache that keeps them: map, filter, scan, reduce, cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, final

import numpy as np

from hpcstrat._core import nests
from hpcstrat._process import settings
from hpcstrat.data import _elements
from hpcstrat.data._checksum import PipelineChecksum
from hpcstrat.data._epoch import EpochPass
from hpcstrat.data._index_ops import Choosing
from hpcstrat.data._node import (
    UNKNOWN,
    Chunk,
    FailedElement,
    Node,
    Transformation,
    unwrap,
    with_failures,
)
from hpcstrat.data._sources import Generated, name_of
from hpcstrat.data._threads import map_in_threads


@final
class Map(Transformation):
    """The result of a function for each element.

    The function runs when an element is loaded, so each replica runs it only for its own elements.

    Args:
        source: the input.
        function: the function.
        calls: how many of its calls may run at once, in threads.
        dataset_of: makes a dataset of a node.
    """

    def __init__(
        self,
        source: Node,
        function: Callable[..., Any],
        calls: int,
        dataset_of: Callable[[Node], Any],
    ) -> None:
        super().__init__(source, f"map({name_of(function)})")
        self.width, self.user_code = source.width, True
        self._function = function
        self._calls = calls
        self._dataset_of = dataset_of
        self._spec: Any = None

    def spec(self) -> Any:
        """See `Node`. Calls the function on the first element.

        If a size of the input is unknown, the function is also called on an element of another
        size: sizes of the result that change are unknown, too.
        """
        if self._spec is None:
            inner = self._source.spec()
            example = next(self._source.elements(EpochPass(frozen=True)), None)
            if example is None:
                example = self._example(inner)
            resized = _resize(example, inner)
            spec = _elements.spec_of(self._apply(example))
            if resized is not None:
                try:
                    spec = _elements.common_spec(spec, _elements.spec_of(self._apply(resized)))
                except Exception:  # the function accepts only the first size
                    pass
            self._spec = spec
        return self._spec

    def load(self, item: Any) -> Any:
        return self._apply(self._source.load(item))

    @property
    def threads(self) -> int:
        return min(self._calls, self._source.threads or self._calls)

    def elements(self, epoch: EpochPass) -> Iterator[Any]:
        return map_in_threads(self._apply, self._source.elements(epoch), self._calls)

    def fetch(self, chunk: Chunk) -> Any:
        if self.width is None:
            elements = map(self._source.load, chunk)
        else:  # a single gather for the whole chunk, then the function row by row
            elements = _elements.unstack(self._source.fetch(chunk))
        return _elements.stack(
            list(map_in_threads(self._apply, elements, min(self._calls, len(chunk))))
        )

    def _example(self, spec: Any) -> Any:
        """An element of zeros that matches `spec`; a dataset in it has one element."""

        def example(leaf: Any) -> Any:
            if not isinstance(leaf, _elements.DatasetSpec):
                return np.zeros([n or 2 for n in leaf.shape], leaf.dtype)[()]
            return self._dataset_of(
                Generated(lambda: [self._example(leaf.element_spec)], (), None, None)
            )

        return nests.map_leaves(example, spec)

    def _apply(self, element: Any) -> Any:
        result = call_on(self._function, element, "Dataset.map", "map_func")
        return _elements.as_element(tuple(result) if type(result) is list else result)


@final
class Filter(Transformation):
    """The elements for which a function is true.

    Every element must be loaded to call it, so an item is the element itself.
    """

    def __init__(self, source: Node, predicate: Callable[..., Any]) -> None:
        super().__init__(source, f"filter({name_of(predicate)})")
        self.user_code = True
        self._predicate = predicate

    def cardinality(self) -> int:
        return UNKNOWN

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        for result in with_failures(map(self._test, self._source.elements(epoch))):
            if isinstance(result, FailedElement):
                yield [result]
            elif result[0]:
                yield [result[1]]

    def _test(self, element: Any) -> tuple[bool, Any]:
        return bool(call_on(self._predicate, element, "Dataset.filter", "predicate")), element

    def load(self, item: Any) -> Any:
        return unwrap(item)


@final
class Scan(Transformation):
    """The elements that a function returns, with the next state, for a state and each element.

    An item is the element itself.
    """

    def __init__(self, source: Node, initial_state: Any, function: Callable[..., Any]) -> None:
        super().__init__(source, f"scan({name_of(function)})")
        self.user_code = True
        self._initial_state = _elements.as_element(initial_state)
        self._function = function

    def spec(self) -> Any:
        for element in self.elements(EpochPass(frozen=True)):
            return _elements.spec_of(element)
        raise ValueError(
            f"Dataset.element_spec: {self!r} has no elements, so the shapes and dtypes that its "
            "function would return are unknown"
        )

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        state = self._initial_state
        for element in with_failures(self._source.elements(epoch)):
            try:
                result = call_with(
                    self._function, (state, unwrap(element)), "Dataset.scan", "scan_func"
                )
                if not (type(result) in (tuple, list) and len(result) == 2):
                    raise TypeError(
                        f"Dataset.scan: scan_func returned {type(result).__name__}; it must return "
                        "a pair, the next state and the element"
                    )
                following, made = map(_elements.as_element, result)
                state = same_structure(state, following, "Dataset.scan", "scan_func")
                yield [made]
            except Exception as error:
                yield [FailedElement(error)]

    def load(self, item: Any) -> Any:
        return unwrap(item)


def reduce(source: Node, initial_state: Any, function: Callable[..., Any]) -> Any:
    """The last state. See `Dataset.reduce`."""
    state = _elements.as_element(initial_state)
    for element in source.elements(EpochPass()):
        result = call_with(function, (state, element), "Dataset.reduce", "reduce_func")
        following = _elements.as_element(tuple(result) if type(result) is list else result)
        state = same_structure(state, following, "Dataset.reduce", "reduce_func")
    return state


def same_structure(state: Any, following: Any, call: str, argument: str) -> Any:
    """The state `following`.

    Raises:
        ValueError: its structure is not that of `state`.
    """
    (_, before), (_, after) = nests.flatten(state), nests.flatten(following)
    if before != after:
        raise ValueError(
            f"{call}: {argument} returned a state that is {after}; it must be a nest like the "
            f"initial state, {before}"
        )
    return following


def cache(source: Node) -> Node:
    """The node that keeps the results of `source`.

    It stores no order: an order is a function of seed and round, so walking it again gives the same
    order. Without user code it stores nothing at all: the arrays are in memory already.
    """
    if not source.user_code:
        return _SameOrder(source)
    return _ByPosition(source) if source.width is None else _ByKey(source)


class _SameOrder(Choosing):
    """Keeps the order alone."""

    def __init__(self, source: Node) -> None:
        super().__init__(source, "cache()")

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        return self._source.chunks(epoch.frozen())


@final
class _ByKey(_SameOrder):
    """Keeps each element when it is first loaded, so each replica keeps only its own."""

    def __init__(self, source: Node) -> None:
        super().__init__(source)
        self._kept: dict[bytes, Any] = {}

    def load(self, item: Any) -> Any:
        return _elements.copy_of(self._keep(item))

    def fetch(self, chunk: Chunk) -> Any:
        return _elements.stack([self._keep(item) for item in chunk])

    def _keep(self, item: Any) -> Any:
        key = item.tobytes()
        if key not in self._kept:
            self._kept[key] = self._source.load(item)
        return self._kept[key]


@final
class _ByPosition(_SameOrder):
    """Keeps the elements of the first pass that ends without a failed element."""

    def __init__(self, source: Node) -> None:
        super().__init__(source)
        self.rows = None  # items are elements here, not the chunks of a batch
        # Each element, and the checksum of what user code had yielded by then.
        self._kept: list[tuple[Any, int]] | None = None

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        for element, checksum in self._first_pass(epoch) if self._kept is None else self._kept:
            epoch.checksum.add_text(f"{checksum}")
            yield [element]

    def _first_pass(self, epoch: EpochPass) -> Iterator[tuple[Any, int]]:
        inner, kept = epoch.frozen(), []
        # On, because passes of all ranks may come later, some of them of kept elements.
        inner.checksum = PipelineChecksum(True, every=settings.is_on("HPCSTRAT_CHECK"))
        for element in with_failures(self._source.elements(inner)):
            kept.append((element, inner.checksum.value))
            yield kept[-1]
        if not any(isinstance(element, FailedElement) for element, _ in kept):
            self._kept = kept

    def load(self, item: Any) -> Any:
        return _elements.copy_of(unwrap(item))  # the caller may write to it

    def fetch(self, chunk: Chunk) -> Any:
        return _elements.stack([unwrap(item) for item in chunk])


def call_on(function: Callable[..., Any], element: Any, call: str, argument: str) -> Any:
    """Calls `function` as `tf.data` does: the members of a tuple are separate arguments.

    Raises:
        RuntimeError: it raised `StopIteration`, which would look like the end of the dataset.
    """
    return call_with(function, element if type(element) is tuple else (element,), call, argument)


def call_with(function: Callable[..., Any], args: tuple[Any, ...], call: str, argument: str) -> Any:
    """`function(*args)`.

    Raises:
        RuntimeError: it raised `StopIteration`, which would look like the end of the dataset.
    """
    try:
        return function(*args)
    except StopIteration as error:
        raise RuntimeError(
            f"{call}: {argument} raised StopIteration, which cannot end the dataset; catch it in "
            "the function, or raise another exception"
        ) from error


def _resize(example: Any, spec: Any) -> Any:
    """`example` with other sizes where `spec` does not know them; `None` if it knows all sizes."""
    leaves, structure = nests.flatten(example)
    specs, _ = nests.flatten(spec)
    if all(None not in leaf.shape for leaf in specs):
        return None
    resized = []
    for leaf, known in zip(leaves, specs, strict=True):
        for axis, size in enumerate(known.shape):
            if size is None:
                length = leaf.shape[axis]
                leaf = leaf.take(
                    np.arange(length - 1) if length > 1 else np.zeros(2 * length, np.int64), axis
                )
        resized.append(leaf)
    return structure.unflatten(resized)
