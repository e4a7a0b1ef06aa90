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
from rounds import header, interleaved, repeated, row

import hpcstrat as hs
from hpcstrat._update import compiled

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


def values(dtype):
    random = np.random.default_rng(COMM.rank)
    return [random.standard_normal(shape).astype(np.float32).astype(dtype) for shape in SHAPES]


def ours(make, dtype, compiles, in_buffers=False):
    """Updates its own variables, with gradients in any arrays or in the optimizer's buffers."""
    strategy = hs.CentralStorageStrategy(["CPU:0"] * COMM.size)
    with strategy.scope():
        variables = [hs.Variable(value) for value in values(dtype)]
        optimizer = make()
    gradients = values(dtype)
    loop = compiled.loop

    def fill_buffers():
        for gradient, buffer in zip(gradients, optimizer.gradient_buffers(variables), strict=True):
            buffer[...] = gradient
        gradients[:] = optimizer.gradient_buffers(variables)

    if in_buffers:
        strategy.run(fill_buffers)

    def step():
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def turn(calls):
        seconds = []
        compiled.loop = loop if compiles else lambda *_: None
        strategy.run(lambda: seconds.append(repeated(step)(calls)))
        compiled.loop = loop
        return seconds[0]

    return turn


def torchs(make, dtype, **how):
    """An alternative that runs on rank 0 only."""
    if COMM.rank:
        return lambda calls: 0.0
    parameters = [
        torch.from_numpy(value.astype(np.float32)).to(getattr(torch, dtype))
        for value in values("float32")
    ]
    for parameter in parameters:
        parameter.requires_grad_()
        parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)
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
        "dtype",
        "compiled",
        "from buffers",
        "by NumPy",
        "PyTorch, fused",
        "PyTorch, plain",
        "compiled / fused",
    )
    for name, (make, make_torchs) in OPTIMIZERS.items():
        for dtype in ("float32", "float16", "bfloat16"):
            ways = {
                "compiled": ours(make, kind(dtype), True),
                "NumPy": ours(make, kind(dtype), False),
            }
            ways["buffers"] = ours(make, kind(dtype), True, in_buffers=True)
            if torch is not None:
                ways["fused"] = torchs(make_torchs, dtype, fused=True)
                ways["plain"] = torchs(make_torchs, dtype, foreach=False)
            found = interleaved(ways, rounds, 1, COMM)
            columns = ("compiled", "buffers", "NumPy", "fused", "plain")
            cells = [f"{1e3 * found[way]:.2f}" if way in found else "" for way in columns]
            ratio = f"{found['compiled'] / found['fused']:.2f}" if torch is not None else ""
            if COMM.rank == 0:
                row(name, dtype, *cells, ratio)


def kind(dtype):
    """A dtype of NumPy's or of ml_dtypes."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, dtype, dtype))


if __name__ == "__main__":
    main()
