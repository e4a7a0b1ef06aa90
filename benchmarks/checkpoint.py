"""Times saving and restoring a checkpoint, next to the disk itself.

    OMP_NUM_THREADS=1 mpirun -n 4 python benchmarks/checkpoint.py --folder /scratch

`the disk` writes the same number of bytes, as zeros, and syncs them. `without disk` leaves out
waiting for the disk (`fsync`): the checksum and the page cache remain. `stall` is the time for
which `save(blocking=False)` stops the program. The restored file is in the page cache.
"""

import argparse
import os
import tempfile
import time
from unittest import mock

import numpy as np
from mpi4py import MPI
from rounds import header, interleaved, row

import hpcstrat as hs

COMM = MPI.COMM_WORLD


def trained(strategy, size):
    """A checkpoint of a variable and Adam's two slots."""
    with strategy.scope():
        v, optimizer = hs.Variable(np.zeros(size, np.float32)), hs.optimizers.Adam()
    strategy.run(lambda: optimizer.apply_gradients([(np.ones(size, np.float32), v)]))
    return hs.checkpoint.Checkpoint(v=v, optimizer=optimizer)


def timed(call, after=lambda: None):
    """An alternative that times a call alone, and not what has to follow it."""

    def way(calls):
        seconds = 0.0
        for _ in range(calls):
            begin = time.perf_counter()
            call()
            seconds += time.perf_counter() - begin
            after()
        return seconds

    return way


def write_zeros(path, nbytes):
    """Rank 0 writes that many zeros to a file and syncs it."""
    if COMM.rank == 0:
        zeros = bytes(1 << 22)
        with open(path, "wb", buffering=0) as file:
            for start in range(0, nbytes, len(zeros)):
                file.write(zeros[: nbytes - start])
            os.fsync(file.fileno())
    COMM.Barrier()


def alternatives(checkpoint, path, nbytes):
    """What is timed, by the name of its column."""

    def save_without_disk():
        with mock.patch("os.fsync"):
            checkpoint.save(path)

    checkpoint.save(path)  # for the first `restore`
    return {
        "the disk": timed(lambda: write_zeros(f"{path}-zeros", nbytes)),
        "save": timed(lambda: checkpoint.save(path)),
        "without disk": timed(save_without_disk),
        "stall": timed(lambda: checkpoint.save(path, blocking=False), checkpoint.sync),
        "restore": timed(lambda: checkpoint.restore(path)),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--elements",
        type=int,
        default=1 << 28,
        help="of float32, a third of them variables (1 GiB)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="of each way (%(default)s)")
    parser.add_argument("--folder", default=".", help="on the disk to measure (%(default)s)")
    options = parser.parse_args()
    kinds = {"central": hs.CentralStorageStrategy, "mirrored": hs.MirroredStrategy}
    header("strategy, seconds", "the disk", "save", "without disk", "stall", "restore")
    with tempfile.TemporaryDirectory(dir=options.folder) as own:
        path = os.path.join(COMM.bcast(own), "saved")
        for name, kind in kinds.items():
            with kind(["CPU:0"] * hs.size()) as strategy:
                checkpoint = trained(strategy, options.elements // 3)
                ways = alternatives(checkpoint, path, 4 * options.elements)
                took = interleaved(ways, options.rounds, comm=COMM)
            row(name, *(f"{seconds:.3f}" for seconds in took.values()))


if __name__ == "__main__":
    main()
