"""A user-defined optimizer whose updates use norms of whole variables."""

import numpy as np

import hpcstrat as hs


class LAMB(hs.optimizers.Optimizer):
    """LAMB (You et al. 2020, algorithm 2): Adam's update, scaled by the norm of each variable."""

    def __init__(
        self,
        learning_rate=0.001,
        beta_1=0.9,
        beta_2=0.999,
        epsilon=1e-6,
        weight_decay=0.01,
        **options,
    ):
        super().__init__(learning_rate, **options)
        self.beta_1, self.beta_2, self.epsilon, self.weight_decay = (
            beta_1,
            beta_2,
            epsilon,
            weight_decay,
        )

    @property
    def slots(self):
        return {"m": 0.0, "v": 0.0}

    @staticmethod
    def formula(
        value, gradient, m, v, *, learning_rate, beta_1, beta_2, epsilon, weight_decay, step
    ):
        m = beta_1 * m + (1 - beta_1) * gradient
        v = beta_2 * v + (1 - beta_2) * gradient**2
        update = (
            m / (1 - beta_1**step) / (np.sqrt(v / (1 - beta_2**step)) + epsilon)
            + weight_decay * value
        )
        ours, its = np.linalg.norm(value), np.linalg.norm(update)
        trust = np.where(ours > 0, np.where(its > 0, ours / its, 1), 1)
        return value - learning_rate * trust * update, m, v
