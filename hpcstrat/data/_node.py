"""The nodes of a pipeline, the items that flow through them, and a pass with its random orders.

Items say which element comes when; elements are made from them only where they are needed. The
pipeline `range(6).shuffle(6).batch(2)` on two replicas:

    range     keys 0 1 2 3 4 5          every rank walks the keys ...
    shuffle   keys 3 0 5 1 4 2
    batch     items [3 0] [5 1] [4 2]
                     |  |
                     |  replica 1 loads element 0      ... but each replica loads only its own rows
                     replica 0 loads element 3
"""

from __future__ import annotations

import abc
import itertools
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hpcstrat._core import nests
from hpcstrat._process import worlds
from hpcstrat.data import _elements
from hpcstrat.data._threads import map_in_threads

INFINITE = -1
UNKNOWN = -2

Keys: TypeAlias = npt.NDArray[np.int64]
Chunk: TypeAlias = Any
"""Consecutive items: `Keys` of shape `(n, width)`, one row per item, or a list of n objects.

If the objects are arrays of one shape, there may be one stacked array instead: batches of keys are
a view of the keys.
"""

_BYTES_AHEAD = 1 << 20
_drawn = itertools.count()  # counts the unseeded shuffles that drew a seed in this process


class ShuffleState:
    """The seed of one shuffle and its round, from which each order is derived.

    An order depends only on (seed, round), so ranks that agree on these two numbers need not
    exchange orders, and a checkpoint that saves them can replay an order.

    Attributes:
        seed: the seed of all rounds; `None` until an unseeded shuffle first needs it.
        next_round: the round with which the next pass starts.
        reshuffle: whether rounds differ.
        own_seed: the seed that the user gave, or `None`.
    """

    __slots__ = ("next_round", "own_seed", "reshuffle", "seed")

    def __init__(self, seed: int | None, reshuffle: bool) -> None:
        self.own_seed: int | None = None if seed is None else seed % 2**64
        self.seed: int | None = self.own_seed
        self.next_round: int = 0
        self.reshuffle: bool = reshuffle

    def state(self) -> tuple[int, int]:
        """The seed, drawn now if there is none yet, and the next round: both define the order."""
        if self.seed is None:
            self.seed = _fresh_seed()
        return self.seed, self.next_round


def _fresh_seed() -> int:
    """A seed for a shuffle without one.

    All ranks have the same `World.seed`, so ranks that draw in the same order draw the same seeds
    without communicating inside a lazy pipeline.
    """
    world = worlds.find()
    if world is None or world.size == 1:
        return int.from_bytes(os.urandom(7), "little")
    return int(np.random.SeedSequence([world.seed, next(_drawn)]).generate_state(1, np.uint64)[0])


class PipelineChecksum:
    """The running checksum of one pass over a pipeline.

    Args:
        is_on: whether elements are added at all.
        every: whether all elements are added, rather than only the first few.

    Attributes:
        value: the checksum so far.
    """

    __slots__ = ("_every", "_is_on", "value")

    def __init__(self, is_on: bool = False, every: bool = False) -> None:
        self._is_on = is_on
        self._every = every
        self.value: int = 0

    def fresh(self) -> PipelineChecksum:
        """A checksum with the same settings to which nothing has been added."""
        return PipelineChecksum(self._is_on, self._every)

    def takes(self, number: int, first: int) -> bool:
        """Whether to add element `number` of a source; always, if on, for the first `first`."""
        return self._is_on and (self._every or number < first)

    def add_text(self, text: str) -> None:
        """Adds a text."""
        self.value = zlib.crc32(text.encode(), self.value)

    def add(self, element: Any) -> None:
        """Adds `element`, a nest of host arrays: its structure, shapes, dtypes and contents."""
        leaves, structure = _elements.flatten(element)
        self.value = zlib.crc32(nests.describe(structure).encode(), self.value)
        for leaf in leaves:
            self.value = _elements.checksum_of(np.asarray(leaf), self.value)


