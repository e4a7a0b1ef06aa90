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
import operator
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hpcstrat._core import nests
from hpcstrat._process import settings, worlds
from hpcstrat.data import _elements

INFINITE = -1
UNKNOWN = -2

Keys: TypeAlias = npt.NDArray[np.int64]
Chunk: TypeAlias = Any
"""Consecutive items: `Keys` of shape `(n,)`, or a list of n objects.

Batches of keys may come as one array of shape `(batches, size)`, a view of the keys.
"""

_BYTES_AHEAD = 1 << 20
_PIECE = 1024  # keys
_drawn = itertools.count()  # counts the unseeded shuffles that drew a seed in this process


class ShuffleState:
    """The seed of one shuffle, and the number of its next pass.

    An order depends only on the seed, the number of the pass and the round within it. So ranks that
    agree on two numbers need not exchange orders, and a checkpoint that saves them can replay one.

    Attributes:
        seed: the seed of all passes; `None` until an unseeded shuffle first needs it.
        passes: the number of the next pass.
        reshuffle: whether passes and rounds differ.
    """

    __slots__ = ("passes", "reshuffle", "seed")

    def __init__(self, seed: int | None, reshuffle: bool) -> None:
        self.seed: int | None = None if seed is None else seed % 2**64
        self.passes: int = 0
        self.reshuffle: bool = reshuffle

    def drawn(self) -> int:
        """The seed, drawn now if there is none yet.

        All ranks have the same `World.seed`, so ranks that draw in the same order draw the same
        seeds without communicating inside a lazy pipeline.
        """
        if self.seed is None:
            world = worlds.find()
            if world is None or world.size == 1:
                self.seed = int.from_bytes(os.urandom(7), "little")
            else:
                entropy = np.random.SeedSequence([world.seed, next(_drawn)])
                self.seed = int(entropy.generate_state(1, np.uint64)[0])
        return self.seed


class PipelineChecksum:
    """The running checksum of what user code yields in one pass, for ranks to compare.

    Args:
        is_on: whether elements are added at all.

    Attributes:
        value: the checksum so far.
    """

    __slots__ = ("_every", "_is_on", "value")

    def __init__(self, is_on: bool = False) -> None:
        self._is_on = is_on
        self._every = is_on and settings.is_on("HPCSTRAT_CHECK")
        self.value: int = 0

    def takes(self, number: int, first: int) -> bool:
        """Whether to add element `number` of a source: one of the `first`, or any if all are."""
        return self._every or (self._is_on and number < first)

    def add_text(self, text: str) -> None:
        """Adds a text."""
        self.value = zlib.crc32(text.encode(), self.value)

    def add(self, element: Any) -> None:
        """Adds `element`, a nest of host arrays: its structure, shapes, dtypes and contents."""
        leaves, structure = _elements.flatten(element)
        self.add_text(nests.describe(structure))
        for leaf in leaves:
            self.value = _elements.checksum_of(np.asarray(leaf), self.value)


class EpochPass:
    """One pass over a pipeline: its orders follow from seeds, these numbers, and rounds.

    Attributes:
        numbers: the number of the pass for each shuffle. It is 0 for those that are not listed: a
            cache repeats the order of pass 0, and a look at the first element draws it.
        checksum: the checksum of what user code yields in this pass.
        loader: the own state of a data loader, once it has begun this pass; see `Batches`.
        least: how many elements a resumed pass has, as it had before.
    """

    def __init__(
        self,
        numbers: Mapping[ShuffleState, int] | None = None,
        checksum: PipelineChecksum | None = None,
    ) -> None:
        self.numbers: Mapping[ShuffleState, int] = numbers or {}
        self.checksum: PipelineChecksum = checksum or PipelineChecksum()
        self.loader: Any = None
        self.least: int = 0
        self._rounds: dict[ShuffleState, int] = {}

    def generator(self, shuffle: ShuffleState) -> np.random.Generator:
        """The random numbers for the next round of a shuffle, such as one of `repeat`."""
        round_ = self._rounds.get(shuffle, 0)
        self._rounds[shuffle] = round_ + 1
        order = [self.numbers.get(shuffle, 0), round_] if shuffle.reshuffle else [0, 0]
        return np.random.default_rng([shuffle.drawn(), *order])


