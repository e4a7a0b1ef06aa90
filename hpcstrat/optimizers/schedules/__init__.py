"""Learning rates by the number of steps done, named as in `tf.keras.optimizers.schedules`."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hpcstrat._core import nests

__all__ = [
    "CosineDecay",
    "ExponentialDecay",
    "InverseTimeDecay",
    "PiecewiseConstantDecay",
    "PolynomialDecay",
]


@nests.leaf
@dataclass(frozen=True)
class ExponentialDecay:
    """`initial_learning_rate * decay_rate ** (step / decay_steps)`.

    `staircase` rounds the exponent down.

    Raises:
        ValueError: `decay_steps` is not positive.
    """

    initial_learning_rate: float
    decay_steps: int
    decay_rate: float
    staircase: bool = False

    def __post_init__(self) -> None:
        _require_steps(self, self.decay_steps)

    def __call__(self, step: int) -> float:
        """The learning rate after `step` steps."""
        exponent = step / self.decay_steps
        return self.initial_learning_rate * self.decay_rate ** (
            math.floor(exponent) if self.staircase else exponent
        )


@nests.leaf
@dataclass(frozen=True)
class PiecewiseConstantDecay:
    """`values[i]` up to and including step `boundaries[i]`, and the last value after that.

    So `values` has one more item than `boundaries`.
    """

    boundaries: Sequence[int]
    values: Sequence[float]

    def __call__(self, step: int) -> float:
        """The learning rate after `step` steps."""
        return self.values[bisect.bisect_left(self.boundaries, step)]


@nests.leaf
@dataclass(frozen=True)
class PolynomialDecay:
    """From the initial to the end learning rate in `decay_steps` steps.

    The difference falls by `(1 - step / decay_steps) ** power`. With `cycle` the rate starts again
    from a larger multiple of `decay_steps` instead of staying at the end.

    Raises:
        ValueError: `decay_steps` is not positive.
    """

    initial_learning_rate: float
    decay_steps: int
    end_learning_rate: float = 0.0001
    power: float = 1.0
    cycle: bool = False

    def __post_init__(self) -> None:
        _require_steps(self, self.decay_steps)

    def __call__(self, step: int) -> float:
        """The learning rate after `step` steps."""
        last = self.decay_steps * (max(1, math.ceil(step / self.decay_steps)) if self.cycle else 1)
        share = (1 - min(step, last) / last) ** self.power
        return (
            self.initial_learning_rate - self.end_learning_rate
        ) * share + self.end_learning_rate


@nests.leaf
@dataclass(frozen=True)
class InverseTimeDecay:
    """`initial_learning_rate / (1 + decay_rate * step / decay_steps)`.

    `staircase` rounds `step / decay_steps` down.

    Raises:
        ValueError: `decay_steps` is not positive.
    """

    initial_learning_rate: float
    decay_steps: int
    decay_rate: float
    staircase: bool = False

    def __post_init__(self) -> None:
        _require_steps(self, self.decay_steps)

    def __call__(self, step: int) -> float:
        """The learning rate after `step` steps."""
        steps = step / self.decay_steps
        return self.initial_learning_rate / (
            1 + self.decay_rate * (math.floor(steps) if self.staircase else steps)
        )


@nests.leaf
@dataclass(frozen=True)
class CosineDecay:
    """From the initial learning rate to `alpha` times it, along half a cosine.

    By Loshchilov and Hutter (2017). With `warmup_target` the rate first goes linearly from the
    initial rate to this target, in `warmup_steps` steps, and decays from there.

    Raises:
        ValueError: `decay_steps` is not positive.
    """

    initial_learning_rate: float
    decay_steps: int
    alpha: float = 0.0
    warmup_target: float | None = None
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        _require_steps(self, self.decay_steps)

    def __call__(self, step: int) -> float:
        """The learning rate after `step` steps."""
        start = self.initial_learning_rate
        if self.warmup_target is not None and step < self.warmup_steps:
            return start + (self.warmup_target - start) * step / self.warmup_steps
        if self.warmup_target is not None:
            start, step = self.warmup_target, step - self.warmup_steps
        cosine = 0.5 * (1 + math.cos(math.pi * min(step, self.decay_steps) / self.decay_steps))
        return start * ((1 - self.alpha) * cosine + self.alpha)


def _require_steps(schedule: object, decay_steps: int) -> None:
    if decay_steps <= 0:
        raise ValueError(
            f"{type(schedule).__name__}: decay_steps is {decay_steps}; it must be a positive "
            "number of steps"
        )
