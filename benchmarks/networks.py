"""The networks of host_step.py and tensorflow_step.py in plain NumPy: perceptrons with ReLU."""

import itertools

import numpy as np

NETWORKS = {  # layers: (batch per replica, steps per round)
    (64, 32, 10): (32, 200),
    (64, 128, 64, 10): (64, 100),
    (1024, 2048, 2048, 1024): (16, 3),
}
RATE, MOMENTUM = 1e-4, 0.9  # of SGD


def initial(layers):
    """The initial weights and biases of each layer."""
    random = np.random.default_rng(0)
    for a, b in itertools.pairwise(layers):
        yield random.normal(0, (2 / a) ** 0.5, (a, b)).astype(np.float32)
        yield np.zeros(b, np.float32)


def data(layers, batch, replica):
    """A replica's inputs and targets."""
    random = np.random.default_rng(replica)
    return random.random((batch, layers[0]), np.float32), random.random(
        (batch, layers[-1]), np.float32
    )


def gradients(weights, x, y, out=None):
    """The gradients of half the squared error over the batch, in the order of the weights.

    They are written to `out`, or to new arrays.
    """
    out = [None] * len(weights) if out is None else out
    inputs = [x]
    for w, b in zip(weights[:-2:2], weights[1:-2:2], strict=True):
        inputs.append(np.maximum(inputs[-1] @ w + b, 0))
    d = (inputs[-1] @ weights[-2] + weights[-1] - y) / len(x)
    found = []
    for i in range(len(inputs) - 1, -1, -1):
        found += [np.sum(d, axis=0, out=out[2 * i + 1]), np.matmul(inputs[i].T, d, out=out[2 * i])]
        if i:
            d = (d @ weights[2 * i].T) * (inputs[i] > 0)
    return found[::-1]
