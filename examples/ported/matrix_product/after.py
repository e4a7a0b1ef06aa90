"""The product of two distributed matrices: before.py with hpcstrat.

    mpirun -n 4 python examples/ported/matrix_product/after.py

A tile of B and where it starts go around the ring together, so that nobody has to know who had it
first. The library splits and joins the matrices.
"""

import argparse

import numpy as np

import hpcstrat as hs


def multiply(xp, a, b, indices):
    """This replica's rows of the product, of its rows of the factors."""
    replica = hs.get_replica_context()
    c, start = xp.zeros((a.shape[0], b.shape[1])), indices.start
    for _ in range(replica.num_replicas_in_sync):
        c += a[:, start : start + len(b)] @ b
        _, (b, start) = replica.neighbor_exchange((b, start), None, periodic=True)
    return c


def main():
    parser = argparse.ArgumentParser(description="The product of two matrices.")
    parser.add_argument("--shape", type=int, nargs=3, default=(301, 205, 157), help="m, k and n")
    m, k, n = parser.parse_args().shape
    strategy = hs.CentralStorageStrategy()

    random = np.random.default_rng(0)
    all_a, all_b = random.standard_normal((m, k)), random.standard_normal((k, n))
    b, indices = strategy.scatter(all_b, return_indices=True)
    c = strategy.run(multiply, args=(strategy.xp, strategy.scatter(all_a), b, indices))
    all_c = hs.asnumpy(strategy.gather(c, axis=0))
    print(f"shape {all_c.shape}, norm {np.linalg.norm(all_c):.9f}")
    print(f"first {all_c[0, 0]:.9f}, last {all_c[-1, -1]:.9f}")
    print(f"the product of NumPy: {np.allclose(all_c, all_a @ all_b, rtol=0, atol=1e-12)}")


if __name__ == "__main__":
    main()
