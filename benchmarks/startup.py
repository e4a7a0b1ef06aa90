"""Times how long programs take to start: the import, and the time until the first step has ended.

    OMP_NUM_THREADS=1 python benchmarks/startup.py --ranks 4

Times are milliseconds, medians over rounds in which fresh processes take turns. Start it without
mpirun, which it runs itself. A program reports when its first step, or its Allreduce, has ended;
what follows is not counted.
"""

import argparse
import shlex
import subprocess
import sys
import time

from rounds import header, interleaved, row

FIRST_STEP = """
import time
import numpy as np
import hpcstrat as hs

strategy = hs.CentralStorageStrategy(["CPU:0"] * hs.size())
with strategy.scope():
    w, b = hs.Variable(np.zeros((64, 10), np.float32)), hs.Variable(np.zeros(10, np.float32))
    optimizer = hs.optimizers.SGD(0.1, momentum=0.9)


def step(x):
    d = x @ w + b - 1
    optimizer.apply_gradients([(x.T @ d, w), (d.sum(axis=0), b)])


strategy.run(step, args=(np.ones((32, 64), np.float32),))
print(time.monotonic())
"""
ALLREDUCE = """
import time
import numpy as np
from mpi4py import MPI

total = np.empty(1)
MPI.COMM_WORLD.Allreduce(np.ones(1), total)
if MPI.COMM_WORLD.rank == 0:
    print(time.monotonic())
"""
MOMENT = "; import time; print(time.monotonic())"


def start(program, command=()):
    """An alternative that runs the program, under a command, until it reports that moment."""

    def way(calls):
        seconds = 0
        for _ in range(calls):
            start = time.monotonic()  # the same clock in all processes
            told = subprocess.run(
                [*command, sys.executable, "-c", program], check=True, stdout=subprocess.PIPE
            ).stdout
            seconds += float(told) - start
        return seconds

    return way


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=15, help="turns that each way takes (%(default)s)"
    )
    parser.add_argument("--ranks", type=int, default=4, help="of the job (%(default)s)")
    parser.add_argument(
        "--mpirun", default="mpirun", help="with the options that it needs (%(default)s)"
    )
    options = parser.parse_args()
    job = [*shlex.split(options.mpirun), "-n", str(options.ranks)]
    print(f"From the start of fresh processes, milliseconds, medians of {options.rounds} rounds\n")
    header("until", "ours", "beside", "more", "goal of that")
    for name, ours, beside, goal in (
        (
            "import hpcstrat, beside import numpy",
            start(f"import hpcstrat{MOMENT}"),
            start(f"import numpy{MOMENT}"),
            60,
        ),
        (
            f"the end of the first step on {options.ranks} ranks, beside one Allreduce of mpi4py",
            start(FIRST_STEP, job),
            start(ALLREDUCE, job),
            500,
        ),
    ):
        medians = interleaved({"ours": ours, "beside": beside}, options.rounds)
        ours, beside = 1e3 * medians["ours"], 1e3 * medians["beside"]
        row(name, f"{ours:,.0f}", f"{beside:,.0f}", f"{ours - beside:,.0f}", goal)


if __name__ == "__main__":
    main()
