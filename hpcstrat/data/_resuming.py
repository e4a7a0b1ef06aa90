"""Datasets and iterators whose position a checkpoint saves, and another program resumes."""

from __future__ import annotations

import abc
import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, final

from hpcstrat._memory.intervals import divide_up
from hpcstrat.data import _elements
from hpcstrat.data._batching import Batch
from hpcstrat.data._elements import unwrap, with_failures
from hpcstrat.data._indexing import Annotated, Counted, Slice, prefetched_at_end
from hpcstrat.data._node import INFINITE, UNKNOWN, EpochPass, Node, ShuffleState
from hpcstrat.data._threads import threads_of

if TYPE_CHECKING:
    from typing_extensions import Self

_T = TypeVar("_T")
_END = object()


class Position(NamedTuple):
    """The position of an iteration, or that no iteration is in progress.

    It holds no order and no elements: seeking walks the same shuffles again and skips. So a
    checkpoint of a dataset has a few numbers, however large the dataset and its shuffle buffers.

    Attributes:
        pipeline: the nodes, without the batches at the end: the program that resumes may have
            another batch size.
        shuffles: for each shuffle, its seed and the round with which the iteration started, or the
            next iteration starts if none is in progress.
        taken: the number of elements of `pipeline` that the iteration has yielded; `None` if no
            iteration is in progress.
    """

    pipeline: str
    shuffles: tuple[tuple[int, int], ...]
    taken: int | None


class Resumable(abc.ABC):
    """A dataset or iterator that knows its position and can seek to another position.

    The methods are private because users' datasets inherit them; checkpoints call them.
    """

    def __init__(self, node: Node) -> None:
        self._node = node

    @abc.abstractmethod
    def _position(self) -> Position:
        """The position of the iteration."""

    @abc.abstractmethod
    def _seek(self, position: Position) -> None:
        """Seeks to `position`. Check with `_incompatibility` first."""

    def _incompatibility(self, position: Position) -> str | None:
        """Why this pipeline cannot seek to `position`; `None` if it can."""
        # With another dataset, or another order of transformations, the program would skip elements
        # or repeat them: that is worth an error. Another batch size is not.
        shuffles, saved = len(self._node.shuffles()), len(position.shuffles)
        if shuffles != saved:
            return f"its pipeline has {shuffles} shuffles and the saved one {saved}"
        if position.taken is None:
            return None
        inner, size, pipeline = _without_batches(self._node)
        if pipeline != position.pipeline:
            return f"its pipeline is {pipeline} and the saved one {position.pipeline}"
        if position.taken % size and position.taken != inner.cardinality():
            return (
                f"it was saved after {position.taken} elements, not a multiple of its batch size "
                f"{size}"
            )
        return None

    def _position_at(self, epoch: EpochPass, taken: int | None) -> Position:
        """The position of a pass after `taken` elements of the node."""
        inner, size, pipeline = _without_batches(self._node)
        if taken is not None:
            taken *= size
            # After a short last batch, this is beyond the end, where no pipeline could resume.
            if (cardinality := inner.cardinality()) >= 0:
                taken = min(taken, cardinality)
        shuffles = [
            (shuffle.state()[0], epoch.first_round(shuffle)) for shuffle in self._node.shuffles()
        ]
        return Position(pipeline, tuple(shuffles), taken)

    def _restore(self, position: Position) -> tuple[dict[ShuffleState, int], int]:
        """Sets all shuffles to a saved position.

        Returns:
            The rounds with which they start, and how many of the node's elements cover those that
            were taken; the last may be short.
        """
        rounds = {}
        for shuffle, (seed, number) in zip(self._node.shuffles(), position.shuffles, strict=True):
            shuffle.seed, shuffle.next_round = seed, number
            rounds[shuffle] = number
        return rounds, divide_up(position.taken or 0, _without_batches(self._node)[1])


def _without_batches(node: Node) -> tuple[Node, int, str]:
    """The node whose elements positions count, how many form an element of `node`, and its text.

    Batches at the end, and what only describes elements, may be others in the program that resumes.
    """
    size = 1
    while isinstance(node, (Annotated, Counted, Batch)):
        if isinstance(node, Batch):
            if node.size is None:
                break
            size *= node.size
        (node,) = node.inputs
    return node, size, f"{node!r} with {node.cardinality()} elements"


