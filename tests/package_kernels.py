"""One optimizer of each form of the library's formulas, and of its options."""

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from hpcstrat.optimizers import SGD, Adagrad, Adam, AdamW, Lion, Optimizer, RMSprop

DTYPES = [
    *map(np.dtype, ("float32", "float64", "float16", "complex64", "complex128")),
    np.dtype(ml_dtypes.bfloat16),
]


class Choosing(Optimizer):
    """Uses all functions that the library's own formulas do not use."""

    slots = {"largest": 0.0}

    @staticmethod
    def formula(value, gradient, largest, *, rate):
        largest = np.maximum(largest, np.minimum(abs(gradient), 2.0))
        value = np.where(abs(gradient) < np.inf, value, np.nan)
        value = np.where(gradient != value, value, rate)
        moved = np.where(gradient < 0, value + np.sign(gradient), value - rate * gradient**2)
        return np.where(gradient == 0, value, moved), -largest


OPTIMIZERS = {
    "SGD": partial(SGD, 0.1),
    "SGD with momentum": partial(SGD, 0.1, 0.9),
    "SGD with Nesterov's momentum": partial(SGD, 0.1, 0.9, nesterov=True),
    "Adam": partial(Adam, 0.1),
    "Adagrad": partial(Adagrad, 0.1),
    "RMSprop": partial(RMSprop, 0.1),
    "RMSprop with momentum": partial(RMSprop, 0.1, momentum=0.5),
    "RMSprop, centered": partial(RMSprop, 0.1, centered=True),
    "RMSprop, centered, with momentum": partial(RMSprop, 0.1, momentum=0.5, centered=True),
}
OF_REALS = {"Lion": partial(Lion, 0.1)}
WITH_OPTIONS = {
    "AdamW": partial(AdamW, 0.1),
    "decay": partial(SGD, 0.1, weight_decay=0.1),
    "clipped norms": partial(SGD, 0.1, 0.9, clipnorm=0.5),
    "a clipped norm of all, and decay": partial(Adam, 0.1, global_clipnorm=0.5, weight_decay=0.1),
}
OF_REALS_WITH_OPTIONS = {
    "clipped values, and decay": partial(SGD, 0.1, 0.9, clipvalue=0.5, weight_decay=0.1),
    "choices": partial(Choosing, 0.1),
}


def optimizers_of(dtype, with_options=True):
    """Functions that make the optimizers that variables of this dtype can have, by name."""
    made = OPTIMIZERS | (WITH_OPTIONS if with_options else {})
    if dtype.kind != "c":  # complex numbers have no order
        made |= OF_REALS | (OF_REALS_WITH_OPTIONS if with_options else {})
    return made


def numbers_of(optimizer, step, dtype: Any = np.float64) -> dict[str, Any]:
    """What a formula is given beside the arrays, as numbers of this dtype."""
    given = optimizer.numbers(optimizer.learning_rate, step)
    kept = (bool, type(None))
    return {n: x if isinstance(x, kept) else np.asarray(x, dtype)[()] for n, x in given.items()}


def rule_of(optimizer, step):
    """The update of a step."""
    optimizer._state.iterations = step - 1
    return optimizer._rule()
