"""Optimizers that add squares of gradients up: Adagrad, RMSprop, Adadelta and Ftrl."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, final

import numpy as np

from hpcstrat._core.arrays import as_number
from hpcstrat.optimizers._optimizer import Optimizer
from hpcstrat.optimizers._options import FROM_0_TO_1, NOT_NEGATIVE, any_bool

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

    _checks = MappingProxyType({"initial_accumulator_value": NOT_NEGATIVE, "epsilon": NOT_NEGATIVE})

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(learning_rate, **options)
        self.initial_accumulator_value: float = initial_accumulator_value
        self.epsilon: float = epsilon

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

    _checks = MappingProxyType(
        {
            "rho": FROM_0_TO_1,
            "momentum": FROM_0_TO_1,
            "epsilon": NOT_NEGATIVE,
            "centered": any_bool,
        }
    )

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
        self.rho: float = rho
        self.momentum: float = momentum
        self.epsilon: float = epsilon
        self.centered: bool = centered

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

    _checks = MappingProxyType({"rho": FROM_0_TO_1, "epsilon": NOT_NEGATIVE})

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        rho: float = 0.95,
        epsilon: float = 1e-7,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(learning_rate, **options)
        self.rho: float = rho
        self.epsilon: float = epsilon

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


_TAKES_ROOT: Mapping[float, bool | None] = {-0.5: True, -1.0: False, 0.0: None}
"""For each learning rate power, whether squares of gradients count by their root, or not at all."""


def _power(owner: str, name: str, value: Any) -> float:
    power = as_number(owner, name, value)
    if power not in _TAKES_ROOT:
        raise ValueError(f"{owner}: {name} is {power!r}; it must be -0.5, 0 or -1")
    return power


@final
class Ftrl(Optimizer):
    """FTRL-Proximal (McMahan et al. 2013, algorithm 1), as TensorFlow has it.

    With `p = -learning_rate_power`, `l1`, `l2` and `s` the three strengths, in their order, and `g`
    the gradient: `b = a + g^2`, `z += g + 2 s w - (b^p - a^p) / learning_rate w`, `a = b` and
    `w = (max(-l1, min(z, l1)) - z) / ((b^p + beta) / learning_rate + 2 l2)`. So `w` starts from 0
    in the first step, whatever it was, and is exactly 0 where `|z| <= l1`.

    Args:
        learning_rate: a number of at least 0, or a callable; see `Optimizer`. Where it is 0,
            variables become NaN.
        learning_rate_power: -0.5; or 0, where the learning rate does not fall as squares of
            gradients add up; or -1. No other power has the same bits on every processor.
        initial_accumulator_value: the value that `a` starts from, at least 0.
        l1_regularization_strength: at least 0.
        l2_regularization_strength: at least 0.
        l2_shrinkage_regularization_strength: at least 0; of a penalty that changes the gradient,
            not the minimum.
        beta: at least 0.
        **options: see `OptimizerOptions`.

    Raises:
        ValueError: a number is out of range.
        TypeError: an argument is not a number.

    Examples:
        The first step from 0, by each of its arguments; `l1_regularization_strength` keeps an
        element at exactly 0 where the gradient is smaller:

        >>> def one_step(**options):
        ...     w = hs.Variable(np.zeros(2))
        ...     optimizer = hs.optimizers.Ftrl(1.0, initial_accumulator_value=0.0, **options)
        ...     optimizer.apply_gradients([(np.array([4.0, 1.0]), w)])
        ...     return w.numpy()
        >>> one_step()  # each gradient divided by its size
        array([-1., -1.])
        >>> one_step(l1_regularization_strength=2.0)
        array([-0.5,  0. ])
        >>> one_step(l2_regularization_strength=2.0)  # 4 / (4 + 2 * 2) and 1 / (1 + 2 * 2)
        array([-0.5, -0.2])
        >>> one_step(beta=1.0)
        array([-0.8, -0.5])
        >>> one_step(learning_rate_power=0.0)  # plain gradient descent
        array([-4., -1.])
    """

    _checks = MappingProxyType(
        {
            "learning_rate_power": _power,
            "initial_accumulator_value": NOT_NEGATIVE,
            "l1_regularization_strength": NOT_NEGATIVE,
            "l2_regularization_strength": NOT_NEGATIVE,
            "l2_shrinkage_regularization_strength": NOT_NEGATIVE,
            "beta": NOT_NEGATIVE,
        }
    )

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        l2_shrinkage_regularization_strength: float = 0.0,
        beta: float = 0.0,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(learning_rate, **options)
        self.learning_rate_power: float = learning_rate_power
        self.initial_accumulator_value: float = initial_accumulator_value
        self.l1_regularization_strength: float = l1_regularization_strength
        self.l2_regularization_strength: float = l2_regularization_strength
        self.l2_shrinkage_regularization_strength: float = l2_shrinkage_regularization_strength
        self.beta: float = beta

    @property
    def slots(self) -> dict[str, float]:
        """See `Optimizer.slots`."""
        return {"accumulator": self.initial_accumulator_value, "linear": 0.0}

    @property
    def takes_root(self) -> bool | None:
        """Whether squares of gradients count by their root; `None`: they do not count.

        Examples:
            >>> hs.optimizers.Ftrl().takes_root
            True
        """
        return _TAKES_ROOT[self.learning_rate_power]

    @staticmethod
    def formula(
        value: Any,
        gradient: Any,
        accumulator: Any,
        linear: Any,
        *,
        learning_rate: Any,
        takes_root: bool | None,
        l1_regularization_strength: Any,
        l2_regularization_strength: Any,
        l2_shrinkage_regularization_strength: Any,
        beta: Any,
    ) -> Any:
        """See `Optimizer.formula`."""
        new = accumulator + gradient * gradient
        before, after = accumulator, new
        if takes_root:
            before, after = np.sqrt(accumulator), np.sqrt(new)
        elif takes_root is None:
            before, after = 1.0, 1.0
        linear = linear + (
            gradient
            + 2 * l2_shrinkage_regularization_strength * value
            - (after - before) / learning_rate * value
        )
        most = l1_regularization_strength
        clipped = np.maximum(np.minimum(linear, most), -most)
        divisor = (after + beta) / learning_rate + 2 * l2_regularization_strength
        return (clipped - linear) / divisor, new, linear
