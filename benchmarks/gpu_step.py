"""Times a training step on GPUs next to hand-written CuPy + NCCL and PyTorch's DDP.

    mpirun -n 4 python benchmarks/gpu_step.py                     # a GPU for each rank
    launch/share-gpu mpirun -n 4 python benchmarks/gpu_step.py    # one GPU for all

Each network is a multilayer perceptron, trained by SGD with momentum 0.9 on half the squared error.
The alternatives:

    ours       hpcstrat.CentralStorageStrategy: reduction to the parameter rank, update, broadcast
    mirrored   hpcstrat.MirroredStrategy: one all-reduce, an update on every rank
    graph      ours as one CUDA graph, by hs.function; not beside PyTorch, which it refuses
    by hand    CuPy and NCCL: one all-reduce of the flat gradient, a fused update on every rank
    DDP        torch.nn.parallel.DistributedDataParallel, if PyTorch is installed and wanted

They take turns, round by round, so that all see the same state of the machine. The table has
medians over rounds, and their ratios to ours. Our steps and the hand-written one must learn the
same weights, but for what another order of sums changes. Before the steps comes the memory of Adam's slots on the GPUs, after them the cost of
single calls, and the cost of feeding a step with batches from the host.
"""

import argparse
import importlib
import importlib.util
import itertools
import random
import tempfile
import time
from typing import Any

import cupy as cp
import numpy as np
from cupy.cuda import nccl
from mpi4py import MPI

import hpcstrat as hs

torch: Any = None  # imported in `main`, if at all

NETWORKS = {  # layers: (batch per replica, steps per round)
    (64, 32, 10): (32, 200),
    (64, 128, 64, 10): (64, 200),
    (1024, 2048, 2048, 1024): (16, 50),
}
RATE, MOMENTUM = 1e-4, 0.9
COMM = MPI.COMM_WORLD


# ---- measuring


def interleaved(ways, rounds, steps):
    """The median seconds per call of each of `ways`, over rounds of `steps` calls.

    Each round has its own order, equal on all ranks, so that no alternative always follows the
    same other one.
    """
    times = {name: [] for name in ways}
    for turn in range(rounds + 2):
        for name in random.Random(turn).sample(list(ways), len(ways)):
            call = ways[name]
            cp.cuda.Device().synchronize()
            COMM.Barrier()
            begin = time.perf_counter()
            for _ in range(steps):
                call()
            cp.cuda.Device().synchronize()
            if turn > 1:  # the first rounds compile and warm up
                times[name].append((time.perf_counter() - begin) / steps)
    return {
        name: COMM.allreduce(float(np.median(values)), MPI.MAX) for name, values in times.items()
    }


def show(title, medians):
    ours = next(iter(medians.values()))
    shown = ", ".join(f"{name} {1e6 * t:,.0f} ({ours / t:.2f})" for name, t in medians.items())
    print(f"{title:42} {shown}", flush=True)


# ---- memory


def memory_of_slots(strategy):
    layers = next(reversed(NETWORKS))
    with strategy.scope():
        weights = [hs.Variable(value) for value in initial(layers)]
        optimizer = hs.optimizers.Adam()
    zeros = [cp.zeros(weight.shape, np.float32) for weight in weights]

    def apply():
        optimizer.apply_gradients(zip(zeros, weights, strict=True))

    before = used()
    strategy.run(apply)
    size = sum(weight.size for weight in weights) * 4 / 2**20
    print(
        f"Adam, {size:.0f} MiB of parameters: the first step takes {used() - before:.0f} MiB "
        f"over all ranks; the slots are {2 * size:.0f}, a message is {size:.0f} on each rank\n"
    )


def used():
    """MiB in use on all GPUs of the ranks; a GPU that ranks share counts once."""
    cp.cuda.Device().synchronize()
    COMM.Barrier()
    free, total = cp.cuda.runtime.memGetInfo()
    identity = bytes(cp.cuda.runtime.getDeviceProperties(cp.cuda.Device().id)["uuid"])
    return sum(dict(COMM.allgather((identity, total - free))).values()) / 2**20


# ---- a step


