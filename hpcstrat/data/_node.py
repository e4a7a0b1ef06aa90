"""The stages of a pipeline, streams of keys that say which element comes when, and one pass over all of them."""

from __future__ import annotations

import abc
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hpcstrat import _nest, _world
from hpcstrat.data import _elements
from hpcstrat.data._checksum import Checksum

INFINITE = -1
UNKNOWN = -2

Keys: TypeAlias = npt.NDArray[np.int64]
Chunk: TypeAlias = Any
"""Some consecutive items of a stream: `Keys` of shape `(n, width)`, one row an item, or a list of n Python objects."""

_BYTES_AHEAD = 1 << 20
_drawn = itertools.count()


class ShuffleState:
    """The source of one shuffle's orders: round after round another one, or always the same.

    Attributes:
        seed: what all rounds derive from; `None` until an unseeded shuffle first needs it.
        next_round: the number of the round that the next pass begins with.
        reshuffle: whether rounds differ.
    """

    __slots__ = ("next_round", "reshuffle", "seed")

    def __init__(self, seed: int | None, reshuffle: bool) -> None:
        self.seed = None if seed is None else seed % 2**64
        self.next_round: int = 0
        self.reshuffle: bool = reshuffle

    def state(self) -> tuple[int, int]:
        """The seed, drawn if there was none yet, and the next round: equal states give equal orders."""
        if self.seed is None:
            self.seed = _fresh_seed()
        return self.seed, self.next_round


class EpochPass:
    """One pass over a pipeline.

    Every pass, and every round of a `repeat` within it, takes the next round of each shuffle that it meets.

    Args:
        rounds: the round with which each shuffle begins; one that is not named goes on where its last pass ended.
        frozen: whether every shuffle begins with its first round instead, and this pass does not count as one.

    Attributes:
        checksum: of what the user's code yields in this pass.
    """

    def __init__(self, rounds: Mapping[ShuffleState, int] | None = None, *, frozen: bool = False) -> None:
        self._rounds = dict(rounds or {})
        self._first = dict(self._rounds)
        self._frozen = frozen
        self.checksum: Checksum = Checksum()

    def frozen(self) -> EpochPass:
        """A pass that meets the same orders each time: over what a cache holds."""
        return EpochPass(frozen=True)

    def first_round(self, shuffle: ShuffleState) -> int:
        """The round of a shuffle with which this pass began, or will begin."""
        return self._first.get(shuffle, shuffle.next_round)

    def generator(self, shuffle: ShuffleState) -> np.random.Generator:
        """The random numbers of the next round of a shuffle."""
        seed, next_round = shuffle.state()
        number = self._rounds.get(shuffle, 0 if self._frozen else next_round)
        self._rounds[shuffle] = number + 1
        self._first.setdefault(shuffle, number)
        if not self._frozen:
            shuffle.next_round = max(next_round, number + 1)
        return np.random.default_rng([seed, number if shuffle.reshuffle else 0])


