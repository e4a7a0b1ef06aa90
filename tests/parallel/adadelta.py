"""An optimizer as a program writes one: of public names only."""

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

    def update_rule(self, learning_rate, step):
        rho, epsilon = self.rho, self.epsilon

        def apply(value, gradient, slots, scratch):
            squares, changes = slots
            squares += (1 - rho) * (gradient**2 - squares)
            np.divide(changes + epsilon, squares + epsilon, out=scratch)
            change = np.sqrt(scratch) * gradient
            changes += (1 - rho) * (change**2 - changes)
            value -= learning_rate * change

        constants = {"learning_rate": learning_rate, "rho": rho, "epsilon": epsilon}
        return hs.optimizers.UpdateRule(apply, constants)
