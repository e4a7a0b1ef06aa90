"""Adagrad."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import numpy as np

from hpcstrat.optimizers._optimizer import Optimizer
from hpcstrat.optimizers._options import not_negative

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from hpcstrat.optimizers._options import LearningRate, OptimizerOptions


@final
class Adagrad(Optimizer):
    """Adagrad (Duchi et al. 2011): `a += g^2`, then `w -= learning_rate g / sqrt(a + epsilon)`.

    Args:
        learning_rate: a number of at least 0, or a callable that returns it; called without
            arguments or with the number of steps done.
        initial_accumulator_value: the value that `a` starts from, at least 0.
        epsilon: keeps the divisor from 0; at least 0.
        **options: see `OptimizerOptions`.

    Raises:
        ValueError: a number is negative or not finite.
        TypeError: an argument is not a number.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(learning_rate, **options)
        self.initial_accumulator_value: float = not_negative(
            "Adagrad", "initial_accumulator_value", initial_accumulator_value
        )
        self.epsilon: float = not_negative("Adagrad", "epsilon", epsilon)

    @property
    def slots(self) -> dict[str, float]:
        """See `Optimizer.slots`."""
        return {"accumulator": self.initial_accumulator_value}

    @staticmethod
    def formula(
        value: Any, gradient: Any, accumulator: Any, *, learning_rate: Any, epsilon: Any
    ) -> Any:
        """See `Optimizer.formula`."""
        accumulator = accumulator + gradient * gradient
        return value - learning_rate * (gradient / np.sqrt(accumulator + epsilon)), accumulator
