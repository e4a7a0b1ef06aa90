"""Iterators of datasets, and their positions: a checkpoint saves one, another program resumes it.

A position holds no order and no elements: a resumed pass walks the same shuffles again and skips.
So it is a few numbers, however large the dataset and its shuffle buffers.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, final

from hpcstrat._core.call_name import current_call
from hpcstrat._memory.intervals import divide_up
from hpcstrat.data import _loaders
from hpcstrat.data._computing import Batch
from hpcstrat.data._node import INFINITE, UNKNOWN, EpochPass, Node
from hpcstrat.data._ordering import Prefetch, Slice
from hpcstrat.data._threads import take_ahead

if TYPE_CHECKING:
    from typing_extensions import Self


class Position(NamedTuple):
    """The position of a pass, or that no pass is in progress.

    Attributes:
        pipeline: the nodes, without the batches at the end: the program that resumes may have
            another batch size.
        shuffles: for each shuffle, its seed and the number of this pass, or of the next pass if
            none is in progress.
        taken: the number of elements of `pipeline` that the pass has yielded; `None` if no pass is
            in progress.
        size: the batch size: if their number is unknown, the last batch may have been shorter.
        loader: the own state of a data loader at the start of the pass, encoded for JSON.
        by_worker: if several workers have pipelines of their own, the position of each.
    """

    pipeline: str
    shuffles: tuple[tuple[int, int], ...]
    taken: int | None
    size: int = 1
    loader: Any = None
    by_worker: tuple[Position, ...] = ()


def incompatibility(node: Node, position: Position) -> str | None:
    """Why a pipeline cannot resume at `position`; `None` if it can."""
    # With another dataset, or another order of transformations, the program would skip elements or
    # repeat them: that is worth an error. Another batch size is not.
    inner, size, pipeline = _without_batches(node)
    if pipeline != position.pipeline:
        return f"its pipeline is {pipeline} and the saved one {position.pipeline}"
    shuffles, saved = len(node.shuffles()), len(position.shuffles)
    if shuffles != saved:
        return f"its pipeline has {shuffles} shuffles and the saved one {saved}"
    taken = position.taken
    if taken is not None and taken % size and taken != inner.cardinality():
        return f"it was saved after {taken} elements, not a multiple of its batch size {size}"
    try:
        _loaders.decode(position.loader)
    except ValueError as error:
        return str(error)
    return None


def _without_batches(node: Node) -> tuple[Node, int, str]:
    """The node whose elements positions count, how many form an element of `node`, and its text.

    Batches at the end, and `prefetch`, may be others in the program that resumes.
    """
    size = 1
    while isinstance(node, (Prefetch, Batch)):
        size *= node.size if isinstance(node, Batch) else 1
        (node,) = node.inputs
    return node, size, f"{node!r} with {node.cardinality()} elements"


def begin(node: Node, position: Position | None) -> tuple[EpochPass, int]:
    """Counts a new pass: the next one, or that of a position, which `incompatibility` accepts.

    Returns:
        The pass, and how many elements of the node it skips.
    """
    if position is not None:
        restore(node, position)
    epoch, taken = EpochPass({shuffle: shuffle.passes for shuffle in node.shuffles()}), 0
    for shuffle in epoch.numbers:
        shuffle.passes += 1
    if position is not None and position.taken:
        _, size, _ = _without_batches(node)
        # The last of the elements that cover those that were taken may be short, or be dropped.
        taken = divide_up(position.taken, size)
        if (cardinality := node.cardinality()) >= 0:
            taken = min(taken, cardinality)
        epoch.least = max(0, position.taken - position.size + 1) // size
    return epoch, taken


def restore(node: Node, position: Position) -> None:
    """Makes the next pass the one of a position."""
    for shuffle, (seed, number) in zip(node.shuffles(), position.shuffles, strict=True):
        shuffle.seed, shuffle.passes = seed, number
    if isinstance(node, _loaders.Batches):
        node.set_state(_loaders.decode(position.loader))


def position_at(node: Node, epoch: EpochPass | None, taken: int | None = None) -> Position:
    """The position of a pass after `taken` elements; that of the next pass if there is none."""
    inner, size, pipeline = _without_batches(node)
    if taken is not None:
        taken *= size
        # After a short last batch, this is beyond the end, where no pipeline could resume.
        if (cardinality := inner.cardinality()) >= 0:
            taken = min(taken, cardinality)
    shuffles = [
        (shuffle.drawn(), shuffle.passes if epoch is None else epoch.numbers[shuffle])
        for shuffle in node.shuffles()
    ]
    loader = None
    if isinstance(node, _loaders.Batches):
        node.check_resumable(current_call())
        try:
            begun = None if epoch is None else epoch.loader
            loader = _loaders.encode(node.state() if begun is None else begun)
        except TypeError as error:
            raise TypeError(f"{current_call()}: the position in {node!r}: {error}") from None
    return Position(pipeline, tuple(shuffles), taken, size, loader)


class DatasetIterator:
    """One iteration over a `Dataset`."""

    def __init__(self, node: Node, epoch: EpochPass, taken: int) -> None:
        self._node = node
        self._begin(epoch, taken)

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
            Exception: whatever a function of the pipeline raised; the pass is then over, and its
                position is at this element.
        """
        taken = self._taken
        try:
            element = next(self._elements)
        except StopIteration:
            self._end()
            raise
        except Exception:
            self._fail()
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
            return Optional(next(self))
        except StopIteration:
            return Optional()

    def _begin(self, epoch: EpochPass, taken: int) -> None:
        """Begins a pass, after the first `taken` elements of the node."""
        self._epoch = epoch
        self._taken: int | None = taken  # None after the end
        self._has_failed = False
        node = Slice(self._node, "skip", taken, least=epoch.least) if taken else self._node
        self._elements: Iterator[Any] = self._elements_of(node)

    def _elements_of(self, node: Node) -> Iterator[Any]:
        """The elements of `node` in the pass."""
        return self._ahead(node.elements(self._epoch))

    def _ahead(self, elements: Iterator[Any]) -> Iterator[Any]:
        """The elements; a thread prepares them ahead if the pipeline ends with `prefetch`."""
        ahead = self._node.ahead if isinstance(self._node, Prefetch) else 0
        return take_ahead(elements, ahead) if ahead else elements

    def _stop(self) -> None:
        """Releases the pipeline: the next element is the end."""
        self._elements = iter(())

    def _fail(self) -> None:
        """Ends the pass at an element that failed, where its position stays."""
        self._stop()
        self._has_failed = True

    def _end(self) -> None:
        """Ends the pass."""
        self._stop()
        if not self._has_failed:
            self._taken = None

    def _go_back(self, taken: int | None) -> None:
        """Makes the next element the one after `taken`, though a signal has interrupted `next`.

        Its exception, such as Ctrl-C's, has ended the generators, which would yield no more.
        """
        if taken is None or self._has_failed:
            self._end()
            return
        if isinstance(self._node, _loaders.Batches):
            self._node.set_state(self._epoch.loader)
        self._begin(EpochPass(self._epoch.numbers), taken)

    def _position(self) -> Position:
        epoch = None if self._taken is None else self._epoch
        return position_at(self._node, epoch, self._taken)

    def _incompatibility(self, position: Position) -> str | None:
        return incompatibility(self._node, position)

    def _seek(self, position: Position) -> None:
        self._stop()
        self._taken = None
        if position.taken is None:
            restore(self._node, position)
        else:
            self._begin(*begin(self._node, position))


