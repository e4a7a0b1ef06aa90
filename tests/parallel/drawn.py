"""Random numbers as gradients, whose sums over the ranks are the same in any order if need be."""

import numpy as np


def numbers(random, shape, dtype, exact):
    """Numbers from -0.5 to 0.5 of this generator.

    NCCL adds up in another order in each of its operations. Where gradients cancel, an optimizer
    that divides by their size makes any difference of what is left of them.

    Args:
        exact: multiples of 1/256, of which even float16 holds the sums of eight ranks.
    """
    values = random.random(shape) - 0.5
    return (np.round(values * 256) / 256 if exact else values).astype(dtype)
