"""Passes over a pipeline: ranks begin them together, and another program can resume them."""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, final

from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import ReplicaMismatchError
from hpcstrat._replicas.group import Workers
from hpcstrat.data import _elements
from hpcstrat.data._index_ops import Prefetch, Skip, WithOptions
from hpcstrat.data._node import INFINITE, UNKNOWN, EpochPass, Node, ShuffleState
from hpcstrat.data._threads import prepare_ahead


class Position(NamedTuple):
    """The position of an iteration, or that none is under way.

    It holds no order and no elements: to seek is to walk the same shuffles again and skip. So a
    checkpoint of a dataset
    has a few numbers, whatever the size of the dataset and its shuffle buffers.

    Attributes:
        pipeline: the nodes, without the batches at the end: the program that resumes may have
            another batch size.
        shuffles: for each shuffle its seed and the round with which the iteration began; if no
            iteration is under way, the round with which the next one begins.
        taken: the number of elements of `pipeline` that the iteration has yielded; `None` if no
            iteration is under way.
    """

    pipeline: str
    shuffles: tuple[tuple[int, int], ...]
    taken: int | None


class Resumable(abc.ABC):
    """A dataset or iterator that knows its position and can seek to another one.

    The methods are private because users' datasets inherit them; checkpoints call them.

    Args:
        node: the last node of the pipeline.
    """

    def __init__(self, node: Node) -> None:
        self._node = node

    @abc.abstractmethod
    def _position(self) -> Position:
        """Where the iteration stands."""

    @abc.abstractmethod
    def _seek(self, position: Position) -> None:
        """Seeks to `position`. Check with `_incompatibility` first."""

    def _incompatibility(self, position: Position) -> str | None:
        """Why this pipeline cannot seek to `position`; `None` if it can."""
        # Another dataset, or another order of transformations, would resume at elements that the
        # first program never saw, or twice at the same: that is worth an error. Another batch size
        # is not: it is left out of the text.
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
            return f"it was saved after {position.taken} elements, not a multiple of its batch size {size}"
        return None

    def _restore_rounds(self, position: Position) -> dict[ShuffleState, int]:
        """Sets all shuffles to the rounds with which the saved iteration began, and returns these."""
        rounds = {}
        for shuffle, (seed, number) in zip(self._node.shuffles(), position.shuffles, strict=True):
            shuffle.seed, shuffle.next_round = seed, number
            rounds[shuffle] = number
        return rounds


@final
class Optional:
    """An element of an iteration, or none because the iteration is over: what `get_next_as_optional` returns."""

    def __init__(self, values: tuple[Any] | tuple[()], spec: Callable[[], Any]) -> None:
        self._values = values
        self._spec = spec

    @staticmethod
    def from_value(value: Any) -> Optional:
        """One with the element `value`, a nest of arrays.

        Raises:
            TypeError: a leaf cannot become an array.
        """
        element = _elements.as_element(value)
        return Optional((element,), lambda: _elements.spec_of(element))

    @staticmethod
    def empty(element_spec: Any) -> Optional:
        """One without an element, which would be described by `element_spec`."""
        return Optional((), lambda: element_spec)

    def has_value(self) -> bool:
        """Whether there is an element."""
        return bool(self._values)

    def get_value(self) -> Any:
        """The element.

        Raises:
            ValueError: there is none.
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
        """The next element, as `next` returns it, or an `Optional` without one if the pass is over."""
        try:
            return Optional((next(self),), lambda: self.element_spec)
        except StopIteration:
            return Optional((), lambda: self.element_spec)

    @abc.abstractmethod
    def _begin(self, epoch: EpochPass, taken: int) -> None:
        """Begins a pass, after the first `taken` of the node's elements."""

    @abc.abstractmethod
    def _end(self) -> None:
        """Ends the pass."""

    def _position(self) -> Position:
        return _position_of(self._node, self._epoch, self._taken)

    def _seek(self, position: Position) -> None:
        self._end()
        rounds = self._restore_rounds(position)
        if position.taken is not None:
            self._begin(EpochPass(rounds), _batches_covering(self._node, position.taken))


class ResumableDataset(Resumable):
    """A dataset, which can be iterated over repeatedly.

    Its position is that of its last iteration, while it lasts.

    Args:
        node: the last node of the pipeline.
    """

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        # Weak: an iteration that the program has dropped is over, and must not keep its batches in
        # memory.
        self._last: weakref.ref[ResumableIterator] | None = None
        self._resumed: Position | None = (
            None  # where the next iteration begins, if not at the beginning
        )

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
        """The rounds of shuffles and the number of elements to skip, if the next iteration resumes one."""
        resumed = self._resumed
        if resumed is None or resumed.taken is None:
            return {}, 0
        return self._restore_rounds(resumed), _batches_covering(self._node, resumed.taken)

    def _note_begun(self, iteration: ResumableIterator) -> None:
        self._last, self._resumed = weakref.ref(iteration), None


