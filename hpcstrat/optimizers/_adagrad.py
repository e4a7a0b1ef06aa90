"""Optimizers that divide by means of squares: Adagrad, RMSprop and Adadelta."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import numpy as np

from hpcstrat.optimizers._optimizer import Optimizer
from hpcstrat.optimizers._options import not_negative, number_in

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from hpcstrat.optimizers._options import LearningRate, OptimizerOptions


@final
class Adagrad(Optimizer):
    """Adagrad (Duchi et al. 2011): `a += g^2`, then `w -= learning_rate g / sqrt(a + epsilon)`.

    Args:
        learning_rate: a number of at least 0, or a callable; see `Optimizer`.
        initial_accumulator_value: the value that `a` starts from, at least 0.
        epsilon: keeps the divisor from 0; at least 0.
        **options: see `OptimizerOptions`.

    Raises:
        ValueError: a number is negative or not finite.
        TypeError: an argument is not a number.

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


@final
class RMSprop(Optimizer):
    """RMSprop (Tieleman and Hinton 2012), as TensorFlow has it.

    `r = rho r + (1 - rho) g^2`; `centered` subtracts the square of the mean gradient from `r`. With
    `u = learning_rate g / sqrt(r + epsilon)`: `w -= u`, or with momentum `m = momentum m + u` and
    `w -= m`.

    Args:
        learning_rate: a number of at least 0, or a callable; see `Optimizer`.
        rho: the decay of the mean of squares.
        momentum: from 0 to 1.
        epsilon: keeps the divisor from 0; at least 0.
        centered: whether to divide by an estimate of the variance.
        **options: see `OptimizerOptions`.

    Raises:
        ValueError: rho or momentum is not from 0 to 1, or another number is negative or not finite.
        TypeError: an argument is not a number.

    Examples:
        The first step is `learning_rate / sqrt(1 - rho)`, whatever the gradient's size:

        >>> def two_steps(**arguments):
        ...     w, steps = hs.Variable(np.zeros(1)), []
        ...     optimizer = hs.optimizers.RMSprop(1.0, rho=0.75, epsilon=0.0, **arguments)
        ...     for _ in range(2):
        ...         optimizer.apply_gradients([(np.full(1, 5.0), w)])
        ...         steps.append(round(float(w[0]), 3))
        ...     return steps
        >>> two_steps()
        [-2.0, -3.512]
        >>> two_steps(centered=True)  # divides by sqrt(0.25 - 0.25**2) first, not by sqrt(0.25)
        [-2.309, -4.325]
        >>> two_steps(momentum=0.5)  # the second adds half of the first
        [-2.0, -4.512]
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(learning_rate, **options)
        self.rho: float = number_in("RMSprop", "rho", rho)
        self.momentum: float = number_in("RMSprop", "momentum", momentum)
        self.epsilon: float = not_negative("RMSprop", "epsilon", epsilon)
        self.centered: bool = bool(centered)

    @property
    def slots(self) -> dict[str, float]:
        """See `Optimizer.slots`."""
        names = ["rms", *["average"] * self.centered, *["momentum"] * bool(self.momentum)]
        return dict.fromkeys(names, 0.0)

    @staticmethod
    def formula(
        value: Any,
        gradient: Any,
        rms: Any,
        *others: Any,
        learning_rate: Any,
        rho: Any,
        momentum: Any,
        epsilon: Any,
        centered: bool,
    ) -> Any:
        """See `Optimizer.formula`."""
        rms = rho * rms + (1 - rho) * (gradient * gradient)
        slots, divisor = [rms], rms
        if centered:
            average = rho * others[0] + (1 - rho) * gradient
            slots, divisor = [rms, average], rms - average * average
        change = learning_rate * (gradient / np.sqrt(divisor + epsilon))
        if len(others) > centered:
            change = momentum * others[-1] + change
            slots.append(change)
        return value - change, *slots


@final
class Adadelta(Optimizer):
    """Adadelta (Zeiler 2012, algorithm 1), as TensorFlow has it.

    `a = rho a + (1 - rho) g^2`, `u = sqrt((d + epsilon) / (a + epsilon)) g`,
    `d = rho d + (1 - rho) u^2` and `w -= learning_rate u`.

    Args:
        learning_rate: a number of at least 0, or a callable; see `Optimizer`. The paper's is 1.
        rho: the decay of both means of squares, from 0 to 1.
        epsilon: keeps the divisor from 0; at least 0.
        **options: see `OptimizerOptions`.

    Raises:
        ValueError: rho is not from 0 to 1, or another number is negative or not finite.
        TypeError: an argument is not a number.

    Examples:
        No step depends on the gradient's scale, and the first ones are about `sqrt(epsilon)`:

        >>> w = hs.Variable(np.zeros(2))
        >>> optimizer = hs.optimizers.Adadelta(1.0, rho=0.75, epsilon=1e-6)
        >>> for _ in range(2):
        ...     optimizer.apply_gradients([(np.array([1.0, 1000.0]), w)])
        ...     print(w.numpy().round(6))
        [-0.002 -0.002]
        [-0.004138 -0.004138]
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        rho: float = 0.95,
        epsilon: float = 1e-7,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(learning_rate, **options)
        self.rho: float = number_in("Adadelta", "rho", rho)
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