class DatasetIterator(Resumable):
    """One iteration over a `Dataset`."""

    def __init__(self, node: Node, epoch: EpochPass, taken: int) -> None:
        super().__init__(node)
        self._start(epoch, taken)

    @property
    def element_spec(self) -> Any:
        """The nest of specifications of what `next` returns."""
        return self._node.spec()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """The next element: a nest of NumPy arrays and scalars.

        Raises:
            StopIteration: the pass is over.
            Exception: whatever a function of the pipeline raised. The next call returns the next
                element; if `batch` follows the function, the next batch.
        """
        taken = self._taken
        try:
            element = next(self._elements)
        except StopIteration:
            self._end()
            raise
        except Exception:
            # A failed element counts too: a program that resumes after it must not meet it again.
            self._taken = (taken or 0) + 1
            raise
        except BaseException:
            self._go_back(taken)
            raise
        self._taken = (taken or 0) + 1
        return element

    def get_next(self) -> Any:
        """The next element, as `next` returns it.

        Raises:
            StopIteration: the pass is over.

        Examples:
            >>> iterator = iter(hs.data.Dataset.range(3).batch(2))
            >>> print(iterator.get_next(), iterator.get_next())
            [0 1] [2]
        """
        return next(self)

    def get_next_as_optional(self) -> Optional:
        """The next element, as `next` returns it; an empty `Optional` if the pass is over.

        Examples:
            >>> iterator = iter(hs.data.Dataset.range(3).batch(2))
            >>> [iterator.get_next_as_optional() for _ in range(3)]
            [Optional(array([0, 1])), Optional(array([2])), Optional()]
        """
        try:
            return Optional((next(self),), lambda: self.element_spec)
        except StopIteration:
            return Optional((), lambda: self.element_spec)

    def _start(self, epoch: EpochPass, taken: int) -> None:
        """Starts a pass, after the first `taken` of the node's elements."""
        self._epoch = epoch
        self._taken: int | None = taken  # elements of the node; None after the end
        left = Slice(self._node, f"skip({taken})", taken) if taken else self._node
        self._elements: Iterator[Any] = self._elements_of(left)

    def _elements_of(self, node: Node) -> Iterator[Any]:
        """The elements of `node` in the pass."""
        return self._ahead(node.elements(self._epoch))

    def _ahead(self, elements: Iterator[Any]) -> Iterator[Any]:
        """The elements; a thread prepares them ahead if the pipeline ends with `prefetch`."""
        count = prefetched_at_end(self._node)
        if not count:
            return elements
        ahead = functools.partial(_take_ahead, count=count)
        return map(unwrap, in_turn(with_failures(elements), ahead, self._epoch))

    def _end(self) -> None:
        """Ends the pass and releases the pipeline."""
        self._elements, self._taken = iter(()), None

    def _go_back(self, taken: int | None) -> None:
        """Makes the next element the one after `taken`, though a signal has interrupted `next`.

        Its exception, such as Ctrl-C's, has ended the generators, which would yield no more.
        """
        self._taken = taken
        self._seek(self._position())

    def _position(self) -> Position:
        return self._position_at(self._epoch, self._taken)

    def _seek(self, position: Position) -> None:
        self._end()
        rounds, taken = self._restore(position)
        if position.taken is not None:
            self._start(EpochPass(rounds), taken)


class ResumableDataset(Resumable):
    """A dataset, which can be iterated over repeatedly.

    Its position is that of its last iteration, while that is in progress.
    """

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        # Weak: an iteration that the program dropped is over, and must not keep batches in memory.
        self._last: weakref.ref[DatasetIterator] | None = None
        # Where the next iteration starts, if not at the first element.
        self._resumed: Position | None = None

    def _position(self) -> Position:
        if self._resumed is not None:
            return self._resumed
        last = self._last and self._last()
        if last is None or last._taken is None:
            return self._position_at(EpochPass(), None)
        return last._position()

    def _seek(self, position: Position) -> None:
        self._restore(position)
        self._last = None
        self._resumed = None if position.taken is None else position

    def _next_start(self) -> tuple[dict[ShuffleState, int], int]:
        """The rounds of shuffles and the number of elements to skip in the next iteration."""
        return ({}, 0) if self._resumed is None else self._restore(self._resumed)

    def _note_start(self, iteration: DatasetIterator) -> None:
        self._last, self._resumed = weakref.ref(iteration), None


