"""The nodes of a pipeline, the streams of keys that say which element comes when, and a pass over all nodes."""

from __future__ import annotations

import abc
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hpcstrat._core import nests
from hpcstrat._process import worlds
from hpcstrat.data import _elements
from hpcstrat.data._checksum import PipelineChecksum

INFINITE = -1
UNKNOWN = -2

Keys: TypeAlias = npt.NDArray[np.int64]
Chunk: TypeAlias = Any
"""Some consecutive items of a stream: `Keys` of shape `(n, width)`, one row an item, or a list of n Python objects.

In place of a list of arrays of one shape there may be one array of them: batches of keys are a view
of the keys.
"""

_BYTES_AHEAD = 1 << 20
_drawn = itertools.count()  # the unseeded shuffles that this process has drawn a seed for


class ShuffleState:
    """The seed of one shuffle and its round, from which each order is derived.

    An order is a function of (seed, round) alone, so ranks that agree on these two numbers need not
    exchange orders, and a checkpoint that saves them can replay an order.

    Attributes:
        seed: the seed of all rounds; `None` until an unseeded shuffle first needs it.
        next_round: the round with which the next pass begins.
        reshuffle: whether rounds differ.
        own_seed: the seed that the user gave, or `None`.
    """

    __slots__ = ("next_round", "own_seed", "reshuffle", "seed")

    def __init__(self, seed: int | None, reshuffle: bool) -> None:
        self.seed = None if seed is None else seed % 2**64
        self.next_round: int = 0
        self.reshuffle: bool = reshuffle
        self.own_seed: int | None = self.seed

    def state(self) -> tuple[int, int]:
        """The seed, drawn now if there is none yet, and the next round.

        Equal states give equal orders.
        """
        if self.seed is None:
            self.seed = _fresh_seed()
        return self.seed, self.next_round


class EpochPass:
    """One pass over a pipeline.

    Every pass, and every round of a `repeat` within it, takes the next round of each shuffle that
    it meets.

    Args:
        rounds: the round with which each shuffle begins; a shuffle not listed continues after its
            last pass.
        frozen: whether every shuffle begins with its first round instead, and its count of rounds
            stays as it is.
        salt: numbers from which orders without a seed derive; for a pass over a dataset that a
            function of the pipeline makes, whose shuffles no other rank, and no program that
            resumes, could know of.
        place: numbers from which, and from its seed, an order with a seed derives there: the round
            of the pipeline's pass and the position of the dataset in it, the same in every program.

    Attributes:
        checksum: the checksum of what user code yields in this pass.
        reached: for each shuffle that it has met the round with which a pass after it begins.
        runs_ahead: whether these count only by `commit`, as the elements behind them are asked for
            later.
    """

    def __init__(
        self,
        rounds: Mapping[ShuffleState, int] | None = None,
        *,
        frozen: bool = False,
        salt: tuple[int, ...] | None = None,
        place: tuple[int, ...] = (),
    ) -> None:
        self._rounds = dict(rounds or {})
        self._first = dict(self._rounds)
        self._frozen = frozen
        self._salt = salt
        self._place = place
        self.reached: Mapping[ShuffleState, int] = {}
        self.runs_ahead: bool = False
        self.checksum: PipelineChecksum = PipelineChecksum()

    def frozen(self) -> EpochPass:
        """A pass that meets the same orders each time, as a cache needs it."""
        return EpochPass(frozen=True, salt=self._salt, place=self._place)

    def inner_passes(self, shuffle: ShuffleState) -> Iterator[EpochPass]:
        """Passes over the datasets that a function makes, one after the other, in a round of the node's own shuffle."""
        salt = int(self.generator(shuffle).integers(2**63))
        place = *self._place, self._rounds[shuffle] - 1
        for number in itertools.count():
            inner = EpochPass(salt=(salt, number), place=(*place, number))
            inner.checksum = self.checksum
            yield inner

    def first_round(self, shuffle: ShuffleState) -> int:
        """The round of a shuffle with which this pass began, or will begin."""
        return self._first.get(shuffle, shuffle.next_round)

    def commit(self, reached: Mapping[ShuffleState, int]) -> None:
        """Has the next pass begin with these rounds."""
        for shuffle, number in reached.items():
            # Of two passes under way at once, the one that lags behind does not set the count back.
            shuffle.next_round = max(shuffle.next_round, number)

    def generator(self, shuffle: ShuffleState) -> np.random.Generator:
        """The random numbers for the next round of a shuffle."""
        if self._salt is not None:
            number = self._rounds.setdefault(shuffle, 0)
            self._rounds[shuffle] = number + 1
            if (
                shuffle.own_seed is None
            ):  # two of them have different orders; two with one seed equal ones, as outside
                own, within = (0, list(self._rounds).index(shuffle)), self._salt
            else:
                own, within = (shuffle.own_seed,), self._place
            return np.random.default_rng([*own, *((*within, number) if shuffle.reshuffle else ())])
        seed, next_round = shuffle.state()
        number = self._rounds.get(shuffle, 0 if self._frozen else next_round)
        self._rounds[shuffle] = number + 1
        self._first.setdefault(shuffle, number)
        if not self._frozen:
            self.reached = {
                **self.reached,
                shuffle: number + 1,
            }  # a new one, which another thread may keep
            if not self.runs_ahead:
                self.commit(self.reached)
        return np.random.default_rng([seed, number if shuffle.reshuffle else 0])


