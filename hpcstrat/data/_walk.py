"""One pass over a pipeline, and the random orders that it meets on its way."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping

import numpy as np

from hpcstrat import _world
from hpcstrat.data._checksum import Checksum

_drawn = itertools.count()


def _fresh_seed() -> int:
    """The seed of a shuffle that was given none. Ranks that draw in one order draw the same ones."""
    world = _world.started()
    if world is None or world.size == 1:
        return int.from_bytes(os.urandom(7), "little")
    return int(np.random.SeedSequence([world.seed, next(_drawn)]).generate_state(1, np.uint64)[0])


class Shuffler:
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


class Walk:
    """One pass over a pipeline.

    Every pass, and every round of a `repeat` within it, takes the next round of each shuffle that it meets.

    Args:
        rounds: the round with which each shuffle begins; one that is not named goes on where its last pass ended.
        frozen: whether every shuffle begins with its first round instead, and this pass does not count as one.

    Attributes:
        checksum: of what the user's code yields in this pass.
    """

    def __init__(self, rounds: Mapping[Shuffler, int] | None = None, *, frozen: bool = False) -> None:
        self._rounds = dict(rounds or {})
        self._first = dict(self._rounds)
        self._frozen = frozen
        self.checksum: Checksum = Checksum()

    def frozen(self) -> Walk:
        """A pass that meets the same orders each time: over what a cache holds."""
        return Walk(frozen=True)

    def first_round(self, shuffler: Shuffler) -> int:
        """The round of a shuffle with which this pass began, or will begin."""
        return self._first.get(shuffler, shuffler.next_round)

    def generator(self, shuffler: Shuffler) -> np.random.Generator:
        """The random numbers of the next round of a shuffle."""
        seed, next_round = shuffler.state()
        number = self._rounds.get(shuffler, 0 if self._frozen else next_round)
        self._rounds[shuffler] = number + 1
        self._first.setdefault(shuffler, number)
        if not self._frozen:
            shuffler.next_round = max(next_round, number + 1)
        return np.random.default_rng([seed, number if shuffler.reshuffle else 0])
