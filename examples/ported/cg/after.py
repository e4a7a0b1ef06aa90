"""Conjugate gradients on any number of replicas: before.py with hpcstrat.

    mpirun -n 4 python examples/ported/cg/after.py

Each replica has some rows of A, and the same elements of every vector. To multiply by A it needs
the other replicas' elements of the direction, which are gathered; inner products are summed over
the replicas, which therefore all stop after the same iteration.
"""

import argparse

import numpy as np

import hpcstrat as hs


def solve(xp, a, b, tol, max_iter):
    """The solution x, of shape (n,), and the residual's norm after each iteration."""
    replica = hs.get_replica_context()
    x = xp.zeros_like(b)
    residual = direction = b
    square = replica.all_reduce("SUM", residual @ residual)
    norms = []
    for _ in range(max_iter):
        image = a @ replica.all_gather(direction, axis=0)
        step = square / replica.all_reduce("SUM", direction @ image)
        x = x + step * direction
        residual = residual - step * image
        last, square = square, replica.all_reduce("SUM", residual @ residual)
        norms.append(float(square) ** 0.5)
        if norms[-1] < tol:
            break
        direction = residual + square / last * direction
    return x, norms


def main():
    parser = argparse.ArgumentParser(description="Conjugate gradients.")
    parser.add_argument("--num", type=int, default=503, help="equations")
    parser.add_argument("--tol", type=float, default=0.1)
    parser.add_argument("--max-iter", type=int, default=5000)
    options = parser.parse_args()
    strategy = hs.CentralStorageStrategy()
    xp = strategy.xp

    random = np.random.default_rng(0)
    history = []
    for trial in range(3):
        a = random.integers(-50, 50, size=(options.num, options.num)).astype(np.float64)
        a = a @ a.T + 500 * options.num * np.eye(options.num)
        answer = random.integers(-50, 50, size=options.num).astype(np.float64)
        b = a @ answer

        parts = strategy.scatter((a, b))
        x, norms = strategy.run(solve, args=(xp, *parts, options.tol, options.max_iter))
        x, norms = strategy.gather(x, axis=0), strategy.experimental_local_results(norms)[0]
        error = float(((x - xp.asarray(answer)) ** 2).sum()) ** 0.5
        print(f"trial {trial}: {len(norms)} iterations, error {error:.3e}")
        history.append(norms)
    return history


if __name__ == "__main__":
    main()
