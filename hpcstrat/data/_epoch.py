"""A pass over a pipeline, and the orders of its shuffles."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping

import numpy as np

from hpcstrat._process import worlds
from hpcstrat.data._checksum import PipelineChecksum

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
        self.seed = None if seed is None else seed % 2**64
        self.next_round: int = 0
        self.reshuffle: bool = reshuffle
        self.own_seed: int | None = self.seed

    def state(self) -> tuple[int, int]:
        """The seed, drawn now if there is none yet, and the next round: both define the order."""
        if self.seed is None:
            self.seed = _fresh_seed()
        return self.seed, self.next_round


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
        self._rounds = dict(rounds or {})
        self._first = dict(self._rounds)
        self._frozen = frozen
        self._salt = salt
        self._place = place
        self.reached: Mapping[ShuffleState, int] = {}
        self.runs_ahead: bool = False
        self.checksum: PipelineChecksum = PipelineChecksum()

    def frozen(self) -> EpochPass:
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


def _fresh_seed() -> int:
    """A seed for a shuffle without one.

    All ranks have the same `World.seed`, so ranks that draw in the same order draw the same seeds
    without communicating inside a lazy pipeline.
    """
    world = worlds.find()
    if world is None or world.size == 1:
        return int.from_bytes(os.urandom(7), "little")
    return int(np.random.SeedSequence([world.seed, next(_drawn)]).generate_state(1, np.uint64)[0])
