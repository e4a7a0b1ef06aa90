"""Stochastic gradient descent."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import final

import numpy as np

from hpcstrat._storage.base import Array
from hpcstrat._storage.rule import Kernel, UpdateRule
from hpcstrat.optimizers.base import LearningRate, Optimizer

_PLAIN = Kernel("sgd", (), ("learning_rate",), "value -= learning_rate * gradient;")
_MOMENTUM = Kernel(
    "sgd_momentum",
    ("velocity",),
    ("learning_rate", "momentum"),
    "velocity = momentum * velocity - learning_rate * gradient; value += velocity;",
)
_NESTEROV = _MOMENTUM._replace(
    name="sgd_nesterov",
    body="""
    const auto change = learning_rate * gradient;
    velocity = momentum * velocity - change;
    value += momentum * velocity - change;
    """,
)


@final
class SGD(Optimizer):
    """Gradient descent, with momentum if that is not 0.

    With `g` the gradient and `v` the velocity (Sutskever et al. 2013, as TensorFlow writes it):
    `v = momentum * v - learning_rate * g`, then `w += v`, or `w += momentum * v - learning_rate * g` with `nesterov`.

    Args:
        learning_rate: a number of at least 0, or a callable that gives one, without arguments or of the number of steps
            done.
        momentum: from 0 to 1.
        nesterov: whether to use Nesterov's momentum.
        global_clipnorm: the largest norm of the summed gradients, or `None`.
        name: a name.

    Raises:
        ValueError: momentum is not from 0 to 1, the learning rate negative or not finite.
        TypeError: the learning rate is no number.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        *,
        global_clipnorm: float | None = None,
        name: str = "SGD",
    ) -> None:
        if not 0 <= momentum <= 1:
            raise ValueError(f"SGD: momentum is {momentum!r}; it must be from 0 to 1")
        super().__init__(learning_rate, global_clipnorm, name)
        self.momentum: float = float(momentum)
        self.nesterov: bool = bool(nesterov)

    @property
    def slots(self) -> dict[str, float]:
        """See `Optimizer.slots`."""
        return {"momentum": 0.0} if self.momentum else {}

    def update_rule(self, learning_rate: float, step: int) -> UpdateRule:
        """See `Optimizer.update_rule`."""
        return _descent(learning_rate, self.momentum, self.nesterov)


@functools.lru_cache(maxsize=128)
def _descent(learning_rate: float, momentum: float, nesterov: bool) -> UpdateRule:
    def descend(value: Array, gradient: Array, slots: Sequence[Array], scratch: Array) -> None:
        number = value.dtype.type
        np.multiply(gradient, number(learning_rate), out=gradient)
        if not slots:
            np.subtract(value, gradient, out=value)
            return
        (velocity,) = slots
        np.multiply(velocity, number(momentum), out=velocity)
        np.subtract(velocity, gradient, out=velocity)
        if nesterov:
            np.multiply(velocity, number(momentum), out=scratch)
            np.subtract(scratch, gradient, out=scratch)
            np.add(value, scratch, out=value)
        else:
            np.add(value, velocity, out=value)

    constants = {"learning_rate": learning_rate, "momentum": momentum, "nesterov": nesterov}
    if not momentum:
        return UpdateRule(descend, constants, _PLAIN, (learning_rate,))
    return UpdateRule(descend, constants, _NESTEROV if nesterov else _MOMENTUM, (learning_rate, momentum))
