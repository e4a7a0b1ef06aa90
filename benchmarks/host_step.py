"""Times a training step on CPU replicas next to its alternatives, in one run.

    OMP_NUM_THREADS=1 mpirun -n 4 python benchmarks/host_step.py
    OMP_NUM_THREADS=1 mpirun -n 4 python benchmarks/host_step.py --tensorflow /path/to/python

--tensorflow names a Python that has TensorFlow. The networks of networks.py are trained by SGD with
momentum 0.9, and the largest by Adam too: next to MirroredStrategy and to a window with the
library's own compiled loop. The alternatives:

    ours         hpcstrat.CentralStorageStrategy
    in buffers   the same, with gradients written to optimizer.gradient_buffers
    allreduce    mpi4py: one Allreduce of the flat gradient, then every rank updates its own copy
    window       mpi4py: one copy in a shared window, each rank updates its slice between barriers
    hs.torch     PyTorch's module and optimizer, with one all_reduce_gradients, if PyTorch is there
    DDP          torch.nn.parallel.DistributedDataParallel over gloo, if PyTorch is there
    TensorFlow   its own CentralStorageStrategy, if --tensorflow names a Python that has it
    JAX          shard_map, if --jax names a Python that has it

The first four share the code of the forward and the backward pass; PyTorch and TensorFlow derive
gradients themselves. They take turns, round by round, so that all see the same state of the
machine, and all must end with the same weights. DDP comes last: gloo's thread wakes a hundred times
a second until the process ends, and would slow the others where ranks outnumber cores. The table has medians over rounds on the slowest rank, their ratio to ours,
and the goal for that ratio.

TensorFlow and JAX are one process each for all replicas, started by rank 0. They may use all cores
of the ranks, with their own choice of threads, and time themselves, so that their figures exclude
the pipe. The ranks sleep in their turns, and they wait for a line of input in all others; a pause
in between lets their threads stop polling for work.

A last table shows the largest network's step compiled, not compiled, and its page faults.

With --json the figures are written to a file, which chart.py draws.
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
import page_faults
from by_hand import ADAM_RATE, AllReduce, Window, WindowAdam
from mpi4py import MPI
from networks import MOMENTUM, NETWORKS, RATE, data, gradients, initial
from rounds import header, interleaved, repeated, row

import hpcstrat as hs

try:
    import torch
except ImportError:
    torch = None

PAUSE = 0.02
COMM = MPI.COMM_WORLD
GOALS = {
    "allreduce": (1.25 if COMM.size < 4 else 1.4, 1.25, 0.6),
    "window": (None, None, 1.1),
    "TensorFlow": (0.5, 0.7, 1.0),
}
ADAM_GOALS = {"window": 1.05}


# ---- the alternatives: each returns a step, and a function that returns the weights


def sgd():
    return hs.optimizers.SGD(RATE, MOMENTUM)


def ours(layers, x, y, in_buffers=False, make=sgd, strategy=None):
    strategy = strategy or hs.CentralStorageStrategy(["CPU:0"] * hs.size())
    with strategy.scope():
        weights = [hs.Variable(value) for value in initial(layers)]
        optimizer = make()
        buffers = optimizer.gradient_buffers(weights) if in_buffers else None

    def replica_step(x, y):
        values = [weight.value() for weight in weights]
        optimizer.apply_gradients(zip(gradients(values, x, y, buffers), weights, strict=True))

    return lambda: strategy.run(replica_step, args=(x, y)), lambda: [
        weight.numpy() for weight in weights
    ]


def by_hand(kind, layers, x, y):
    hand = kind(list(initial(layers)))
    return lambda: hand.step(gradients(hand.weights, x, y)), lambda: hand.weights


def torch_sgd(parameters):
    return torch.optim.SGD(parameters, RATE, MOMENTUM, fused=True)


def pytorch(layers, x, y, with_ddp, make=torch_sgd):
    modules = []
    for a, b in itertools.pairwise(layers):
        modules += [torch.nn.Linear(a, b), torch.nn.ReLU()]
    module = torch.nn.Sequential(*modules[:-1])
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), initial(layers), strict=True):
            parameter.copy_(torch.from_numpy(value.T))
    model = torch.nn.parallel.DistributedDataParallel(module) if with_ddp else module
    optimizer = make(module.parameters())
    x, y = torch.from_numpy(x), torch.from_numpy(y)

    def step():
        optimizer.zero_grad()
        # Both take the mean over ranks.
        (COMM.size * (model(x) - y).square().sum() / (2 * len(x))).backward()
        if not with_ddp:
            hs.torch.all_reduce_gradients("MEAN", module)
        optimizer.step()

    def weights():
        return [parameter.detach().numpy().T for parameter in module.parameters()]

    if with_ddp:
        return step, weights
    strategy = hs.CentralStorageStrategy(["CPU:0"] * hs.size())
    return lambda: strategy.run(step), weights


@contextlib.contextmanager
def process_group():
    """A block with PyTorch's process group, over gloo. Collective."""
    with tempfile.TemporaryDirectory() as folder:
        torch.set_num_threads(1)
        meeting = f"file://{COMM.bcast(folder)}/ranks"
        torch.distributed.init_process_group(
            "gloo", init_method=meeting, rank=COMM.rank, world_size=COMM.size
        )
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()
            COMM.Barrier()  # the file is in rank 0's folder


