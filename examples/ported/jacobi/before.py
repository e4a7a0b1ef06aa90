"""Jacobi iteration for the temperature of a plate, after the Jacobi code of mpi4py's demos.

    mpirun -n 4 python examples/ported/jacobi/before.py

That is demo/mpi-ref-v1/ex-2.16.py (github.com/mpi4py/mpi4py, BSD-3-Clause licence): each rank has a
block of the grid, its neighbours' edges are exchanged by `Sendrecv`, with null processes at the
ends, and an `Allreduce` tells when all have converged. Here blocks are of rows, of any number; one
edge of the plate is hot, and the largest change decides.
"""

import argparse

import numpy as np
from mpi4py import MPI


def relax(part, tolerance):
    """Relaxes this rank's rows, of shape (rows + 2, columns + 2); returns all changes."""
    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    above = rank - 1 if rank > 0 else MPI.PROC_NULL
    below = rank + 1 if rank < size - 1 else MPI.PROC_NULL
    changes = []
    while not changes or changes[-1] > tolerance:
        comm.Sendrecv(part[1], dest=above, recvbuf=part[-1], source=below)
        comm.Sendrecv(part[-2], dest=below, recvbuf=part[0], source=above)
        new = (part[:-2, 1:-1] + part[2:, 1:-1] + part[1:-1, :-2] + part[1:-1, 2:]) / 4
        change = np.abs(new - part[1:-1, 1:-1]).max()
        changes.append(comm.allreduce(float(change), op=MPI.MAX))
        part[1:-1, 1:-1] = new
    return changes


def main():
    parser = argparse.ArgumentParser(description="Laplace's equation on a plate.")
    parser.add_argument("--rows", type=int, default=23, help="inside of the edges")
    parser.add_argument("--columns", type=int, default=40)
    parser.add_argument("--tolerance", type=float, default=0.01, help="in degrees")
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()

    plate, counts, shape = None, None, (options.rows + 2, options.columns + 2)
    edge = 100 * np.sin(np.pi * np.arange(shape[1]) / (shape[1] - 1))
    rows = [options.rows // size + (r < options.rows % size) for r in range(size)]
    part = np.zeros((rows[rank] + 2, shape[1]))
    if rank == 0:
        part[0] = edge
        plate = np.zeros(shape)
        plate[0] = edge
        counts = [count * shape[1] for count in rows]

    changes = relax(part, options.tolerance)
    comm.Gatherv(part[1:-1], (plate[1:-1], counts) if rank == 0 else None)
    if rank == 0:
        print(f"{len(changes)} iterations; the last changed a point by up to {changes[-1]:.6f}")
        for i in range(0, shape[0], 6):
            print(f"row {i:2}: {plate[i, shape[1] // 2]:.9f} degrees in the middle")
    return plate, changes


if __name__ == "__main__":
    main()
