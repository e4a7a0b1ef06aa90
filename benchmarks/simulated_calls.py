"""Counts what a steady step asks of Python and CUDA, on simulated GPUs: `calls.py --simulated-gpu`.

Counts are equal on every machine, so they show a change that timings of a simulation would not. A
step is `Strategy.run` of a function that only applies gradients. Calls are those of Python functions
inside the package, on the rank that makes most; launches are kernels, copies and groups of NCCL's
calls; records and waits are those of events on streams. What NCCL's barrier polls is left out: of
several steps, the one with the fewest calls counts. The simulation must have been entered.
"""

import collections
import pathlib
import sys

import cupy  # pyright: ignore[reportMissingImports]
import numpy as np
from cupy import _streams  # pyright: ignore[reportMissingImports]
from mpi4py import MPI
from rounds import header, row

import hpcstrat as hs

FEW = [(64, 32), (32,), (32, 10), (10,)]
MANY = [(16, 16), (16,)] * 12
IN_HOST_MEMORY = "in host memory"
STRATEGIES = {
    "central": hs.CentralStorageStrategy,
    IN_HOST_MEMORY: lambda: hs.CentralStorageStrategy(parameter_device="CPU:0"),
    "mirrored": hs.MirroredStrategy,
}
SCHEDULE = hs.optimizers.schedules.ExponentialDecay(0.1, 1000, 0.9)
OPTIMIZERS = {
    "plain": lambda: hs.optimizers.SGD(0.1, 0.9),
    "with a schedule": lambda: hs.optimizers.SGD(SCHEDULE, 0.9),
    "clipped": lambda: hs.optimizers.SGD(0.1, 0.9, global_clipnorm=1.0),
    "Adam": lambda: hs.optimizers.Adam(0.1),
}
GOALS = {("plain", 4): 40, ("plain", 24): 60, ("with a schedule", 4): 44, ("clipped", 4): 55}
STEPS = 5
_PACKAGE = str(pathlib.Path(hs.__file__).parent)
_found = collections.Counter()


def _count(owner, name, what):
    """Makes calls of a method count."""
    real = getattr(owner, name)

    def counted(*args, **options):
        _found[what] += 1
        return real(*args, **options)

    setattr(owner, name, counted)


def _profile(frame, event, _):
    code = frame.f_code  # a barrier's `_wait` polls if another rank is late
    _found["calls"] += (
        event == "call" and code.co_name != "_wait" and code.co_filename.startswith(_PACKAGE)
    )


def counts_of(step):
    """What the cheapest of some steady steps asks for."""
    for _ in range(3):  # the first ones make plans and fill caches
        step()
    every = []
    for _ in range(STEPS):
        _found.clear()
        sys.setprofile(_profile)
        try:
            step()
        finally:
            sys.setprofile(None)
        every.append(dict(_found))
    return min(every, key=lambda found: found["calls"])


def measure(make_strategy, make_optimizer, shapes):
    """The counts of a step of all ranks, which are those of the rank with most calls."""
    strategy = make_strategy()
    with strategy.scope():
        variables = [hs.Variable(np.zeros(shape, np.float32)) for shape in shapes]
        optimizer = make_optimizer()
    gradients = [cupy.full(shape, 1.0, np.float32) for shape in shapes]

    def replica_step():
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    found = counts_of(lambda: strategy.run(replica_step))
    strategy.close()
    return max(MPI.COMM_WORLD.allgather(found), key=lambda one: one["calls"])


def main():
    _count(_streams.Queue, "put", "launches")
    _count(_streams.Event, "record", "records")
    _count(_streams.Stream, "wait_event", "waits")
    print(f"A steady step on {hs.size()} simulated GPUs\n")
    header("strategy", "optimizer", "arrays", "calls", "goal", "launches", "records", "waits")
    for strategy, make_strategy in STRATEGIES.items():
        for optimizer, make_optimizer in OPTIMIZERS.items():
            for shapes in (FEW, MANY):
                found = measure(make_strategy, make_optimizer, shapes)
                is_on_gpus = strategy != IN_HOST_MEMORY  # the goals are of updates on GPUs
                goal = GOALS.get((optimizer, len(shapes)), "") if is_on_gpus else ""
                numbers = [found.get(what, 0) for what in ("launches", "records", "waits")]
                row(strategy, optimizer, len(shapes), found["calls"], goal, *numbers)