class OneProcess:
    """The process of tensorflow_step.py or jax_step.py on rank 0; `None` on the other ranks."""

    def __init__(self, python, script):
        cores = set().union(*COMM.allgather(os.sched_getaffinity(0)))
        self.process = None
        if COMM.rank == 0:
            program = pathlib.Path(__file__).with_name(script)
            command = [python, program, str(COMM.size)]
            own = os.sched_getaffinity(0)
            # Set before it starts: JAX makes a thread for each core that it sees then.
            os.sched_setaffinity(0, cores)
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            os.sched_setaffinity(0, own)

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


def timed(made, rounds, steps, expected=None, others=None):
    """The median seconds of alternatives, which must end with the same weights, and the weights.

    Args:
        made: by name, a step and a function that returns the weights.
        rounds: turns per alternative.
        steps: per turn.
        expected: the weights; by default those of the first alternative.
        others: by name, alternatives that are an `OneProcess`.
    """
    others = others or {}
    ways = {name: repeated(step) for name, (step, _) in made.items()}
    ways |= {name: other.turn for name, other in others.items()}
    medians = interleaved(ways, rounds, steps, COMM)
    expected = expected or next(iter(made.values()))[1]()
    all_weights = {name: weights for name, (_, weights) in made.items()}
    all_weights |= {name: other.weights for name, other in others.items()}
    for name, weights in all_weights.items():
        for one, another in zip(weights() or expected, expected, strict=True):
            # Apart by more than rounding where a unit of some sample is at the kink of its ReLU.
            np.testing.assert_allclose(one, another, rtol=1e-2, atol=2e-3, err_msg=name)
    return medians, expected


def adam():
    return hs.optimizers.Adam(ADAM_RATE)


def measure(layers, others, rounds):
    """What `timed` returns, with SGD."""
    batch, steps = NETWORKS[layers]
    x, y = data(layers, batch, COMM.rank)
    made = {
        "ours": ours(layers, x, y),
        "in buffers": ours(layers, x, y, in_buffers=True),
        "allreduce": by_hand(AllReduce, layers, x, y),
        "window": by_hand(Window, layers, x, y),
    }
    if torch is not None:
        made["hs.torch"] = pytorch(layers, x, y, with_ddp=False)
    for other in others.values():
        other.ask(layers=layers, batch=batch)
    return timed(made, rounds, steps, others=others)


