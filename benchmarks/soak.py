"""Runs many steps of all kinds, and shows that memory and open files do not grow.

    OMP_NUM_THREADS=1 mpirun -n 3 python benchmarks/soak.py --steps 100000

Each step runs a replica function that updates a model, and reduces a number. Now and then it makes
and drops a variable, iterates over a dataset, and saves a checkpoint. The exit status is 1 if,
between a tenth of the steps and the end, the proportional set size (Pss, without files' pages) of
all ranks grows by more than `--most` MiB, or the number of open files grows.
"""

import argparse
import os
import sys
import tempfile

import numpy as np
from memory import pss
from mpi4py import MPI
from rounds import header, row

import hpcstrat as hs

COMM = MPI.COMM_WORLD


class Work:
    """The work of a step: a small model, and whatever else programs use."""

    def __init__(self, folder):
        self.strategy = hs.CentralStorageStrategy(["CPU:0"] * hs.size())
        random = np.random.default_rng(0)
        self.x, self.y = random.standard_normal((64, 16)), random.standard_normal((64, 4))
        with self.strategy.scope():
            self.w = hs.Variable(np.zeros((16, 4)))
            self.optimizer = hs.optimizers.Adam(1e-3)
        self.dataset = hs.data.Dataset.from_tensor_slices((self.x, self.y)).shuffle(64).batch(16)
        self.checkpoint = hs.checkpoint.Checkpoint(w=self.w, optimizer=self.optimizer)
        self.path = os.path.join(folder, "saved")

    def in_replica(self, x, y):
        error = x @ self.w - y
        self.optimizer.apply_gradients([(x.T @ error / 64, self.w)])
        return (error**2).sum()

    def step(self, number):
        loss = self.strategy.run(self.in_replica, args=(self.x, self.y))
        found = self.strategy.reduce("MEAN", loss, axis=None)
        assert np.isfinite(found)
        if number % 100 == 0:
            with self.strategy.scope():
                fleeting = hs.Variable(np.full(10_000, float(number)))
            assert fleeting[-1] == number
            for batch in self.strategy.experimental_distribute_dataset(self.dataset):
                self.strategy.run(self.in_replica, args=batch)
        if number % 1000 == 0:
            self.checkpoint.save(self.path)


def measured(processes):
    """MiB and open files of all ranks, on every rank."""
    hs.barrier()
    memory = hs.broadcast_object(pss(processes) if hs.is_lead() else None)
    return memory, COMM.allreduce(len(os.listdir("/proc/self/fd")))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000, help="to run (%(default)s)")
    parser.add_argument(
        "--most", type=float, default=1.0, help="MiB that a rank may grow by (%(default)s)"
    )
    parser.add_argument(
        "--leak", type=int, default=0, help="bytes to lose in each step, to try this program itself"
    )
    parser.add_argument(
        "--lose-files", action="store_true", help="lose an open file in each step, for the same"
    )
    options = parser.parse_args()
    processes = COMM.allgather(os.getpid())
    lost = []
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Work(hs.broadcast_object(folder))
        header("steps", "Pss of all ranks, MiB", "open files")
        marks = {max(1, options.steps // 10), options.steps // 2, options.steps}
        for number in range(1, options.steps + 1):
            work.step(number)
            if options.leak:
                lost.append(np.ones(options.leak, np.uint8))
            if options.lose_files:
                lost.append(os.open(os.devnull, os.O_RDONLY))
            if number in marks:
                figures[number] = memory, files = measured(processes)
                row(f"{number:,}", f"{memory:,.2f}", files)
        hs.barrier()  # before the folder is removed
    (first, first_files), (last, last_files) = figures[min(marks)], figures[options.steps]
    grown = last - first
    if grown > options.most * hs.size() or last_files > first_files:
        print(f"grown by {grown:,.2f} MiB and {last_files - first_files} open files")
        sys.exit(1)


if __name__ == "__main__":
    main()