class EpochPass:
    """One pass over a pipeline.

    Every pass, and every round of a `repeat` within it, takes the next round of each shuffle that
    it meets.

    Args:
        rounds: the round with which each shuffle starts; a shuffle that is not listed continues
            after its last pass.
        frozen: whether every shuffle starts with its first round instead, and its count of rounds
            does not change.
        salt: numbers from which orders without a seed derive; for a pass over a dataset that a
            function of the pipeline makes, whose shuffles are unknown to other ranks and to a
            program that resumes.
        place: numbers from which, with its seed, an order with a seed derives in such a dataset:
            the round of the pipeline's pass and the position of the dataset in it, the same in
            every program.

    Attributes:
        checksum: the checksum of the elements that user code yields in this pass.
        reached: for each shuffle that it has met, the round with which the next pass starts.
        runs_ahead: whether these rounds count only after `commit`, because the pass runs ahead of
            the elements that are asked for.
    """

    def __init__(
        self,
        rounds: Mapping[ShuffleState, int] | None = None,
        *,
        frozen: bool = False,
        salt: tuple[int, ...] | None = None,
        place: tuple[int, ...] = (),
    ) -> None:
        self._rounds = dict(rounds or {})  # each shuffle's next round here
        self._first = dict(self._rounds)  # that of the pass's start; `reached`: of the next pass
        self._frozen, self._salt, self._place = frozen, salt, place
        self.reached: Mapping[ShuffleState, int] = {}
        self.runs_ahead: bool = False
        self.checksum: PipelineChecksum = PipelineChecksum()

    def freeze(self) -> EpochPass:
        """A pass that meets the same orders each time, for a cache."""
        other = EpochPass(frozen=True, salt=self._salt, place=self._place)
        other.checksum = self.checksum
        return other

    def inner_passes(self, shuffle: ShuffleState) -> Iterator[EpochPass]:
        """Passes over the datasets that a function makes, in a round of the node's own shuffle."""
        salt = int(self.generator(shuffle).integers(2**63))
        place = *self._place, self._rounds[shuffle] - 1  # `generator` has counted this round
        for number in itertools.count():
            inner = EpochPass(salt=(salt, number), place=(*place, number))
            inner.checksum = self.checksum
            yield inner

    def first_round(self, shuffle: ShuffleState) -> int:
        """The round of a shuffle with which this pass started, or will start."""
        return self._first.get(shuffle, shuffle.next_round)

    def commit(self, reached: Mapping[ShuffleState, int]) -> None:
        """Makes the next pass start with these rounds."""
        for shuffle, number in reached.items():
            # Of two simultaneous passes, the slower must not set the count back.
            shuffle.next_round = max(shuffle.next_round, number)

    def generator(self, shuffle: ShuffleState) -> np.random.Generator:
        """The random numbers for the next round of a shuffle."""
        if self._salt is not None:
            number = self._rounds.setdefault(shuffle, 0)
            self._rounds[shuffle] = number + 1
            # Two shuffles without a seed have different orders; two with the same seed have the
            # same order, as elsewhere.
            if shuffle.own_seed is None:
                # Known by its place in this pass.
                own, within = [0, list(self._rounds).index(shuffle)], self._salt
            else:
                own, within = [shuffle.own_seed], self._place
            return np.random.default_rng([*own, *within, number] if shuffle.reshuffle else own)
        seed, next_round = shuffle.state()
        number = self._rounds.get(shuffle, 0 if self._frozen else next_round)
        self._rounds[shuffle] = number + 1
        self._first.setdefault(shuffle, number)
        if not self._frozen:
            # A new dict, because another thread may hold the old one.
            self.reached = {**self.reached, shuffle: number + 1}
            if not self.runs_ahead:
                self.commit(self.reached)
        return np.random.default_rng([seed, number if shuffle.reshuffle else 0])


