"""Adadelta."""

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
class Adadelta(Optimizer):
    """Adadelta (Zeiler 2012, algorithm 1), as TensorFlow has it.

    `a = rho a + (1 - rho) g^2`, `u = sqrt((d + epsilon) / (a + epsilon)) g`,
    `d = rho d + (1 - rho) u^2` and `w -= learning_rate u`.

    Args:
        learning_rate: a number of at least 0, or a callable that returns it; called without
            arguments or with the number of steps done. The paper's is 1.
        rho: the decay of both means of squares, from 0 to 1.
        epsilon: keeps the divisor from 0; at least 0.
        **options: see `OptimizerOptions`.

    Raises:
        ValueError: rho is not from 0 to 1, or another number is negative or not finite.
        TypeError: an argument is not a number.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        rho: float = 0.95,
        epsilon: float = 1e-7,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        if not 0 <= as_number("Adadelta", "rho", rho) <= 1:
            raise ValueError(f"Adadelta: rho is {rho!r}; it must be from 0 to 1")
        super().__init__(learning_rate, **options)
        self.rho: float = float(rho)
        self.epsilon: float = not_negative("Adadelta", "epsilon", epsilon)

    @property
    def slots(self) -> dict[str, float]:
        """See `Optimizer.slots`."""
        return {"squares": 0.0, "changes": 0.0}

    @staticmethod
    def formula(
        value: Any,
        gradient: Any,
        squares: Any,
        changes: Any,
        *,
        learning_rate: Any,
        rho: Any,
        epsilon: Any,
    ) -> Any:
        """See `Optimizer.formula`."""
        squares = rho * squares + (1 - rho) * (gradient * gradient)
        change = np.sqrt(changes + epsilon) * gradient / np.sqrt(squares + epsilon)
        return (
            value - learning_rate * change,
            squares,
            rho * changes + (1 - rho) * (change * change),
        )
