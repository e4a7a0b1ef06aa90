"""Adam, and AdamW."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from hpcstrat.optimizers._fields import (
    BELOW_1,
    NOT_NEGATIVE,
    NOT_NEGATIVE_OR_NONE,
    LearningRate,
    checked,
)
from hpcstrat.optimizers._optimizer import Optimizer


@dataclass(eq=False, repr=False)
class Adam(Optimizer):
    """Adam (Kingma and Ba 2014), as TensorFlow has it.

    This is the paper's algorithm 1 with the reformulation before section 2.1. In step t, with `g`
    the gradient: `m += (1 - beta_1) (g - m)`, `v += (1 - beta_2) (g^2 - v)` and
    `w -= learning_rate sqrt(1 - beta_2^t) / (1 - beta_1^t) m / (sqrt(v) + epsilon)`.

    Args:
        learning_rate: see `Optimizer`, as are the keyword arguments.
        beta_1: the decay of the first moment, at least 0 and less than 1.
        beta_2: the decay of the second moment, at least 0 and less than 1.
        epsilon: keeps the divisor from 0; at least 0.

    Examples:
        The first step has the size of the learning rate unless the gradient is small next to
        `epsilon`:

        >>> def one_step(*arguments, **options):
        ...     w = hs.Variable(np.zeros(2))
        ...     optimizer = hs.optimizers.Adam(*arguments, **options)
        ...     optimizer.apply_gradients([(np.array([100.0, -0.01]), w)])
        ...     return w.numpy().round(4)
        >>> one_step(0.1)
        array([-0.1,  0.1])
        >>> one_step(0.1, epsilon=1e-3)  # the second sqrt(v) is 0.0003
        array([-0.1  ,  0.024])

        `beta_1` says how long old gradients last, here after the sign has changed:

        >>> def turn(beta_1):
        ...     w = hs.Variable(np.zeros(1))
        ...     optimizer = hs.optimizers.Adam(0.1, beta_1=beta_1)
        ...     for gradient in 1.0, 1.0, -1.0:
        ...         optimizer.apply_gradients([(np.array([gradient]), w)])
        ...     return w.numpy().round(3)
        >>> turn(0.9), turn(0.0)
        (array([-0.226]), array([-0.1]))
    """

    learning_rate: LearningRate = 0.001
    beta_1: float = checked(0.9, BELOW_1)
    beta_2: float = checked(0.999, BELOW_1)
    epsilon: float = checked(1e-7, NOT_NEGATIVE)

    @property
    def slots(self) -> dict[str, float]:
        """See `Optimizer.slots`."""
        return {"m": 0.0, "v": 0.0}

    def numbers(self, rate: float, step: int) -> dict[str, Any]:
        """See `Optimizer.numbers`."""
        beta_1, beta_2 = self.beta_1, self.beta_2
        return {
            "rate": rate * math.sqrt(1 - beta_2**step) / (1 - beta_1**step),
            "new_m": 1 - beta_1,
            "new_v": 1 - beta_2,
            "epsilon": self.epsilon,
        }

    @staticmethod
    def formula(
        value: Any,
        gradient: Any,
        m: Any,
        v: Any,
        *,
        rate: Any,
        new_m: Any,
        new_v: Any,
        epsilon: Any,
    ) -> Any:
        """See `Optimizer.formula`."""
        m = m + new_m * (gradient - m)
        v = v + new_v * (gradient * gradient - v)
        return value - rate * (m / (np.sqrt(v) + epsilon)), m, v


@final
@dataclass(eq=False, repr=False)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019).

    Each step does `w -= learning_rate weight_decay w` first.

    Args:
        learning_rate: see `Optimizer`, as are the keyword arguments.
        weight_decay: the decay, at least 0.
        beta_1: the decay of the first moment, at least 0 and less than 1.
        beta_2: the decay of the second moment, at least 0 and less than 1.
        epsilon: keeps the divisor from 0; at least 0.

    Examples:
        Where the gradient is 0, only the decay is left, by `1 - learning_rate * weight_decay`:

        >>> w = hs.Variable(np.array([8.0, -8.0]))
        >>> optimizer = hs.optimizers.AdamW(0.5, weight_decay=0.5)
        >>> optimizer.apply_gradients([(np.zeros(2), w)])
        >>> w.numpy()
        array([ 6., -6.])
    """

    weight_decay: float | None = checked(0.004, NOT_NEGATIVE_OR_NONE, kw_only=False)