class Node(abc.ABC):
    """A source or a transformation of elements.

    A pass over a node is a stream of *items*, which are cheap and say which element comes when;
    `load` and `fetch` make elements of them. So nodes that reorder or choose elements touch no
    data, every rank can walk the whole stream, and each replica loads its own elements only.

    Everything that distribution and checkpoints need to know is an argument without a default: a
    new transformation
    that forgets one fails when it is constructed, instead of being split or resumed like some other
    node.

    Args:
        *inputs: the nodes that this one reads.
        width: the number of int64 columns of an item if the stream consists of `Keys`; `None` if
            items are Python objects.
        user_code: whether a pass runs functions of the user, and so may end or fail on one rank
            only.
        batch_sizes: the size of each `batch` that still holds, outermost last; 0 if it is unknown.
        rows: if elements are batches, the node whose elements are their rows, and whose chunks are
            this node's items; else `None`.
        inputs_per_element: the unit in which a saved position counts. `None`: this node's own
            elements. A number: elements of its only input, this many to an element, so that a
            program with another batch size can resume.

    The arguments are attributes, too.
    """

    def __init__(
        self,
        *inputs: Node,
        width: int | None,
        user_code: bool,
        batch_sizes: tuple[int, ...],
        rows: Node | None,
        inputs_per_element: int | None,
    ) -> None:
        self.inputs: tuple[Node, ...] = inputs
        self.width: int | None = width
        self.user_code: bool = user_code
        self.batch_sizes: tuple[int, ...] = batch_sizes
        self.rows: Node | None = rows
        self.inputs_per_element: int | None = inputs_per_element

    @abc.abstractmethod
    def __repr__(self) -> str:
        """The pipeline up to here as the user wrote it. Ranks compare pipelines by this text."""

    @abc.abstractmethod
    def spec(self) -> Any:
        """An element's nest of `TensorSpec`."""

    @abc.abstractmethod
    def cardinality(self) -> int:
        """The number of elements, `INFINITE` or `UNKNOWN`."""

    @abc.abstractmethod
    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        """One pass: the items in order, in chunks of any length, short ones if the stream is infinite."""

    @abc.abstractmethod
    def load(self, item: Any) -> Any:
        """The element that `item` stands for; safe to write to."""

    def fetch(self, chunk: Chunk) -> Any:
        """The elements of a chunk, stacked: a nest of new arrays of shape `(len(chunk), ...)`."""
        return _elements.stack([self.load(item) for item in chunk])

    @property
    def threads(self) -> int:
        """How many threads may call `load` at once; 0 for any number, where that is of no use."""
        return 1 if self.user_code else 0

    @property
    def seekable(self) -> bool:
        """Whether an empty chunk can be fetched, and fetching runs no user code."""
        return self.width is not None and not self.user_code

    def elements(self, epoch: EpochPass) -> Iterator[Any]:
        """One pass over the elements themselves, lazily: user code runs no sooner than needed.

        An element that user code fails to make raises when its turn comes; the next element
        follows.
        """
        if self.seekable:
            return self._fetched(epoch)
        return map(self.load, itertools.chain.from_iterable(self.chunks(epoch)))

    def _fetched(self, epoch: EpochPass) -> Iterator[Any]:
        ahead = None
        for chunk in self.chunks(epoch):
            # One gather for many rows: element by element the cost of NumPy's calls would dominate.
            ahead = ahead or self._rows_ahead(chunk)
            for start in range(0, len(chunk), ahead):
                yield from _elements.unstack(self.fetch(chunk[start : start + ahead]))

    def shuffles(self) -> list[ShuffleState]:
        """The shuffles of this node and of all before it, in a fixed order, each once."""
        found: dict[ShuffleState, None] = {}
        for node in self.inputs:
            found.update(dict.fromkeys(node.shuffles()))
        return [*found, *self.own_shuffles()]

    def own_shuffles(self) -> Sequence[ShuffleState]:
        """The shuffles of this node itself."""
        return ()

    def checksums(self, every: bool) -> list[tuple[str, int]]:
        """For each source of arrays its description and a checksum: of samples, or of all its data if `every`."""
        return [found for node in self.inputs for found in node.checksums(every)]

    def _rows_ahead(self, chunk: Keys) -> int:
        """How many elements make about a megabyte, to fetch at once."""
        leaves, _ = nests.flatten(self.fetch(chunk[:0]))
        size = sum(leaf.dtype.itemsize * math.prod(leaf.shape[1:]) for leaf in leaves)
        return max(1, min(1024, _BYTES_AHEAD // max(1, size)))


class Transformation(Node):
    """A node with one input.

    Args:
        source: the input.
        call: the method that made this node, with its arguments.
        width: see `Node`, as the rest.
        user_code: likewise.
        batch_sizes: likewise.
        rows: likewise.
        inputs_per_element: likewise.
    """

    def __init__(
        self,
        source: Node,
        call: str,
        *,
        width: int | None,
        user_code: bool,
        batch_sizes: tuple[int, ...],
        rows: Node | None,
        inputs_per_element: int | None,
    ) -> None:
        super().__init__(
            source,
            width=width,
            user_code=user_code,
            batch_sizes=batch_sizes,
            rows=rows,
            inputs_per_element=inputs_per_element,
        )
        self._source = source
        self._call = call

    def __repr__(self) -> str:
        return f"{self._source!r}.{self._call}"


class FailedElement:
    """Stands in a stream for an element that user code failed to make.

    A generator that raises is finished. Where elements stay in a stream or a buffer, the exception
    has to travel as a value, so that it is raised when its turn comes and the elements after it are
    not lost.

    Attributes:
        error: the exception.
    """

    __slots__ = ("error",)

    def __init__(self, error: Exception) -> None:
        self.error = error


def with_failures(elements: Iterator[Any]) -> Iterator[Any]:
    """The elements, with a `FailedElement` in place of each that raises."""
    while True:
        try:
            element = next(elements)
        except StopIteration:
            return
        except Exception as error:
            element = FailedElement(error)
        yield element


def unwrapped(item: Any) -> Any:
    """The item, which is an element; raises if it is a `FailedElement`."""
    if isinstance(item, FailedElement):
        raise item.error
    return item


def first(batch: Any) -> Any:
    """The only row of a batch of one."""
    return nests.map_leaves(lambda leaf: leaf[0], batch)


def join(chunks: Sequence[Chunk]) -> Chunk:
    """Joins chunks of the same stream."""
    if len(chunks) == 1:
        return chunks[0]
    if (
        isinstance(chunks[0], np.ndarray) and chunks[0].ndim == 2
    ):  # keys; batches of them may differ in size
        return np.concatenate(chunks)
    return [item for chunk in chunks for item in chunk]


def load_rows(node: Node, chunk: Chunk, start: int, stop: int) -> Any:
    """The elements `start` to `stop` of a chunk, stacked; the range may be empty."""
    if start == stop and not node.seekable:
        # Shapes and dtypes of an empty batch are known only from an element, so one is made for
        # nothing.
        return _elements.rows(node.fetch(chunk[:1]), 0, 0)
    return node.fetch(chunk[start:stop])


def _fresh_seed() -> int:
    """A seed for a shuffle without one.

    All ranks have the same `World.seed`, so ranks that draw in the same order draw the same seeds,
    and no rank has to communicate inside a lazy pipeline.
    """
    world = worlds.started()
    if world is None or world.size == 1:
        return int.from_bytes(os.urandom(7), "little")
    return int(np.random.SeedSequence([world.seed, next(_drawn)]).generate_state(1, np.uint64)[0])
