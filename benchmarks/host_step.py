"""Times a training step on CPU replicas: ours beside two ways of writing it by hand, in one run.

    OMP_NUM_THREADS=1 mpirun -n 4 python benchmarks/host_step.py

Each network is a perceptron of some layers, trained by SGD with momentum 0.9; the forward and the backward pass are the
same code for all. The ways to a step:

    ours        hpcstrat.CentralStorageStrategy
    allreduce   mpi4py: one Allreduce of the flat gradient, then every rank updates its own copy
    window      mpi4py: one copy in an MPI-3 shared window, each rank updates its slice between two barriers

The ways take turns, round by round, so that all meet the same state of the machine. Printed are medians over all steps
of the time on rank 0, and their ratio to ours.
"""

import argparse
import itertools
import time

import numpy as np
from mpi4py import MPI

import hpcstrat as hs

NETWORKS = {  # layers: (batch of a replica, steps a round)
    (64, 32, 10): (32, 200),
    (64, 128, 64, 10): (64, 100),
    (1024, 2048, 2048, 1024): (16, 3),
}
RATE, MOMENTUM, CHUNK = 1e-4, 0.9, 16_384
COMM = MPI.COMM_WORLD


def gradients(weights, x, y):
    """The gradients of half the squared error of a perceptron with ReLU, in the order of the weights."""
    inputs = [x]
    for w, b in zip(weights[:-2:2], weights[1:-2:2], strict=True):
        inputs.append(np.maximum(inputs[-1] @ w + b, 0))
    d = (inputs[-1] @ weights[-2] + weights[-1] - y) / len(x)
    found = []
    for i in range(len(inputs) - 1, -1, -1):
        found += [d.sum(axis=0), inputs[i].T @ d]
        if i:
            d = (d @ weights[2 * i].T) * (inputs[i] > 0)
    return found[::-1]


def initial(layers):
    random = np.random.default_rng(0)
    for a, b in itertools.pairwise(layers):
        yield random.normal(0, (2 / a) ** 0.5, (a, b)).astype(np.float32)
        yield np.zeros(b, np.float32)


def views(flat, arrays):
    ends = np.cumsum([0, *(array.size for array in arrays)])
    return [flat[a:b].reshape(array.shape) for a, b, array in zip(ends, ends[1:], arrays, strict=False)]


def ours(layers, x, y):
    strategy = hs.CentralStorageStrategy()
    with strategy.scope():
        weights = [hs.Variable(value) for value in initial(layers)]
        optimizer = hs.optimizers.SGD(RATE, MOMENTUM)

    def replica_step(x, y):
        values = [weight.value() for weight in weights]
        optimizer.apply_gradients(zip(gradients(values, x, y), weights, strict=True))

    return lambda: strategy.run(replica_step, args=(x, y)), lambda: [weight.numpy() for weight in weights]


def allreduce(layers, x, y):
    start = list(initial(layers))
    flat = np.concatenate([value.ravel() for value in start])
    weights, velocity, gradient = views(flat, start), np.zeros_like(flat), np.empty_like(flat)
    places = views(gradient, start)

    def step():
        for place, value in zip(places, gradients(weights, x, y), strict=True):
            place[...] = value
        COMM.Allreduce(MPI.IN_PLACE, gradient)
        np.multiply(velocity, MOMENTUM, out=velocity)
        np.multiply(gradient, RATE, out=gradient)
        np.subtract(velocity, gradient, out=velocity)
        np.add(flat, velocity, out=flat)

    return step, lambda: weights


def window(layers, x, y):
    start = list(initial(layers))
    size = sum(value.size for value in start)
    shared = MPI.Win.Allocate_shared((2 + COMM.size) * size * 4 if COMM.rank == 0 else 0, 4, comm=COMM)
    memory = np.frombuffer(shared.Shared_query(0)[0], np.float32).reshape(2 + COMM.size, size)
    flat, velocity, mailboxes = memory[0], memory[1], memory[2:]
    weights, places = views(flat, start), views(mailboxes[COMM.rank], start)
    if COMM.rank == 0:
        for weight, value in zip(weights, start, strict=True):
            weight[...] = value
        velocity[...] = 0
    COMM.Barrier()
    own = range(size * COMM.rank // COMM.size, size * (COMM.rank + 1) // COMM.size)
    total = np.empty(CHUNK, np.float32)

    def step():
        for place, value in zip(places, gradients(weights, x, y), strict=True):
            place[...] = value
        COMM.Barrier()
        for a in range(own.start, own.stop, CHUNK):
            b = min(a + CHUNK, own.stop)
            g, v, w = total[: b - a], velocity[a:b], flat[a:b]
            g[...] = mailboxes[0, a:b]
            for mailbox in mailboxes[1:]:
                np.add(g, mailbox[a:b], out=g)
            np.multiply(v, MOMENTUM, out=v)
            np.multiply(g, RATE, out=g)
            np.subtract(v, g, out=v)
            np.add(w, v, out=w)
        COMM.Barrier()

    return step, lambda: weights


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="turns that each way takes (%(default)s)")
    rounds = parser.parse_args().rounds
    ways = {"ours": ours, "allreduce": allreduce, "window": window}
    print(f"{COMM.size} ranks, microseconds a step (ours / that)")
    for layers, (batch, steps) in NETWORKS.items():
        random = np.random.default_rng(COMM.rank)
        x, y = random.random((batch, layers[0]), np.float32), random.random((batch, layers[-1]), np.float32)
        made = {name: way(layers, x, y) for name, way in ways.items()}
        times = {name: [] for name in ways}
        for turn in range(rounds + 1):
            for name, (step, _) in made.items():
                COMM.Barrier()
                for _ in range(steps):
                    begin = time.perf_counter()
                    step()
                    if turn:  # the first one warms up
                        times[name].append(time.perf_counter() - begin)
        results = [np.concatenate([value.ravel() for value in values()]) for _, values in made.values()]
        for result in results[1:]:
            np.testing.assert_allclose(result, results[0], rtol=1e-2, atol=1e-3)
        medians = {name: 1e6 * float(np.median(values)) for name, values in times.items()}
        shown = ", ".join(f"{name} {t:,.0f} ({medians['ours'] / t:.2f})" for name, t in medians.items())
        print(f"{'-'.join(map(str, layers)):24} batch {batch:3}: {shown}")


if __name__ == "__main__":
    main()