def gradients(weights, x, y):
    """The gradients of a ReLU perceptron's half squared error, in the order of the weights."""
    inputs = [x]
    for w, b in zip(weights[:-2:2], weights[1:-2:2], strict=True):
        inputs.append(cp.maximum(inputs[-1] @ w + b, 0))
    d = (inputs[-1] @ weights[-2] + weights[-1] - y) / len(x)
    found = []
    for i in range(len(inputs) - 1, -1, -1):
        found += [d.sum(axis=0), inputs[i].T @ d]
        if i:
            d = (d @ weights[2 * i].T) * (inputs[i] > 0)
    return found[::-1]


def initial(layers):
    generator = np.random.default_rng(0)
    for a, b in itertools.pairwise(layers):
        yield generator.normal(0, (2 / a) ** 0.5, (a, b)).astype(np.float32)
        yield np.zeros(b, np.float32)


def ours(strategy, layers, x, y, make=lambda step: step):
    with strategy.scope():
        weights = [hs.Variable(value) for value in initial(layers)]
        optimizer = hs.optimizers.SGD(RATE, MOMENTUM)

    def replica_step(x, y):
        values = [weight.value() for weight in weights]
        optimizer.apply_gradients(zip(gradients(values, x, y), weights, strict=True))

    step = make(replica_step)
    return lambda: strategy.run(step, args=(x, y)), lambda: [weight.numpy() for weight in weights]


class ByHand:
    """The state of a hand-written program: a communicator and a stream."""

    def __init__(self):
        unique = COMM.bcast(nccl.get_unique_id() if COMM.rank == 0 else None)
        self.comm = nccl.NcclCommunicator(COMM.size, unique, COMM.rank)
        self.stream = cp.cuda.Stream(non_blocking=True)
        self.update = cp.ElementwiseKernel(
            "T gradient, T rate, T momentum",
            "T weight, T velocity",
            "velocity = momentum * velocity - rate * gradient; weight += velocity",
            "momentum_update",
        )

    def all_reduce(self, array):
        place = array.data.ptr
        self.comm.allReduce(
            place, place, array.size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, self.stream.ptr
        )

    def step(self, layers, x, y):
        start = list(initial(layers))
        flat = cp.asarray(np.concatenate([value.ravel() for value in start]))
        velocity, gradient = cp.zeros_like(flat), cp.empty_like(flat)
        ends = np.cumsum([0, *(value.size for value in start)]).tolist()
        weights = [
            flat[a:b].reshape(v.shape) for a, b, v in zip(ends, ends[1:], start, strict=False)
        ]
        cp.cuda.Device().synchronize()

        def step():
            with self.stream:
                cp.concatenate([one.ravel() for one in gradients(weights, x, y)], out=gradient)
                self.all_reduce(gradient)
                self.update(gradient, RATE, MOMENTUM, flat, velocity)

        return step, lambda: [weight.get() for weight in weights]


def ddp(layers, x, y):
    device = torch.device("cuda", cp.cuda.Device().id)
    modules = []
    for a, b in itertools.pairwise(layers):
        modules += [torch.nn.Linear(a, b), torch.nn.ReLU()]
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(*modules[:-1]).to(device), device_ids=[device.index]
    )
    optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM, fused=True)
    x, y = torch.as_tensor(x.get(), device=device), torch.as_tensor(y.get(), device=device)

    def step():
        optimizer.zero_grad(set_to_none=True)
        (0.5 * (model(x) - y).square().sum() / len(x)).backward()
        optimizer.step()

    return step


def time_steps(strategy, by_hand, rounds):
    strategies = {
        "ours": strategy,
        "mirrored": hs.MirroredStrategy(),
    }
    print(f"A step, microseconds (ours / that), {COMM.size} ranks")
    for layers, (batch, steps) in NETWORKS.items():
        generator = np.random.default_rng(COMM.rank)
        x, y = (
            cp.asarray(generator.random((batch, n), np.float32)) for n in (layers[0], layers[-1])
        )
        made = {name: ours(one, layers, x, y) for name, one in strategies.items()}
        if torch is None:
            made["graph"] = ours(strategy, layers, x, y, hs.function)
        made["by hand"] = by_hand.step(layers, x, y)
        ways = {name: step for name, (step, _) in made.items()}
        if torch is not None:
            ways["DDP"] = ddp(layers, x, y)
        medians = interleaved(ways, rounds, steps)
        ends = [weights() for _, weights in made.values()]
        for end in ends[:-1]:
            # Sums in another order part the ways of ReLUs that are near 0: after 850 steps on 4
            # ranks, by up to 3 % of what was learned. A wrong sum changes all of it.
            for one, other, first in zip(end, ends[-1], initial(layers), strict=True):
                assert np.linalg.norm(one - other) <= 0.1 * np.linalg.norm(other - first)
        show(f"{'-'.join(map(str, layers))}, batch {batch}", medians)


