"""Learns to read handwritten digits in a job that may be stopped and resumed at any time.

    mpirun -n 4 python examples/resume.py --checkpoint run/checkpoint

On SIGUSR1 or SIGTERM all replicas finish their step, save, and exit with status 75. The same
command then continues with the next step, and ends with the same numbers as an uninterrupted run.
"""

import argparse
import pathlib

import numpy as np

import hpcstrat as hs


def load_data():
    """1797 images of 8 x 8 pixels, and their digits, as a dataset."""
    images, digits = np.load(pathlib.Path(__file__).with_name("digits.npz")).values()
    return hs.data.Dataset.from_tensor_slices(((images / 16).astype(np.float32), digits))


def main():
    parser = argparse.ArgumentParser(
        description="Learns to read handwritten digits, and may be stopped at any time."
    )
    parser.add_argument(
        "--checkpoint", default="checkpoint", help="file to save to and resume from (%(default)s)"
    )
    parser.add_argument(
        "--epochs", type=int, default=20, help="passes over the images (%(default)s)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=64, help="images per step, of all replicas (%(default)s)"
    )
    parser.add_argument("--learning-rate", type=float, default=0.01, help="of Adam (%(default)s)")
    options = parser.parse_args()

    strategy = hs.CentralStorageStrategy()
    with strategy.scope():
        w, b = hs.Variable(np.zeros((64, 10), np.float32)), hs.Variable(np.zeros(10, np.float32))
        optimizer = hs.optimizers.Adam(options.learning_rate)
        loss = hs.metrics.Mean()
        epoch = hs.Variable(0, dtype=np.int64)  # epochs done; a variable, to be saved
        history = hs.Variable(np.zeros(options.epochs))  # their losses

    def train_step(images, digits):
        losses, d_scores = hs.losses.softmax_cross_entropy(digits, images @ w.value() + b.value())
        d_scores /= options.batch_size
        optimizer.apply_gradients([(images.T @ d_scores, w), (d_scores.sum(axis=0), b)])
        loss.update_state(losses)

    data = load_data()
    data = data.shuffle(len(data), seed=0).batch(options.batch_size)
    batches = strategy.experimental_distribute_dataset(data)

    # Everything that the next step depends on. The loop iterates over `batches`: its place in the
    # epoch is saved too.
    checkpoint = hs.checkpoint.Checkpoint(
        model={"w": w, "b": b},
        optimizer=optimizer,
        batches=batches,
        loss=loss,
        epoch=epoch,
        history=history,
    )
    with hs.checkpoint.CheckpointManager(checkpoint, options.checkpoint) as manager:
        if manager.restore_or_initialize():
            print(f"continues in epoch {int(epoch) + 1}, after step {manager.steps}")
        while int(epoch) < options.epochs:
            for batch in batches:  # after a restore: the rest of the interrupted epoch
                strategy.run(train_step, args=batch)
                manager.step()  # saves and exits if a signal has arrived
            losses = history.numpy()
            losses[int(epoch)] = loss.result()
            history.assign(losses)
            loss.reset_state()
            epoch.assign_add(1)
            manager.save()  # after every epoch, so that a crash costs at most one
            print(f"epoch {int(epoch)} is done", flush=True)

    for number, value in enumerate(history.numpy(), start=1):
        print(f"epoch {number:2}: loss {value:.12f}")


if __name__ == "__main__":
    main()
