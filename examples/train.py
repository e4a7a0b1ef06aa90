"""Learns to read handwritten digits, on one replica per rank.

    mpirun -n 4 python examples/train.py

Four replicas split each batch and take the same steps as a single replica.
"""

import argparse
import itertools
import pathlib

import numpy as np

import hpcstrat as hs

STRATEGIES = {
    "central": hs.CentralStorageStrategy,
    "mirrored": hs.MirroredStrategy,
    "multi_worker": hs.MultiWorkerMirroredStrategy,
}
LAYERS = 64, 128, 64, 10  # pixels, two hidden layers, digits


# ---- the network, in plain NumPy or CuPy: `xp` is either


def initial_weights(seed):
    """w1, b1, w2, b2, w3, b3: random by He et al. (2015) and, for the biases, zero."""
    random = np.random.default_rng(seed)
    for inputs, outputs in itertools.pairwise(LAYERS):
        yield random.normal(0, (2 / inputs) ** 0.5, (inputs, outputs)).astype(np.float32)
        yield np.zeros(outputs, np.float32)


def forward(xp, weights, images):
    """The outputs of the three layers; the last are the scores of the digits, of shape (n, 10)."""
    w1, b1, w2, b2, w3, b3 = weights
    hidden1 = xp.maximum(images @ w1 + b1, 0)
    hidden2 = xp.maximum(hidden1 @ w2 + b2, 0)
    return hidden1, hidden2, hidden2 @ w3 + b3


def backward(weights, images, hidden1, hidden2, d_scores):
    """The gradients of the weights, summed over the images."""
    _, _, w2, _, w3, _ = weights
    d_hidden2 = d_scores @ w3.T * (hidden2 > 0)
    d_hidden1 = d_hidden2 @ w2.T * (hidden1 > 0)
    for inputs, d_outputs in (images, d_hidden1), (hidden1, d_hidden2), (hidden2, d_scores):
        yield inputs.T @ d_outputs
        yield d_outputs.sum(axis=0)


# ---- the data


def load_data(seed):
    """1797 shuffled images of 8 x 8 pixels, with digits: a training set, and a fifth to test."""
    images, digits = np.load(pathlib.Path(__file__).with_name("digits.npz")).values()
    images = (images / 16).astype(np.float32)
    order = np.random.default_rng(seed).permutation(len(images))
    train, test = np.split(order, [len(order) * 4 // 5])
    return [
        hs.data.Dataset.from_tensor_slices((images[part], digits[part])) for part in (train, test)
    ]


# ---- the program


def main():
    parser = argparse.ArgumentParser(description="Learns to read handwritten digits.")
    parser.add_argument(
        "--strategy", choices=STRATEGIES, default="central", help="multi_worker for several hosts"
    )
    parser.add_argument(
        "--epochs", type=int, default=10, help="passes over the training images (%(default)s)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=64, help="images per step, of all replicas (%(default)s)"
    )
    parser.add_argument(
        "--learning-rate", type=float, default=0.05, help="of SGD with momentum (%(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the split, the weights and the order (%(default)s)"
    )
    parser.add_argument("--plot", metavar="FILE", help="draws the learning curves")
    options = parser.parse_args()

    strategy = STRATEGIES[options.strategy]()  # one replica per rank
    xp = strategy.xp
    with strategy.scope():
        # With central storage they are stored once, and all replicas read them.
        weights = [hs.Variable(value) for value in initial_weights(options.seed)]
        optimizer = hs.optimizers.SGD(options.learning_rate, momentum=0.9)
        loss, accuracy = hs.metrics.Mean(), hs.metrics.SparseCategoricalAccuracy()

    def train_step(images, digits):  # on each replica's part of the batch, which may be empty
        values = [weight.value() for weight in weights]
        hidden1, hidden2, scores = forward(xp, values, images)
        losses, d_scores = hs.losses.softmax_cross_entropy(digits, scores)
        # All replicas divide by the same number, so their gradients add up to those of a single
        # replica with the whole batch.
        gradients = backward(values, images, hidden1, hidden2, d_scores / options.batch_size)
        # Sums over the replicas and updates once.
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
        loss.update_state(losses)
        accuracy.update_state(digits, scores)

    def test_step(images, digits):
        *_, scores = forward(xp, [weight.value() for weight in weights], images)
        accuracy.update_state(digits, scores)

    train, test = load_data(options.seed)
    replicas = strategy.num_replicas_in_sync
    print(f"images: {len(train)} to learn from, {len(test)} to test; replicas: {replicas}")

    # The last batch is smaller.
    train = train.shuffle(len(train), seed=options.seed).batch(options.batch_size)
    train_batches = strategy.experimental_distribute_dataset(train)
    history = []
    for epoch in range(1, options.epochs + 1):
        loss.reset_state()
        accuracy.reset_state()
        for batch in hs.progress(
            train_batches, desc=f"epoch {epoch}", total=len(train), leave=False
        ):
            strategy.run(train_step, args=batch)
        history.append((loss.result(), accuracy.result()))
        print("epoch {:2}: loss {:.6f}, accuracy {:.4f}".format(epoch, *history[-1]), flush=True)

    accuracy.reset_state()
    test_batches = strategy.experimental_distribute_dataset(test.batch(options.batch_size))
    for batch in test_batches:
        strategy.run(test_step, args=batch)
    test_accuracy = accuracy.result()
    print(f"test accuracy: {test_accuracy:.4f}")
    if options.plot:
        from pictures import learning

        hs.on_lead(learning, options.plot, history, test_accuracy)


if __name__ == "__main__":
    main()
