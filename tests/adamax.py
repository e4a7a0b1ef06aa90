"""A user-defined optimizer: TensorFlow's Adamax, in numbers and a formula."""

import dataclasses

import numpy as np

import hpcstrat as hs


@dataclasses.dataclass(eq=False, repr=False)
class Adamax(hs.optimizers.Optimizer):
    """Adamax (Kingma and Ba 2015, section 7.1)."""

    learning_rate: float = 0.001
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7

    slots = {"m": 0.0, "u": 0.0}

    def numbers(self, rate, step):
        return {
            "rate": rate / (1 - self.beta_1**step),
            "new": 1 - self.beta_1,
            "keep": self.beta_2,
            "epsilon": self.epsilon,
        }

    @staticmethod
    def formula(value, gradient, m, u, *, rate, new, keep, epsilon):
        m = m + new * (gradient - m)
        u = np.maximum(keep * u, np.absolute(gradient))
        return value - rate * (m / (u + epsilon)), m, u