# ---- single calls


def time_calls(strategy, by_hand, rounds):
    print(f"\nSingle calls, microseconds (ours / that), {COMM.size} ranks")
    for kilobytes in (1, 1024, 16384):
        array = cp.ones(kilobytes * 256, np.float32)
        result = cp.ones_like(array)
        cp.cuda.Device().synchronize()

        def reduce(array=array):
            hs.get_replica_context().all_reduce("SUM", array)

        def reduce_by_hand(array=array, result=result):
            with by_hand.stream:
                cp.copyto(result, array)
                by_hand.all_reduce(result)

        ways = {"ours": lambda reduce=reduce: strategy.run(reduce), "by hand": reduce_by_hand}
        show(f"all_reduce of {kilobytes:,} KiB", interleaved(ways, rounds, 100))
    nest = {"a": 1, "b": [2, 3], "c": 4}
    show(
        "run of an empty function, nest of four",
        interleaved({"ours": lambda: strategy.run(_id, (nest,))}, rounds, 500),
    )


def _id(value):
    return value


# ---- input


def time_input(strategy, rounds):
    """Times steps that compute for about as long as the copy of their batch takes."""
    print(f"\nA step fed from the host, microseconds (ours / that), {COMM.size} ranks")
    rows = np.random.default_rng(0).random((COMM.size * 4096, 2048), np.float32)
    weight = cp.ones((2048, 2048), np.float32)
    batches = 24

    def compute(x):
        for _ in range(4):
            x = cp.tanh(x @ weight)

    def epoch(options):
        dataset = (
            hs.data.Dataset.from_tensor_slices(rows).batch(COMM.size * 1024).repeat().take(batches)
        )
        distributed = strategy.experimental_distribute_dataset(dataset, options)

        def run():
            for x in distributed:
                strategy.run(lambda x: compute(cp.asarray(x)), args=(x,))

        return run

    resident = cp.asarray(rows[:1024])
    ways = {
        "staged": epoch(None),
        "copied in the step": epoch(hs.InputOptions(experimental_fetch_to_device=False)),
        "resident": lambda: [strategy.run(compute, args=(resident,)) for _ in range(batches)],
    }
    medians = {name: t / batches for name, t in interleaved(ways, rounds, 1).items()}
    show("8 MiB a replica", medians)
    staged, copied, alone = medians.values()
    print(
        f"{'':42} hidden by staging: {100 * (copied - staged) / max(copied - alone, 1e-9):.0f} % "
        "of the copying"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=15, help="turns that each way takes (%(default)s)"
    )
    parser.add_argument("--without-torch", action="store_true", help="without DDP, with graphs")
    options = parser.parse_args()
    rounds = options.rounds
    global torch
    if not options.without_torch and importlib.util.find_spec("torch"):
        torch = importlib.import_module("torch")
    strategy = hs.CentralStorageStrategy()
    if strategy.xp is not cp:
        parser.error("there is no GPU here")
    by_hand = ByHand()
    properties = cp.cuda.runtime.getDeviceProperties(cp.cuda.Device().id)
    print(
        f"{properties['name'].decode()}, CuPy {cp.__version__}, NCCL {nccl.get_version()}", end=""
    )
    print(", without PyTorch" if torch is None else f", PyTorch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        if torch is not None:
            torch.cuda.set_device(cp.cuda.Device().id)
            torch.manual_seed(0)
            meeting = COMM.bcast(folder)
            torch.distributed.init_process_group(
                "nccl", init_method=f"file://{meeting}/ranks", rank=COMM.rank, world_size=COMM.size
            )
        memory_of_slots(strategy)  # first: later there is memory that other models left
        time_steps(strategy, by_hand, rounds)
        time_calls(strategy, by_hand, rounds)
        time_input(strategy, rounds)
        COMM.Barrier()
        if torch is not None:
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
