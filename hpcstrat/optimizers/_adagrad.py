"""Adagrad."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np

from hpcstrat.optimizers._fields import NOT_NEGATIVE, LearningRate, checked
from hpcstrat.optimizers._optimizer import Optimizer


@final
@dataclass(eq=False, repr=False)
class Adagrad(Optimizer):
    """Adagrad (Duchi et al. 2011): `a += g^2`, then `w -= learning_rate g / sqrt(a + epsilon)`.

    Args:
        learning_rate: see `Optimizer`, as are the keyword arguments.
        initial_accumulator_value: the value that `a` starts from, at least 0.
        epsilon: keeps the divisor from 0; at least 0.

    Examples:
        Each element's rate falls with the squares of its own gradients:

        >>> w = hs.Variable(np.zeros(2))
        >>> optimizer = hs.optimizers.Adagrad(1.0, initial_accumulator_value=7.0, epsilon=0.0)
        >>> optimizer.apply_gradients([(np.array([3.0, 0.0]), w)])  # sqrt(7 + 9) is 4
        >>> w.numpy()
        array([-0.75,  0.  ])
        >>> optimizer.apply_gradients([(np.array([3.0, 3.0]), w)])  # sqrt(16 + 9), sqrt(7 + 9)
        >>> w.numpy()
        array([-1.35, -0.75])
    """

    learning_rate: LearningRate = 0.001
    initial_accumulator_value: float = checked(0.1, NOT_NEGATIVE)
    epsilon: float = checked(1e-7, NOT_NEGATIVE)

    @property
    def slots(self) -> dict[str, float]:
        """See `Optimizer.slots`."""
        return {"accumulator": self.initial_accumulator_value}

    def numbers(self, rate: float, step: int) -> dict[str, Any]:
        """See `Optimizer.numbers`."""
        return {"rate": rate, "epsilon": self.epsilon}

    @staticmethod
    def formula(value: Any, gradient: Any, accumulator: Any, *, rate: Any, epsilon: Any) -> Any:
        """See `Optimizer.formula`."""
        accumulator = accumulator + gradient * gradient
        return value - rate * (gradient / np.sqrt(accumulator + epsilon)), accumulator
