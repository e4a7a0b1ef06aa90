"""An optimizer as a program would write it: with public names only."""

import numpy as np

import hpcstrat as hs


class Adadelta(hs.optimizers.Optimizer):
    """Adadelta (Zeiler 2012)."""

    def __init__(self, learning_rate=1.0, rho=0.95, epsilon=1e-6, *, global_clipnorm=None):
        super().__init__(learning_rate, global_clipnorm)
        self.rho, self.epsilon = rho, epsilon

    @property
    def slots(self):
        return {"squares": 0.0, "changes": 0.0}

    @staticmethod
    def formula(value, gradient, squares, changes, *, learning_rate, rho, epsilon):
        squares = squares + (1 - rho) * (gradient**2 - squares)
        change = np.sqrt((changes + epsilon) / (squares + epsilon)) * gradient
        return value - learning_rate * change, squares, changes + (1 - rho) * (change**2 - changes)
