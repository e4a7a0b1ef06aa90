"""Finds the directions in which handwritten digits differ most: their principal components.

    mpirun -n 4 python examples/pca.py

The method is orthogonal iteration (Golub and Van Loan, Matrix Computations, 8.2.4): each replica
multiplies its own images by the current directions and back, and the products are summed. No
replica sees all images, and no covariance matrix is sent.
"""

import argparse
import pathlib

import numpy as np

import hpcstrat as hs


def main():
    parser = argparse.ArgumentParser(description="Principal components of handwritten digits.")
    parser.add_argument("--components", type=int, default=4, help="how many (%(default)s)")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-9,
        help="relative change of the variances (%(default)s)",
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="draws the components and the digits in their plane"
    )
    options = parser.parse_args()

    strategy = hs.CentralStorageStrategy()
    xp = strategy.xp
    images, digits = np.load(pathlib.Path(__file__).with_name("digits.npz")).values()
    images = images / 16

    def own_part(context):  # the same number of rows on each replica, or one more
        return xp.asarray(
            np.array_split(images, context.num_replicas_in_sync)[context.replica_id_in_sync_group]
        )

    part = strategy.experimental_distribute_values_from_function(own_part)
    mean = strategy.reduce("MEAN", part, axis=0)
    # Some more directions than wanted, because the last converge slowest.
    start = np.linalg.qr(
        np.random.default_rng(0).standard_normal((images.shape[1], options.components + 8))
    )[0]
    with strategy.scope():
        directions = hs.Variable(start)

    def multiply(part):
        centred, context = part - mean, hs.get_replica_context()
        return context.all_reduce("SUM", centred.T @ (centred @ directions.value()))

    variances = np.zeros(options.components)
    iterations = 0
    while True:
        # The mean of equal products.
        product = strategy.reduce("MEAN", strategy.run(multiply, args=(part,)), axis=None)
        q, r = np.linalg.qr(hs.asnumpy(product))
        directions.assign(q)
        latest = np.abs(np.diag(r))[: options.components] / len(images)
        if np.allclose(latest, variances, rtol=options.tolerance, atol=0):
            break
        variances, iterations = latest, iterations + 1

    squares = strategy.run(lambda part: (part - mean) ** 2, args=(part,))
    total = float(strategy.reduce("MEAN", squares, axis=0).sum())
    print(f"iterations: {iterations}")
    for i, variance in enumerate(latest, start=1):
        print(f"component {i}: variance {variance:.6f}, {100 * variance / total:.2f} % of all")
    if options.plot:
        from pictures import pca

        plane = (images - hs.asnumpy(mean)) @ q[:, :2]
        hs.on_lead(pca, options.plot, q[:, : options.components], plane, digits)


if __name__ == "__main__":
    main()
