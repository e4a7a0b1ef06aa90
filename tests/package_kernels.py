"""The kernels that the package can launch on a GPU, for each optimizer and dtype."""

import ml_dtypes
import numpy as np
from lamb import LAMB

from hpcstrat import optimizers

DTYPES = [
    *map(np.dtype, ("float32", "float64", "float16", "complex64", "complex128")),
    np.dtype(ml_dtypes.bfloat16),
]


class Choosing(optimizers.Optimizer):
    """Uses all functions that the package's own formulas do not use.

    Not for complex numbers, which have no order.
    """

    @property
    def slots(self):
        return {"largest": 0.0}

    @staticmethod
    def formula(value, gradient, largest, *, learning_rate):
        largest = np.maximum(largest, np.minimum(abs(gradient), 2.0))
        value = np.where(abs(gradient) < np.inf, value, np.nan)
        return np.where(
            gradient < 0, value + np.sign(gradient), value - learning_rate * gradient**2
        ), -largest


OPTIMIZERS = {
    "SGD": optimizers.SGD(0.1),
    "SGD with momentum": optimizers.SGD(0.1, 0.9),
    "SGD with Nesterov's momentum": optimizers.SGD(0.1, 0.9, nesterov=True),
    "Adam": optimizers.Adam(0.1),
    "AdamW": optimizers.AdamW(0.1),
    "Adamax": optimizers.Adamax(0.1),
    "Nadam": optimizers.Nadam(0.1),
    "Adadelta": optimizers.Adadelta(0.1),
    "Lion": optimizers.Lion(0.1),
    "Ftrl": optimizers.Ftrl(0.1, l1_regularization_strength=0.1, beta=0.1),
    "Ftrl without roots": optimizers.Ftrl(0.1, learning_rate_power=-1),
    "Ftrl without power": optimizers.Ftrl(0.1, learning_rate_power=0),
    "Adagrad": optimizers.Adagrad(0.1),
    "RMSprop": optimizers.RMSprop(0.1),
    "RMSprop with momentum": optimizers.RMSprop(0.1, momentum=0.5),
    "RMSprop, centered": optimizers.RMSprop(0.1, centered=True),
    "RMSprop, centered, with momentum": optimizers.RMSprop(0.1, momentum=0.5, centered=True),
}
"""One of each form of an optimizer's kernel."""


def optimizers_of(dtype):
    """The optimizers that variables of this dtype can have, by name."""
    options = {
        "clipped norms": optimizers.SGD(0.1, 0.9, clipnorm=0.5),
        "averages": optimizers.SGD(0.1, use_ema=True, weight_decay=0.1),
        "averages that overwrite": optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
    }
    every = OPTIMIZERS | options | {"norms": LAMB(0.1)}
    if dtype.kind == "c":
        ordered = optimizers.Adamax, optimizers.Lion, optimizers.Ftrl
        return {name: one for name, one in every.items() if not isinstance(one, ordered)}
    clipped = {"clipped values": optimizers.SGD(0.1, 0.9, clipvalue=0.5)}
    return every | clipped | {"choices": Choosing(0.1)}


def with_norms_of_norms(dtype):
    """Optimizers whose norms depend on other norms, by name."""
    return {
        "norms of norms": LAMB(0.1, clipnorm=0.5),
        "norms of a norm of all": LAMB(0.1, global_clipnorm=0.5),
    }
