"""Stochastic gradient descent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from hpcstrat.optimizers._fields import FROM_0_TO_1, LearningRate, any_bool, checked
from hpcstrat.optimizers._optimizer import Optimizer


@final
@dataclass(eq=False, repr=False)
class SGD(Optimizer):
    """Gradient descent, with momentum unless it is 0.

    With `g` the gradient and `v` the velocity (Sutskever et al. 2013, as TensorFlow writes it):
    `v = momentum * v - learning_rate * g`, then `w += v`, or
    `w += momentum * v - learning_rate * g` with `nesterov`.

    Args:
        learning_rate: see `Optimizer`, as are the keyword arguments.
        momentum: from 0 to 1.
        nesterov: whether to use Nesterov's momentum.

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

    learning_rate: LearningRate = 0.01
    momentum: float = checked(0.0, FROM_0_TO_1)
    nesterov: bool = checked(False, any_bool)

    @property
    def slots(self) -> dict[str, float]:
        """See `Optimizer.slots`."""
        return {"momentum": 0.0} if self.momentum else {}

    def numbers(self, rate: float, step: int) -> dict[str, Any]:
        """See `Optimizer.numbers`."""
        return {"rate": rate, "momentum": self.momentum, "nesterov": self.nesterov}

    @staticmethod
    def formula(
        value: Any, gradient: Any, velocity: Any = None, *, rate: Any, momentum: Any, nesterov: bool
    ) -> Any:
        """See `Optimizer.formula`."""
        change = rate * gradient
        if velocity is None:
            return value - change
        velocity = momentum * velocity - change
        return value + (momentum * velocity - change if nesterov else velocity), velocity
