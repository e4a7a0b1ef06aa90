"""Passes over a pipeline: ranks start them together, and another program can resume them."""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, final

from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import ReplicaMismatchError
from hpcstrat._memory.intervals import divide_up
from hpcstrat._replicas.group import Workers
from hpcstrat.data import _elements
from hpcstrat.data._epoch import EpochPass, ShuffleState
from hpcstrat.data._index_ops import Prefetch, Skip, WithOptions
from hpcstrat.data._node import INFINITE, UNKNOWN, Node
from hpcstrat.data._threads import prepare_ahead


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

    Args:
        node: the last node of the pipeline.
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
        # or repeat them: that is worth an error. Another batch size is not, and `pipeline` is
        # without it.
        shuffles = len(self._node.shuffles())
        if shuffles != len(position.shuffles):
            return (
                f"its pipeline has {shuffles} shuffles and the saved one {len(position.shuffles)}"
            )
        if position.taken is None:
            return None
        if (pipeline := _describe(self._node)) != position.pipeline:
            return f"its pipeline is {pipeline} and the saved one {position.pipeline}"
        inner, size = _without_batches(self._node)
        if position.taken % size and position.taken != inner.cardinality():
            return (
                f"it was saved after {position.taken} elements, not a multiple of its batch size "
                f"{size}"
            )
        return None

    def _restore_rounds(self, position: Position) -> dict[ShuffleState, int]:
        """Sets all shuffles to, and returns, the rounds at the start of the saved iteration."""
        rounds = {}
        for shuffle, (seed, number) in zip(self._node.shuffles(), position.shuffles, strict=True):
            shuffle.seed, shuffle.next_round = seed, number
            rounds[shuffle] = number
        return rounds


@final
class Optional:
    """An element, or none because the iteration is over: the result of `get_next_as_optional`."""

    def __init__(self, values: tuple[Any] | tuple[()], spec: Callable[[], Any]) -> None:
        self._values = values
        self._spec = spec

    @staticmethod
    def from_value(value: Any) -> Optional:
        """An `Optional` with the element `value`, a nest of arrays.

        Raises:
            TypeError: a leaf cannot become an array.
        """
        element = _elements.as_element(value)
        return Optional((element,), lambda: _elements.spec_of(element))

    @staticmethod
    def empty(element_spec: Any) -> Optional:
        """An `Optional` without an element; `element_spec` describes the missing element."""
        return Optional((), lambda: element_spec)

    def has_value(self) -> bool:
        """Whether there is an element."""
        return bool(self._values)

    def get_value(self) -> Any:
        """The element.

        Raises:
            ValueError: there is no element.
        """
        if not self._values:
            raise ValueError("Optional.get_value: there is no element; ask has_value() first")
        return self._values[0]

    @property
    def element_spec(self) -> Any:
        """The element's nest of `TensorSpec`."""
        return self._spec()

    def __repr__(self) -> str:
        return f"Optional({self._values[0]!r})" if self._values else "Optional()"


class ResumableIterator(Resumable):
    """One pass over a pipeline.

    Args:
        node: the last node of the pipeline.
    """

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._epoch = EpochPass()
        self._taken: int | None = None  # elements of `node`; None after the end

    @property
    @abc.abstractmethod
    def element_spec(self) -> Any:
        """The nest of specifications of what `next` returns."""

    @abc.abstractmethod
    def __next__(self) -> Any:
        """The next element."""

    def get_next(self) -> Any:
        """The next element, as `next` returns it.

        Raises:
            StopIteration: the pass is over.
        """
        return next(self)

    def get_next_as_optional(self) -> Optional:
        """The next element, as `next` returns it; an empty `Optional` if the pass is over."""
        try:
            return Optional((next(self),), lambda: self.element_spec)
        except StopIteration:
            return Optional((), lambda: self.element_spec)

    @abc.abstractmethod
    def _start(self, epoch: EpochPass, taken: int) -> None:
        """Starts a pass, after the first `taken` of the node's elements."""

    @abc.abstractmethod
    def _end(self) -> None:
        """Ends the pass."""

    def _position(self) -> Position:
        return _position_of(self._node, self._epoch, self._taken)

    def _seek(self, position: Position) -> None:
        self._end()
        rounds = self._restore_rounds(position)
        if position.taken is not None:
            self._start(EpochPass(rounds), _batches_covering(self._node, position.taken))


class ResumableDataset(Resumable):
    """A dataset, which can be iterated over repeatedly.

    Its position is that of its last iteration, while that is in progress.

    Args:
        node: the last node of the pipeline.
    """

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        # Weak: an iteration that the program dropped is over, and must not keep batches in memory.
        self._last: weakref.ref[ResumableIterator] | None = None
        # Where the next iteration starts, if not at the first element.
        self._resumed: Position | None = None

    def _position(self) -> Position:
        if self._resumed is not None:
            return self._resumed
        last = None if self._last is None else self._last()
        return (
            _position_of(self._node, EpochPass(), None)
            if last is None or last._taken is None
            else last._position()
        )

    def _seek(self, position: Position) -> None:
        self._restore_rounds(position)
        self._last = None
        self._resumed = None if position.taken is None else position

    def _next_start(self) -> tuple[dict[ShuffleState, int], int]:
        """The rounds of shuffles and the number of elements to skip in the next iteration."""
        resumed = self._resumed
        if resumed is None or resumed.taken is None:
            return {}, 0
        return self._restore_rounds(resumed), _batches_covering(self._node, resumed.taken)

    def _note_start(self, iteration: ResumableIterator) -> None:
        self._last, self._resumed = weakref.ref(iteration), None


