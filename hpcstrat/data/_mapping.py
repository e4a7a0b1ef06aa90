"""Nodes that compute elements by functions: map, filter, scan, reduce, flat_map, interleave."""

from __future__ import annotations

import itertools
import math
import operator
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, final

import numpy as np

from hpcstrat.data import _elements
from hpcstrat.data._elements import FailedElement, attempt, unwrap, with_failures
from hpcstrat.data._node import (
    UNKNOWN,
    Chunk,
    EpochPass,
    Node,
    ShuffleState,
    Transformation,
)
from hpcstrat.data._sources import generated, name_of
from hpcstrat.data._threads import Submit, map_in_threads, threads_of

# Datasets per pass whose text and arrays the ranks compare: a single one may be equal by chance.
_COMPARED = 32
_END = object()


@final
class Map(Transformation):
    """The result of a function for each element.

    The function runs when an element is loaded, so each replica runs it only for its own elements:
    up to `calls` of them at once, in threads. `dataset_of` makes a dataset of a node.
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
            return self._dataset_of(generated(lambda: [self._example(leaf.element_spec)]))

        return _elements.map_leaves(example, spec)

    def _apply(self, element: Any) -> Any:
        result = call_on(self._function, element, "Dataset.map", "map_func")
        return _elements.as_element(tuple(result) if type(result) is list else result)


def _resize(example: Any, spec: Any) -> Any:
    """`example` with other sizes where `spec` does not know them; `None` if it knows all sizes."""
    leaves, structure = _elements.flatten(example)
    specs, _ = _elements.flatten(spec)
    if all(None not in leaf.shape for leaf in specs):
        return None
    resized = []
    for leaf, known in zip(leaves, specs, strict=True):
        for axis, size in enumerate(known.shape):
            if size is None:
                length = leaf.shape[axis]
                rows = np.arange(length - 1) if length > 1 else np.zeros(2 * length, np.int64)
                leaf = leaf.take(rows, axis)
        resized.append(leaf)
    return structure.unflatten(resized)


@final
class Filter(Transformation):
    """The elements for which a function is true; each must be loaded to call it."""

    def __init__(self, source: Node, predicate: Callable[..., Any]) -> None:
        super().__init__(source, f"filter({name_of(predicate)})")
        self.user_code = True
        self._predicate = predicate

    def cardinality(self) -> int:
        return UNKNOWN

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        def keeps(element: Any) -> bool:
            kept = call_on(self._predicate, element, "Dataset.filter", "predicate")
            if kept is None or math.prod(getattr(kept, "shape", ())) != 1:
                raise TypeError(
                    f"Dataset.filter: predicate returned {kept!r}; it must return True or False"
                )
            return bool(kept)

        for element in with_failures(self._source.elements(epoch)):
            is_kept = attempt(keeps, element)
            if isinstance(is_kept, FailedElement):
                yield [is_kept]
            elif is_kept:
                yield [element]


@final
class Scan(Transformation):
    """The elements that a function returns, with the next state, for a state and each element."""

    def __init__(self, source: Node, initial_state: Any, function: Callable[..., Any]) -> None:
        super().__init__(source, f"scan({name_of(function)})")
        self.user_code = True
        self._initial_state = _elements.as_element(initial_state)
        self._function = function

    def spec(self) -> Any:
        for element in self.elements(EpochPass(frozen=True)):
            return _elements.spec_of(element)
        raise _no_elements(self)

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        state = self._initial_state

        def advance(element: Any) -> Any:
            nonlocal state
            result = _call(self._function, (state, element), "Dataset.scan", "scan_func")
            if not (type(result) in (tuple, list) and len(result) == 2):
                raise TypeError(
                    f"Dataset.scan: scan_func returned {type(result).__name__}; it must return "
                    "a pair, the next state and the element"
                )
            following, made = map(_elements.as_element, result)
            state = _same_structure(state, following, "Dataset.scan: scan_func")
            return made

        for element in with_failures(self._source.elements(epoch)):
            yield [attempt(advance, element)]


def reduce(source: Node, initial_state: Any, function: Callable[..., Any]) -> Any:
    """The last state. See `Dataset.reduce`."""
    state = _elements.as_element(initial_state)
    for element in source.elements(EpochPass()):
        result = _call(function, (state, element), "Dataset.reduce", "reduce_func")
        following = _elements.as_element(tuple(result) if type(result) is list else result)
        state = _same_structure(state, following, "Dataset.reduce: reduce_func")
    return state


def _same_structure(state: Any, following: Any, what: str) -> Any:
    """The state `following`, which must be a nest like `state`."""
    (_, before), (_, after) = _elements.flatten(state), _elements.flatten(following)
    if before != after:
        raise ValueError(
            f"{what} returned a state that is {after}; it must be a nest like the initial state, "
            f"{before}"
        )
    return following


def call_on(function: Callable[..., Any], element: Any, call: str, argument: str) -> Any:
    """Calls `function` as `tf.data` does: the members of a tuple are separate arguments."""
    args = element if type(element) is tuple else (element,)
    return _call(function, args, call, argument)


def _call(function: Callable[..., Any], args: tuple[Any, ...], call: str, argument: str) -> Any:
    try:
        return function(*args)
    except StopIteration as error:  # it would look like the end of the dataset
        raise RuntimeError(
            f"{call}: {argument} raised StopIteration, which cannot end the dataset; catch it in "
            "the function, or raise another exception"
        ) from error


def _no_elements(node: Node) -> ValueError:
    return ValueError(
        f"Dataset.element_spec: {node!r} has no elements, so the shapes and dtypes that its "
        "function would return are unknown"
    )


@final
class Interleave(Transformation):
    """Elements of the datasets that a function makes from elements: `block_length` of each in turn.

    An item is a pair of a node and an item of it, so every rank makes all datasets but loads only
    its own elements; or a `FailedElement`. With a cycle length of 2 and a block length of 1:

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
        cycle_length: int = 1,
        block_length: int = 1,
        threads: int = 0,
    ) -> None:
        super().__init__(source, call)
        self.user_code, self.batch_sizes = True, ()
        self._function = function
        self._cycle_length, self._block_length = cycle_length, block_length
        self._threads = threads
        # The seeds of the datasets' own shuffles derive from this one.
        self._shuffle = ShuffleState(None, True)

    def shuffles(self) -> list[ShuffleState]:
        return [*super().shuffles(), self._shuffle]

    def spec(self) -> Any:
        """See `Node`.

        The function is called on the first two elements: sizes in which the results differ are
        unknown.
        """
        elements = itertools.islice(self._source.elements(EpochPass(frozen=True)), 2)
        specs = [self._function(element).spec() for element in elements]
        if not specs:
            raise _no_elements(self)
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
            yield from self._in_turn(self._read_ahead(opened, epoch, submit, count))

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
            node = attempt(self._function, element)
            if isinstance(node, FailedElement):
                yield inner, iter([node])
                continue
            if epoch.checksum.takes(number, _COMPARED):
                epoch.checksum.add_text(f"{node!r} {node.cardinality()} {node.checksums(False)}")
            yield inner, _items(node, inner)

    def _read_ahead(
        self,
        opened: Iterator[tuple[EpochPass, Iterator[Any]]],
        epoch: EpochPass,
        submit: Submit,
        count: int,
    ) -> Iterator[Iterator[Any]]:
        """The items of each dataset, read in blocks of a turn, one block ahead.

        `count` datasets are started before they are asked for. The elements that user code yields
        in a dataset are added to the checksum of the pass when their block is taken, so that the
        checksum does not depend on the threads.
        """

        def read(inner: EpochPass, items: Iterator[Any]) -> tuple[list[Any], int]:
            return list(itertools.islice(items, self._block_length)), inner.checksum.value

        def blocks(inner: EpochPass, items: Iterator[Any], reading: Future[Any]) -> Iterator[Any]:
            while True:
                block, checksum = reading.result()
                if not block:
                    return
                reading = submit(read, inner, items)
                epoch.checksum.add_text(f"{checksum}")
                yield from block

        started: deque[Iterator[Any]] = deque()
        for inner, items in opened:
            inner.checksum = epoch.checksum.fresh()
            started.append(blocks(inner, items, submit(read, inner, items)))
            if len(started) > count:
                yield started.popleft()
        yield from started

    def load(self, item: Any) -> Any:
        node, inner = unwrap(item)
        return node.load(inner)

    def fetch(self, chunk: Chunk) -> Any:
        parts = []
        for node, group in itertools.groupby(map(unwrap, chunk), key=operator.itemgetter(0)):
            inner = [item for _, item in group]
            parts.append(node.fetch(inner if node.width is None else np.stack(inner)))
        if len(parts) == 1:
            return parts[0]
        return _elements.stack([row for part in parts for row in _elements.unstack(part)])


def _items(node: Node, epoch: EpochPass) -> Iterator[tuple[Node, Any] | FailedElement]:
    for chunk in with_failures(node.chunks(epoch)):
        if isinstance(chunk, FailedElement):
            yield chunk
        else:
            for item in chunk:
                yield node, item
