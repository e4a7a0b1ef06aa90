"""Nodes that choose each element from several nodes: sample_from_datasets, choose_from_datasets."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from typing import final

import numpy as np

from hpcstrat.data._combine_ops import SourceCursor
from hpcstrat.data._epoch import EpochPass, ShuffleState
from hpcstrat.data._merge_ops import Merging
from hpcstrat.data._node import INFINITE, UNKNOWN, Chunk, Keys, Node, join

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
        self._never_chosen = np.zeros(len(nodes), bool)

    @abc.abstractmethod
    def _choices(self, epoch: EpochPass) -> Iterator[Keys]:
        """The indices of the chosen nodes, as many at once as elements may be taken at once."""

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        sources = [SourceCursor(node.chunks(epoch)) for node in self._nodes]
        ended = self._never_chosen.copy()
        for choices in self._choices(epoch):
            if not self._stops:
                choices = choices[~ended[choices]]
            places, items, end = [], [], len(choices)
            for which in np.unique(choices).tolist():
                wanted = np.flatnonzero(choices == which)
                taken = sources[which].take(len(wanted))
                if len(taken):
                    places.append(wanted[: len(taken)])
                    items.append(self._tag(which, taken))
                if len(taken) < len(wanted):
                    ended[which] = True
                    if self._stops:
                        end = min(end, int(wanted[len(taken)]))
            if places and end:
                yield _pick(join(items), np.argsort(np.concatenate(places))[:end])
            if end < len(choices) or ended.all():
                return


def _pick(items: Chunk, order: Keys) -> Chunk:
    return items[order] if isinstance(items, np.ndarray) else [items[i] for i in order]


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
        self._never_chosen = np.array(self._weights) == 0
        self._shuffle = ShuffleState(seed, reshuffle)

    def __repr__(self) -> str:
        # Ranks compare this text. For datasets that a function makes, nothing else compares seeds.
        seed = self._shuffle.own_seed
        return (
            f"Dataset.sample_from_datasets({list(self._nodes)}, {self._weights}, {seed}, "
            f"{self._stops})"
        )

    def cardinality(self) -> int:
        chosen = np.flatnonzero(~self._never_chosen).tolist()
        sizes = [self._nodes[which].cardinality() for which in chosen]
        if len(sizes) == 1:
            return sizes[0]
        return INFINITE if INFINITE in sizes else UNKNOWN

    def own_shuffles(self) -> Sequence[ShuffleState]:
        return (self._shuffle,)

    def _choices(self, epoch: EpochPass) -> Iterator[Keys]:
        random, total = epoch.generator(self._shuffle), sum(self._weights)
        shares = [weight / total for weight in self._weights]
        # Elements of user code are taken one by one, so that the code runs no sooner than needed.
        together = 1 if self.user_code else _CHOICES
        while True:
            drawn = random.choice(len(self._nodes), _CHOICES, p=shares)
            yield from drawn.reshape(-1, together)


@final
class Choose(_Chosen):
    """The next element of the node whose index another node yields."""

    def __init__(self, nodes: Sequence[Node], choice: Node, stops: bool) -> None:
        super().__init__(nodes, stops, "Dataset.choose_from_datasets", choice)
        self._choice = choice

    def __repr__(self) -> str:
        return f"Dataset.choose_from_datasets({list(self._nodes)}, {self._choice!r}, {self._stops})"

    def cardinality(self) -> int:
        return INFINITE if INFINITE in [node.cardinality() for node in self._nodes] else UNKNOWN

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
