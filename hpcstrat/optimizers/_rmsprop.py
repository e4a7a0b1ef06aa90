"""RMSprop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np

from hpcstrat.optimizers._fields import FROM_0_TO_1, NOT_NEGATIVE, LearningRate, any_bool, checked
from hpcstrat.optimizers._optimizer import Optimizer


@final
@dataclass(eq=False, repr=False)
class RMSprop(Optimizer):
    """RMSprop (Tieleman and Hinton 2012), as TensorFlow has it.

    `r = rho r + (1 - rho) g^2`; `centered` subtracts the square of the mean gradient from `r`. With
    `u = learning_rate g / sqrt(r + epsilon)`: `w -= u`, or with momentum `m = momentum m + u` and
    `w -= m`.

    Args:
        learning_rate: see `Optimizer`, as are the keyword arguments.
        rho: the decay of the mean of squares, from 0 to 1.
        momentum: from 0 to 1.
        epsilon: keeps the divisor from 0; at least 0.
        centered: whether to divide by an estimate of the variance.

    Examples:
        The first step is `learning_rate / sqrt(1 - rho)`, whatever the gradient's size:

        >>> def two_steps(**arguments):
        ...     w, steps = hs.Variable(np.zeros(1)), []
        ...     optimizer = hs.optimizers.RMSprop(1.0, rho=0.75, epsilon=0.0, **arguments)
        ...     for _ in range(2):
        ...         optimizer.apply_gradients([(np.full(1, 5.0), w)])
        ...         steps.append(round(float(w[0]), 3))
        ...     return steps
        >>> two_steps()
        [-2.0, -3.512]
        >>> two_steps(centered=True)  # divides by sqrt(0.25 - 0.25**2) first, not by sqrt(0.25)
        [-2.309, -4.325]
        >>> two_steps(momentum=0.5)  # the second adds half of the first
        [-2.0, -4.512]
    """

    learning_rate: LearningRate = 0.001
    rho: float = checked(0.9, FROM_0_TO_1)
    momentum: float = checked(0.0, FROM_0_TO_1)
    epsilon: float = checked(1e-7, NOT_NEGATIVE)
    centered: bool = checked(False, any_bool)

    @property
    def slots(self) -> dict[str, float]:
        """See `Optimizer.slots`."""
        names = ["rms", *["average"] * self.centered, *["momentum"] * bool(self.momentum)]
        return dict.fromkeys(names, 0.0)

    def numbers(self, rate: float, step: int) -> dict[str, Any]:
        """See `Optimizer.numbers`."""
        return {
            "rate": rate,
            "rho": self.rho,
            "new": 1 - self.rho,
            "momentum": self.momentum,
            "epsilon": self.epsilon,
            "centered": self.centered,
        }

    @staticmethod
    def formula(
        value: Any,
        gradient: Any,
        rms: Any,
        *others: Any,
        rate: Any,
        rho: Any,
        new: Any,
        momentum: Any,
        epsilon: Any,
        centered: bool,
    ) -> Any:
        """See `Optimizer.formula`."""
        rms = rho * rms + new * (gradient * gradient)
        slots, divisor = [rms], rms
        if centered:
            average = rho * others[0] + new * gradient
            slots, divisor = [rms, average], rms - average * average
        change = rate * (gradient / np.sqrt(divisor + epsilon))
        if len(others) > centered:
            change = momentum * others[-1] + change
            slots.append(change)
        return value - change, *slots
