"""JAX's MNIST classifier with hpcstrat: the same steps on any number of replicas.

    mpirun -n 4 python examples/ported/jax_mnist/after.py

The strategy splits the batches that the generator makes. Losses and correct answers are sums over
a replica's part, and so are the gradients: `all_reduce` adds up those of all replicas, and the
numbers of images, which differ in the last batch.
"""

import itertools
import pathlib

import jax  # pyright: ignore[reportMissingImports]
import numpy as np
from jax import numpy as jnp  # pyright: ignore[reportMissingImports]

import hpcstrat as hs

LAYERS = 64, 128, 128, 10
SCALE = 0.1
STEP_SIZE = 0.5
EPOCHS = 8
BATCH_SIZE = 128


def as_jax(nest):
    """JAX's arrays: over the same memory, which only DLPack keeps; numbers have none."""
    return jax.tree.map(lambda x: jnp.from_dlpack(x) if np.ndim(x) else jnp.asarray(x), nest)


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
    return -jnp.sum(predict(params, inputs) * targets) / 10


@jax.jit
def correct(params, batch):
    inputs, targets = batch
    return jnp.sum(predict(params, inputs).argmax(axis=1) == targets.argmax(axis=1))


def data_stream(inputs, targets):
    random = np.random.default_rng(0)
    while True:
        order = random.permutation(len(inputs))
        for start in range(0, len(inputs), BATCH_SIZE):
            part = order[start : start + BATCH_SIZE]
            yield inputs[part], targets[part]


gradients_of = jax.jit(jax.grad(loss))


@jax.jit
def descend(params, grads, n):
    return jax.tree.map(lambda p, d: p - STEP_SIZE * d / n, params, grads)


def update(params, batch):
    grads = gradients_of(params, as_jax(batch))
    replica = hs.get_replica_context()
    return descend(params, *as_jax(replica.all_reduce("SUM", (grads, len(batch[0])))))


def evaluate(params, train, test):
    train, test = as_jax((train, test))
    return loss(params, train), correct(params, train), correct(params, test)


def main():
    strategy = hs.MirroredStrategy()
    train, test = load_data()
    batches = iter(strategy.experimental_distribute_dataset(lambda: data_stream(*train)))
    parts = strategy.scatter(train), strategy.scatter(test)
    params = initial_params()
    history = []
    for epoch in range(EPOCHS):
        for _ in range(-(-len(train[0]) // BATCH_SIZE)):
            params = strategy.run(update, args=(params, next(batches)))
        sums = strategy.reduce("SUM", strategy.run(evaluate, args=(params, *parts)), axis=None)
        counts = len(train[0]), len(train[0]), len(test[0])
        history.append([total / n for total, n in zip(sums, counts, strict=True)])
        print("epoch {}: loss {:.6f}, accuracy {:.4f}, of tests {:.4f}".format(epoch, *history[-1]))
    return history


if __name__ == "__main__":
    main()