class InputCommunicator(Protocol):
    """The methods of a communicator that datasets use; in tests, threads can be the ranks."""

    @property
    def rank(self) -> int:
        """The index of this replica."""
        ...

    @property
    def size(self) -> int:
        """The number of replicas."""
        ...

    def raise_together(self) -> AbstractContextManager[Any]:
        """A block in which a rank's exception before its next collective is raised on all ranks."""
        ...

    def all_gather_obj(self, obj: Any) -> list[Any]:
        """Every rank's object, in rank order. Collective."""
        ...


def start_together(
    node: Node,
    communicator: InputCommunicator,
    starts: Mapping[ShuffleState, int],
    taken: int,
    workers: Workers,
    arrays: Callable[[], list[tuple[str, int]]] | None,
) -> EpochPass:
    """A pass in which all ranks of a worker meet the same elements in the same order. Collective.

    Args:
        node: the last node of the pipeline.
        communicator: the replicas.
        starts: the rounds with which shuffles start, if not with their next rounds.
        taken: the number of elements to skip.
        workers: the workers, each with its own pipeline.
        arrays: returns descriptions and checksums of the pipeline's arrays; `None` if they need no
            comparison.

    Raises:
        ReplicaMismatchError: the pipelines of a worker's ranks, or their arrays, differ.
    """
    if communicator.size == 1:
        return EpochPass(starts)
    with communicator.raise_together():
        shuffles = node.shuffles()
        pipeline = f"{node!r} with {node.cardinality()} elements" + (
            f" after the first {taken}" if taken else ""
        )
        states = [
            (seed, starts.get(shuffle, number))
            for shuffle in shuffles
            for seed, number in [shuffle.state()]
        ]
        own = pipeline, states, [] if arrays is None else arrays()
        everyones = communicator.all_gather_obj(own)
    pipelines, orders, contents = zip(*everyones, strict=True)
    if any(len(set(of_worker)) > 1 for of_worker in workers.group_by_worker(pipelines)):
        seen = "; ".join(f"rank {rank} has {other}" for rank, other in enumerate(pipelines))
        raise ReplicaMismatchError(
            f"{current_call()}: every rank must make the same dataset; each replica then gets its "
            f"share. {seen}"
        )
    _require_equal_arrays(contents, workers)
    # All take the seeds and rounds of the worker's first rank: shuffles without a seed may differ,
    # and a rank may have iterated on its own.
    rounds = {}
    for shuffle, (seed, number) in zip(shuffles, orders[workers.peers[0]], strict=True):
        shuffle.seed = seed
        rounds[shuffle] = number
    return EpochPass(rounds)


def _require_equal_arrays(contents: Sequence[list[tuple[str, int]]], workers: Workers) -> None:
    for of_worker in workers.group_by_worker(list(enumerate(contents))):
        for checksums in zip(*(content for _, content in of_worker), strict=True):
            if len(set(checksums)) > 1:
                ranks = [rank for rank, _ in of_worker]
                seen = ", ".join(
                    f"rank {rank} {checksum:08x}"
                    for rank, (_, checksum) in zip(ranks, checksums, strict=True)
                )
                raise ReplicaMismatchError(
                    f"{current_call()}: the ranks have different arrays in {checksums[0][0]}, with "
                    f"checksums {seen}. Every rank must have the same data in the same order; each "
                    "replica then gets its share. Draw, shuffle and split with a seed that all "
                    "ranks share, such as np.random.default_rng(0) or train_test_split(..., "
                    "random_state=0), or send rank 0's arrays to all: hs.broadcast_object(arrays)"
                )


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


def prefetch(elements: Iterator[Any], node: Node, epoch: EpochPass) -> Iterator[Any]:
    """The elements of a pass; a thread prepares them ahead if the pipeline ends with `prefetch`."""
    while isinstance(node, WithOptions):
        (node,) = node.inputs
    ahead = node.size if isinstance(node, Prefetch) else 0
    return prepare_ahead(elements, ahead, epoch) if ahead else elements


def after(node: Node, count: int) -> Node:
    """The pipeline without its first `count` elements.

    Elements with keys are skipped without being loaded.
    """
    return Skip(node, count) if count else node


def _position_of(node: Node, epoch: EpochPass, taken: int | None) -> Position:
    shuffles = tuple(
        [(shuffle.state()[0], epoch.first_round(shuffle)) for shuffle in node.shuffles()]
    )
    if taken is None:
        return Position(_describe(node), shuffles, None)
    inner, size = _without_batches(node)
    # After a short last batch, `taken * size` is beyond the end, where no pipeline could resume.
    cardinality = inner.cardinality()
    return Position(
        _describe(node),
        shuffles,
        taken * size if cardinality < 0 else min(taken * size, cardinality),
    )


def _batches_covering(node: Node, taken: int) -> int:
    """How many of the node's elements cover `taken` unbatched elements; the last may be short."""
    return divide_up(taken, _without_batches(node)[1])


def _without_batches(node: Node) -> tuple[Node, int]:
    """The node whose elements positions count, and how many of them form an element of `node`."""
    size = 1
    while node.inputs_per_element is not None:
        size *= node.inputs_per_element
        (node,) = node.inputs
    return node, size


def _describe(node: Node) -> str:
    inner, _ = _without_batches(node)
    return f"{inner!r} with {inner.cardinality()} elements"
