"""Stochastic gradient descent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from hpcstrat._core.arrays import as_number
from hpcstrat.optimizers._optimizer import Optimizer

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
        learning_rate: a number of at least 0, or a callable that returns it; called without
            arguments or with the number of steps done.
        momentum: from 0 to 1.
        nesterov: whether to use Nesterov's momentum.
        **options: see `OptimizerOptions`.

    Raises:
        ValueError: momentum is not from 0 to 1, or the learning rate is negative or not finite.
        TypeError: the learning rate is not a number.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        if not 0 <= as_number("SGD", "momentum", momentum) <= 1:
            raise ValueError(f"SGD: momentum is {momentum!r}; it must be from 0 to 1")
        super().__init__(learning_rate, **options)
        self.momentum: float = float(momentum)
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
