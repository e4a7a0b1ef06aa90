"""Where the iteration over a pipeline stands, so that another program can go on from there."""

from __future__ import annotations

import abc
import weakref
from typing import NamedTuple

from hpcstrat.data._choosing import Prefetch, Skip
from hpcstrat.data._node import Node
from hpcstrat.data._transforming import Batch
from hpcstrat.data._walk import Shuffler, Walk


class Position(NamedTuple):
    """Where an iteration stands, or that there is none under way.

    Attributes:
        pipeline: the stages, but for batches at their end: these may differ where it goes on.
        shuffles: for each shuffle its seed and the round with which the iteration under way began; where there is none,
            the round of the next one.
        taken: how many elements of `pipeline` the iteration has given; `None` where none is under way.
    """

    pipeline: str
    shuffles: tuple[tuple[int, int], ...]
    taken: int | None


class Positioned(abc.ABC):
    """What can tell its position and go to another one.

    Args:
        node: the last stage of the pipeline.
    """

    def __init__(self, node: Node) -> None:
        self._node = node

    @abc.abstractmethod
    def _position(self) -> Position:
        """Where the iteration stands."""

    @abc.abstractmethod
    def _go_to(self, position: Position) -> None:
        """Makes what comes next that which came next there. `_misfit` says beforehand whether that can be."""

    def _misfit(self, position: Position) -> str | None:
        """Why this pipeline cannot go to a position; `None` where it can."""
        shuffles = len(self._node.shufflers())
        if shuffles != len(position.shuffles):
            return f"its pipeline has {shuffles} shuffles and the saved one {len(position.shuffles)}"
        if position.taken is None:
            return None
        if (pipeline := _describe(self._node)) != position.pipeline:
            return f"its pipeline is {pipeline} and the saved one {position.pipeline}"
        inner, size = _without_batches(self._node)
        if position.taken % size and position.taken != inner.cardinality():
            return f"it was saved after {position.taken} elements, which batches of {size} do not come to"
        return None

    def _rounds_at(self, position: Position) -> dict[Shuffler, int]:
        """The rounds with which the iteration there began; from now on they are the next ones of all shuffles."""
        rounds = {}
        for shuffler, (seed, number) in zip(self._node.shufflers(), position.shuffles, strict=True):
            shuffler.seed, shuffler.next_round = seed, number
            rounds[shuffler] = number
        return rounds


class Iteration(Positioned):
    """One pass over a pipeline.

    Args:
        node: the last stage of the pipeline.
    """

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._walk = Walk()
        self._taken: int | None = None  # elements of `node`; None after the end

    @abc.abstractmethod
    def _begin(self, walk: Walk, taken: int) -> None:
        """Begins a pass, after so many of the node's elements."""

    @abc.abstractmethod
    def _end(self) -> None:
        """From now on there is no further element."""

    def _position(self) -> Position:
        return _position_of(self._node, self._walk, self._taken)

    def _go_to(self, position: Position) -> None:
        self._end()
        rounds = self._rounds_at(position)
        if position.taken is not None:
            self._begin(Walk(rounds), _places(self._node, position.taken))


class Reiterable(Positioned):
    """What can be iterated over again and again. Its position is that of the iteration begun last, if it goes on.

    Args:
        node: the last stage of the pipeline.
    """

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._last: weakref.ref[Iteration] | None = None
        self._resumed: Position | None = None  # where the next iteration begins, if not at the beginning

    def _position(self) -> Position:
        if self._resumed is not None:
            return self._resumed
        last = None if self._last is None else self._last()
        return _position_of(self._node, Walk(), None) if last is None or last._taken is None else last._position()

    def _go_to(self, position: Position) -> None:
        self._rounds_at(position)
        self._last = None
        self._resumed = None if position.taken is None else position

    def _next_start(self) -> tuple[dict[Shuffler, int], int]:
        """The rounds that the next iteration begins with, where they are given, and how many elements it leaves out."""
        resumed = self._resumed
        if resumed is None or resumed.taken is None:
            return {}, 0
        return self._rounds_at(resumed), _places(self._node, resumed.taken)

    def _note_begun(self, iteration: Iteration) -> None:
        self._last, self._resumed = weakref.ref(iteration), None


def after(node: Node, count: int) -> Node:
    """The pipeline without its first elements; where they can be told apart by keys, none of them is loaded."""
    return Skip(node, count) if count else node


def _position_of(node: Node, walk: Walk, taken: int | None) -> Position:
    shuffles = tuple([(shuffler.state()[0], walk.first_round(shuffler)) for shuffler in node.shufflers()])
    if taken is None:
        return Position(_describe(node), shuffles, None)
    inner, size = _without_batches(node)
    there = inner.cardinality()
    return Position(_describe(node), shuffles, taken * size if there < 0 else min(taken * size, there))


def _places(node: Node, taken: int) -> int:
    """How many of the node's elements hold so many of those before its batches; the last batch may be short."""
    return -(-taken // _without_batches(node)[1])


def _without_batches(node: Node) -> tuple[Node, int]:
    """The pipeline without the batches at its end, and how many of its elements make one of the node's."""
    size = 1
    while isinstance(node, (Batch, Prefetch)):
        size *= node.batch_sizes[-1] if isinstance(node, Batch) else 1
        (node,) = node.inputs
    return node, size


def _describe(node: Node) -> str:
    inner, _ = _without_batches(node)
    return f"{inner!r} with {inner.cardinality()} elements"
