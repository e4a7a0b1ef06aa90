"""Learning rates by the number of steps done, named as in `tf.keras.optimizers.schedules`.

`name`, which TensorFlow gives to operations of its graph, is kept and changes nothing.
"""

from __future__ import annotations

import abc
import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpcstrat._core import nests

__all__ = [
    "CosineDecay",
    "CosineDecayRestarts",
    "ExponentialDecay",
    "InverseTimeDecay",
    "LearningRateSchedule",
    "PiecewiseConstantDecay",
    "PolynomialDecay",
]


class LearningRateSchedule(abc.ABC):
    """The base class of schedules, for `isinstance`: an optimizer takes any function of the step.

    Examples:
        >>> rate = hs.optimizers.schedules.CosineDecay(1.0, decay_steps=20)
        >>> isinstance(rate, hs.optimizers.schedules.LearningRateSchedule), rate(10)
        (True, 0.5)
        >>> hs.optimizers.Adam(lambda step: 0.1 / (1 + step)).learning_rate(4)
        0.02
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        nests.leaf_types.add(cls)  # though a dataclass: each is a single value

    @abc.abstractmethod
    def __call__(self, step: int, /) -> float:
        """The learning rate after `step` steps; the same on all ranks."""


@dataclass(frozen=True)
class ExponentialDecay(LearningRateSchedule):
    """`initial_learning_rate * decay_rate ** (step / decay_steps)`.

    `staircase` rounds the exponent down.

    Raises:
        ValueError: `decay_steps` is not positive.

    Examples:
        >>> rate = hs.optimizers.schedules.ExponentialDecay(0.8, decay_steps=10, decay_rate=0.5)
        >>> [round(rate(step), 3) for step in (0, 5, 10, 20)]
        [0.8, 0.566, 0.4, 0.2]
        >>> stairs = hs.optimizers.schedules.ExponentialDecay(0.8, 10, 0.5, staircase=True)
        >>> [stairs(step) for step in (0, 9, 10, 20)]
        [0.8, 0.8, 0.4, 0.2]
    """

    initial_learning_rate: float
    decay_steps: int
    decay_rate: float
    staircase: bool = False
    name: str | None = None

    def __post_init__(self) -> None:
        _require_positive(self, "decay_steps")

    def __call__(self, step: int) -> float:
        """The learning rate after `step` steps."""
        exponent = step / self.decay_steps
        return self.initial_learning_rate * self.decay_rate ** (
            math.floor(exponent) if self.staircase else exponent
        )


@dataclass(frozen=True)
class PiecewiseConstantDecay(LearningRateSchedule):
    """`values[i]` up to and including step `boundaries[i]`, and the last value after that.

    Raises:
        ValueError: `values` does not have exactly one item more than `boundaries`, or these do not
            increase.

    Examples:
        >>> rate = hs.optimizers.schedules.PiecewiseConstantDecay([10, 20], [0.1, 0.05, 0.01])
        >>> [rate(step) for step in (0, 10, 11, 20, 21)]
        [0.1, 0.1, 0.05, 0.05, 0.01]
    """

    boundaries: Sequence[int]
    values: Sequence[float]
    name: str | None = None

    def __post_init__(self) -> None:
        if len(self.values) != len(self.boundaries) + 1:
            raise ValueError(
                f"PiecewiseConstantDecay: {len(self.boundaries)} boundaries and "
                f"{len(self.values)} values; there must be one value more than boundaries"
            )
        if not all(one < later for one, later in itertools.pairwise(self.boundaries)):
            raise ValueError(
                f"PiecewiseConstantDecay: boundaries are {self.boundaries}; they must increase"
            )

    def __call__(self, step: int) -> float:
        """The learning rate after `step` steps."""
        return self.values[bisect.bisect_left(self.boundaries, step)]


@dataclass(frozen=True)
class PolynomialDecay(LearningRateSchedule):
    """From the initial to the end learning rate in `decay_steps` steps.

    The difference falls by `(1 - step / decay_steps) ** power`. With `cycle` the rate starts again
    from a larger multiple of `decay_steps` instead of staying at the end.

    Raises:
        ValueError: `decay_steps` is not positive.

    Examples:
        >>> PolynomialDecay = hs.optimizers.schedules.PolynomialDecay
        >>> line = PolynomialDecay(1.0, decay_steps=10, end_learning_rate=0.5)
        >>> [line(step) for step in (0, 5, 10, 15)]
        [1.0, 0.75, 0.5, 0.5]
        >>> curve = PolynomialDecay(1.0, decay_steps=10, end_learning_rate=0.0, power=2.0)
        >>> [curve(step) for step in (0, 5, 10, 15)]
        [1.0, 0.25, 0.0, 0.0]
        >>> again = PolynomialDecay(1.0, decay_steps=10, end_learning_rate=0.0, cycle=True)
        >>> [again(step) for step in (0, 5, 10, 15)]  # after step 10 as with decay_steps=20
        [1.0, 0.5, 0.0, 0.25]
    """

    initial_learning_rate: float
    decay_steps: int
    end_learning_rate: float = 0.0001
    power: float = 1.0
    cycle: bool = False
    name: str | None = None

    def __post_init__(self) -> None:
        _require_positive(self, "decay_steps")

    def __call__(self, step: int) -> float:
        """The learning rate after `step` steps."""
        last = self.decay_steps * (max(1, math.ceil(step / self.decay_steps)) if self.cycle else 1)
        share = (1 - min(step, last) / last) ** self.power
        return (
            self.initial_learning_rate - self.end_learning_rate
        ) * share + self.end_learning_rate


@dataclass(frozen=True)
class InverseTimeDecay(LearningRateSchedule):
    """`initial_learning_rate / (1 + decay_rate * step / decay_steps)`.

    `staircase` rounds `step / decay_steps` down.

    Raises:
        ValueError: `decay_steps` is not positive.

    Examples:
        >>> rate = hs.optimizers.schedules.InverseTimeDecay(1.0, decay_steps=10, decay_rate=1.0)
        >>> [round(rate(step), 3) for step in (0, 5, 10, 30)]
        [1.0, 0.667, 0.5, 0.25]
        >>> stairs = hs.optimizers.schedules.InverseTimeDecay(1.0, 10, 1.0, staircase=True)
        >>> [stairs(step) for step in (0, 9, 10, 30)]
        [1.0, 1.0, 0.5, 0.25]
    """

    initial_learning_rate: float
    decay_steps: int
    decay_rate: float
    staircase: bool = False
    name: str | None = None

    def __post_init__(self) -> None:
        _require_positive(self, "decay_steps")

    def __call__(self, step: int) -> float:
        """The learning rate after `step` steps."""
        steps = step / self.decay_steps
        return self.initial_learning_rate / (
            1 + self.decay_rate * (math.floor(steps) if self.staircase else steps)
        )


@dataclass(frozen=True)
class CosineDecay(LearningRateSchedule):
    """From the initial learning rate to `alpha` times it, along half a cosine.

    By Loshchilov and Hutter (2017). With `warmup_target` the rate first goes linearly from the
    initial rate to this target, in `warmup_steps` steps, and decays from there.

    Raises:
        ValueError: `decay_steps` is not positive.

    Examples:
        >>> rate = hs.optimizers.schedules.CosineDecay(1.0, decay_steps=20, alpha=0.5)
        >>> [round(rate(step), 3) for step in (0, 5, 10, 20, 30)]
        [1.0, 0.927, 0.75, 0.5, 0.5]

        Four steps of warm-up from 0 to 1, then the decay from 1 to 0 in 8 steps:

        >>> rate = hs.optimizers.schedules.CosineDecay(0.0, 8, warmup_target=1.0, warmup_steps=4)
        >>> [round(rate(step), 3) for step in range(0, 13, 2)]
        [0.0, 0.5, 1.0, 0.854, 0.5, 0.146, 0.0]
    """

    initial_learning_rate: float
    decay_steps: int
    alpha: float = 0.0
    name: str | None = None
    warmup_target: float | None = None
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        _require_positive(self, "decay_steps")

    def __call__(self, step: int) -> float:
        """The learning rate after `step` steps."""
        start = self.initial_learning_rate
        if self.warmup_target is not None and step < self.warmup_steps:
            return start + (self.warmup_target - start) * step / self.warmup_steps
        if self.warmup_target is not None:
            start, step = self.warmup_target, step - self.warmup_steps
        cosine = 0.5 * (1 + math.cos(math.pi * min(step, self.decay_steps) / self.decay_steps))
        return start * ((1 - self.alpha) * cosine + self.alpha)


@dataclass(frozen=True)
class CosineDecayRestarts(LearningRateSchedule):
    """Half a cosine from the initial learning rate to `alpha` times it, again and again.

    By Loshchilov and Hutter (2017). The first period has `first_decay_steps` steps; each period is
    `t_mul` times as long as the one before, and starts from a rate `m_mul` times as large.

    Raises:
        ValueError: `first_decay_steps` is not positive, or `t_mul` is less than 1.

    Examples:
        Periods of 4, 8 and 16 steps, from 1, 0.5 and 0.25:

        >>> rate = hs.optimizers.schedules.CosineDecayRestarts(1.0, 4, t_mul=2.0, m_mul=0.5)
        >>> [round(rate(step), 3) for step in range(0, 13, 2)]
        [1.0, 0.5, 0.5, 0.427, 0.25, 0.073, 0.25]
    """

    initial_learning_rate: float
    first_decay_steps: int
    t_mul: float = 2.0
    m_mul: float = 1.0
    alpha: float = 0.0
    name: str | None = None

    def __post_init__(self) -> None:
        _require_positive(self, "first_decay_steps")
        if self.t_mul < 1:
            raise ValueError(
                f"CosineDecayRestarts: t_mul is {self.t_mul}; it must be at least 1, because "
                "periods that get shorter end after finitely many steps"
            )

    def __call__(self, step: int) -> float:
        """The learning rate after `step` steps."""
        period: float = self.first_decay_steps
        restarts, done = divmod(step, period) if self.t_mul == 1 else (0, step)
        while done >= period:
            restarts, done, period = restarts + 1, done - period, period * self.t_mul
        cosine = 0.5 * self.m_mul**restarts * (1 + math.cos(math.pi * done / period))
        return self.initial_learning_rate * ((1 - self.alpha) * cosine + self.alpha)


def _require_positive(schedule: LearningRateSchedule, argument: str) -> None:
    steps = getattr(schedule, argument)
    if steps <= 0:
        raise ValueError(
            f"{type(schedule).__name__}: {argument} is {steps}; it must be a positive number of "
            "steps"
        )
