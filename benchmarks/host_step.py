"""Times a training step on CPU replicas: ours next to its alternatives, in one run.

    OMP_NUM_THREADS=1 mpirun -n 4 python benchmarks/host_step.py
    OMP_NUM_THREADS=1 mpirun -n 4 python benchmarks/host_step.py --tensorflow /path/to/python    # which has TensorFlow

The networks of networks.py are trained by SGD with momentum 0.9. The alternatives:

    ours         hpcstrat.CentralStorageStrategy
    in buffers   the same, with gradients written to optimizer.gradient_buffers
    allreduce    mpi4py: one Allreduce of the flat gradient, then every rank updates its own copy
    window       mpi4py: one copy in an MPI-3 shared window, each rank updates its slice between two barriers
    DDP          torch.nn.parallel.DistributedDataParallel over gloo, where PyTorch is installed
    TensorFlow   its own CentralStorageStrategy, where --tensorflow names a Python that has it

The first four share the code of the forward and the backward pass; PyTorch and TensorFlow derive gradients themselves.
They take turns, round by round, so that all see the same state of the machine, and all must end with the same weights.
The table has medians over rounds on the slowest rank, their ratio to ours, and the goal for that ratio.

TensorFlow is one process for all replicas, started by rank 0. It may use all cores of the ranks, with its own
choice of threads, and times itself, so that its figure leaves out the pipe. The ranks sleep in its turn, and it waits
for a line of input in theirs; a pause in between lets its threads stop polling for work.
"""

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import subprocess
import tempfile
import time

import numpy as np
from by_hand import AllReduce, Window
from mpi4py import MPI
from networks import MOMENTUM, NETWORKS, RATE, data, gradients, initial
from rounds import header, interleaved, repeated, row

import hpcstrat as hs

try:
    import torch
except ImportError:
    torch = None

GOALS = {"allreduce": (1.5, 1.25, 0.6), "window": (None, None, 1.1), "TensorFlow": (0.5, 0.7, 1.0)}
PAUSE = 0.02
COMM = MPI.COMM_WORLD


# ---- the alternatives: each returns a step, and a function that returns the weights


def ours(layers, x, y, in_buffers=False):
    strategy = hs.CentralStorageStrategy(["CPU:0"] * hs.size())
    with strategy.scope():
        weights = [hs.Variable(value) for value in initial(layers)]
        optimizer = hs.optimizers.SGD(RATE, MOMENTUM)
        buffers = optimizer.gradient_buffers(weights) if in_buffers else None

    def replica_step(x, y):
        values = [weight.value() for weight in weights]
        optimizer.apply_gradients(zip(gradients(values, x, y, buffers), weights, strict=True))

    return lambda: strategy.run(replica_step, args=(x, y)), lambda: [weight.numpy() for weight in weights]


def by_hand(kind, layers, x, y):
    hand = kind(list(initial(layers)))
    return lambda: hand.step(gradients(hand.weights, x, y)), lambda: hand.weights


def ddp(layers, x, y):
    modules = []
    for a, b in itertools.pairwise(layers):
        modules += [torch.nn.Linear(a, b), torch.nn.ReLU()]
    module = torch.nn.Sequential(*modules[:-1])
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), initial(layers), strict=True):
            parameter.copy_(torch.from_numpy(value.T))
    model = torch.nn.parallel.DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM, fused=True)
    x, y = torch.from_numpy(x), torch.from_numpy(y)

    def step():
        optimizer.zero_grad()
        (COMM.size * (model(x) - y).square().sum() / (2 * len(x))).backward()  # of which it takes the mean over ranks
        optimizer.step()

    return step, lambda: [parameter.detach().numpy().T for parameter in model.parameters()]


class TensorFlow:
    """The process of tensorflow_step.py on rank 0; `None` on the other ranks."""

    def __init__(self, python):
        cores = set().union(*COMM.allgather(os.sched_getaffinity(0)))
        self.process = None
        if COMM.rank == 0:
            program = pathlib.Path(__file__).with_name("tensorflow_step.py")
            command = [python, program, str(COMM.size)]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            os.sched_setaffinity(self.process.pid, cores)

    def ask(self, **command):
        """The answer, on rank 0. Collective; the other ranks sleep until it is there."""
        answer = None
        if self.process is not None:
            print(json.dumps(command), file=self.process.stdin, flush=True)
            answer = json.loads(self.process.stdout.readline())
        done = COMM.Ibarrier()
        while not done.Test():
            time.sleep(PAUSE)
        return answer

    def turn(self, steps):
        time.sleep(PAUSE)
        seconds = COMM.bcast(self.ask(steps=steps))
        time.sleep(PAUSE)
        return seconds

    def weights(self):
        """On rank 0; the other ranks have no copy."""
        with tempfile.NamedTemporaryFile(suffix=".npz") as file:
            self.ask(save=file.name)
            return list(np.load(file).values()) if COMM.rank == 0 else None

    def close(self):
        if self.process is not None:
            self.process.communicate()


# ---- the program


def measure(layers, tensorflow, rounds):
    """The median times of all alternatives for one network. All must end with the same weights."""
    batch, steps = NETWORKS[layers]
    x, y = data(layers, batch, COMM.rank)
    made = {
        "ours": ours(layers, x, y),
        "in buffers": ours(layers, x, y, in_buffers=True),
        "allreduce": by_hand(AllReduce, layers, x, y),
        "window": by_hand(Window, layers, x, y),
    }
    if torch is not None:
        made["DDP"] = ddp(layers, x, y)
    ways = {name: repeated(step) for name, (step, _) in made.items()}
    results = {name: weights for name, (_, weights) in made.items()}
    if tensorflow is not None:
        tensorflow.ask(layers=layers, batch=batch)
        ways["TensorFlow"], results["TensorFlow"] = tensorflow.turn, tensorflow.weights
    medians = interleaved(ways, rounds, steps, COMM)
    expected = results["ours"]()
    for weights in results.values():
        for one, other in zip(weights() or expected, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-2, atol=1e-3)
    return medians


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="turns that each way takes (%(default)s)")
    parser.add_argument("--tensorflow", metavar="PYTHON", help="a Python that has TensorFlow")
    options = parser.parse_args()
    tensorflow = TensorFlow(options.tensorflow) if options.tensorflow else None
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ending:
        if torch is not None:
            torch.set_num_threads(1)
            meeting = f"file://{COMM.bcast(folder)}/ranks"
            torch.distributed.init_process_group("gloo", init_method=meeting, rank=COMM.rank, world_size=COMM.size)
            ending.callback(torch.distributed.destroy_process_group)
        print(f"A step on {COMM.size} ranks, medians of {options.rounds} rounds\n")
        header("network, batch of a replica", "way", "microseconds", "ours / that", "goal")
        for number, layers in enumerate(NETWORKS):
            medians = measure(layers, tensorflow, options.rounds)
            name = f"{'-'.join(map(str, layers))}, {NETWORKS[layers][0]}"
            for way, seconds in medians.items():
                goal = GOALS.get(way, [None] * len(NETWORKS))[number]
                row(name, way, f"{1e6 * seconds:,.0f}", f"{medians['ours'] / seconds:.2f}", goal or "")
                name = ""
        COMM.Barrier()
    if tensorflow is not None:
        tensorflow.close()


if __name__ == "__main__":
    main()
