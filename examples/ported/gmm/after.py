"""A mixture of two Gaussians on any number of replicas: before.py with hpcstrat.

    mpirun -n 4 python examples/ported/gmm/after.py

Each replica has a part of the points. One line communicates in `fit`: its sums become those of all
points, and the means and variances follow from them as before. The accuracy is a mean over all
points, whatever their numbers on the replicas.
"""

import argparse
import math

import numpy as np

import hpcstrat as hs


def log_joint(xp, points, means, variances, weights):
    """The logarithm of each component's weight times its density, of shape (n, components)."""
    squares = ((points[:, None] - means) ** 2 / variances).sum(axis=2)
    return xp.log(weights) - (squares + xp.log(2 * math.pi * variances).sum(axis=1)) / 2


def fit(xp, points, means, variances, max_iter, tol):
    """The components' means and variances, of shape (components, 2), and their weights."""
    replica = hs.get_replica_context()
    weights = xp.full(len(means), 1 / len(means))
    last = -math.inf
    for _ in range(max_iter):
        joint = log_joint(xp, points, means, variances, weights)
        logs = xp.log(xp.exp(joint).sum(axis=1))
        shares = xp.exp(joint - logs[:, None])
        sums = logs.sum(), shares.sum(axis=0), shares.T @ points, shares.T @ points**2
        likelihood, counts, firsts, seconds = replica.all_reduce("SUM", sums)
        weights = counts / counts.sum()
        means = firsts / counts[:, None]
        variances = seconds / counts[:, None] - means**2
        likelihood = float(likelihood / counts.sum())
        if abs(likelihood - last) < tol:
            break
        last = likelihood
    return means, variances, weights


def hits(xp, points, clouds, *model):
    """1 for each point that is said to be from its cloud, else 0: of shape (n,)."""
    return (log_joint(xp, points, *model).argmax(axis=1) == clouds).astype(np.float64)


def make_clouds(random, num):
    """Points of two clouds, and the clouds' numbers."""
    first = random.normal(3, [1, 2], size=(num, 2))
    second = random.normal(-3, [2, 1], size=(num, 2))
    return np.concatenate([first, second]), np.repeat([0, 1], num)


def main():
    parser = argparse.ArgumentParser(description="A mixture of two Gaussians.")
    parser.add_argument("--num", type=int, default=50_003, help="points in each cloud")
    parser.add_argument("--max-iter", type=int, default=30)
    parser.add_argument("--tol", type=float, default=1e-3)
    options = parser.parse_args()
    strategy = hs.CentralStorageStrategy()
    xp = strategy.xp

    random = np.random.default_rng(0)
    points, clouds = make_clouds(random, options.num)
    test_points, test_clouds = make_clouds(random, 100)
    means = np.stack([random.normal(3, [1, 2]), random.normal(-3, [2, 1])])
    begin = xp.asarray(means), xp.asarray(random.random((2, 2)))

    train = strategy.scatter((points, clouds))
    test = strategy.scatter((test_points, test_clouds))
    model = strategy.run(fit, args=(xp, train[0], *begin, options.max_iter, options.tol))
    for name, data in ("training", train), ("test", test):
        found = strategy.run(hits, args=(xp, *data, *model))
        accuracy = strategy.reduce("MEAN", found, axis=0)
        print(f"{name} accuracy: {100 * float(accuracy):.4f} %")
    means, variances, weights = strategy.experimental_local_results(model)[0]
    for i, (x, y) in enumerate(means.tolist()):
        print(f"component {i}: weight {float(weights[i]):.6f}, mean ({x:.6f}, {y:.6f})")
    return test_points, test_clouds, means, variances


if __name__ == "__main__":
    main()
