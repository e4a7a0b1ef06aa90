"""RMSprop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import numpy as np

from hpcstrat._core.arrays import as_number
from hpcstrat.optimizers._optimizer import Optimizer
from hpcstrat.optimizers._options import not_negative

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from hpcstrat.optimizers._options import LearningRate, OptimizerOptions


@final
class RMSprop(Optimizer):
    """RMSprop (Tieleman and Hinton 2012), as TensorFlow has it.

    `r = rho r + (1 - rho) g^2`; `centered` subtracts the square of the mean gradient from `r`. With
    `u = learning_rate g / sqrt(r + epsilon)`: `w -= u`, or with momentum `m = momentum m + u` and
    `w -= m`.

    Args:
        learning_rate: a number of at least 0, or a callable that returns it; called without
            arguments or with the number of steps done.
        rho: the decay of the mean of squares.
        momentum: from 0 to 1.
        epsilon: keeps the divisor from 0; at least 0.
        centered: whether to divide by an estimate of the variance.
        **options: see `OptimizerOptions`.

    Raises:
        ValueError: rho or momentum is not from 0 to 1, or another number is negative or not finite.
        TypeError: an argument is not a number.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        for argument, value in (("rho", rho), ("momentum", momentum)):
            if not 0 <= as_number("RMSprop", argument, value) <= 1:
                raise ValueError(f"RMSprop: {argument} is {value!r}; it must be from 0 to 1")
        super().__init__(learning_rate, **options)
        self.rho: float = float(rho)
        self.momentum: float = float(momentum)
        self.epsilon: float = not_negative("RMSprop", "epsilon", epsilon)
        self.centered: bool = bool(centered)

    @property
    def slots(self) -> dict[str, float]:
        """See `Optimizer.slots`."""
        names = ["rms", *["average"] * self.centered, *["momentum"] * bool(self.momentum)]
        return dict.fromkeys(names, 0.0)

    @staticmethod
    def formula(
        value: Any,
        gradient: Any,
        rms: Any,
        *others: Any,
        learning_rate: Any,
        rho: Any,
        momentum: Any,
        epsilon: Any,
        centered: bool,
    ) -> Any:
        """See `Optimizer.formula`."""
        rms = rho * rms + (1 - rho) * (gradient * gradient)
        slots, divisor = [rms], rms
        if centered:
            average = rho * others[0] + (1 - rho) * gradient
            slots, divisor = [rms, average], rms - average * average
        change = learning_rate * (gradient / np.sqrt(divisor + epsilon))
        if len(others) > centered:
            change = momentum * others[-1] + change
            slots.append(change)
        return value - change, *slots
