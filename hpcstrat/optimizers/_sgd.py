"""Optimizers with one momentum: SGD and Lion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import numpy as np

from hpcstrat.optimizers._optimizer import Optimizer
from hpcstrat.optimizers._options import ABOVE_0, number_in

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from hpcstrat.optimizers._options import LearningRate, OptimizerOptions


@final
class SGD(Optimizer):
    """Gradient descent, with momentum unless it is 0.

    With `g` the gradient and `v` the velocity (Sutskever et al. 2013, as TensorFlow writes it):
    `v = momentum * v - learning_rate * g`, then `w += v`, or
    `w += momentum * v - learning_rate * g` with `nesterov`.

    Args:
        learning_rate: a number of at least 0, or a callable; see `Optimizer`.
        momentum: from 0 to 1.
        nesterov: whether to use Nesterov's momentum.
        **options: see `OptimizerOptions`.

    Raises:
        ValueError: momentum is not from 0 to 1, or the learning rate is negative or not finite.
        TypeError: the learning rate is not a number.

    Examples:
        Two steps with a gradient of 1, without momentum and with:

        >>> def two_steps(optimizer):
        ...     w = hs.Variable(np.zeros(1))
        ...     for _ in range(2):
        ...         optimizer.apply_gradients([(np.ones(1), w)])
        ...     return w.numpy()
        >>> two_steps(hs.optimizers.SGD(1.0))
        array([-2.])
        >>> two_steps(hs.optimizers.SGD(1.0, momentum=0.5))  # 1, then 1 + 0.5
        array([-2.5])
        >>> two_steps(hs.optimizers.SGD(1.0, momentum=0.5, nesterov=True))  # 1 + 0.5, then 1 + 0.75
        array([-3.25])
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(learning_rate, **options)
        self.momentum: float = number_in("SGD", "momentum", momentum)
        self.nesterov: bool = bool(nesterov)

    @property
    def slots(self) -> dict[str, float]:
        """See `Optimizer.slots`."""
        return {"momentum": 0.0} if self.momentum else {}

    @staticmethod
    def formula(
        value: Any,
        gradient: Any,
        velocity: Any = None,
        *,
        learning_rate: Any,
        momentum: Any,
        nesterov: bool,
    ) -> Any:
        """See `Optimizer.formula`."""
        change = learning_rate * gradient
        if velocity is None:
            return value - change
        velocity = momentum * velocity - change
        return value + (momentum * velocity - change if nesterov else velocity), velocity


@final
class Lion(Optimizer):
    """Lion (Chen et al. 2023, algorithm 2): `w -= learning_rate sign(beta_1 m + (1 - beta_1) g)`.

    Then `m = beta_2 m + (1 - beta_2) g`. The paper's weight decay is the option of that name.

    Args:
        learning_rate: a number of at least 0, or a callable; see `Optimizer`. A tenth to a third of
            Adam's is usual.
        beta_1: the share of the momentum in the step, above 0 and at most 1.
        beta_2: the decay of the momentum, above 0 and at most 1.
        **options: see `OptimizerOptions`.

    Raises:
        ValueError: a decay is out of range, or the learning rate is negative or not finite.
        TypeError: an argument is not a number.

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

    def __init__(
        self,
        learning_rate: LearningRate = 0.0001,
        beta_1: float = 0.9,
        beta_2: float = 0.99,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(learning_rate, **options)
        self.beta_1: float = number_in("Lion", "beta_1", beta_1, ABOVE_0)
        self.beta_2: float = number_in("Lion", "beta_2", beta_2, ABOVE_0)

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
