"""RMSprop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from hpcstrat._storage.base import Array
from hpcstrat._storage.rule import Kernel, UpdateRule
from hpcstrat.optimizers.base import LearningRate, Optimizer

_NUMBERS = ("learning_rate", "rho", "rest", "epsilon")
_PLAIN = """
squares = rho * squares + rest * gradient * gradient;
const auto change = learning_rate * gradient / sqrt(squares + epsilon);
"""
_CENTERED = """
squares = rho * squares + rest * gradient * gradient;
mean = rho * mean + rest * gradient;
const auto change = learning_rate * gradient / sqrt(squares - mean * mean + epsilon);
"""
_CHANGE = "value -= change;"
_MOMENTUM = "velocity = momentum * velocity + change; value -= velocity;"
_KERNELS = {
    (False, False): Kernel("rmsprop", ("squares",), _NUMBERS, _PLAIN + _CHANGE),
    (True, False): Kernel("rmsprop", ("squares", "mean"), _NUMBERS, _CENTERED + _CHANGE),
    (False, True): Kernel("rmsprop", ("squares", "velocity"), (*_NUMBERS, "momentum"), _PLAIN + _MOMENTUM),
    (True, True): Kernel("rmsprop", ("squares", "mean", "velocity"), (*_NUMBERS, "momentum"), _CENTERED + _MOMENTUM),
}
"""By whether they are centered, and have momentum."""


@final
class RMSprop(Optimizer):
    """RMSprop (Tieleman and Hinton 2012), as TensorFlow has it.

    `r = rho r + (1 - rho) g^2`; `centered` subtracts the square of the mean gradient from `r`. With
    `u = learning_rate g / sqrt(r + epsilon)`: `w -= u`, or with momentum `m = momentum m + u` and `w -= m`.

    Args:
        learning_rate: a number of at least 0, or a callable that gives one, without arguments or of the number of steps
            done.
        rho: the decay of the mean of squares.
        momentum: from 0 to 1.
        epsilon: keeps the divisor from 0; at least 0.
        centered: whether to divide by an estimate of the variance.
        global_clipnorm: the largest norm of the summed gradients, or `None`.
        name: a name.

    Raises:
        ValueError: rho or momentum is not from 0 to 1, another number negative or not finite.
        TypeError: a number is none.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        *,
        global_clipnorm: float | None = None,
        name: str = "RMSprop",
    ) -> None:
        for argument, value in (("rho", rho), ("momentum", momentum)):
            if not 0 <= value <= 1:
                raise ValueError(f"RMSprop: {argument} is {value!r}; it must be from 0 to 1")
        super().__init__(learning_rate, global_clipnorm, name)
        self.rho: float = float(rho)
        self.momentum: float = float(momentum)
        self.epsilon: float = self._not_negative("epsilon", epsilon)
        self.centered: bool = bool(centered)

    @property
    def slots(self) -> dict[str, float]:
        """See `Optimizer.slots`."""
        names = ["rms", *["average"] * self.centered, *["momentum"] * bool(self.momentum)]
        return dict.fromkeys(names, 0.0)

    def update_rule(self, learning_rate: float, step: int) -> UpdateRule:
        """See `Optimizer.update_rule`."""
        rho, momentum, epsilon, centered = self.rho, self.momentum, self.epsilon, self.centered

        def descend(value: Array, gradient: Array, slots: Sequence[Array], scratch: Array) -> None:
            number = value.dtype.type
            squares = slots[0]
            np.multiply(gradient, gradient, out=scratch)
            _average(squares, scratch, number(rho), number(1 - rho))
            if centered:
                mean = slots[1]
                np.copyto(scratch, gradient)
                _average(mean, scratch, number(rho), number(1 - rho))
                np.multiply(mean, mean, out=scratch)
                np.subtract(squares, scratch, out=scratch)
                np.add(scratch, number(epsilon), out=scratch)
            else:
                np.add(squares, number(epsilon), out=scratch)
            np.sqrt(scratch, out=scratch)
            np.divide(gradient, scratch, out=scratch)
            np.multiply(scratch, number(learning_rate), out=scratch)
            if momentum:
                velocity = slots[-1]
                np.multiply(velocity, number(momentum), out=velocity)
                np.add(velocity, scratch, out=velocity)
                np.subtract(value, velocity, out=value)
            else:
                np.subtract(value, scratch, out=value)

        constants = {
            "learning_rate": learning_rate,
            "rho": rho,
            "momentum": momentum,
            "epsilon": epsilon,
            "centered": centered,
        }
        of_kernel = (learning_rate, rho, 1 - rho, epsilon, *[momentum] * bool(momentum))
        return UpdateRule(descend, constants, _KERNELS[centered, bool(momentum)], of_kernel)


def _average(mean: Array, new: Array, old_share: float, new_share: float) -> None:
    """A moving average; `new` is overwritten."""
    np.multiply(mean, old_share, out=mean)
    np.multiply(new, new_share, out=new)
    np.add(mean, new, out=mean)
