"""Adam, and AdamW, which decays weights too."""

from __future__ import annotations

from typing import Any, final

import numpy as np

from hpcstrat.optimizers.base import LearningRate, Optimizer


def _moved(
    value: Any, gradient: Any, m: Any, v: Any, learning_rate: Any, beta_1: Any, beta_2: Any, epsilon: Any, step: Any
) -> Any:
    """Adam's formula."""
    rate = learning_rate * np.sqrt(1 - beta_2**step) / (1 - beta_1**step)
    m = m + (1 - beta_1) * (gradient - m)
    v = v + (1 - beta_2) * (gradient * gradient - v)
    return value - rate * (m / (np.sqrt(v) + epsilon)), m, v


class _Adam(Optimizer):
    """The numbers of both."""

    def __init__(
        self,
        learning_rate: LearningRate,
        beta_1: float,
        beta_2: float,
        epsilon: float,
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

    @property
    def slots(self) -> dict[str, float]:
        """See `Optimizer.slots`."""
        return {"m": 0.0, "v": 0.0}


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
        TypeError: an argument is not a number.
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
        super().__init__(learning_rate, beta_1, beta_2, epsilon, global_clipnorm, name)

    @staticmethod
    def formula(
        value: Any,
        gradient: Any,
        m: Any,
        v: Any,
        *,
        learning_rate: Any,
        beta_1: Any,
        beta_2: Any,
        epsilon: Any,
        step: Any,
    ) -> Any:
        """See `Optimizer.formula`."""
        return _moved(value, gradient, m, v, learning_rate, beta_1, beta_2, epsilon, step)


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
        TypeError: an argument is not a number.
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
        super().__init__(learning_rate, beta_1, beta_2, epsilon, global_clipnorm, name)
        self.weight_decay: float = self._not_negative("weight_decay", weight_decay)

    @staticmethod
    def formula(
        value: Any,
        gradient: Any,
        m: Any,
        v: Any,
        *,
        learning_rate: Any,
        beta_1: Any,
        beta_2: Any,
        epsilon: Any,
        weight_decay: Any,
        step: Any,
    ) -> Any:
        """See `Optimizer.formula`."""
        value = value * (1 - weight_decay * learning_rate)
        return _moved(value, gradient, m, v, learning_rate, beta_1, beta_2, epsilon, step)
