"""Nodes that pick each element from one of several: sample_from_datasets, choose_from_datasets."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from typing import final

import numpy as np

from hpcstrat.data._combine_ops import Merging
from hpcstrat.data._node import INFINITE, UNKNOWN, Chunk, EpochPass, Keys, Node, ShuffleState, join

_CHOICES = 1024  # drawn at once


class _Chosen(Merging):
    """The elements of several nodes; a stream of indices chooses the node of each.

    Args:
        nodes: the nodes.
        stop_on_empty: whether to end when an exhausted node is chosen; if not, such choices are
            skipped.
        call: the public name of the method.
        *others: further nodes that it reads.
    """

    def __init__(
        self, nodes: Sequence[Node], stop_on_empty: bool, call: str, *others: Node
    ) -> None:
        super().__init__(nodes, call, *others)
        self._stops = stop_on_empty
        # The number of elements chosen at once. Those of user code are taken one by one, so that
        # the code runs no sooner than needed.
        self._together = 1 if self.user_code else _CHOICES

    @abc.abstractmethod
    def _choices(self, epoch: EpochPass) -> Iterator[Keys]:
        """The indices of the chosen nodes, in chunks of any length."""

    def _can_follow(self, ended: Sequence[bool]) -> bool:
        """Whether a node that has not ended may still be chosen."""
        return not all(ended)

    def cardinality(self) -> int:
        return INFINITE if INFINITE in [node.cardinality() for node in self._nodes] else UNKNOWN

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        streams = [_SourceCursor(node.chunks(epoch)) for node in self._nodes]
        ended = np.zeros(len(streams), bool)
        for chunk in self._choices(epoch):
            for start in range(0, len(chunk), self._together):
                chosen = chunk[start : start + self._together]
                if not self._stops:
                    chosen = chosen[~ended[chosen]]
                taken, end = [], len(chosen)
                for which in np.unique(chosen).tolist():
                    places = np.flatnonzero(chosen == which)
                    items = streams[which].take(len(places))
                    if len(items) < len(places):
                        ended[which] = True
                        if self._stops:
                            end = min(end, int(places[len(items)]))
                    taken.append(
                        (places[: len(items)], self._tag(which, items) if len(items) else ())
                    )
                yield from self._in_order(taken, end)
                if end < len(chosen) or not (self._stops or self._can_follow(ended.tolist())):
                    return

    def _in_order(self, taken: list[tuple[Keys, Chunk]], end: int) -> Iterator[Chunk]:
        """The items whose place is before `end`, in the order of their places, as one chunk."""
        taken = [(places, items) for places, items in taken if len(items)]
        if not taken:
            return
        places = np.concatenate([places for places, _ in taken])
        order = np.argsort(places)[: int((places < end).sum())]
        if len(order):
            items = join([items for _, items in taken])
            yield items[order] if isinstance(items, np.ndarray) else [items[i] for i in order]


@final
class Sample(_Chosen):
    """The next element of a node drawn at random."""

    def __init__(
        self,
        nodes: Sequence[Node],
        weights: Sequence[float] | None,
        seed: int | None,
        reshuffle: bool,
        stops: bool,
    ) -> None:
        super().__init__(nodes, stops, "Dataset.sample_from_datasets")
        self._weights = [1.0] * len(nodes) if weights is None else list(weights)
        self._shuffle = ShuffleState(seed, reshuffle)

    def __repr__(self) -> str:
        # Ranks compare this text. For datasets that a function makes, nothing else compares seeds.
        seed = self._shuffle.own_seed
        return (
            f"Dataset.sample_from_datasets({list(self._nodes)}, {self._weights}, {seed}, "
            f"{self._stops})"
        )

    def cardinality(self) -> int:
        sizes = [
            node.cardinality()
            for node, weight in zip(self._nodes, self._weights, strict=True)
            if weight > 0
        ]
        return sizes[0] if len(sizes) == 1 else INFINITE if INFINITE in sizes else UNKNOWN

    def own_shuffles(self) -> Sequence[ShuffleState]:
        return (self._shuffle,)

    def _choices(self, epoch: EpochPass) -> Iterator[Keys]:
        random, total = epoch.generator(self._shuffle), sum(self._weights)
        while True:
            yield random.choice(
                len(self._nodes), _CHOICES, p=[weight / total for weight in self._weights]
            )

    def _can_follow(self, ended: Sequence[bool]) -> bool:
        return any(
            weight > 0 and not over for weight, over in zip(self._weights, ended, strict=True)
        )


@final
class Choose(_Chosen):
    """The next element of the node whose index another node yields."""

    def __init__(self, nodes: Sequence[Node], choice: Node, stops: bool) -> None:
        super().__init__(nodes, stops, "Dataset.choose_from_datasets", choice)
        self._choice = choice

    def __repr__(self) -> str:
        return f"Dataset.choose_from_datasets({list(self._nodes)}, {self._choice!r}, {self._stops})"

    def _choices(self, epoch: EpochPass) -> Iterator[Keys]:
        for choice in self._choice.elements(epoch):
            if not (
                np.ndim(choice) == 0
                and isinstance(choice, np.integer)
                and 0 <= choice < len(self._nodes)
            ):
                raise ValueError(
                    f"{self._name}: choice_dataset has an element {choice!r}; it must be an "
                    f"integer in [0, {len(self._nodes)}), the index of a dataset"
                )
            yield np.array([choice], np.int64)


class _SourceCursor:
    """Takes items from a stream of chunks."""

    def __init__(self, chunks: Iterator[Chunk]) -> None:
        self._chunks = chunks
        self._head: Chunk = []

    def take(self, count: int) -> Chunk:
        """The next `count` items; fewer at the end."""
        while len(self._head) < count:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            self._head = join([self._head, chunk]) if len(self._head) else chunk
        taken, self._head = self._head[:count], self._head[count:]
        return taken
