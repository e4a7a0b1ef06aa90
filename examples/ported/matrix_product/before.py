"""The product of two distributed matrices, after a program of mpi4py-examples.

    mpirun -n 4 python examples/ported/matrix_product/before.py

That is 08-matrix-matrix-product.py (github.com/jbornschein/mpi4py-examples, MIT licence), whose
ranks form a grid, multiply the tiles that they have, and pass them on to the next rank. Here the
grid has one column, so that only the tiles of B travel, and tiles may differ in size; the matrices
are given, and their product is checked. The original multiplies while tiles are under way.
"""

import argparse

import numpy as np
from mpi4py import MPI


def split(count, size):
    """The numbers of rows of each rank, and where they start."""
    counts = [count // size + (r < count % size) for r in range(size)]
    return counts, np.cumsum([0, *counts])


def multiply(a, b, counts, starts):
    """This rank's rows of the product, of its rows of the factors."""
    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    c = np.zeros((a.shape[0], b.shape[1]))
    for step in range(size):
        owner = (rank + step) % size
        c += a[:, starts[owner] : starts[owner + 1]] @ b
        arriving = np.empty((counts[(owner + 1) % size], b.shape[1]))
        left, right = (rank - 1) % size, (rank + 1) % size
        comm.Sendrecv(b, dest=left, recvbuf=arriving, source=right)
        b = arriving
    return c


def main():
    parser = argparse.ArgumentParser(description="The product of two matrices.")
    parser.add_argument("--shape", type=int, nargs=3, default=(301, 205, 157), help="m, k and n")
    m, k, n = parser.parse_args().shape
    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()

    (rows, _), (counts, starts) = split(m, size), split(k, size)
    all_a = all_b = all_c = None
    if rank == 0:
        random = np.random.default_rng(0)
        all_a, all_b = random.standard_normal((m, k)), random.standard_normal((k, n))
        all_c = np.empty((m, n))
    a, b, sizes = np.empty((rows[rank], k)), np.empty((counts[rank], n)), np.array(rows)
    comm.Scatterv((all_a, sizes * k) if rank == 0 else None, a)
    comm.Scatterv((all_b, np.array(counts) * n) if rank == 0 else None, b)
    comm.Gatherv(multiply(a, b, counts, starts), (all_c, sizes * n) if rank == 0 else None)
    if rank == 0:
        print(f"shape {all_c.shape}, norm {np.linalg.norm(all_c):.9f}")
        print(f"first {all_c[0, 0]:.9f}, last {all_c[-1, -1]:.9f}")
        print(f"the product of NumPy: {np.allclose(all_c, all_a @ all_b, rtol=0, atol=1e-12)}")


if __name__ == "__main__":
    main()
