"""A program that uses every part of the GPU path once. It is run as it is, and with bugs planted in the package."""

import contextlib
import pathlib

import numpy as np

import hpcstrat as hs

N = hs.size()


def train(strategy, folder):
    """Steps over a dataset, reductions, parts of several sizes, a checkpoint, all on a stream of the user's own."""
    xp = strategy.xp
    stream = contextlib.nullcontext() if xp is np else xp.cuda.Stream(non_blocking=True)
    with strategy.scope(), stream:
        weights = [
            hs.Variable(np.zeros((6, 3), np.float32)),
            hs.Variable(np.zeros(4)),
            hs.Variable(np.zeros(3, np.float32)),
        ]
        counter = hs.Variable(0, aggregation="SUM")
        optimizer = hs.optimizers.Adam(0.1)

        def step(x):
            gradient = (x * 1.0).T[:6, :3].astype(np.float32)  # in Fortran's order
            optimizer.apply_gradients(list(zip([gradient, x.sum(axis=0)[:4], gradient[0]], weights, strict=True)))
            counter.assign_add(1)
            with contextlib.nullcontext() if xp is np else xp.cuda.Stream(non_blocking=True):
                pass  # whose end must not leave the rest of the function on another stream
            return {"sum": (x * 2).sum(), "part": x[: hs.rank() + 1]}

        rows = np.arange(40.0 * 4 * N * 8).reshape(-1, 8)
        sums = []
        for x in strategy.experimental_distribute_dataset(hs.data.Dataset.from_tensor_slices(rows).batch(4 * N)):
            found = strategy.run(step, args=(x,))
            sums.append(strategy.reduce("SUM", found["sum"], axis=None))  # the host waits for nothing
            strategy.gather(found["part"], axis=0)
        assert float(sum(sums)) == 2 * rows.sum() and counter.numpy() == 40 * N
        kept = [w.numpy() for w in weights]
        checkpoint = hs.checkpoint.Checkpoint(weights=weights, optimizer=optimizer)
        checkpoint.save(folder / "saved")
        for w in weights:
            w.assign(xp.zeros(w.shape, w.dtype))
            for _ in range(2):
                strategy.extended.update(w, lambda v: v.assign_add(np.ones(v.shape, v.dtype)))
        checkpoint.restore(folder / "saved")
        for w, before in zip(weights, kept, strict=True):
            assert np.array_equal(w.numpy(), before)


def main():
    gpus = [f"GPU:{rank}" for rank in range(N)]
    places = {
        "central": lambda: hs.CentralStorageStrategy(gpus),
        "parameters of the host": lambda: hs.CentralStorageStrategy(gpus, "CPU:0"),
        "mirrored": lambda: hs.MirroredStrategy(gpus),
        "of both kinds": lambda: hs.CentralStorageStrategy([*gpus[1:], "CPU:0"]),
    }
    for name, make in places.items():
        with make() as strategy:
            folder = pathlib.Path(name)
            folder.mkdir(exist_ok=True)
            train(strategy, folder)
    if hs.is_lead():
        print("trained")


main()
