"""Adagrad."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from hpcstrat._storage.base import Array
from hpcstrat._storage.rule import Kernel, UpdateRule
from hpcstrat.optimizers.base import LearningRate, Optimizer

_KERNEL = Kernel(
    "adagrad",
    ("accumulator",),
    ("learning_rate", "epsilon"),
    """
    accumulator += gradient * gradient;
    value -= learning_rate * gradient / sqrt(accumulator + epsilon);
    """,
)


@final
class Adagrad(Optimizer):
    """Adagrad (Duchi et al. 2011): `a += g^2`, then `w -= learning_rate g / sqrt(a + epsilon)`.

    Args:
        learning_rate: a number of at least 0, or a callable that gives one, without arguments or of the number of steps
            done.
        initial_accumulator_value: what `a` starts from, at least 0.
        epsilon: keeps the divisor from 0; at least 0.
        global_clipnorm: the largest norm of the summed gradients, or `None`.
        name: a name.

    Raises:
        ValueError: a number is negative or not finite.
        TypeError: a number is none.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        *,
        global_clipnorm: float | None = None,
        name: str = "Adagrad",
    ) -> None:
        if not initial_accumulator_value >= 0:
            raise ValueError(
                f"Adagrad: initial_accumulator_value is {initial_accumulator_value!r}; it must be at least 0"
            )
        super().__init__(learning_rate, global_clipnorm, name)
        self.initial_accumulator_value: float = float(initial_accumulator_value)
        self.epsilon: float = self._not_negative("epsilon", epsilon)

    @property
    def slots(self) -> dict[str, float]:
        """See `Optimizer.slots`."""
        return {"accumulator": self.initial_accumulator_value}

    def update_rule(self, learning_rate: float, step: int) -> UpdateRule:
        """See `Optimizer.update_rule`."""
        epsilon = self.epsilon

        def descend(value: Array, gradient: Array, slots: Sequence[Array], scratch: Array) -> None:
            number = value.dtype.type
            (accumulator,) = slots
            np.multiply(gradient, gradient, out=scratch)
            np.add(accumulator, scratch, out=accumulator)
            np.add(accumulator, number(epsilon), out=scratch)
            np.sqrt(scratch, out=scratch)
            np.divide(gradient, scratch, out=scratch)
            np.multiply(scratch, number(learning_rate), out=scratch)
            np.subtract(value, scratch, out=value)

        constants = {"learning_rate": learning_rate, "epsilon": epsilon}
        return UpdateRule(descend, constants, _KERNEL, (learning_rate, epsilon))
