"""The temperature of a plate by Jacobi iteration: before.py with hpcstrat.

    mpirun -n 4 python examples/ported/jacobi/after.py

`neighbor_exchange` takes the place of the two `Sendrecv`, `all_reduce` that of `allreduce`. No rank
counts rows or looks for its neighbours, and the replicas may have GPUs.
"""

import argparse

import numpy as np

import hpcstrat as hs


def relax(xp, plate, rows, tolerance):
    """This replica's rows of the relaxed plate, and all changes."""
    replica = hs.get_replica_context()
    part = xp.array(plate[rows.start : rows.stop + 2])  # with a row above and a row below
    changes = []
    while not changes or changes[-1] > tolerance:
        above, below = replica.neighbor_exchange(to_left=part[1], to_right=part[-2])
        part[0] = part[0] if above is None else above
        part[-1] = part[-1] if below is None else below
        new = (part[:-2, 1:-1] + part[2:, 1:-1] + part[1:-1, :-2] + part[1:-1, 2:]) / 4
        change = xp.abs(new - part[1:-1, 1:-1]).max()
        changes.append(float(replica.all_reduce("MAX", change)))
        part[1:-1, 1:-1] = new
    return part[1:-1], np.array(changes)


def main():
    parser = argparse.ArgumentParser(description="Laplace's equation on a plate.")
    parser.add_argument("--rows", type=int, default=23, help="inside of the edges")
    parser.add_argument("--columns", type=int, default=40)
    parser.add_argument("--tolerance", type=float, default=0.01, help="in degrees")
    options = parser.parse_args()
    strategy = hs.CentralStorageStrategy()

    plate = np.zeros((options.rows + 2, options.columns + 2))
    plate[0] = 100 * np.sin(np.pi * np.arange(plate.shape[1]) / (plate.shape[1] - 1))
    _, rows = strategy.scatter(plate[1:-1], return_indices=True)

    parts, changes = strategy.run(relax, args=(strategy.xp, plate, rows, options.tolerance))
    plate[1:-1] = hs.asnumpy(strategy.gather(parts, axis=0))
    changes = strategy.experimental_local_results(changes)[0]  # the same on all replicas
    print(f"{len(changes)} iterations; the last changed a point by up to {changes[-1]:.6f}")
    for i in range(0, plate.shape[0], 6):
        print(f"row {i:2}: {plate[i, plate.shape[1] // 2]:.9f} degrees in the middle")
    return plate, changes


if __name__ == "__main__":
    main()
