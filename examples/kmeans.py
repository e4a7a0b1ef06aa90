"""Sorts handwritten digits into clusters by k-means, without knowing the digits.

    mpirun -n 4 python examples/kmeans.py

Each replica assigns its images to the nearest centres; the sums over all replicas give the new
centres. The method is Lloyd's (1982); the first centres are drawn by k-means++ (Arthur and
Vassilvitskii 2007).
"""

import argparse
import pathlib

import numpy as np

import hpcstrat as hs


def initial_centres(images, count, seed):
    """Images that are far from each other, of shape (count, pixels)."""
    random = np.random.default_rng(seed)
    centres = [images[random.integers(len(images))]]
    while len(centres) < count:
        squares = np.min([((images - centre) ** 2).sum(axis=1) for centre in centres], axis=0)
        centres.append(images[random.choice(len(images), p=squares / squares.sum())])
    return np.array(centres)


def nearest(xp, images, centres):
    """The index of each image's nearest centre, and its squared distance: both of shape (n,)."""
    squares = (images**2).sum(axis=1)[:, None] - 2 * images @ centres.T + (centres**2).sum(axis=1)
    return squares.argmin(axis=1), xp.maximum(squares.min(axis=1), 0)


def main():
    parser = argparse.ArgumentParser(description="k-means of handwritten digits.")
    parser.add_argument("--clusters", type=int, default=10, help="how many (%(default)s)")
    parser.add_argument(
        "--batch-size",
        type=int,
        default=512,
        help="images at a time, of all replicas (%(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first centres (%(default)s)")
    parser.add_argument("--plot", metavar="FILE", help="draws the distances and the centres")
    options = parser.parse_args()

    strategy = hs.CentralStorageStrategy()
    xp = strategy.xp
    images, digits = np.load(pathlib.Path(__file__).with_name("digits.npz")).values()
    images = images / 16
    with strategy.scope():
        centres = hs.Variable(initial_centres(images, options.clusters, options.seed))
        sums = hs.Variable(np.zeros_like(centres.numpy()), aggregation="SUM")
        counts = hs.Variable(np.zeros(options.clusters), aggregation="SUM")
        distance = hs.metrics.Sum()
    dataset = hs.data.Dataset.from_tensor_slices((images, digits)).batch(options.batch_size)
    batches = strategy.experimental_distribute_dataset(dataset)

    def assign(images, digits):
        chosen, squares = nearest(xp, images, centres.value())
        is_chosen = chosen[:, None] == xp.arange(options.clusters)
        members = is_chosen.astype(images.dtype)  # one-hot, of shape (n, clusters)
        sums.assign_add(members.T @ images)
        counts.assign_add(members.sum(axis=0))
        distance.update_state(squares)

    def count_digits(images, digits):
        chosen, _ = nearest(xp, images, centres.value())
        of_cluster = chosen[:, None] == xp.arange(options.clusters)
        of_digit = digits[:, None] == xp.arange(10)
        return (of_cluster.astype(np.int64).T @ of_digit.astype(np.int64))[None]

    totals = []
    for iteration in range(1, 101):
        for variable in (sums, counts):
            variable.assign(np.zeros(variable.shape))
        distance.reset_state()
        for batch in batches:
            strategy.run(assign, args=batch)
        totals.append(float(distance.result()))
        print(f"iteration {iteration:2}: sum of squared distances {totals[-1]:.4f}", flush=True)
        if len(totals) > 1 and totals[-1] >= totals[-2] - 1e-9:
            break
        old = centres.numpy()
        some = counts.numpy()[:, None]
        centres.assign(np.where(some > 0, sums.numpy() / np.maximum(some, 1), old))

    if options.plot:
        from pictures import kmeans

        hs.on_lead(kmeans, options.plot, totals, centres.numpy())

    table = sum(
        strategy.reduce("SUM", strategy.run(count_digits, args=batch), axis=0) for batch in batches
    )
    table = hs.asnumpy(table)
    print(f"images in a cluster of mostly their digit: {table.max(axis=1).sum() / table.sum():.4f}")


if __name__ == "__main__":
    main()
