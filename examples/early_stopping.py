"""Stops when the validation accuracy no longer improves, keeps the best weights, and can resume.

    mpirun -n 4 python examples/early_stopping.py --folder run

Softmax regression on handwritten digits. Every epoch saves everything; the best weights so far have
their own file. After a kill, start it again with the same folder, on any number of ranks, and it
continues after the last epoch.
"""

import argparse
import os
import pathlib

import numpy as np

import hpcstrat as hs


def main():
    parser = argparse.ArgumentParser(description="Early stopping.")
    parser.add_argument("--folder", default="checkpoints", help="for the checkpoints (%(default)s)")
    parser.add_argument(
        "--patience",
        type=int,
        default=3,
        help="epochs without improvement before it stops (%(default)s)",
    )
    parser.add_argument(
        "--epochs",
        type=int,
        default=100,
        help="most epochs, counted from the first start (%(default)s)",
    )
    options = parser.parse_args()

    strategy = hs.CentralStorageStrategy()
    images, digits = np.load(pathlib.Path(__file__).with_name("digits.npz")).values()
    order = np.random.default_rng(0).permutation(len(images))
    images, digits = (images[order] / 16).astype(np.float32), digits[order]
    train = (
        hs.data.Dataset.from_tensor_slices((images[:1400], digits[:1400]))
        .shuffle(1400, seed=0)
        .batch(50)
    )
    held_back = hs.data.Dataset.from_tensor_slices((images[1400:], digits[1400:])).batch(200)
    train, held_back = (
        strategy.experimental_distribute_dataset(dataset) for dataset in (train, held_back)
    )
    with strategy.scope():
        weights = hs.Variable(np.zeros((64, 10), np.float32))
        optimizer = hs.optimizers.Adam(0.05)
        accuracy = hs.metrics.SparseCategoricalAccuracy()
        epoch, best_epoch = (hs.Variable(0, dtype=np.int64) for _ in range(2))
        best = hs.Variable(0.0, dtype=np.float64)

    def step(images, digits):
        _, d_scores = hs.losses.softmax_cross_entropy(digits, images @ weights.value())
        optimizer.apply_gradients([(images.T @ d_scores / 50, weights)])

    def test(images, digits):
        accuracy.update_state(digits, images @ weights.value())

    last_file, best_file = (os.path.join(options.folder, name) for name in ("last", "best"))
    state = hs.checkpoint.Checkpoint(
        weights=weights,
        optimizer=optimizer,
        epoch=epoch,
        best=best,
        best_epoch=best_epoch,
        train=train,
    )
    model = hs.checkpoint.Checkpoint(weights=weights)
    if hs.any_rank(os.path.exists(last_file)):
        state.restore(last_file)
        print(f"continues after epoch {int(epoch.numpy())}")

    while (
        int(epoch.numpy()) < options.epochs
        and int(epoch.numpy()) - int(best_epoch.numpy()) < options.patience
    ):
        for batch in train:
            strategy.run(step, args=batch)
        epoch.assign_add(1)
        accuracy.reset_state()
        for batch in held_back:
            strategy.run(test, args=batch)
        result = float(accuracy.result())
        print(f"epoch {int(epoch.numpy()):2}: accuracy {result:.4f}", flush=True)
        if result > float(best.numpy()):
            best.assign(result)
            best_epoch.assign(epoch.numpy())
            model.save(best_file)
        state.save(last_file)

    model.restore(best_file)
    print(f"best: epoch {int(best_epoch.numpy())}, accuracy {float(best.numpy()):.4f}")


if __name__ == "__main__":
    main()
