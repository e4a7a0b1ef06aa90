"""JAX's MNIST classifier from scratch (jax-ml/jax, examples, Apache-2.0 licence), on small digits.

    python examples/ported/jax_mnist/before.py

A perceptron of `jax.numpy` functions; `jax.grad` derives its gradients, `jax.jit` compiles.
Digits of 8 x 8 pixels in place of MNIST's, and a smaller network.
"""

import itertools
import pathlib

import jax  # pyright: ignore[reportMissingImports]
import numpy as np
from jax import numpy as jnp  # pyright: ignore[reportMissingImports]

LAYERS = 64, 128, 128, 10
SCALE = 0.1
STEP_SIZE = 0.5
EPOCHS = 8
BATCH_SIZE = 128


def load_data():
    """1437 images with one-hot digits, shapes (n, 64) and (n, 10), and 360 to test."""
    images, digits = np.load(pathlib.Path(__file__).parents[2] / "digits.npz").values()
    order = np.random.default_rng(0).permutation(len(images))
    images, targets = (images[order] / 16).astype(np.float32), np.eye(10, dtype=np.float32)[digits]
    return (images[:1437], targets[order][:1437]), (images[1437:], targets[order][1437:])


def initial_params():
    random = np.random.default_rng(0)
    return [
        (
            (SCALE * random.standard_normal((m, n))).astype(np.float32),
            (SCALE * random.standard_normal(n)).astype(np.float32),
        )
        for m, n in itertools.pairwise(LAYERS)
    ]


def predict(params, inputs):
    for w, b in params[:-1]:
        inputs = jnp.tanh(inputs @ w + b)
    w, b = params[-1]
    return jax.nn.log_softmax(inputs @ w + b)


@jax.jit
def loss(params, batch):
    inputs, targets = batch
    return -jnp.mean(predict(params, inputs) * targets)


@jax.jit
def accuracy(params, batch):
    inputs, targets = batch
    return jnp.mean(predict(params, inputs).argmax(axis=1) == targets.argmax(axis=1))


def data_stream(inputs, targets):
    random = np.random.default_rng(0)
    while True:
        order = random.permutation(len(inputs))
        for start in range(0, len(inputs), BATCH_SIZE):
            part = order[start : start + BATCH_SIZE]
            yield inputs[part], targets[part]


@jax.jit
def update(params, batch):
    grads = jax.grad(loss)(params, batch)
    return jax.tree.map(lambda p, d: p - STEP_SIZE * d, params, grads)


def main():
    train, test = load_data()
    batches = data_stream(*train)
    params = initial_params()
    history = []
    for epoch in range(EPOCHS):
        for _ in range(-(-len(train[0]) // BATCH_SIZE)):
            params = update(params, next(batches))
        history.append([loss(params, train), accuracy(params, train), accuracy(params, test)])
        print("epoch {}: loss {:.6f}, accuracy {:.4f}, of tests {:.4f}".format(epoch, *history[-1]))
    return history


if __name__ == "__main__":
    main()
