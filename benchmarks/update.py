"""Times updates of large variables on the host: compiled, by NumPy's operations, and by PyTorch.

    OMP_NUM_THREADS=1 mpirun -n 2 python benchmarks/update.py

It times `apply_gradients` of CentralStorageStrategy alone, with gradients that exist already, in
any arrays or in `optimizer.gradient_buffers`. Next to it is PyTorch, if installed: its fused
optimizer, which is one pass over memory too, and the plain one (`foreach=False`), one operation at
a time. PyTorch updates all elements on rank 0, with one thread, while the other ranks wait. Our
ranks update their slices, for which they sum all ranks' gradients.

The alternatives take turns, round by round. Times are medians over rounds in milliseconds, on the
slowest rank.
"""

import argparse

import numpy as np
from mpi4py import MPI
from page_faults import uncompiled
from rounds import header, interleaved, repeated, row

import hpcstrat as hs

try:
    import torch
except ImportError:
    torch = None

COMM = MPI.COMM_WORLD
SHAPES = [(1024, 2048), (2048,), (2048, 2048), (2048,), (2048, 1024), (1024,)]
OPTIMIZERS = {
    "SGD, momentum 0.9": (
        lambda: hs.optimizers.SGD(1e-3, 0.9),
        lambda p, **how: torch.optim.SGD(p, 1e-3, 0.9, **how),
    ),
    "Adam": (lambda: hs.optimizers.Adam(1e-3), lambda p, **how: torch.optim.Adam(p, 1e-3, **how)),
}


def values():
    random = np.random.default_rng(COMM.rank)
    return [random.standard_normal(shape, np.float32) for shape in SHAPES]


def ours(make, compiles=True, in_buffers=False):
    """Updates its own variables, with gradients in any arrays or in the optimizer's buffers."""
    strategy = hs.CentralStorageStrategy(["CPU:0"] * COMM.size)
    with strategy.scope():
        variables = [hs.Variable(value) for value in values()]
        optimizer = make()
    gradients = values()

    def fill_buffers():
        for gradient, buffer in zip(gradients, optimizer.gradient_buffers(variables), strict=True):
            buffer[...] = gradient
        gradients[:] = optimizer.gradient_buffers(variables)

    if in_buffers:
        strategy.run(fill_buffers)

    def step():
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    if not compiles:
        uncompiled(strategy, lambda: strategy.run(step))

    def turn(calls):
        seconds = []
        strategy.run(lambda: seconds.append(repeated(step)(calls)))
        return seconds[0]

    return turn


def torchs(make, **how):
    """An alternative that runs on rank 0 only."""
    if COMM.rank:
        return lambda calls: 0.0
    parameters = [torch.from_numpy(value).requires_grad_() for value in values()]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape)
    return repeated(make(parameters, **how).step)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="turns of each way (15)")
    rounds = parser.parse_args().rounds
    if torch is not None:
        torch.set_num_threads(1)
    count = sum(int(np.prod(shape)) for shape in SHAPES)
    print(
        f"An update of {count:,} elements on {COMM.size} ranks, milliseconds, medians of {rounds} "
        "rounds\n"
    )
    header(
        "optimizer",
        "compiled",
        "from buffers",
        "by NumPy",
        "PyTorch, fused",
        "PyTorch, plain",
        "compiled / fused",
    )
    for name, (make, make_torchs) in OPTIMIZERS.items():
        ways = {
            "compiled": ours(make),
            "buffers": ours(make, in_buffers=True),
            "NumPy": ours(make, compiles=False),
        }
        if torch is not None:
            ways["fused"] = torchs(make_torchs, fused=True)
            ways["plain"] = torchs(make_torchs, foreach=False)
        found = interleaved(ways, rounds, 1, COMM)
        cells = [f"{1e3 * found[way]:.2f}" for way in ways] + [""] * (5 - len(ways))
        ratio = f"{found['compiled'] / found['fused']:.2f}" if torch is not None else ""
        if COMM.rank == 0:
            row(name, *cells, ratio)


if __name__ == "__main__":
    main()
