"""Lion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np

from hpcstrat.optimizers._fields import ABOVE_0, LearningRate, checked
from hpcstrat.optimizers._optimizer import Optimizer


@final
@dataclass(eq=False, repr=False)
class Lion(Optimizer):
    """Lion (Chen et al. 2023, algorithm 2): `w -= learning_rate sign(beta_1 m + (1 - beta_1) g)`.

    Then `m = beta_2 m + (1 - beta_2) g`. The paper's weight decay is the argument of that name.

    Args:
        learning_rate: see `Optimizer`, as are the keyword arguments. A tenth to a third of Adam's
            is usual.
        beta_1: the share of the momentum in the step, above 0 and at most 1.
        beta_2: the decay of the momentum, above 0 and at most 1.

    Examples:
        A step has one length; its sign is that of nine parts momentum and one part gradient:

        >>> w = hs.Variable(np.zeros(3))
        >>> optimizer = hs.optimizers.Lion(0.5, beta_1=0.9, beta_2=0.75)
        >>> optimizer.apply_gradients([(np.array([4.0, 0.01, -4.0]), w)])  # m = g / 4 after it
        >>> w.numpy()
        array([-0.5, -0.5,  0.5])
        >>> optimizer.apply_gradients([(np.full(3, -2.0), w)])  # 0.9 * 1 - 0.1 * 2 > 0
        >>> w.numpy()
        array([-1.,  0.,  1.])
    """

    learning_rate: LearningRate = 0.0001
    beta_1: float = checked(0.9, ABOVE_0)
    beta_2: float = checked(0.99, ABOVE_0)

    @property
    def slots(self) -> dict[str, float]:
        """See `Optimizer.slots`."""
        return {"m": 0.0}

    def numbers(self, rate: float, step: int) -> dict[str, Any]:
        """See `Optimizer.numbers`."""
        beta_1, beta_2 = self.beta_1, self.beta_2
        return {
            "rate": rate,
            **{"beta_1": beta_1, "new_1": 1 - beta_1, "beta_2": beta_2, "new_2": 1 - beta_2},
        }

    @staticmethod
    def formula(
        value: Any,
        gradient: Any,
        m: Any,
        *,
        rate: Any,
        beta_1: Any,
        new_1: Any,
        beta_2: Any,
        new_2: Any,
    ) -> Any:
        """See `Optimizer.formula`."""
        change = np.sign(beta_1 * m + new_1 * gradient)
        return value - rate * change, beta_2 * m + new_2 * gradient