def measure_adam(layers, rounds):
    """What `timed` returns, with Adam: next to the shared window with the same compiled loop."""
    batch, steps = NETWORKS[layers]
    x, y = data(layers, batch, COMM.rank)
    mirrored = hs.MirroredStrategy(["CPU:0"] * hs.size())
    made = {
        "ours": ours(layers, x, y, make=adam),
        "in buffers": ours(layers, x, y, in_buffers=True, make=adam),
        "mirrored": ours(layers, x, y, make=adam, strategy=mirrored),
        "window": by_hand(WindowAdam, layers, x, y),
    }
    return timed(made, rounds, steps)


def measure_ddp(layers, rounds, expected, make=torch_sgd):
    """The median of PyTorch's DDP; the process group must exist."""
    batch, steps = NETWORKS[layers]
    x, y = data(layers, batch, COMM.rank)
    return timed({"DDP": pytorch(layers, x, y, True, make)}, rounds, steps, expected)[0]


def torch_adam(parameters):
    return torch.optim.Adam(parameters, lr=ADAM_RATE, eps=1e-7, fused=True)


def show_page_faults(layers, rounds):
    """Prints a step with each optimizer compiled and not, with its page faults."""
    batch, steps = NETWORKS[layers]
    x, y = data(layers, batch, COMM.rank)
    page_faults.head()
    for optimizer, make in (("SGD", sgd), ("Adam", adam)):
        strategy = hs.CentralStorageStrategy(["CPU:0"] * hs.size())
        plain, buffers, again = (
            ours(layers, x, y, in_buffers, make, strategy)[0] for in_buffers in (False, True, False)
        )
        ways = {
            "compiled": plain,
            "compiled, in buffers": buffers,
            "not compiled": page_faults.uncompiled(strategy, again),
        }
        page_faults.show(f"{named(layers)}, {optimizer}", ways, rounds, steps)


def named(layers):
    return f"{'-'.join(map(str, layers))}, {NETWORKS[layers][0]}"


def show(name, medians, goals):
    for way, seconds in medians.items():
        row(
            name,
            way,
            f"{1e6 * seconds:,.0f}",
            f"{medians['ours'] / seconds:.2f}",
            goals.get(way) or "",
        )
        name = ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=20, help="turns that each way takes (%(default)s)"
    )
    parser.add_argument("--tensorflow", metavar="PYTHON", help="a Python that has TensorFlow")
    parser.add_argument("--jax", metavar="PYTHON", help="a Python that has JAX")
    parser.add_argument("--json", metavar="FILE", help="where to write the figures")
    options = parser.parse_args()
    pythons = {"TensorFlow": options.tensorflow, "JAX": options.jax}
    others = {
        name: OneProcess(python, f"{name.lower()}_step.py")
        for name, python in pythons.items()
        if python
    }
    figures, weights = {}, {}
    for layers in NETWORKS:
        figures[named(layers)], weights[layers] = measure(layers, others, options.rounds)
    with_adam, weights_of_adam = measure_adam(layers, options.rounds)
    if torch is not None:
        with process_group():
            for each in NETWORKS:
                figures[named(each)] |= measure_ddp(each, options.rounds, weights[each])
            with_adam |= measure_ddp(layers, options.rounds, weights_of_adam, torch_adam)
    print(f"A step on {COMM.size} ranks, medians of {options.rounds} rounds\n")
    header("network, batch of a replica", "way", "microseconds", "ours / that", "goal")
    for number, (name, medians) in enumerate(figures.items()):
        show(name, medians, {way: goals[number] for way, goals in GOALS.items()})
    show(f"{named(layers)}, Adam", with_adam, ADAM_GOALS)
    show_page_faults(layers, options.rounds)
    for other in others.values():
        other.close()
    if options.json and COMM.rank == 0:
        pathlib.Path(options.json).write_text(
            json.dumps({"ranks": COMM.size, "seconds": figures}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
