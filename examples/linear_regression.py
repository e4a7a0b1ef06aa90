"""Fits a linear model to a file: each replica reads only its share of a batch at a time.

    mpirun -n 4 python examples/linear_regression.py

The file is a `.npy` that the lead makes first: rows of features, with the target in the last
column.
"""

import argparse
import os
import tempfile

import numpy as np

import hpcstrat as hs

FEATURES = 20


def make_file(path, rows):
    """Writes rows of float32: normal features, and a target, their weighted sum plus noise."""
    random = np.random.default_rng(0)
    table = np.lib.format.open_memmap(path, "w+", np.float32, (rows, FEATURES + 1))
    for start in range(0, rows, 10_000):
        block = random.standard_normal((min(10_000, rows - start), FEATURES + 1)).astype(np.float32)
        block[:, -1] = block[:, :-1] @ true_weights() + 0.1 * block[:, -1]
        table[start : start + len(block)] = block
    table.flush()


def true_weights():
    """The weights that the data was made with, of shape (FEATURES,)."""
    return np.linspace(-1, 1, FEATURES, dtype=np.float32)


def main():
    parser = argparse.ArgumentParser(description="Linear regression on a file.")
    parser.add_argument("--rows", type=int, default=100_000, help="rows of the file (%(default)s)")
    parser.add_argument(
        "--batch-size", type=int, default=1000, help="rows per step, of all replicas (%(default)s)"
    )
    parser.add_argument("--epochs", type=int, default=3, help="passes over the file (%(default)s)")
    options = parser.parse_args()

    strategy = hs.CentralStorageStrategy()
    folder = hs.broadcast_object(tempfile.mkdtemp() if hs.is_lead() else None)
    path = os.path.join(folder, "table.npy")
    if hs.is_lead():
        make_file(path, options.rows)
    hs.barrier()

    table = np.load(path, mmap_mode="r")  # rows are read when they are indexed
    dataset = (
        hs.data.Dataset.from_tensor_slices(table)
        .shuffle(options.rows, seed=0)
        .batch(options.batch_size)
    )
    batches = strategy.experimental_distribute_dataset(dataset)
    with strategy.scope():
        weights = hs.Variable(np.zeros(FEATURES, np.float32))
        optimizer = hs.optimizers.SGD(0.1)
        loss = hs.metrics.Mean()

    def step(rows):
        features, targets = rows[:, :-1], rows[:, -1]
        errors = features @ weights.value() - targets
        optimizer.apply_gradients([(2 * features.T @ errors / options.batch_size, weights)])
        loss.update_state(errors**2)

    for epoch in range(1, options.epochs + 1):
        loss.reset_state()
        for batch in batches:
            strategy.run(step, args=(batch,))
        print(f"epoch {epoch}: mean squared error {loss.result():.6f}", flush=True)
    print(f"largest error of a weight: {np.abs(weights.numpy() - true_weights()).max():.4f}")

    hs.barrier()
    if hs.is_lead():
        os.remove(path)
        os.rmdir(folder)


if __name__ == "__main__":
    main()