def in_turn(
    elements: Iterator[_T], ahead: Callable[[Iterator[_T]], Iterator[_T]], epoch: EpochPass
) -> Iterator[_T]:
    """`ahead(elements)` for elements of a pass, which `ahead` takes before they are asked for."""
    # A round of a shuffle that only `ahead` has reached does not count: the next pass must not
    # depend on how fast a thread is.
    epoch.runs_ahead = True
    reached: deque[Mapping[ShuffleState, int]] = deque()

    def noted() -> Iterator[_T]:
        for element in elements:
            reached.append(epoch.reached)
            yield element

    for element in ahead(noted()):
        epoch.commit(reached.popleft())
        yield element
    epoch.commit(epoch.reached)


def _take_ahead(elements: Iterator[Any], count: int) -> Iterator[Any]:
    """The elements; a thread takes up to `count` before they are asked for."""
    with threads_of(1) as submit:
        waiting = deque([submit(next, elements, _END) for _ in range(count)])
        while True:
            waiting.append(submit(next, elements, _END))
            if (element := waiting.popleft().result()) is _END:
                return
            yield element


@final
class Optional:
    """An element, or none because the iteration is over: the result of `get_next_as_optional`.

    Examples:
        >>> import hpcstrat as hs
        >>> iterator = iter(hs.data.Dataset.range(3).batch(2))
        >>> while (batch := iterator.get_next_as_optional()).has_value():
        ...     print(batch.get_value())
        [0 1]
        [2]
    """

    def __init__(self, values: tuple[Any] | tuple[()], spec: Callable[[], Any]) -> None:
        self._values = values
        self._spec = spec

    @staticmethod
    def from_value(value: Any) -> Optional:
        """An `Optional` with the element `value`, a nest of arrays or array-likes.

        Raises:
            TypeError: a leaf cannot become an array.

        Examples:
            >>> hs.data.Optional.from_value({"x": [1.5, 2.5]})
            Optional({'x': array([1.5, 2.5], dtype=float32)})
        """
        element = _elements.as_element(value)
        return Optional((element,), lambda: _elements.spec_of(element))

    @staticmethod
    def empty(element_spec: Any) -> Optional:
        """An `Optional` without an element; `element_spec` describes the missing element.

        Examples:
            >>> nothing = hs.data.Optional.empty(hs.TensorSpec((2,)))
            >>> nothing, nothing.element_spec
            (Optional(), TensorSpec(shape=(2,), dtype=float32, name=None))
        """
        return Optional((), lambda: element_spec)

    def has_value(self) -> bool:
        """Whether there is an element.

        Examples:
            >>> iterator = iter(hs.data.Dataset.range(1))
            >>> [iterator.get_next_as_optional().has_value() for _ in range(3)]
            [True, False, False]
        """
        return bool(self._values)

    def get_value(self) -> Any:
        """The element.

        Raises:
            ValueError: there is no element.

        Examples:
            >>> hs.data.Optional.empty(None).get_value()
            Traceback (most recent call last):
            ValueError: Optional.get_value: there is no element; ask has_value() first
        """
        if not self._values:
            raise ValueError("Optional.get_value: there is no element; ask has_value() first")
        return self._values[0]

    @property
    def element_spec(self) -> Any:
        """The element's nest of `TensorSpec`, with or without an element.

        Examples:
            >>> hs.data.Optional.from_value(np.zeros((2, 3))).element_spec
            TensorSpec(shape=(2, 3), dtype=float64, name=None)
        """
        return self._spec()

    def __repr__(self) -> str:
        return f"Optional({self._values[0]!r})" if self._values else "Optional()"


def length(cardinality: int, what: str) -> int:
    """The result of `len` for a dataset with this cardinality; `what` names it in the message.

    Raises:
        TypeError: it is infinite or unknown.
    """
    if cardinality < 0:
        why = {INFINITE: "infinite", UNKNOWN: "unknown"}[cardinality]
        raise TypeError(
            f"{what}: len() has no result because the number of elements is {why}; ask for its "
            "cardinality, which is then negative"
        )
    return cardinality