class InputCommunicator(Protocol):
    """The methods of a communicator that datasets use; a protocol, so that tests can use threads as ranks."""

    @property
    def rank(self) -> int:
        """The index of this replica."""
        ...

    @property
    def size(self) -> int:
        """The number of replicas."""
        ...

    def raise_together(self) -> AbstractContextManager[Any]:
        """A block in which an exception on one rank, before its next collective, is raised on every rank."""
        ...

    def all_gather_obj(self, obj: Any) -> list[Any]:
        """Every rank's object, in rank order. Collective."""
        ...


def begin_together(
    node: Node,
    communicator: InputCommunicator,
    begun: Mapping[ShuffleState, int],
    taken: int,
    workers: Workers,
    arrays: Callable[[], list[tuple[str, int]]] | None,
) -> EpochPass:
    """A pass in which all ranks of a worker meet the same elements in the same order. Collective.

    Args:
        node: the last node of the pipeline.
        communicator: the replicas.
        begun: the rounds with which shuffles begin, if not their next ones.
        taken: the number of elements to skip.
        workers: the workers, each with its own pipeline.
        arrays: returns descriptions and checksums of the pipeline's arrays; `None` if they need no
            comparison.

    Raises:
        ReplicaMismatchError: the pipelines of a worker's ranks, or their arrays, differ.
    """
    if communicator.size == 1:
        return EpochPass(begun)
    with communicator.raise_together():
        shuffles = node.shuffles()
        pipeline = f"{node!r} with {node.cardinality()} elements" + (
            f" after the first {taken}" if taken else ""
        )
        states = [
            (seed, begun.get(shuffle, number))
            for shuffle in shuffles
            for seed, number in [shuffle.state()]
        ]
        own = pipeline, states, [] if arrays is None else arrays()
        everyones = communicator.all_gather_obj(own)
    pipelines, orders, contents = zip(*everyones, strict=True)
    if any(len(set(of_worker)) > 1 for of_worker in workers.grouped(pipelines)):
        seen = "; ".join(f"rank {rank} has {other}" for rank, other in enumerate(pipelines))
        raise ReplicaMismatchError(
            f"{current_call()}: every rank must make the same dataset; each replica then gets its "
            f"share. {seen}"
        )
    _require_equal_arrays(contents, workers)
    # Unseeded shuffles take the seed of the worker's first rank, and rounds too: a rank may have
    # iterated on its own.
    rounds = {}
    for shuffle, (seed, number) in zip(shuffles, orders[workers.peers[0]], strict=True):
        shuffle.seed = seed
        rounds[shuffle] = number
    return EpochPass(rounds)


def _require_equal_arrays(contents: Sequence[list[tuple[str, int]]], workers: Workers) -> None:
    for of_worker in workers.grouped(list(enumerate(contents))):
        for found in zip(*(content for _, content in of_worker), strict=True):
            if len(set(found)) > 1:
                ranks = [rank for rank, _ in of_worker]
                seen = ", ".join(
                    f"rank {rank} {checksum:08x}"
                    for rank, (_, checksum) in zip(ranks, found, strict=True)
                )
                raise ReplicaMismatchError(
                    f"{current_call()}: the ranks have different arrays in {found[0][0]}, with "
                    f"checksums {seen}. Every rank must have the same data in the same order; each "
                    "replica then gets its share. Draw, shuffle and split with a seed that all "
                    "ranks share, such as np.random.default_rng(0) or train_test_split(..., "
                    "random_state=0), or send rank 0's arrays to all: hs.broadcast_object(arrays)"
                )


def length(cardinality: int, what: str) -> int:
    """What `len` gives for a dataset with this cardinality.

    Raises:
        TypeError: it is infinite or unknown. `what` names the dataset in the message.
    """
    if cardinality < 0:
        why = {INFINITE: "infinite", UNKNOWN: "unknown"}[cardinality]
        raise TypeError(
            f"{what}: len() has no result because the number of elements is {why}; ask for its "
            "cardinality, which is negative then"
        )
    return cardinality


def prefetched(elements: Iterator[Any], node: Node, epoch: EpochPass) -> Iterator[Any]:
    """The elements of a pass, which a thread prepares ahead of their use if the pipeline ends with `prefetch`."""
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
    # After a short last batch `taken * size` lies beyond the end, where no pipeline could resume.
    cardinality = inner.cardinality()
    return Position(
        _describe(node),
        shuffles,
        taken * size if cardinality < 0 else min(taken * size, cardinality),
    )


def _batches_covering(node: Node, taken: int) -> int:
    """The number of the node's elements that cover `taken` unbatched elements, rounded up: the last may be short."""
    return -(-taken // _without_batches(node)[1])


def _without_batches(node: Node) -> tuple[Node, int]:
    """The node in whose elements positions count, and how many of these make one element of `node`; see `Node`."""
    size = 1
    while node.inputs_per_element is not None:
        size *= node.inputs_per_element
        (node,) = node.inputs
    return node, size


def _describe(node: Node) -> str:
    inner, _ = _without_batches(node)
    return f"{inner!r} with {inner.cardinality()} elements"