class Node(abc.ABC):
    """A stage of a pipeline.

    A pass over it is a stream of *items*, which are cheap and say which element stands where; `load` and `fetch` make
    elements of them. So stages that reorder or choose elements never touch any, and each replica loads its own only.

    All that the distribution and the checkpoint ask of a stage is an argument without a default: a new transformation
    that forgets one fails as it is made, instead of being split or resumed like another one.

    Args:
        *inputs: the stages that this one reads.
        width: the number of int64 columns of an item where the stream is one of `Keys`; `None` where items are
            Python objects.
        user_code: whether a pass runs functions of the user's, so that it may end or fail on one rank only.
        batch_sizes: for each `batch` that still holds, outermost last, its size; 0 if it is unknown.
        rows: the stage whose chunks the items of this one are, where elements are batches of that stage's; else `None`.
        inputs_per_element: how a saved position counts. `None`: in this stage's own elements. A number: in elements of
            its only input, this many for each of its own, so that a program with another batch size can resume.

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
        """The pipeline up to here as the user wrote it; equal on all ranks if they wrote the same."""

    @abc.abstractmethod
    def spec(self) -> Any:
        """The nest of `TensorSpec` of an element."""

    @abc.abstractmethod
    def cardinality(self) -> int:
        """The number of elements, `INFINITE` or `UNKNOWN`."""

    @abc.abstractmethod
    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        """One pass: the items in order, in chunks of any length. What has no end comes in short ones."""

    @abc.abstractmethod
    def load(self, item: Any) -> Any:
        """The element that `item` stands for; safe to write to."""

    @abc.abstractmethod
    def fetch(self, chunk: Chunk) -> Any:
        """The elements of a chunk, stacked: a nest of new arrays of shape `(len(chunk), ...)`."""

    @property
    def seekable(self) -> bool:
        """Whether a chunk of no items can be fetched, and fetching runs none of the user's code."""
        return self.width is not None and not self.user_code

    def elements(self, epoch: EpochPass) -> Iterator[Any]:
        """One pass over the elements themselves, lazily: the user's functions run no sooner than needed.

        One that a function fails to make raises in its turn, and the next element comes after it.
        """
        if self.seekable:
            return self._fetched(epoch)
        return map(self.load, itertools.chain.from_iterable(self.chunks(epoch)))

    def _fetched(self, epoch: EpochPass) -> Iterator[Any]:
        ahead = None
        for chunk in self.chunks(epoch):
            ahead = ahead or self._rows_ahead(chunk)
            for start in range(0, len(chunk), ahead):
                yield from _elements.unstack(self.fetch(chunk[start : start + ahead]))

    def shuffles(self) -> list[ShuffleState]:
        """The shuffles from here up, in a fixed order, each once."""
        found: dict[ShuffleState, None] = {}
        for node in self.inputs:
            found.update(dict.fromkeys(node.shuffles()))
        return [*found, *self.own_shuffles()]

    def own_shuffles(self) -> Sequence[ShuffleState]:
        """The shuffles of this stage itself."""
        return ()

    def checksums(self, every: bool) -> list[tuple[str, int]]:
        """Of each source of arrays its description, and a checksum of samples or, where `every`, of all it has."""
        return [found for node in self.inputs for found in node.checksums(every)]

    def _rows_ahead(self, chunk: Keys) -> int:
        """How many elements to fetch at once, so that they are about a megabyte."""
        leaves, _ = _nest.flatten(self.fetch(chunk[:0]))
        size = sum(leaf.dtype.itemsize * math.prod(leaf.shape[1:]) for leaf in leaves)
        return max(1, min(1024, _BYTES_AHEAD // max(1, size)))


class Failure:
    """What stands in a stream in the place of an element that a function failed to make.

    Attributes:
        error: what it raised.
    """

    __slots__ = ("error",)

    def __init__(self, error: Exception) -> None:
        self.error = error


def caught(elements: Iterator[Any]) -> Iterator[Any]:
    """The elements, and a `Failure` in the place of each that raises."""
    while True:
        try:
            element = next(elements)
        except StopIteration:
            return
        except Exception as error:
            element = Failure(error)
        yield element


def opened(item: Any) -> Any:
    """The element that an item is; raises where it is a `Failure`."""
    if isinstance(item, Failure):
        raise item.error
    return item


def first(batch: Any) -> Any:
    """The only row of a batch of one."""
    return _nest.map_leaves(lambda leaf: leaf[0], batch)


def join(chunks: Sequence[Chunk]) -> Chunk:
    """One chunk of several of the same stream."""
    if len(chunks) == 1:
        return chunks[0]
    if isinstance(chunks[0], np.ndarray):
        return np.concatenate(chunks)
    return [item for chunk in chunks for item in chunk]


def load_rows(node: Node, chunk: Chunk, start: int, stop: int) -> Any:
    """The elements `start` to `stop` of a chunk, stacked; also where these are none."""
    if start == stop and not node.seekable:
        return _elements.rows(node.fetch(chunk[:1]), 0, 0)
    return node.fetch(chunk[start:stop])


def _fresh_seed() -> int:
    """The seed of a shuffle that was given none. Ranks that draw in one order draw the same ones."""
    world = _world.started()
    if world is None or world.size == 1:
        return int.from_bytes(os.urandom(7), "little")
    return int(np.random.SeedSequence([world.seed, next(_drawn)]).generate_state(1, np.uint64)[0])
