"""k-means of points in the plane on any number of replicas: before.py with hpcstrat.

    mpirun -n 4 python examples/ported/kmeans/after.py

Each replica has a part of the points. Two lines of `fit` communicate: its sums become those of all
points, and it ends when no replica's points have moved. The rest hands the points out and collects
their labels; `--gpu` is gone, because the strategy finds the GPUs.
"""

import argparse

import numpy as np

import hpcstrat as hs


def fit(xp, points, centres, max_iter):
    """Each point's cluster, of shape (n,), and the centres."""
    replica = hs.get_replica_context()
    labels = xp.full(len(points), -1)
    for _ in range(max_iter):
        squares = ((points[:, None] - centres) ** 2).sum(axis=2)
        previous, labels = labels, squares.argmin(axis=1)
        if replica.all_reduce("MIN", (labels == previous).all()):
            break
        members = (labels[:, None] == xp.arange(len(centres))).astype(points.dtype)
        sums, counts = replica.all_reduce("SUM", (members.T @ points, members.sum(axis=0)))
        centres = sums / counts[:, None]
    return labels, centres


def main():
    parser = argparse.ArgumentParser(description="k-means of points in the plane.")
    parser.add_argument("--n-clusters", type=int, default=2)
    parser.add_argument("--num", type=int, default=50_003, help="points in each cloud")
    parser.add_argument("--max-iter", type=int, default=20)
    options = parser.parse_args()
    strategy = hs.CentralStorageStrategy()
    xp = strategy.xp

    random = np.random.default_rng(0)
    samples = random.standard_normal((options.num, 2))
    points = np.concatenate([samples + 1, samples - 1])
    centres = points[random.choice(len(points), options.n_clusters, replace=False)]

    labels, centres = strategy.run(
        fit, args=(xp, strategy.scatter(points), xp.asarray(centres), options.max_iter)
    )
    labels = strategy.gather(labels, axis=0)
    centres = strategy.experimental_local_results(centres)[0]
    for i, (x, y) in enumerate(centres.tolist()):
        print(f"cluster {i}: {int((labels == i).sum())} points around ({x:.6f}, {y:.6f})")
    return points, labels, centres


if __name__ == "__main__":
    main()