class Progress:
    """How far a dataset is: the position of its last pass, while that is in progress."""

    def __init__(self, node: Node) -> None:
        self._node = node
        # Weak: an iteration that the program dropped is over, and must not keep batches in memory.
        self._last: weakref.ref[DatasetIterator] | None = None
        # Where the next pass starts, if not at the first element.
        self._resumed: Position | None = None

    def position(self) -> Position:
        """The position."""
        if self._resumed is not None:
            return self._resumed
        last = self._last and self._last()
        if last is None or last._taken is None:
            return position_at(self._node, None)
        return DatasetIterator._position(last)  # its own, of a worker

    def seek(self, position: Position) -> None:
        """Makes the next pass start at a position, which `incompatibility` accepts."""
        restore(self._node, position)
        self._last = None
        self._resumed = None if position.taken is None else position

    def begin(self) -> tuple[EpochPass, int]:
        """See `begin`."""
        return begin(self._node, self._resumed)

    def note(self, iteration: DatasetIterator) -> None:
        """Notes that a pass has started."""
        self._last, self._resumed = weakref.ref(iteration), None


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

    def __init__(self, *value: Any) -> None:
        self._value = value

    def has_value(self) -> bool:
        """Whether there is an element.

        Examples:
            >>> iterator = iter(hs.data.Dataset.range(1))
            >>> [iterator.get_next_as_optional().has_value() for _ in range(3)]
            [True, False, False]
        """
        return bool(self._value)

    def get_value(self) -> Any:
        """The element.

        Raises:
            ValueError: there is no element.

        Examples:
            >>> iterator = iter(hs.data.Dataset.range(0))
            >>> iterator.get_next_as_optional().get_value()
            Traceback (most recent call last):
            ValueError: Optional.get_value: there is no element; ask has_value() first
        """
        if not self._value:
            raise ValueError("Optional.get_value: there is no element; ask has_value() first")
        return self._value[0]

    def __repr__(self) -> str:
        return f"Optional({self._value[0]!r})" if self._value else "Optional()"


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
