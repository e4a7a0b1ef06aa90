"""Measures the memory of a large model on CPU replicas: 64 million parameters, trained by Adam.

    OMP_NUM_THREADS=1 mpirun -n 4 python benchmarks/memory.py

It is the proportional set size (Pss), summed over the ranks: a shared page counts once. Pages of
files, such as libraries, are left out. Next to it is the expected size: the parameters and Adam's
two slots once for all ranks, and a mailbox and the gradients on each rank.
"""

import argparse
import os
import threading
import time

import numpy as np
from mpi4py import MPI
from rounds import header, row

import hpcstrat as hs

COMM = MPI.COMM_WORLD
VARIABLES = 16


def pss(processes):
    """MiB of all processes' memory.

    Pages of files are left out: a library's pages are shared with any other program that runs, and
    a process seems to grow when such a program ends.
    """
    total = 0
    for process in processes:
        with open(f"/proc/{process}/smaps_rollup") as file:
            total += sum(
                int(line.split()[1])
                for line in file
                if line.startswith(("Pss_Anon:", "Pss_Shmem:"))
            )
    return total / 1024


class Peak:
    """The largest sum that a thread of rank 0 sees while the block runs."""

    def __init__(self, processes, seconds=0.02):
        self._processes, self._seconds = processes, seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.size, self.samples = 0.0, 0

    def _watch(self):
        while not self._ended.wait(self._seconds):
            self.size = max(self.size, pss(self._processes))
            self.samples += 1

    def __enter__(self):
        if COMM.rank == 0:
            self._thread.start()
        return self

    def __exit__(self, *error):
        if COMM.rank == 0:
            self._ended.set()
            self._thread.join()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--parameters", type=int, default=64_000_000, help="of the model (%(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=10, help="during which the peak is sampled (%(default)s)"
    )
    options = parser.parse_args()
    size = -(-options.parameters // VARIABLES)
    mebibytes = 4 * size * VARIABLES / 2**20
    processes = COMM.allgather(os.getpid())
    strategy = hs.CentralStorageStrategy(["CPU:0"] * hs.size())

    def measured():
        COMM.Barrier()
        found = pss(processes) if COMM.rank == 0 else 0
        COMM.Barrier()
        return found

    before = measured()
    print(
        f"{size * VARIABLES:,} parameters of float32 are {mebibytes:,.1f} MiB; {COMM.size} ranks\n"
    )
    header("Pss of all ranks, MiB", "measured", "more than before", "expected", "unaccounted for")

    def show(stage, found, copies):
        expected = copies * mebibytes
        row(
            stage,
            *(
                f"{one:,.1f}"
                for one in (found, found - before, expected, found - before - expected)
            ),
        )

    show("before", before, 0)
    ones = np.broadcast_to(np.float32(1), size)  # takes no memory
    with strategy.scope():
        variables = [hs.Variable(ones) for _ in range(VARIABLES)]
        optimizer = hs.optimizers.Adam(1e-3)
    show("with the variables", measured(), 1)

    def step():
        optimizer.apply_gradients(
            [(gradient, v) for gradient, v in zip(gradients, variables, strict=True)]
        )

    gradients = [np.full(size, COMM.rank + 1, np.float32) for _ in range(VARIABLES)]
    strategy.run(step)
    show("after the first step: slots, mailboxes, gradients", measured(), 3 + 2 * COMM.size)
    with Peak(processes) as peak:
        for _ in range(options.steps):
            strategy.run(step)
        time.sleep(0.1)  # for at least one sample
    show(
        f"peak of {options.steps} more steps, {peak.samples} samples", peak.size, 3 + 2 * COMM.size
    )
    for v in variables:  # equal gradients move every parameter by the learning rate
        np.testing.assert_allclose(v.numpy()[[0, -1]], 1 - 1e-3 * (options.steps + 1), rtol=1e-4)


if __name__ == "__main__":
    main()
