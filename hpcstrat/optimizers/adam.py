"""Adam, and AdamW, which decays weights too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import numpy as np

from hpcstrat._storage.base import Array
from hpcstrat._storage.rule import Kernel, UpdateRule
from hpcstrat.optimizers.base import LearningRate, Optimizer

_KERNEL = Kernel(
    "adam",
    ("m", "v"),
    ("kept", "rate", "epsilon", "new_1", "new_2"),
    """
    value *= kept;
    m += new_1 * (gradient - m);
    v += new_2 * (gradient * gradient - v);
    value -= rate * m / (sqrt(v) + epsilon);
    """,
)


class _Adam(Optimizer):
    """The update of both."""

    def __init__(
        self,
        learning_rate: LearningRate,
        beta_1: float,
        beta_2: float,
        epsilon: float,
        weight_decay: float,
        global_clipnorm: float | None,
        name: str,
    ) -> None:
        for argument, value in (("beta_1", beta_1), ("beta_2", beta_2)):
            if not 0 <= value < 1:
                raise ValueError(
                    f"{type(self).__name__}: {argument} is {value!r}; it must be at least 0 and less than 1"
                )
        super().__init__(learning_rate, global_clipnorm, name)
        self.beta_1: float = float(beta_1)
        self.beta_2: float = float(beta_2)
        self.epsilon: float = self._not_negative("epsilon", epsilon)
        self._decay = self._not_negative("weight_decay", weight_decay)

    @property
    def slots(self) -> dict[str, float]:
        """See `Optimizer.slots`."""
        return {"m": 0.0, "v": 0.0}

    def update_rule(self, learning_rate: float, step: int) -> UpdateRule:
        """See `Optimizer.update_rule`."""
        beta_1, beta_2, epsilon, decay = self.beta_1, self.beta_2, self.epsilon, self._decay
        rate = learning_rate * math.sqrt(1 - beta_2**step) / (1 - beta_1**step)

        def descend(value: Array, gradient: Array, slots: Sequence[Array], scratch: Array) -> None:
            number = value.dtype.type
            m, v = slots
            if decay:
                np.multiply(value, number(1 - decay * learning_rate), out=value)
            np.subtract(gradient, m, out=scratch)  # m += (1 - beta_1) * (gradient - m)
            np.multiply(scratch, number(1 - beta_1), out=scratch)
            np.add(m, scratch, out=m)
            np.multiply(gradient, gradient, out=gradient)  # v += (1 - beta_2) * (gradient**2 - v)
            np.subtract(gradient, v, out=gradient)
            np.multiply(gradient, number(1 - beta_2), out=gradient)
            np.add(v, gradient, out=v)
            np.sqrt(v, out=scratch)  # value -= rate * m / (sqrt(v) + epsilon)
            np.add(scratch, number(epsilon), out=scratch)
            np.divide(m, scratch, out=scratch)
            np.multiply(scratch, number(rate), out=scratch)
            np.subtract(value, scratch, out=value)

        constants = {
            "learning_rate": learning_rate,
            "beta_1": beta_1,
            "beta_2": beta_2,
            "epsilon": epsilon,
            "weight_decay": decay,
            "step": step,
        }
        return UpdateRule(
            descend, constants, _KERNEL, (1 - decay * learning_rate, rate, epsilon, 1 - beta_1, 1 - beta_2)
        )


@final
class Adam(_Adam):
    """Adam (Kingma and Ba 2014, algorithm 1 with the reformulation before section 2.1), as TensorFlow has it.

    In step t, with `g` the gradient: `m += (1 - beta_1) (g - m)`, `v += (1 - beta_2) (g^2 - v)` and
    `w -= learning_rate sqrt(1 - beta_2^t) / (1 - beta_1^t) m / (sqrt(v) + epsilon)`.

    Args:
        learning_rate: a number of at least 0, or a callable that gives one, without arguments or of the number of steps
            done.
        beta_1: the decay of the first moment, at least 0 and less than 1.
        beta_2: the decay of the second moment, likewise.
        epsilon: keeps the divisor from 0; at least 0.
        global_clipnorm: the largest norm of the summed gradients, or `None`.
        name: a name.

    Raises:
        ValueError: a decay is out of range, another number negative or not finite.
        TypeError: a number is none.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        *,
        global_clipnorm: float | None = None,
        name: str = "Adam",
    ) -> None:
        super().__init__(learning_rate, beta_1, beta_2, epsilon, 0.0, global_clipnorm, name)


@final
class AdamW(_Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019): `w -= learning_rate weight_decay w` comes first.

    Args:
        learning_rate: a number of at least 0, or a callable that gives one, without arguments or of the number of steps
            done.
        weight_decay: the decay, at least 0.
        beta_1: the decay of the first moment, at least 0 and less than 1.
        beta_2: the decay of the second moment, likewise.
        epsilon: keeps the divisor from 0; at least 0.
        global_clipnorm: the largest norm of the summed gradients, or `None`.
        name: a name.

    Raises:
        ValueError: a decay of a moment is out of range, another number negative or not finite.
        TypeError: a number is none.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        weight_decay: float = 0.004,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        *,
        global_clipnorm: float | None = None,
        name: str = "AdamW",
    ) -> None:
        super().__init__(learning_rate, beta_1, beta_2, epsilon, weight_decay, global_clipnorm, name)

    @property
    def weight_decay(self) -> float:
        """The decay."""
        return self._decay