class Node(abc.ABC):
    """A source or a transformation of elements.

    A pass over a node is a stream of *items*, which are cheap and say which element comes when;
    `load` makes elements from them. So nodes that reorder or select elements touch no data, every
    rank can walk the whole stream, and each replica loads only its own elements.

    Attributes:
        inputs: the nodes that this node reads.
        keys: if items are keys, integers, the number that all are below; else `None`, the default.
        gathers: whether items are keys, or tuples of keys, and `fetch` makes the elements of many
            by one gather per array, without user functions. By default not.
        user_code: whether a pass may end or fail on a single rank, because it runs functions of the
            user, for example. Ranks compare their steps only where this is true, so a node that
            runs a function must set it. The default is whether it is true of an input; without an
            input, true.
        batched: how many `batch` calls are still in effect. If 0, a strategy refuses the dataset
            instead of splitting elements. The default is the least of the inputs'.
        rows: if elements are batches, and items the chunks of their rows' items, the node of these
            rows; else `None`, the default: each replica then loads whole batches.
    """

    def __init__(self, *inputs: Node) -> None:
        self.inputs: tuple[Node, ...] = inputs
        self.keys: int | None = None
        self.gathers: bool = False
        self.user_code: bool = not inputs or any(node.user_code for node in inputs)
        self.batched: int = min((node.batched for node in inputs), default=0)
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

    def load(self, chunks: Iterator[Chunk]) -> Iterator[Any]:
        """The elements of the items in chunks, in order, safe to write to; by default the items.

        It is lazy: user code runs no sooner than needed, or as threads were asked for.
        """
        return self._load_blocks(chunks) if self.gathers else itertools.chain.from_iterable(chunks)

    def fetch(self, keys: Chunk) -> Any:
        """The elements of keys, maybe none, stacked: a nest of new arrays of shape `(n, ...)`."""
        raise NotImplementedError

    def items(self, epoch: EpochPass) -> Iterator[Any]:
        """The items of one pass, one by one."""
        return itertools.chain.from_iterable(self.chunks(epoch))

    def elements(self, epoch: EpochPass) -> Iterator[Any]:
        """One lazy pass over the elements themselves."""
        return self.load(self.chunks(epoch))

    def first(self) -> Any:
        """The first element, found by a pass of its own; `None` if there is none."""
        first = (chunk[:1] for chunk in self.chunks(EpochPass()) if len(chunk))
        return next(self.load(itertools.islice(first, 1)), None)

    def _load_blocks(self, chunks: Iterator[Chunk]) -> Iterator[Any]:
        # One gather for many rows, of a megabyte: with one per element, the overhead of NumPy's
        # calls, or of reads from a file, would dominate.
        leaves, _ = _elements.flatten(self.fetch(np.empty(0, np.int64)))
        nbytes = sum(leaf.dtype.itemsize * math.prod(leaf.shape[1:]) for leaf in leaves)
        count = max(1, min(1024, _BYTES_AHEAD // max(1, nbytes)))
        for chunk in chunks:
            items = self.as_chunk(chunk)
            for start in range(0, len(items), count):
                yield from _elements.unstack(self.fetch(items[start : start + count]))

    def as_chunk(self, items: Sequence[Any]) -> Chunk:
        """These items as a chunk."""
        return items if self.keys is None else np.asarray(items, np.int64)

    def shuffles(self) -> list[ShuffleState]:
        """The shuffles of the inputs, each once; a node that shuffles adds its own."""
        return [*dict.fromkeys(shuffle for node in self.inputs for shuffle in node.shuffles())]

    def checksums(self, every: bool) -> list[tuple[str, int]]:
        """The description and checksum of each source of arrays: of samples, or all if `every`."""
        return [checksum for node in self.inputs for checksum in node.checksums(every)]


class Transformation(Node):
    """A node with one input; unless it says otherwise, it has an element for each of the input's.

    Of the input it takes the items, the number and the spec of elements, `user_code` and `batched`;
    `load` makes elements.

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


class Choosing(Transformation):
    """A node whose items are some of its input's, in any order, and so are its elements."""

    def __init__(self, source: Node, call: str) -> None:
        super().__init__(source, call)
        self.keys, self.gathers, self.rows = source.keys, source.gathers, source.rows

    def load(self, chunks: Iterator[Chunk]) -> Iterator[Any]:
        return self._source.load(chunks)

    def fetch(self, keys: Chunk) -> Any:
        return self._source.fetch(keys)


def load_apart(
    chunks: Iterator[Chunk],
    kinds_of: Callable[[Chunk], list[Any]],
    load: Callable[[Any, Iterator[Chunk]], Iterator[Any]],
) -> Iterator[Any]:
    """The elements of items of several kinds, in order; `load(kind, chunks)` makes those of a kind.

    What loads a kind may take many of its items ahead. So it gets consecutive chunks of its own, or
    its part of a chunk of several kinds, but never looks for its next item: the items may be
    endless.
    """

    def marked() -> Iterator[tuple[Any, list[Any], Chunk]]:
        for chunk in chunks:
            kinds = kinds_of(chunk)
            yield kinds[0] if len({*kinds}) == 1 else None, kinds, chunk

    for only, run in itertools.groupby(marked(), operator.itemgetter(0)):
        if only is not None:
            yield from load(only, (chunk for _, _, chunk in run))
            continue
        for _, kinds, chunk in run:
            pairs = list(zip(kinds, chunk, strict=True))
            loading = {
                kind: load(kind, iter([[item for other, item in pairs if other == kind]]))
                for kind in {*kinds}
            }
            for kind in kinds:
                yield next(loading[kind])


def in_pieces(chunks: Iterator[Keys]) -> Iterator[Keys]:
    """Chunks of keys, joined to larger ones: a change from one kind to another costs time."""
    waiting, size = [], 0
    try:
        for chunk in chunks:
            waiting.append(np.asarray(chunk, np.int64))
            size += len(chunk)
            # A list comes of `zip`, which may run user code for the next item.
            if size >= _PIECE or isinstance(chunk, list):
                yield join(waiting)
                waiting, size = [], 0
    except Exception:  # after the elements before it
        if size:
            yield join(waiting)
        raise
    if size:
        yield join(waiting)


def join(chunks: Sequence[Chunk]) -> Chunk:
    """Joins chunks of the same stream."""
    if len(chunks) == 1:
        return chunks[0]
    # Keys are joined; batches of keys stay a list, because they may differ in size.
    if isinstance(chunks[0], np.ndarray) and chunks[0].ndim == 1:
        return np.concatenate(chunks)
    return [item for chunk in chunks for item in chunk]
