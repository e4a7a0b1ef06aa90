"""Lion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import numpy as np

from hpcstrat._core.arrays import as_number
from hpcstrat.optimizers._optimizer import Optimizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from hpcstrat.optimizers._options import LearningRate, OptimizerOptions


@final
class Lion(Optimizer):
    """Lion (Chen et al. 2023, algorithm 2): `w -= learning_rate sign(beta_1 m + (1 - beta_1) g)`.

    Then `m = beta_2 m + (1 - beta_2) g`. The paper's weight decay is the option of that name.

    Args:
        learning_rate: a number of at least 0, or a callable that returns it; called without
            arguments or with the number of steps done. A tenth to a third of Adam's is usual.
        beta_1: the share of the momentum in the step, above 0 and at most 1.
        beta_2: the decay of the momentum, above 0 and at most 1.
        **options: see `OptimizerOptions`.

    Raises:
        ValueError: a decay is out of range, or the learning rate is negative or not finite.
        TypeError: an argument is not a number.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.0001,
        beta_1: float = 0.9,
        beta_2: float = 0.99,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        for argument, value in (("beta_1", beta_1), ("beta_2", beta_2)):
            if not 0 < as_number("Lion", argument, value) <= 1:
                raise ValueError(f"Lion: {argument} is {value!r}; it must be above 0 and at most 1")
        super().__init__(learning_rate, **options)
        self.beta_1: float = float(beta_1)
        self.beta_2: float = float(beta_2)

    @property
    def slots(self) -> dict[str, float]:
        """See `Optimizer.slots`."""
        return {"m": 0.0}

    @staticmethod
    def formula(
        value: Any, gradient: Any, m: Any, *, learning_rate: Any, beta_1: Any, beta_2: Any
    ) -> Any:
        """See `Optimizer.formula`."""
        change = np.sign(beta_1 * m + (1 - beta_1) * gradient)
        return value - learning_rate * change, beta_2 * m + (1 - beta_2) * gradient