class Node(abc.ABC):
    """A source or a transformation of elements.

    A pass over a node is a stream of *items*, which are cheap and say which element comes when;
    `load` and `fetch` make elements from them. So nodes that reorder or select elements touch no
    data, every rank can walk the whole stream, and each replica loads only its own elements.

    Distribution needs four facts about a node, its attributes besides `inputs`. The
    constructor sets their defaults; the constructor of a subclass calls it, then sets the facts
    that differ. Do not set them in the body of a class, where the defaults would hide them.

    Attributes:
        inputs: the nodes that this node reads.
        width: the number of int64 columns of an item if the stream consists of `Keys`; `None`, the
            default, if items may be any objects. With a width and without user code, `fetch` must
            take an empty chunk, too.
        user_code: whether a pass may end or fail on a single rank, because it runs functions of the
            user, for example. Ranks compare their steps only where this is true, so a node that
            runs a function must set it. The default is whether it is true of an input; without an
            input, true.
        batch_sizes: the sizes of the `batch` calls still in effect, outermost last; 0 if unknown.
            With `()` a strategy refuses the dataset instead of splitting elements. The default is
            those of the inputs, so a node must set it if its elements are not the batches of an
            input, or their results.
        rows: if elements are batches, the node whose elements are their rows, and whose chunks are
            this node's items; else `None`, the default, with which each replica loads a whole batch
            and keeps its own rows.
    """

    def __init__(self, *inputs: Node) -> None:
        self.inputs: tuple[Node, ...] = inputs
        self.width: int | None = None
        self.user_code: bool = not inputs or any(node.user_code for node in inputs)
        self.batch_sizes: tuple[int, ...] = common_batch_sizes(inputs)
        self.rows: Node | None = None

    @abc.abstractmethod
    def __repr__(self) -> str:
        """The pipeline up to this node, as the user wrote it; ranks compare this text."""

    @abc.abstractmethod
    def spec(self) -> Any:
        """An element's nest of `TensorSpec`."""

    @abc.abstractmethod
    def cardinality(self) -> int:
        """The number of elements, `INFINITE` or `UNKNOWN`."""

    @abc.abstractmethod
    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        """One pass: the items in order, in chunks of any length (short ones if it is infinite)."""

    def load(self, item: Any) -> Any:
        """The element of an item, safe to write to; by default, the item is the element."""
        return _elements.unwrap(item)

    def fetch(self, chunk: Chunk) -> Any:
        """The elements of a chunk, stacked: a nest of new arrays of shape `(len(chunk), ...)`."""
        return _elements.stack([self.load(item) for item in chunk])

    @property
    def threads(self) -> int:
        """How many threads may call `load` at once; 0 means any number, but threads do not help."""
        return 1 if self.user_code else 0

    @property
    def fetches_freely(self) -> bool:
        """Whether an empty chunk can be fetched, and fetching runs no user code."""
        return self.width is not None and not self.user_code

    def elements(self, epoch: EpochPass) -> Iterator[Any]:
        """One lazy pass over the elements themselves: user code runs no sooner than needed.

        If user code fails to make an element, the error is raised when the element's turn comes;
        the next element follows.
        """
        if self.fetches_freely:
            return self._fetch_ahead(epoch)
        items = itertools.chain.from_iterable(self.chunks(epoch))
        return map_in_threads(self.load, items, self.threads)

    def _fetch_ahead(self, epoch: EpochPass) -> Iterator[Any]:
        ahead = None
        for chunk in self.chunks(epoch):
            # One gather for many rows: with one per element, NumPy's call overhead would dominate.
            ahead = ahead or self._rows_ahead(chunk)
            for start in range(0, len(chunk), ahead):
                yield from _elements.unstack(self.fetch(chunk[start : start + ahead]))

    def _rows_ahead(self, chunk: Keys) -> int:
        """How many elements make about a megabyte, but at most 1,024, to fetch at once."""
        leaves, _ = _elements.flatten(self.fetch(chunk[:0]))
        size = sum(leaf.dtype.itemsize * math.prod(leaf.shape[1:]) for leaf in leaves)
        return max(1, min(1024, _BYTES_AHEAD // max(1, size)))

    def shuffles(self) -> list[ShuffleState]:
        """The shuffles of the inputs, each once; a node that shuffles adds its own."""
        return [*dict.fromkeys(shuffle for node in self.inputs for shuffle in node.shuffles())]

    def checksums(self, every: bool) -> list[tuple[str, int]]:
        """The description and checksum of each source of arrays: of samples, or all if `every`."""
        return [checksum for node in self.inputs for checksum in node.checksums(every)]


def common_batch_sizes(nodes: Sequence[Node]) -> tuple[int, ...]:
    """The batch sizes of all nodes; one unknown size (0) if all have batches but they differ."""
    sizes = {node.batch_sizes for node in nodes}
    if len(sizes) == 1:
        return sizes.pop()
    return () if not sizes or () in sizes else (0,)


class Transformation(Node):
    """A node with one input; unless it says otherwise, it has an element for each of the input's.

    Of the input it takes the items, the number and the spec of elements, `user_code` and
    `batch_sizes`; `load` makes an element.

    Args:
        source: the input.
        call: the method that made this node, with its arguments.
    """

    def __init__(self, source: Node, call: str) -> None:
        super().__init__(source)
        self._source = source
        self._call = call

    def __repr__(self) -> str:
        return f"{self._source!r}.{self._call}"

    def spec(self) -> Any:
        return self._source.spec()

    def cardinality(self) -> int:
        return self._source.cardinality()

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        return self._source.chunks(epoch)


def only_row(batch: Any) -> Any:
    """The only row of a batch of one."""
    return _elements.map_leaves(lambda leaf: leaf[0], batch)


def join(chunks: Sequence[Chunk]) -> Chunk:
    """Joins chunks of the same stream."""
    if len(chunks) == 1:
        return chunks[0]
    # Keys are joined; batches of keys stay a list, because they may differ in size.
    if isinstance(chunks[0], np.ndarray) and chunks[0].ndim == 2:
        return np.concatenate(chunks)
    return [item for chunk in chunks for item in chunk]
