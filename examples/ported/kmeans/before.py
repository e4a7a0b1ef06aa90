"""k-means of points in the plane, after CuPy's examples/kmeans (github.com/cupy/cupy, MIT).

    python examples/ported/kmeans/before.py

Two clouds of normally distributed points; Lloyd's method from points drawn at random. There are
more points than in the original, in 2 instead of 30,000 dimensions.
"""

import argparse

import numpy as np


def fit(xp, points, centres, max_iter):
    """Each point's cluster, of shape (n,), and the centres."""
    labels = xp.full(len(points), -1)
    for _ in range(max_iter):
        squares = ((points[:, None] - centres) ** 2).sum(axis=2)
        previous, labels = labels, squares.argmin(axis=1)
        if (labels == previous).all():
            break
        members = (labels[:, None] == xp.arange(len(centres))).astype(points.dtype)
        sums, counts = members.T @ points, members.sum(axis=0)
        centres = sums / counts[:, None]
    return labels, centres


def main():
    parser = argparse.ArgumentParser(description="k-means of points in the plane.")
    parser.add_argument("--n-clusters", type=int, default=2)
    parser.add_argument("--num", type=int, default=50_003, help="points in each cloud")
    parser.add_argument("--max-iter", type=int, default=20)
    parser.add_argument("--gpu", action="store_true", help="compute with CuPy")
    options = parser.parse_args()
    if options.gpu:
        import cupy as xp
    else:
        xp = np

    random = np.random.default_rng(0)
    samples = random.standard_normal((options.num, 2))
    points = np.concatenate([samples + 1, samples - 1])
    centres = points[random.choice(len(points), options.n_clusters, replace=False)]

    labels, centres = fit(xp, xp.asarray(points), xp.asarray(centres), options.max_iter)
    for i, (x, y) in enumerate(centres.tolist()):
        print(f"cluster {i}: {int((labels == i).sum())} points around ({x:.6f}, {y:.6f})")
    return points, labels, centres


if __name__ == "__main__":
    main()
