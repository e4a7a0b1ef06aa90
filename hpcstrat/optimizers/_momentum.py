"""Optimizers with momentum: SGD, Lion, and Adam with its relatives AdamW, Adamax and Nadam."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, final

import numpy as np

from hpcstrat.optimizers._optimizer import Optimizer
from hpcstrat.optimizers._options import ABOVE_0, BELOW_1, FROM_0_TO_1, NOT_NEGATIVE, any_bool

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

    _checks = MappingProxyType({"momentum": FROM_0_TO_1, "nesterov": any_bool})

    def __init__(
        self,
        learning_rate: LearningRate = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(learning_rate, **options)
        self.momentum: float = momentum
        self.nesterov: bool = nesterov

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

    _checks = MappingProxyType({"beta_1": ABOVE_0, "beta_2": ABOVE_0})

    def __init__(
        self,
        learning_rate: LearningRate = 0.0001,
        beta_1: float = 0.9,
        beta_2: float = 0.99,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(learning_rate, **options)
        self.beta_1: float = beta_1
        self.beta_2: float = beta_2

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


class _Moments(Optimizer):
    """Their arguments and slots."""

    _checks = MappingProxyType({"beta_1": BELOW_1, "beta_2": BELOW_1, "epsilon": NOT_NEGATIVE})

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(learning_rate, **options)
        self.beta_1: float = beta_1
        self.beta_2: float = beta_2
        self.epsilon: float = epsilon

    @property
    def slots(self) -> dict[str, float]:
        """See `Optimizer.slots`."""
        return {"m": 0.0, "v": 0.0}


class Adam(_Moments):
    """Adam (Kingma and Ba 2014), as TensorFlow has it.

    This is the paper's algorithm 1 with the reformulation before section 2.1. In step t, with `g`
    the gradient: `m += (1 - beta_1) (g - m)`, `v += (1 - beta_2) (g^2 - v)` and
    `w -= learning_rate sqrt(1 - beta_2^t) / (1 - beta_1^t) m / (sqrt(v) + epsilon)`.

    Args:
        learning_rate: a number of at least 0, or a callable; see `Optimizer`.
        beta_1: the decay of the first moment, at least 0 and less than 1.
        beta_2: the decay of the second moment, at least 0 and less than 1.
        epsilon: keeps the divisor from 0; at least 0.
        **options: see `OptimizerOptions`.

    Raises:
        ValueError: a decay is out of range, or another number is negative or not finite.
        TypeError: an argument is not a number.

    Examples:
        The first step has the size of the learning rate unless the gradient is small next to
        `epsilon`:

        >>> def one_step(*arguments, **options):
        ...     w = hs.Variable(np.zeros(2))
        ...     optimizer = hs.optimizers.Adam(*arguments, **options)
        ...     optimizer.apply_gradients([(np.array([100.0, -0.01]), w)])
        ...     return w.numpy().round(4)
        >>> one_step(0.1)
        array([-0.1,  0.1])
        >>> one_step(0.1, epsilon=1e-3)  # the second sqrt(v) is 0.0003
        array([-0.1  ,  0.024])

        `beta_1` says how long old gradients last, here after the sign has changed:

        >>> def turn(beta_1):
        ...     w = hs.Variable(np.zeros(1))
        ...     optimizer = hs.optimizers.Adam(0.1, beta_1=beta_1)
        ...     for gradient in 1.0, 1.0, -1.0:
        ...         optimizer.apply_gradients([(np.array([gradient]), w)])
        ...     return w.numpy().round(3)
        >>> turn(0.9), turn(0.0)
        (array([-0.226]), array([-0.1]))
    """

    @staticmethod
    def formula(
        value: Any,
        gradient: Any,
        m: Any,
        v: Any,
        *,
        learning_rate: Any,
        beta_1: Any,
        beta_2: Any,
        epsilon: Any,
        step: Any,
    ) -> Any:
        """See `Optimizer.formula`."""
        rate = learning_rate * np.sqrt(1 - beta_2**step) / (1 - beta_1**step)
        m = m + (1 - beta_1) * (gradient - m)
        v = v + (1 - beta_2) * (gradient * gradient - v)
        return value - rate * (m / (np.sqrt(v) + epsilon)), m, v


@final
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019).

    Each step does `w -= learning_rate weight_decay w` first.

    Args:
        learning_rate: a number of at least 0, or a callable; see `Optimizer`.
        weight_decay: the decay, at least 0.
        beta_1: the decay of the first moment, at least 0 and less than 1.
        beta_2: the decay of the second moment, at least 0 and less than 1.
        epsilon: keeps the divisor from 0; at least 0.
        **options: see `OptimizerOptions`.

    Raises:
        ValueError: a decay of a moment is out of range, or another number is negative or not
            finite.
        TypeError: an argument is not a number.

    Examples:
        Where the gradient is 0, only the decay is left, by `1 - learning_rate * weight_decay`:

        >>> w = hs.Variable(np.array([8.0, -8.0]))
        >>> optimizer = hs.optimizers.AdamW(0.5, weight_decay=0.5)
        >>> optimizer.apply_gradients([(np.zeros(2), w)])
        >>> w.numpy()
        array([ 6., -6.])
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        weight_decay: float = 0.004,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        **options: Any,
    ) -> None:
        super().__init__(
            learning_rate, beta_1, beta_2, epsilon, weight_decay=weight_decay, **options
        )


@final
class Adamax(_Moments):
    """Adamax (Kingma and Ba 2014, algorithm 2), as TensorFlow has it.

    In step t: `m += (1 - beta_1) (g - m)`, `v = max(beta_2 v, |g|)` and
    `w -= learning_rate / (1 - beta_1^t) m / (v + epsilon)`.

    Args:
        learning_rate: a number of at least 0, or a callable; see `Optimizer`.
        beta_1: the decay of the first moment, at least 0 and less than 1.
        beta_2: the decay of the largest gradient, at least 0 and less than 1.
        epsilon: keeps the divisor from 0; at least 0.
        **options: see `OptimizerOptions`.

    Raises:
        ValueError: a decay is out of range, or another number is negative or not finite.
        TypeError: an argument is not a number.

    Examples:
        It divides by the largest gradient so far, which decays: 8, 4 and 2.

        >>> w, steps = hs.Variable(np.zeros(1)), []
        >>> optimizer = hs.optimizers.Adamax(1.0, beta_1=0.0, beta_2=0.5)
        >>> for gradient in 8.0, 1.0, 1.0:
        ...     optimizer.apply_gradients([(np.array([gradient]), w)])
        ...     steps.append(w.numpy().round(4))
        >>> steps
        [array([-1.]), array([-1.25]), array([-1.75])]
    """

    @staticmethod
    def formula(
        value: Any,
        gradient: Any,
        m: Any,
        v: Any,
        *,
        learning_rate: Any,
        beta_1: Any,
        beta_2: Any,
        epsilon: Any,
        step: Any,
    ) -> Any:
        """See `Optimizer.formula`."""
        m = m + (1 - beta_1) * (gradient - m)
        v = np.maximum(beta_2 * v, np.absolute(gradient))
        return value - learning_rate / (1 - beta_1**step) * (m / (v + epsilon)), m, v


@final
class Nadam(_Moments):
    """Adam with Nesterov's momentum (Dozat 2016), as TensorFlow has it.

    With `u_t = beta_1 (1 - 0.96^t / 2)` and `U_t = u_1 ... u_t`, in step t, `m` and `v` as in Adam:
    `n = u_(t+1) m / (1 - U_(t+1)) + (1 - u_t) g / (1 - U_t)` and
    `w -= learning_rate n / (sqrt(v / (1 - beta_2^t)) + epsilon)`.

    Args:
        learning_rate: a number of at least 0, or a callable; see `Optimizer`.
        beta_1: the decay of the first moment, at least 0 and less than 1.
        beta_2: the decay of the second moment, at least 0 and less than 1.
        epsilon: keeps the divisor from 0; at least 0.
        **options: see `OptimizerOptions`.

    Raises:
        ValueError: a decay is out of range, or another number is negative or not finite.
        TypeError: an argument is not a number.

    Examples:
        It looks a step ahead, so it follows a change of sign sooner than Adam:

        >>> for kind in hs.optimizers.Adam, hs.optimizers.Nadam:
        ...     w, optimizer = hs.Variable(np.zeros(1)), kind(0.1, beta_1=0.9)
        ...     for gradient in 1.0, -1.0:
        ...         optimizer.apply_gradients([(np.array([gradient]), w)])
        ...         print(kind.__name__, w.numpy().round(3))
        Adam [-0.1]
        Adam [-0.095]
        Nadam [-0.106]
        Nadam [-0.039]
    """

    # The number of steps in the product, beta_1, and the product.
    _product: tuple[int, float, float] = (0, 0.0, 1.0)

    @property
    def momentum_product(self) -> float:
        """`U_t` of the next step t.

        Examples:
            >>> round(hs.optimizers.Nadam(beta_1=0.5).momentum_product, 3)  # 0.5 (1 - 0.96 / 2)
            0.26
        """
        done, beta_1, product = self._product
        if done > self.iterations or beta_1 != self.beta_1:  # restored, or changed
            done, product = 0, 1.0
        for step in range(done + 1, self.iterations + 2):
            product *= self.beta_1 * (1 - 0.5 * 0.96**step)
        self._product = (self.iterations + 1, self.beta_1, product)
        return product

    @staticmethod
    def formula(
        value: Any,
        gradient: Any,
        m: Any,
        v: Any,
        *,
        learning_rate: Any,
        beta_1: Any,
        beta_2: Any,
        epsilon: Any,
        step: Any,
        momentum_product: Any,
    ) -> Any:
        """See `Optimizer.formula`."""
        now, following = (beta_1 * (1 - 0.5 * 0.96**t) for t in (step, step + 1))
        m = m + (1 - beta_1) * (gradient - m)
        v = v + (1 - beta_2) * (gradient * gradient - v)
        ahead = (
            following / (1 - momentum_product * following) * m
            + (1 - now) / (1 - momentum_product) * gradient
        )
        return value - learning_rate * (ahead / (np.sqrt(v / (1 - beta_2**step)) + epsilon)), m, v
